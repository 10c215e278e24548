"""Each guide leads from files to a checkpoint, with the commands that it shows."""

import io
import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import rollout_io
from rollout_io.cli.main import run
from tests.helpers.guide_helpers import blocks_of, check_outputs

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def commands(guide, places):
    """The `rollouts` commands of a guide, with its paths replaced."""
    for block in re.findall(r"```sh\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[0] == "rollouts":
                yield [places.get(word.rstrip("/"), word) for word in words[1:]]


def check_trained(run_folder, model):
    """The last checkpoint loads, and has other weights than the model it began with."""
    (checkpoint,) = Path(run_folder).glob("checkpoints/global_step_*")
    after, before = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (checkpoint, model)
    )
    assert after.keys() == before.keys()
    assert any(not after[name].equal(before[name].to(after[name].dtype)) for name in before)


def printed_by(given, places):
    """Run commands, and return what they print, with the paths of the guide."""
    terminal = io.StringIO()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        for words in given:
            assert run(words) == 0, (words, terminal.getvalue())
    printed = terminal.getvalue()
    for name, path in places.items():
        printed = printed.replace(path, name)
    return printed


def claude_code_commands(model, tmp_path, logs=ROOT / "examples" / "claude_code"):
    outputs = ("claude", "claude-imitated", "claude-rewarded", "claude-weighted", "claude-good")
    rewards = "examples/claude_code.rewards.jsonl"
    places = {
        "examples/claude_code": str(logs),
        rewards: str(ROOT / rewards),
        ".cache/smollm2": str(model),
        **{f"runs/{name}": str(tmp_path / name) for name in outputs},
    }
    return list(commands("claude_code.md", places))


@pytest.mark.slow
@pytest.mark.model
def test_a_folder_of_claude_code_sessions_becomes_a_checkpoint(narrow_smollm2, tmp_path, capsys):
    given = claude_code_commands(narrow_smollm2, tmp_path)
    verbs = ["convert", "validate", "stats", "inspect", "train", "convert", "train", "filter"]
    assert [words[0] for words in given] == verbs
    page = (GUIDES / "claude_code.md").read_text()
    (printed,) = re.findall(r"```\n(3 sessions .*?)```", page, re.DOTALL)
    for number, words in enumerate(given):
        assert run(words) == 0, words
        if not number:
            said = capsys.readouterr().err.replace(str(tmp_path / "claude"), "runs/claude")
            assert printed in said
    for name in ("claude-imitated", "claude-weighted"):
        check_trained(tmp_path / name, narrow_smollm2)
        updates = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(updates[-1])["grad_norm"] > 0
    good = rollout_io.scan(tmp_path / "claude-good").collect()
    assert good["reward"].to_list() == [1.0, 1.0]


@pytest.mark.nightly  # the test above follows the same guide
@pytest.mark.model
def test_real_sessions_of_claude_code_become_a_checkpoint(harness_logs, narrow_smollm2, tmp_path):
    given = claude_code_commands(narrow_smollm2, tmp_path, harness_logs / "claude_code")[:5]
    for words in given:
        assert run(words) == 0, words
    check_trained(tmp_path / "claude-imitated", narrow_smollm2)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("guide", "logs", "text"),
    [("harbor", "harbor", "trials"), ("verifiers", "verifiers", "evals")],
)
def test_runs_with_token_ids_and_runs_of_text_become_checkpoints(
    guide, logs, text, harness_logs, narrow_smollm2, tmp_path
):
    given = list(commands(f"{guide}.md", {}))
    outputs = {word.rstrip("/") for words in given for word in words if word.startswith("runs/")}
    places = {
        text: str(harness_logs / logs),
        f"examples/{guide}": str(ROOT / "examples" / guide),
        ".cache/smollm2": str(narrow_smollm2),
        **{name: str(tmp_path / name) for name in outputs},
    }
    given = list(commands(f"{guide}.md", places))
    exact = ["convert", "validate", "stats", "inspect", "train"]
    assert [words[0] for words in given] == [*exact, "convert", "train"]
    printed = printed_by(given, places)
    check_outputs(f"{guide}.md", printed)
    sources = [
        set(rollout_io.scan(words[-1]).collect()["token_source"])
        for words in given
        if words[0] == "convert"
    ]
    assert sources[0] == {"engine"}
    assert "retokenized" in sources[1]
    for words in given:
        if words[0] == "train":
            check_trained(words[words.index("--out") + 1], narrow_smollm2)


@pytest.mark.slow
@pytest.mark.model
def test_a_generator_output_of_skyrl_trains_with_its_losses(narrow_smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".cache").symlink_to(narrow_smollm2.parent)
    page = (GUIDES / "skyrl.md").read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "skyrl.toml").write_text(settings)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given = list(commands("skyrl.md", {}))
    verbs = ["convert", "filter", "export", "convert", "validate", "stats", "train"]
    assert [words[0] for words in given] == verbs
    check_outputs("skyrl.md", printed_by(given, {}))
    found = {}
    exec(code, found)
    output = json.loads(Path("runs/skyrl.json").read_text())
    found["save"](output, str(tmp_path / "saved"))
    saved, read = (rollout_io.scan(n).collect() for n in ("saved", "runs/from-skyrl"))
    assert saved["response_ids"].equals(read["response_ids"])
    config = json.loads((tmp_path / "runs" / "skyrl-model" / "config.json").read_text())
    assert (config["loss"]["policy_loss_type"], config["data"]["outcome"]) == ("dual_clip", "last")
    check_trained("runs/skyrl-model", narrow_smollm2)


@pytest.mark.parametrize("guide", ["../audit.md", *sorted(path.name for path in GUIDES.iterdir())])
def test_a_guide_says_to_save_each_script_before_it_is_run(guide):
    saved = set()
    for language, name, code in blocks_of(guide):
        saved |= {name}
        if language == "sh":
            run_here = re.findall(r"(?:^|\s)(?:python|rollouts rl) (\w+\.(?:py|toml))\b", code)
            assert set(run_here) <= saved


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.filterwarnings("ignore")  # of TRL and Transformers
def test_rollouts_become_samples_and_pairs_that_trl_trains(narrow_smollm2, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "smollm2").symlink_to(narrow_smollm2)
    given = list(commands("preferences.md", {}))
    verbs = ["convert", "stats", "export", "export", "filter", "train", *["export"] * 3]
    assert [words[0] for words in given] == verbs
    check_outputs("preferences.md", printed_by(given, {}))
    check_trained("runs/imitated", narrow_smollm2)
    (code,) = re.findall(r"```python\n(.*?)```", (GUIDES / "preferences.md").read_text(), re.DOTALL)
    found = {}
    exec(code, found)
    assert [found[name].state.global_step for name in ("imitation", "preference")] == [2, 2]
