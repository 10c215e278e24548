"""Findings beside a dataset: planted ones found with their spans, each once, and never of other rows."""

import json
import shutil
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import merge
from pipelines.rescoring.attempts import Attempt, Finding, attempts
from pipelines.rescoring.finders import FINDERS
from pipelines.rescoring.rescore import rescore
from pipelines.rescoring.scorers import Scorer
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from rollout_io.dataset.versions import FINDINGS, count_findings, read_version
from schemas.errors import ConfigError, InputError
from tests.helpers.filter_helpers import ids, one_step, relaxed, table
from tests.helpers.kill_helpers import run_after_20_kills

FUNCTIONS = """
from pipelines.rescoring.attempts import Finding


def tell(attempt):
    print(attempt.trajectory_id, flush=True)
    number = int(attempt.trajectory_id.rpartition("_")[2])
    return [Finding(label="odd", text=f"{n} of {number}", step=0) for n in range(number % 3)]


def both(attempt):
    number = int(attempt.trajectory_id.rpartition("_")[2])
    return number / 2, ({"label": name, "start": 0, "length": 1, "step": 0} for name in "ab"[:number])


def fails(attempt):
    if attempt.trajectory_id == "a_0":
        raise ConnectionError("the judge is down")
    return [{"label": "x"}]


def number(attempt):
    return 1.0
"""
BASH = {"name": "bash", "arguments": '{"command": "make test"}'}


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "own_finders.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_finders", raising=False)


def call(name, **arguments):
    return {"name": name, "arguments": json.dumps(arguments)}


def said(text, *calls):
    """A response, with calls as Hermes writes them."""
    return text + "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls)


def conversation(*turns):
    """Steps of (response, result of its calls); each prompt continues the tokens before it."""
    messages, steps, tokens = [{"role": "user", "content": "Fix it."}], [], [1]
    for number, (response, result) in enumerate(turns):
        steps.append(
            {
                "messages": json.dumps(messages),
                "response_text": response,
                "prompt_token_ids": list(tokens),
                "response_ids": [2 + number, 3 + number],
                "loss_mask": [True, True],
                "stop_reason": "stop",
                "reward": 0.0,
            }
        )
        tokens += [2 + number, 3 + number, 7]
        messages = [*messages, {"role": "assistant", "content": response}]
        messages += [] if result is None else [{"role": "tool", "content": result}]
    return steps


def write(path, *trajectories, optional=("messages", "response_text"), **more):
    with RolloutWriter(path, **more) as writer:
        writer.write(table(*trajectories, optional=optional))
    return str(path)


def find(dataset, *functions, **more):
    for function in functions:
        scorer = Scorer(function=function, gives="findings", **more)
        rescore(dataset, function.rpartition(":")[2], scorer, num_workers=2)


def found_in(dataset, name):
    values, _ = read_version(dataset, name, FINDINGS)
    return dict(values.select("trajectory_id", "findings").rows())


LOOP = [(said("", BASH), "Error: 1 failed")] * 4 + [
    (said("", call("ls")), "a"),
    ("All tests pass.", None),
]
CYCLE = [(said("", call(name)), "ok") for name in ("a", "b") * 3] + [("Gave up.", None)]
PLANTED = {
    "loops": [
        (LOOP, 0, "4 times in a row"),
        (CYCLE, 0, "and 1 more, 3 times in a row"),
    ],
    "test_edits": [
        ([(said("", call("edit_file", path="src/tests/test_a.py", new="x")), "ok"), ("Done.", None)], 0, "test_a.py"),
        ([("Hm.", "?"), (said("", call("bash", command="cd r && sed -i s/1/2/ tests/b.py")), "")], 1, "tests/b.py"),
        ([(said("", call("bash", command=["bash", "-lc", "echo > app.test.ts"])), "")], 0, "app.test.ts"),
        ([(said("", call("apply_patch", input="*** Update File: a/conftest.py\n+x")), "")], 0, "conftest.py"),
        ([(said("", call("python", code="open('tests/c.py', 'w').write('')")), "")], 0, "tests/c.py"),
    ],
    "false_success": [
        ([(said("", BASH), "2 failed, 3 passed"), ("I fixed the bug. All tests pass.", None)], 1, "I fixed the bug."),
        ([(said("", BASH), "Traceback (most recent call last):\nKeyError"), ("Everything is done.", None)], 1, "done"),
    ],
    "refusals": [
        ([("I'm sorry, but I can't do that here.", None)], 0, "I can't do that here"),
        ([("Well. I cannot assist with this request.", None)], 0, "I cannot assist with this request"),
    ],
}  # fmt: skip
CLEAN = [
    [turn for n in range(4) for turn in ((said("", BASH), "Error: 1 failed"), (said("", call("edit", path="a.py", new=n)), "ok"))],
    [(said("", call("bash", command="pytest tests/ > out.txt; cat tests/test_a.py")), "3 passed")],
    [(said("", call("view", path="tests/test_a.py")), "x"), (said("", call("str_replace_based_edit_tool", command="view", path="tests/a.py")), "x")],
    [(said("", BASH), "2 failed"), ("The bug is not fixed; the tests still fail.", None)],
    [(said("", BASH), "0 failed, 3 passed"), ("I fixed the bug. All tests pass.", None)],
    [("I can't find the file, so I will list the folder. I cannot help but wonder.", "x"), ("ok", None)],
]  # fmt: skip


def finders_on(steps, tmp_path):
    dataset = write(tmp_path / "one", ("a", 0, steps))
    (attempt,) = attempts(dataset, None)
    return {
        finder.__name__: [Finding(**one) for one in attempt.findings(finder(attempt))]
        for finder in FINDERS
    }


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in PLANTED.items() for case in cases]
)
def test_planted_cases_are_found_with_their_spans(name, case, tmp_path):
    turns, step, text = case
    steps = conversation(*turns)
    (one,) = finders_on(steps, tmp_path)[name]
    assert (one.label, one.step) == (name, step)
    assert text in one.text
    if name in {"loops", "test_edits"}:
        assert (one.start, one.length) == (len(steps[step]["prompt_token_ids"]), 2)
    else:
        shown = steps[step]["response_text"][one.text_start :][: one.text_length]
        assert shown in one.text
        assert one.start is None


@pytest.mark.parametrize("turns", CLEAN)
def test_what_only_looks_alike_is_not_found(turns, tmp_path):
    assert not any(finders_on(conversation(*turns), tmp_path).values())


def test_answers_that_a_limit_cut_off_are_found_with_their_tokens(tmp_path):
    steps = conversation(("a", "b"), ("c", None))
    steps[1]["stop_reason"] = "context_length"
    (one,) = finders_on(steps, tmp_path)["truncations"]
    assert (one.step, one.start, one.length) == (1, 4, 2)


def test_merging_changes_no_finding(tmp_path):
    planted = [case[0] for cases in PLANTED.values() for case in cases]
    steps = write(
        tmp_path / "steps", *(("a", n, conversation(*turns)) for n, turns in enumerate(planted))
    )
    with RolloutWriter(tmp_path / "merged") as writer:
        writer.write(merge(scan(steps)).collect())
    assert len(scan(tmp_path / "merged").collect()) == len(planted)
    first, second = ([*attempts(path, None)] for path in (steps, tmp_path / "merged"))
    for one, other in zip(first, second, strict=True):
        for finder in FINDERS:
            assert one.findings(finder(one)) == other.findings(finder(other))


@pytest.mark.slow
def test_a_version_counts_each_finding_once_and_conditions_filter_by_it(tmp_path, capsys):
    dataset = write(tmp_path / "ds", *one_step(*[0.0] * 5, "failed"), optional=())
    find(dataset, "own_finders:tell")
    assert {name: len(found) for name, found in found_in(dataset, "tell").items()} == {
        f"a_{n}": n % 3 for n in range(5)
    }
    counts = {"findings('tell') > 0": 3, "findings('tell/odd') = 2": 1, "findings('tell') = 0": 2}
    counts |= {"findings('tell/even') = 0": 5, "findings('tell') IS NULL": 1}
    for number, (condition, size) in enumerate(counts.items()):
        out = str(tmp_path / f"out{number}")
        assert run(["filter", dataset, "--where", condition, "--out", out]) == 0, condition
        assert len(ids(scan(out))) == size
        assert not Path(f"{out}.findings").exists()
        capsys.readouterr()
        assert run(["inspect", dataset, "--where", condition, "--json"]) == 0
    for condition in ("findings('other') > 0", "findings(tell) > 0", "findings('../x') > 0"):
        assert run(["filter", dataset, "--where", condition, "--dry-run"]) == 1


@pytest.mark.slow
def test_findings_of_rows_that_changed_are_refused(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0), optional=())
    find(dataset, "own_finders:tell")
    shutil.rmtree(dataset)
    write(tmp_path / "ds", ("a", 0, [{"response_ids": [9], "reward": 0.0}]), *one_step(0.0, 0.0)[1:], optional=())  # fmt: skip
    with pytest.raises(InputError, match="or changed since, such as 'a_0'") as caught:
        count_findings(dataset, "tell")
    assert caught.value.rule == "reward_version"
    find(dataset, "own_finders:tell")
    assert len(count_findings(dataset, "tell")[0]) == 2
    with pytest.raises(ConfigError):
        count_findings("", "tell")


def test_a_function_may_give_a_reward_and_findings_under_one_name(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0, 0.0), optional=())
    scorer = Scorer(function="own_finders:both")
    for num_resumed in (0, 3):
        result = rescore(dataset, "both", scorer)
        assert (result.num_scored, result.num_resumed) == (3, num_resumed)
        assert result.findings == {"a": 2, "b": 1}
    rewards, _ = read_version(dataset, "both")
    assert rewards["reward"].to_list() == [0.0, 0.5, 1.0]
    labels = {
        name: [one["label"] for one in found] for name, found in found_in(dataset, "both").items()
    }
    assert labels == {"a_0": [], "a_1": ["a"], "a_2": ["a", "b"]}


@pytest.mark.slow
def test_a_finder_that_fails_leaves_its_trajectory_unknown_and_is_tried_again(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(0.0, 0.0), optional=())
    scorer = Scorer(function="own_finders:fails", gives="findings")
    assert rescore(dataset, "fails", scorer).num_errors == 1
    assert dict(zip(*count_findings(dataset, "fails"), strict=True)) == {"a_0": None, "a_1": 1}
    assert rescore(dataset, "fails", scorer).num_retried == 1
    with pytest.raises(InputError, match="was made by"):
        rescore(dataset, "fails", Scorer(function="own_finders:tell", gives="findings"))
    result = rescore(dataset, "one", Scorer(function="own_finders:number", gives="findings"))
    assert "[finding]" in next(iter(result.errors))


@pytest.mark.slow
def test_findings_are_compared_per_label_on_tasks_in_common_and_counted_by_stats(tmp_path, capsys):
    groups = [f"t{n}" for n in range(8)]
    a, b = (
        write(
            tmp_path / name,
            *(
                (group, n, conversation(*turns))
                for group in [*groups, f"only {name}"]
                for n in range(2)
            ),
        )
        for name, turns in (("a", CYCLE[-1:]), ("b", CYCLE))
    )
    for dataset in (a, b):
        assert run(["rescore", dataset, "--findings", "loops", "--findings", "refusals"]) == 0
        find(dataset, "own_finders:tell")
    assert "findings loops: 18 loops" in capsys.readouterr().err
    assert run(["diff", a, b, "--json"]) == 0
    numbers = {one["name"]: one for one in json.loads(capsys.readouterr().out)["numbers"]}
    loops = numbers["findings loops"]
    assert (loops["a"], loops["b"], loops["num_tasks"], loops["direction"]) == (0.0, 1.0, 8, -1)
    assert numbers["findings tell/odd"]["change"] == 0
    assert "findings refusals" not in numbers
    assert run(["stats", b, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["findings"]
    assert [(x["name"], x["label"], x["num_findings"], x["num_trajectories"]) for x in told] == [
        ("loops", "loops", 18, 18), ("refusals", None, 0, 0), ("tell", "odd", 9, 9),
    ]  # fmt: skip
    assert run(["stats", b]) == 0
    assert "findings loops: 18 loops in 18 trajectories" in capsys.readouterr().out
    shutil.rmtree(b)
    write(tmp_path / "b", *one_step(0.0, instance="t0"), optional=())
    assert run(["stats", b]) == 0
    assert "changed since" in capsys.readouterr().out
    assert run(["diff", a, b]) == 1
    assert "[reward_version]" in capsys.readouterr().err


def test_findings_of_different_functions_are_not_compared(tmp_path, capsys):
    paths = [write(tmp_path / name, *one_step(0.0, 0.0), optional=()) for name in "ab"]
    for dataset, function in zip(paths, ("tell", "fails"), strict=True):
        scorer = Scorer(function=f"own_finders:{function}", gives="findings")
        rescore(dataset, "same", scorer)
    assert run(["diff", *paths]) == 0
    assert (
        "findings same are not compared: different functions made them" in capsys.readouterr().err
    )


BAD = (
    3, {"label": "x"}, "x", [1], [{"text": "no label"}], [{"label": "a b"}], [{"label": "x", "other": 1}],
    [{"label": "x", "text": 1}], [{"label": "x", "step": 1}], [{"label": "x", "step": -1}],
    [{"label": "x", "step": True}], [{"label": "x", "step": 0, "start": 0}],
    [{"label": "x", "step": 0, "start": 2, "length": 2}], [{"label": "x", "start": 0, "length": 1}],
    [{"label": "x", "step": 0, "text_start": 1, "text_length": 2}], [{"label": "x", "text": "a" * 2001}],
)  # fmt: skip


@pytest.mark.parametrize("value", BAD)
def test_findings_about_what_an_attempt_does_not_have_are_refused(value):
    attempt = Attempt("a_0", "a", [{"response_ids": [5, 6], "response_text": "ab"}], [1])
    with pytest.raises(InputError) as caught:
        attempt.findings(value)
    assert caught.value.rule == "finding"


@relaxed
@given(
    st.dictionaries(
        st.sampled_from(["label", "text", "step", "start", "length", "text_start", "text_length", "x"]),
        st.none() | st.text(max_size=3) | st.integers(-2, 4) | st.booleans() | st.floats(),
    )
)  # fmt: skip
def test_a_finding_is_taken_whole_or_refused_whatever_a_judge_returns(value):
    attempt = Attempt("a_0", "a", [{"response_ids": [5, 6], "response_text": "ab"}], [1])
    try:
        (found,) = attempt.findings([value])
    except InputError:
        return
    stored = pl.DataFrame({"findings": [[found]]}, {"findings": FINDINGS.type})
    assert stored["findings"][0].to_list() == [found]
    assert (found["start"] or 0) + (found["length"] or 0) <= 3


@pytest.mark.slow
def test_a_run_killed_20_times_stores_every_finding_once(tmp_path):
    dataset = write(tmp_path / "ds", *one_step(*[0.0] * 60), optional=())
    command = [sys.executable, "-m", "rollout_io", "rescore", dataset, "--workers", "2"]
    command += ["--findings", "own_finders:tell", "-q"]
    run_after_20_kills(command)
    stored = found_in(dataset, "tell")
    assert {name: [one["text"] for one in found] for name, found in stored.items()} == {
        f"a_{n}": [f"{k} of {n}" for k in range(n % 3)] for n in range(60)
    }
    folder = Path(f"{dataset}.findings")
    assert [p.name for p in folder.iterdir() if "lock" not in p.name] == ["tell.arrow"]
