"""A line of a rewards file names a run in any way that only one run of the log has."""

import pytest

import rollout_io
from rollout_io import convert, read_log
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas.errors import InputError
from tests.helpers.conversion_helpers import call, refusal, rejected_in, write

ANSWERED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def rewarded(tmp_path, *names):
    lines = [{"session": name, "reward": float(i + 1)} for i, name in enumerate(names)]
    return Keywords(rewards=str(write(tmp_path / "rewards.jsonl", *lines)))


@pytest.mark.parametrize("name", ["a/0", "a", "a_0"])
def test_full_names_instances_of_one_run_and_trajectory_ids_name_a_run(name, tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0"), call("b/0"))
    choices = rewarded(tmp_path, name)
    convert([log], tmp_path / "ds", **choices)
    table = rollout_io.read(tmp_path / "ds")
    assert table["trajectory_id"].to_pylist() == ["a_0", "b_0"]
    assert table["reward"].to_pylist() == [1.0, None]
    assert read_log([log], **choices)["reward"].to_pylist() == [1.0, None]


def test_an_instance_may_look_like_a_full_name(tmp_path):
    log = write(tmp_path / "log.jsonl", call("math/12/0"), call("math/13/0"), call("math/13/1"))
    choices = rewarded(tmp_path, "math/12", "math/13_1", "math/13/0")
    assert read_log([log], **choices)["reward"].to_pylist() == [1.0, 3.0, 2.0]


def test_a_full_name_wins_over_an_instance_of_the_same_name(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0"), call("a/0/0"))
    assert read_log([log], **rewarded(tmp_path, "a/0"))["reward"].to_pylist() == [1.0, None]


def test_an_instance_and_a_repetition_never_mean_another_run(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0/3"), call("b_1/0"))
    named = {"instance_id": "a", "repetition_id": 0}
    choices = Keywords(rewards=str(write(tmp_path / "rewards.jsonl", {**named, "reward": 1.0})))
    error = refusal([log], tmp_path / "ds", **choices)
    assert (error.rule, error.got) == (
        "unknown_session",
        "session 'a/0' has a reward but no call in the logs",
    )
    write(tmp_path / "rewards.jsonl", {**named, "error": "lost"})
    table = read_log([log], **choices)
    assert table["trajectory_id"].to_pylist() == ["a/0_3", "b_1_0", "a_0"]
    assert table["error"].to_pylist() == [None, None, "lost"]


@pytest.mark.parametrize(
    ("calls", "name", "names"),
    [
        (("a/0", "a/1"), "a", "2 runs: a/0, a/1"),
        (("a/0", "a_0/0"), "a_0", "2 runs: a/0, a_0/0"),
        (tuple(f"a/b/{i}" for i in range(6)), "a/b", "6 runs: a/b/0, a/b/1, a/b/2, a/b/3, ..."),
    ],
)
def test_a_name_that_fits_several_runs_is_an_error_that_lists_them(calls, name, names, tmp_path):
    log = write(tmp_path / "log.jsonl", *map(call, calls))
    error = refusal([log], tmp_path / "ds", **rewarded(tmp_path, name))
    assert (error.rule, error.where) == ("session_name", f"{tmp_path / 'rewards.jsonl'}:1")
    assert error.got == f"session {name!r} matches {names}"


def test_a_name_of_no_run_is_a_rejected_record_and_its_hint_names_a_run_of_the_log(tmp_path):
    log = write(tmp_path / "log.jsonl", call("alpha/0"), call("beta/0"))
    choices = rewarded(tmp_path, "alpa", "beta")
    error = refusal([log], tmp_path / "ds", **choices)
    assert isinstance(error, InputError)
    assert (error.rule, error.got) == ("session_name", "session 'alpa'")
    assert error.hint.startswith("name a run of the log, for example 'alpha/0'; or pass --on-error")
    skip = Keywords(rewards=choices["rewards"], on_error="skip")
    done = convert([log], tmp_path / "ds", **skip).summary
    assert (done.num_records, done.num_written, done.num_rejected) == (3, 2, 1)
    assert [record["rule"] for record in rejected_in(tmp_path / "ds")] == ["session_name"]
    assert rollout_io.read(tmp_path / "ds")["reward"].to_pylist() == [None, 2.0]


def test_two_names_of_one_run_are_two_lines_about_it(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0"))
    error = refusal([log], tmp_path / "ds", **rewarded(tmp_path, "a/0", "a"))
    assert (error.rule, error.where) == ("reward_line", f"{tmp_path / 'rewards.jsonl'}:2")
    assert "session a/0 already has a line" in error.got


def test_a_failed_run_that_made_no_call_needs_its_full_name(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0"))
    lines = {"session": "b/3", "error": "lost"}, {"session": "a", "error": "crashed"}
    choices = Keywords(rewards=str(write(tmp_path / "rewards.jsonl", *lines)))
    table = read_log([log], **choices)
    assert table["trajectory_id"].to_pylist() == ["a_0", "b_3"]
    assert table["error"].to_pylist() == ["crashed", "lost"]
    write(tmp_path / "rewards.jsonl", {"session": "b", "error": "lost"})
    assert refusal([log], tmp_path / "ds", **choices).rule == "session_name"


@pytest.mark.slow
def test_a_session_of_claude_code_is_named_as_its_log_and_inspect_name_it(
    harness_logs, smollm2_dir, tmp_path, capsys
):
    logs = harness_logs / "claude_code"
    export = str(logs / "simonw.sample_session.json")
    rewards = rewarded(tmp_path, "test_session", "test-session-id_0", export)["rewards"]
    given = ["--tokenizer", str(smollm2_dir), "--chat-template", "chatml_tools_thinking"]
    given += ["--on-error", "skip", "--out", str(tmp_path / "ds"), "--rewards", rewards]
    assert run(["convert", str(logs), *given]) == 0
    table = rollout_io.scan(tmp_path / "ds").filter(is_last_step=True).collect()
    outcomes = dict(table.select("instance_id", "reward").iter_rows())
    assert outcomes == {"test_session": 1.0, "test-session-id": 2.0, export: 3.0}
    assert run(["inspect", str(tmp_path / "ds")]) == 0
    assert "test_session_0" in capsys.readouterr().out


def test_a_key_with_a_nul_character_is_refused_where_it_stands(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0"))
    line = {"session": "a/0", "reward": 1.0, "sco\0re": 2.0}
    choices = Keywords(rewards=str(write(tmp_path / "rewards.jsonl", line)))
    error = refusal([log], tmp_path / "ds", **choices)
    assert error.rule == "reward_line"
    assert error.where.endswith("rewards.jsonl:1")
    assert "NUL character" in error.got
