"""New rewards beside a dataset: each trajectory once, whatever the function does."""

import json
import shutil
import sys
from pathlib import Path

import polars as pl
import pytest

from pipelines import merge, trajectory_returns
from pipelines.rescoring.attempts import attempts
from pipelines.rescoring.rescore import rescore
from pipelines.rescoring.scorers import Scorer, source_digests
from pipelines.rewards import with_version
from rollout_io import RolloutWriter, scan, validate
from rollout_io.cli.main import run
from rollout_io.dataset.versions import digests, read_version, version_path
from rollout_io.plugins import resolve
from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import ConfigError, InputError
from schemas.metadata import DatasetMetadata
from tests.helpers.configs import train_config
from tests.helpers.filter_helpers import one_step, table
from tests.helpers.kill_helpers import run_after_20_kills
from trainer.run.dataset_checks import scan_rows

OPTIONAL = ("messages", "response_text", "metrics")
FUNCTIONS = '''
import os
import sys
import time


def number_of(attempt):
    return int(attempt.trajectory_id.rpartition("_")[2])


def last_digit(attempt):
    return number_of(attempt) % 10


def odd(attempt):
    number = number_of(attempt)
    if number == 1:
        raise ValueError("no reward today")
    if number == 2:
        return float("nan")
    if number == 3:
        os._exit(7)
    if number == 4:
        time.sleep(1000)
    if number == 5:
        return "much"
    return number


def torn(attempt):
    raise ValueError("half a character: \\ud83d")


def told(attempt):
    print(attempt.trajectory_id, flush=True)
    return number_of(attempt)


class Checks:
    """An environment that rewards the responses that are the expected ones."""

    def __init__(self, env_config, extras):
        self.expected = list(extras["expected"])

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        wanted = self.expected.pop(0)
        return {"observations": [], "reward": float(action == wanted), "done": not self.expected}

    def close(self):
        pass
'''


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module of reward functions that worker processes can import, too."""
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path / "own_rewards.py"


def write(path, *trajectories, optional=(), **more):
    with RolloutWriter(path, **more) as writer:
        writer.write(table(*trajectories, optional=optional))
    return str(path)


def scores_of(dataset, name):
    scores, _ = read_version(dataset, name)
    return dict(scores.select("trajectory_id", "reward").rows())


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
def test_a_function_that_raises_hangs_or_dies_costs_only_its_own_trajectory_which_fails(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(*[0.5] * 8, "failed"))
    scorer = Scorer(function="own_rewards:odd", timeout_s=0.5)
    found = rescore(dataset, "odd", scorer, num_workers=2)
    scores, made = read_version(dataset, "odd")
    assert dict(scores.select("trajectory_id", "reward").rows()) == {
        f"a_{n}": None if 1 <= n <= 5 else float(n) for n in range(8)
    }
    assert scores["error"].to_list()[1:6] == [
        "ValueError: no reward today",
        "the result nan is not a finite number",
        "its process ended with exit code 7",
        "no result within 0.5 s",
        "the result 'much' is not a finite number",
    ]
    assert (found.num_scored, found.num_errors, found.num_resumed) == (3, 5, 0)
    assert made["function"] == "own_rewards:odd"
    rows = with_version(scan(dataset), dataset, "odd").collect()
    kept = [0.0, *[None] * 5, 6.0, 7.0, None]
    assert rows["reward"].to_list() == kept
    errors = rows["error"].to_list()
    assert (errors[0], errors[1], errors[8]) == (
        None,
        "reward odd: ValueError: no reward today",
        "timeout",
    )
    config = train_config(dataset=dataset, reward="odd")
    returns = trajectory_returns(scan_rows(config)).collect()
    assert returns["return"].to_list() == kept
    assert run(["filter", dataset, "--reward", "odd", "--drop-failed", "--out", f"{dataset}2"]) == 0
    validate(f"{dataset}2")
    assert scan(f"{dataset}2").collect()["reward"].to_list() == [0.0, 6.0, 7.0]


@pytest.mark.usefixtures("functions")
def test_only_trajectories_without_a_score_are_scored_again(tmp_path, capfd):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0))
    scorer = Scorer(function="own_rewards:told")
    rescore(dataset, "told", scorer)
    assert capfd.readouterr().err.splitlines() == ["a_0", "a_1"]
    write(dataset, *one_step(0.0, instance="b"), append=True)
    with pytest.raises(InputError, match="1 trajectory not scored") as caught:
        with_version(scan(dataset), dataset, "told")
    assert caught.value.rule == "reward_version"
    found = rescore(dataset, "told", scorer)
    assert capfd.readouterr().err.splitlines() == ["b_0"]
    assert found.num_resumed == 2
    assert scores_of(dataset, "told") == {"a_0": 0.0, "a_1": 1.0, "b_0": 0.0}


@pytest.mark.usefixtures("functions")
def test_an_error_that_is_not_unicode_is_kept_readable(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0))
    found = rescore(dataset, "torn", Scorer(function="own_rewards:torn"))
    assert found.errors == {"ValueError: half a character: ?": 1}


def test_the_summary_compares_sums_with_functions_of_the_working_directory(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "rewards_here.py").write_text("def one(attempt):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    steps = [{"reward": 0.75}, {"reward": 0.5}]
    write("ds", ("a", 0, steps), metadata=DatasetMetadata(outcome="sum"))
    assert run(["rescore", "ds", "--reward", "rewards_here:one", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mean_before"], told["num_lower"]) == (1.25, 1)


@pytest.mark.usefixtures("functions")
def test_a_version_is_not_mixed_from_two_functions(functions, tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0))
    rescore(dataset, "mine", Scorer(function="own_rewards:last_digit"))
    with pytest.raises(InputError) as caught:
        rescore(dataset, "mine", Scorer(function="own_rewards:told"))
    assert caught.value.rule == "reward_version"
    functions.write_text(FUNCTIONS.replace("% 10", "% 3"))
    with pytest.raises(InputError) as caught:
        rescore(dataset, "mine", Scorer(function="own_rewards:last_digit"))
    assert caught.value.rule == "reward_version"


IMPORTS = {
    "import": "import limits_a\n\n\ndef score(attempt):\n    return limits_a.LIMIT\n",
    "lazily": "def score(attempt):\n    from limits_a import LIMIT\n\n    return LIMIT\n",
    "over another": "from over import *\n\n\ndef score(attempt):\n    return LIMIT\n",
    "of a package": "from kit.deep import limits\n\n\ndef score(attempt):\n    return limits.LIMIT\n",
    "in a subclass": "from kit.scoring import Scoring\n\nscore = Scoring()\n",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_the_sources_of_a_function_are_all_that_it_imports_from_the_users_files(
    how, tmp_path, monkeypatch
):
    files = {
        "over.py": "from limits_a import LIMIT\n",
        "limits_a.py": "LIMIT = 200\n",
        "kit/deep/limits.py": "LIMIT = 200\n",  # packages without __init__.py
        "kit/deep/other.py": "",
        "kit/scoring.py": "from .deep.limits import LIMIT\n\n\nclass Scoring:\n"
        "    def __call__(self, attempt):\n        return LIMIT\n",
        "unrelated.py": "LIMIT = 1\n",
    }
    (tmp_path / "kit" / "deep").mkdir(parents=True)
    name = f"scored_{list(IMPORTS).index(how)}"
    for path, text in (files | {f"{name}.py": f"import json, polars\n{IMPORTS[how]}"}).items():
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def sources():
        return source_digests(f"{name}:score", resolve(f"{name}:score", "reward_function"))

    before = sources()
    for path in ("limits_a.py", "kit/deep/limits.py", "kit/deep/other.py", "unrelated.py"):
        (tmp_path / path).write_text("LIMIT = 1\n")
    after = sources()
    assert before.keys() == after.keys()
    assert {n for n in before if before[n] != after[n]} == {
        "kit.deep.limits" if "kit" in IMPORTS[how] else "limits_a"
    }
    assert not {"json", "polars", "unrelated"} & before.keys()


def test_scores_of_a_function_whose_helper_changed_are_not_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "limited.py").write_text(IMPORTS["lazily"])
    (tmp_path / "limits_a.py").write_text("LIMIT = 200\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dataset = write(tmp_path / "ds", *one_step(0.0))
    command = ["rescore", dataset, "--reward", "limited:score", "--workers", "1"]
    assert run(command) == 0
    (tmp_path / "limits_a.py").write_text("LIMIT = 1\n")
    assert run(command) == 1
    assert "source changed since (limits_a). [reward_version]" in capsys.readouterr().err
    assert scores_of(dataset, "score") == {"a_0": 200.0}


@pytest.mark.parametrize(
    "change",
    [
        {"truth": "other"},
        {"messages": '[{"role": "user", "content": "?"}]'},
        {"prompt_token_ids": [7]},
        {"response_text": "other"},
        {"response_text": None},
        {"metrics": [{"key": "tests", "value": 2.0}]},
        {"reward": 1.0},
    ],
)
def test_the_digest_of_a_trajectory_changes_with_all_that_its_score_depends_on(change, tmp_path):
    step = {"truth": "x", "messages": "[]", "response_text": "a", "reward": 0.0}
    step["metrics"] = [{"key": "tests", "value": 1.0}]

    def digests_of(first, where, layout="prefix"):
        rows = pl.from_arrow(table(("a", 0, [step | first]), ("b", 0, [step]), optional=OPTIONAL))
        truths = [(step | first)["truth"], step["truth"]]
        with RolloutWriter(where, layout=layout) as writer:
            writer.write(rows.with_columns(truth=pl.Series(truths)))
        return dict(digests(scan(where)).rows())

    before, after = digests_of({}, tmp_path / "a"), digests_of(change, tmp_path / "b")
    assert {name for name in before if before[name] != after[name]} == {"a_0"}
    assert digests_of({}, tmp_path / "c", "full") == before


@pytest.mark.slow
def test_a_judge_that_was_down_is_asked_again_and_its_failures_are_no_scores(
    tmp_path, monkeypatch, capsys
):
    flag = tmp_path / "up"
    (tmp_path / "judges.py").write_text(
        "from pathlib import Path\n\n\ndef judge(attempt):\n"
        f"    if attempt.trajectory_id == 'a_1' and not Path({str(flag)!r}).exists():\n"
        "        raise ConnectionError('the judge is down')\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0, 0.0))
    command = ["rescore", dataset, "--reward", "judges:judge", "--workers", "1"]
    assert run(command) == 0
    assert "ds: 2 scored, 1 without a score" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "out")]
    assert run(["filter", dataset, "--reward", "judge", *out]) == 0
    assert "reward: 1 trajectory without a score, which count as failed" in capsys.readouterr().err
    assert run(["filter", dataset, "--reward", "judge", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["datasets"][0]["num_unscored"] == 1
    assert run(["diff", dataset, dataset, "--reward-b", "judge", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["numbers"]}
    assert (found["return"]["num_attempts_b"], found["return"]["num_unknown_b"]) == (2, 1)
    assert (found["failed"]["b"], found["pass rate"]["b"]) == (0.0, 1.0)
    flag.touch()
    assert run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    facts = ("num_scored", "num_errors", "num_resumed", "num_retried")
    assert [told[name] for name in facts] == [3, 0, 2, 1]
    assert run(command) == 0
    assert "ds: 3 scored (3 kept from before), 0 without a score" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
def test_a_journal_of_another_function_or_with_half_a_line_is_not_trusted(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0))
    scorer = Scorer(function="own_rewards:last_digit")
    rescore(dataset, "mine", scorer)
    path = version_path(dataset, "mine")
    made = read_version(dataset, "mine")[1]
    header = {name: made[name] for name in made if name not in ("created", "num_trajectories")}
    header["dataset_digest"] = digests(scan(dataset))["digest"].sum()
    line = json.dumps({"trajectory_id": "a_0", "reward": 77.0, "error": None})
    journal = path.with_name(f".{path.name}.journal")
    path.unlink()
    journal.write_text("\n".join([json.dumps(header), line, '{"trajectory_id": "a_1", "rew']))
    assert rescore(dataset, "mine", scorer).num_resumed == 1
    assert scores_of(dataset, "mine") == {"a_0": 77.0, "a_1": 1.0}
    path.unlink()
    journal.write_text("\n".join([json.dumps(header | {"sources": {}}), line, ""]))
    assert rescore(dataset, "mine", scorer).num_resumed == 0
    assert scores_of(dataset, "mine") == {"a_0": 0.0, "a_1": 1.0}


@pytest.mark.usefixtures("functions")
def test_an_environment_scores_the_recorded_responses(tmp_path, capsys):
    said = [{"response_text": "x"}, {"response_text": "y"}]
    dataset = write(
        tmp_path / "ds",
        ("a", 0, said),
        ("a", 1, said[:1]),
        ("b", 0, said[:1]),
        optional=("response_text",),
    )
    tasks = tmp_path / "tasks.jsonl"
    task = {"instance_id": "a", "prompt": "?", "expected": ["z", "y"]}
    tasks.write_text(json.dumps(task) + "\n")
    arguments = ["rescore", dataset, "--environment", "own_rewards:Checks", "--tasks", str(tasks)]
    assert run([*arguments, "--json", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["num_scored"] == 2
    scores, _ = read_version(dataset, "Checks")
    assert scores["reward"].to_list() == [1.0, 0.0, None]
    assert "no task 'b'" in scores["error"][2]


@pytest.mark.usefixtures("functions")
def test_an_environment_gets_the_steps_of_merged_rows_one_by_one(shop_dataset, tmp_path):
    rows = scan(shop_dataset).filter(instance_id="shop-1")
    for name, frame in {"steps": rows, "merged": merge(rows)}.items():
        with RolloutWriter(tmp_path / name) as writer:
            writer.write(frame.collect())
    assert len(scan(tmp_path / "merged").collect()) < len(rows.collect())
    said = [row["response_text"] for row in next(iter(attempts(tmp_path / "steps", None))).rows]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"instance_id": "shop-1", "prompt": "?", "expected": said}) + "\n")
    scorer = Scorer(function="own_rewards:Checks", tasks=str(tasks))
    for name in ("steps", "merged"):
        rescore(str(tmp_path / name), "checks", scorer)
    scores = [scores_of(str(tmp_path / name), "checks") for name in ("steps", "merged")]
    assert scores[0] == scores[1]
    assert 1.0 in scores[0].values()


def test_a_response_without_a_logged_text_is_decoded(shop_dataset, smollm2_dir):
    vocabulary = load_token_bytes(str(smollm2_dir))
    first = next(attempts(shop_dataset, vocabulary))
    logged = first.rows[0]["response_text"]
    assert first.instance_id == "shop-0"
    assert [row["step_index"] for row in first.rows] == list(range(5))
    bare = next(iter(attempts(shop_dataset, None)))
    assert bare.rows[0]["response_text"] in (logged, None)
    assert first.response
    assert first.messages[0]["role"] == "system"


@pytest.mark.usefixtures("functions")
def test_scores_of_a_dataset_that_was_written_again_are_not_used(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0))
    scorer = Scorer(function="own_rewards:last_digit")
    rescore(dataset, "mine", scorer)
    shutil.rmtree(dataset)
    other = [("a", 0, [{"response_ids": [9], "reward": 0.0}])]
    write(tmp_path / "ds", *other, *one_step(0.0, 0.0)[1:])
    with pytest.raises(InputError, match="1 trajectory not scored, or changed since") as caught:
        with_version(scan(dataset), dataset, "mine")
    assert caught.value.rule == "reward_version"
    assert rescore(dataset, "mine", scorer).num_resumed == 1
    assert len(with_version(scan(dataset), dataset, "mine").collect()) == 2


@pytest.mark.usefixtures("functions")
def test_a_pattern_of_datasets_leaves_out_their_versions(tmp_path):
    (tmp_path / "runs").mkdir()
    dataset = write(tmp_path / "runs" / "ds", *one_step(0.0, 0.0))
    rescore(dataset, "mine", Scorer(function="own_rewards:last_digit"))
    assert len(scan(tmp_path / "runs" / "*").collect()) == 2


@pytest.mark.parametrize("name", ["../up", "", "a.b", "a" * 200])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        version_path(str(tmp_path), name)
    assert caught.value.rule == "reward_version"


@pytest.mark.usefixtures("functions")
def test_a_damaged_version_and_an_unknown_one_are_named(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0))
    path = version_path(dataset, "mine")
    path.parent.mkdir()
    path.write_bytes(b"PAR1 and more")
    for name in ("mine", "other"):
        with pytest.raises(InputError) as caught:
            read_version(dataset, name)
        assert caught.value.rule == "reward_version"
    assert "mine" in caught.value.hint


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
def test_a_run_killed_20_times_scores_every_trajectory_once(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(*[0.0] * 60))
    command = [sys.executable, "-m", "rollout_io", "rescore", dataset, "--workers", "2"]
    command += ["--reward", "own_rewards:told", "-q"]
    run_after_20_kills(command)
    scores, _ = read_version(dataset, "told")
    assert scores["trajectory_id"].n_unique() == len(scores) == 60
    assert scores_of(dataset, "told") == {f"a_{n}": float(n) for n in range(60)}
    assert sorted(p.name for p in Path(f"{dataset}.rewards").iterdir() if "lock" not in p.name) == [
        "told.arrow"
    ]
