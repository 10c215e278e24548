"""Each guide leads from files to a checkpoint, with the commands that it shows."""

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import rollout_io
from rollout_io.cli.main import run

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def commands(guide, places):
    """The `rollouts` commands of a guide, with its paths replaced."""
    for block in re.findall(r"```sh\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[0] == "rollouts":
                yield [places.get(word.rstrip("/"), word) for word in words[1:]]


def claude_code_commands(smollm2_dir, tmp_path, logs=ROOT / "examples" / "claude_code"):
    outputs = ("claude", "claude-imitated", "claude-rewarded", "claude-weighted", "claude-good")
    rewards = "examples/claude_code.rewards.jsonl"
    places = {
        "examples/claude_code": str(logs),
        rewards: str(ROOT / rewards),
        ".cache/smollm2": str(smollm2_dir),
        **{f"runs/{name}": str(tmp_path / name) for name in outputs},
    }
    return list(commands("claude_code.md", places))


@pytest.mark.slow
@pytest.mark.model
def test_a_folder_of_claude_code_sessions_becomes_a_checkpoint(smollm2_dir, tmp_path, capsys):
    given = claude_code_commands(smollm2_dir, tmp_path)
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
        (checkpoint,) = (tmp_path / name / "checkpoints").glob("global_step_*")
        assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 1e8
        updates = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(updates[-1])["grad_norm"] > 0
    good = rollout_io.scan(tmp_path / "claude-good").collect()
    assert good["reward"].to_list() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.model
def test_real_sessions_of_claude_code_become_a_checkpoint(harness_logs, smollm2_dir, tmp_path):
    given = claude_code_commands(smollm2_dir, tmp_path, harness_logs / "claude_code")[:5]
    for words in given:
        assert run(words) == 0, words
    (checkpoint,) = (tmp_path / "claude-imitated" / "checkpoints").glob("global_step_*")
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 1e8


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("guide", "logs", "text"),
    [("harbor", "harbor", "trials"), ("verifiers", "verifiers", "evals")],
)
def test_runs_with_token_ids_and_runs_of_text_become_checkpoints(
    guide, logs, text, harness_logs, smollm2_dir, tmp_path
):
    given = list(commands(f"{guide}.md", {}))
    outputs = {word.rstrip("/") for words in given for word in words if word.startswith("runs/")}
    places = {
        text: str(harness_logs / logs),
        f"examples/{guide}": str(ROOT / "examples" / guide),
        ".cache/smollm2": str(smollm2_dir),
        **{name: str(tmp_path / name) for name in outputs},
    }
    given = list(commands(f"{guide}.md", places))
    exact = ["convert", "validate", "stats", "inspect", "train"]
    assert [words[0] for words in given] == [*exact, "convert", "train"]
    for words in given:
        assert run(words) == 0, words
    sources = [
        set(rollout_io.scan(words[-1]).collect()["token_source"])
        for words in given
        if words[0] == "convert"
    ]
    assert sources[0] == {"engine"}
    assert "retokenized" in sources[1]
    for words in given:
        if words[0] == "train":
            (checkpoint,) = Path(words[words.index("--out") + 1]).glob("checkpoints/global_step_*")
            assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 1e8


@pytest.mark.slow
@pytest.mark.model
def test_a_generator_output_of_skyrl_trains_with_its_losses(smollm2_dir, tmp_path, monkeypatch):
    assert smollm2_dir == ROOT / ".cache" / "smollm2"
    monkeypatch.chdir(tmp_path)
    for name in ("examples", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = (GUIDES / "skyrl.md").read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "skyrl.toml").write_text(settings)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given = list(commands("skyrl.md", {}))
    verbs = ["convert", "filter", "export", "convert", "validate", "stats", "train"]
    assert [words[0] for words in given] == verbs
    for words in given:
        assert run(words) == 0, words
    found = {}
    exec(code, found)
    output = json.loads(Path("runs/skyrl.json").read_text())
    found["save"](output, str(tmp_path / "saved"))
    saved, read = (rollout_io.scan(n).collect() for n in ("saved", "runs/from-skyrl"))
    assert saved["response_ids"].equals(read["response_ids"])
    config = json.loads((tmp_path / "runs" / "skyrl-model" / "config.json").read_text())
    assert (config["policy_loss_type"], config["outcome"]) == ("dual_clip", "last")
    (checkpoint,) = Path("runs/skyrl-model/checkpoints").glob("global_step_*")
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 1e8
