import dataclasses
import json
import os
import re
import zlib

import msgspec
import polars as pl
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion.chunk import Reader, Settings
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.base import Input, Options, Place
from rollout_io.formats.calls import ADAPTER, read_session
from rollout_io.formats.parsing import records
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.helpers.conversion_helpers import (
    REWARDS,
    SHOP,
    SMALL_CHUNKS,
    call,
    damaged_shop,
    files_in,
    refusal,
    rejected_in,
    rejected_of,
    write,
)
from tests.helpers.harbor_helpers import failure, write_trial


@pytest.mark.slow
def test_fail_names_the_first_bad_record_and_how_many_more_and_leaves_nothing(tmp_path):
    log = damaged_shop(tmp_path)
    for workers, chunk_bytes in ((1, 1 << 20), (2, SMALL_CHUNKS), (1, 1)):
        sizes = {"workers": workers, "chunk_bytes": chunk_bytes}
        error = refusal([log], tmp_path / "ds", format="calls", **sizes)
        assert (error.rule, error.where) == ("json_line", f"{log}:31")
        assert re.search(
            r" \(and (\d+) more records rejected: \d+ \[\w+\] .*\)\.$", error.sentence
        ), error.sentence
        assert "or pass --on-error skip to leave such records out and convert" in error.hint
        assert not (tmp_path / "ds").exists()


def test_fail_goes_by_the_order_of_the_inputs_not_of_their_names(tmp_path):
    logs = [write(tmp_path / name, call(f"{name}/0"), b"{") for name in ("b", "a", "b10", "b9")]
    assert refusal(logs, tmp_path / "ds", format="calls").where == f"{logs[0]}:2"
    assert refusal(logs[1:], tmp_path / "ds", format="calls").where == f"{logs[1]}:2"
    inside = refusal([tmp_path], tmp_path / "ds", format="calls")
    assert inside.where == f"{tmp_path / 'a'}:2"


def test_skip_puts_aside_each_record_with_its_text_and_its_own_reason_and_runs_as_a_whole(tmp_path):
    log, out = damaged_shop(tmp_path), tmp_path / "ds"
    done = convert([log], out, format="calls", on_error="skip", chunk_bytes=SMALL_CHUNKS)
    lines = log.read_bytes().splitlines(keepends=True)
    rejected = rejected_in(out)
    summary = done.summary
    assert (summary.num_records, summary.num_rejected) == (206, len(rejected))
    assert summary.num_written == 206 - len(rejected) == summary.num_rows
    numbers = [int(r["source"].rpartition(":")[2]) for r in rejected]
    assert numbers == sorted(set(numbers))
    assert [r["record"].encode() for r in rejected] == [lines[n - 1] for n in numbers]
    reasons = {n: r["rule"] for n, r in zip(numbers, rejected, strict=True)}
    assert (reasons.pop(31), reasons.pop(101), reasons.pop(152)) == ("json_line",) * 3
    assert set(reasons.values()) == {"incomplete_trajectory"}
    sessions = [json.loads(lines[n - 1])["session"].replace("/", "_") for n in reasons]
    assert not set(sessions) & set(rollout_io.read(out)["trajectory_id"].to_pylist())
    others = [r for r in rejected if r["rule"] == "incomplete_trajectory"]
    assert all(f"{log}:31" in r["got"] or f"{log}:152" in r["got"] for r in others)


def test_a_record_that_is_no_utf_8_is_put_aside_with_its_bytes_escaped(tmp_path):
    log = write(tmp_path / "log", call("a/0"), b'{"session": "b/0", "x": "\xff\\"}')
    convert([log], tmp_path / "ds", format="calls", on_error="skip")
    (record,) = rejected_in(tmp_path / "ds")
    assert record["record"] == '{"session": "b/0", "x": "\\xff\\"}\n'
    assert "0xff at column" in record["got"]


def test_where_every_record_is_rejected_the_file_of_them_is_kept_and_the_exit_code_is_1(
    tmp_path, capsys
):
    log, out = write(tmp_path / "log", b"{}", call("a/0", -5)), tmp_path / "ds"
    arguments = ["convert", str(log), "--format", "calls", "--out", str(out), "--on-error", "skip"]
    assert run(arguments) == 1
    said = capsys.readouterr().err
    assert "no record can be used (2 rejected; the first: record_type" in said
    assert f"see {out}.rejected.jsonl" in said
    assert not out.exists()
    assert [r["source"] for r in rejected_in(out)] == [f"{log}:1", f"{log}:2"]
    assert run(arguments) == 1
    write(log, call("a/0"))
    assert run(arguments) == 0
    assert sorted(files_in(out)) == ["part-00000.parquet"]
    assert not rejected_of(out).exists()


def test_a_run_named_twice_is_rejected_with_the_place_of_the_first(tmp_path):
    log = write(tmp_path / "log", call("a/0"), call("a_0/0"), call("a/0_0"), call("a/1"))
    again = write(tmp_path / "again", call("a_0/1"))
    done = convert([log, again], tmp_path / "ds", on_error="skip")
    assert done.summary.num_rejected == 1
    assert rejected_in(tmp_path / "ds")[0]["rule"] == "session_name"


def test_the_log_s_own_reward_is_chosen_by_its_key(tmp_path, trial):
    rewards = {"tests": 0.25, "style": 1.0}
    for name in ("t1", "t2"):
        write_trial(tmp_path / "job", trial(name, verifier_result={"rewards": rewards}))
    arguments = ["convert", str(tmp_path / "job"), "--format", "harbor"]
    assert run([*arguments, "--out", str(tmp_path / "none")]) == 1
    assert run([*arguments, "--reward", "style", "--out", str(tmp_path / "ds")]) == 0
    table = rollout_io.read(tmp_path / "ds")
    assert table["reward"].to_pylist() == [1.0, 1.0]
    assert metrics_dict(table["metrics"][0].as_py()) | rewards == metrics_dict(
        table["metrics"][0].as_py()
    )
    error = refusal([tmp_path / "job"], tmp_path / "x", reward="stile")
    assert error.hint == "did you mean --reward style?"


def test_timeouts_and_overflows_are_failed_kept_or_zero_as_chosen(tmp_path, trial):
    one = {"verifier_result": {"rewards": {"reward": 1.0}}}
    write_trial(tmp_path / "job", trial("t0", **one))
    write_trial(tmp_path / "job", trial("t1", exception_info=failure("AgentTimeoutError"), **one))
    over = failure("ContextLengthExceededError")
    write_trial(tmp_path / "job", trial("t2", exception_info=over, **one))

    def rewards(*arguments):
        out = tmp_path / "-".join(["ds", *arguments])
        assert run(["convert", str(tmp_path / "job"), *arguments, "--out", str(out)]) == 0
        return rollout_io.read(out)["reward"].to_pylist()

    assert rewards() == [1.0, None, 0.0]
    assert rewards("--timeouts", "keep") == [1.0, 1.0, 0.0]
    assert rewards("--overflows", "keep") == [1.0, None, 1.0]
    assert rewards("--overflows", "fail", "--timeouts", "keep") == [1.0, 1.0, None]


def test_groups_are_chosen_by_labels_and_their_runs_numbered_in_order(tmp_path, trial, capsys):
    for task, name in (("b", "t1"), ("a", "t3"), ("b", "t2"), ("a", "t4")):
        write_trial(tmp_path / "job", trial(name, task=task))
    arguments = ["convert", str(tmp_path / "job"), "--out"]
    assert run([*arguments, str(tmp_path / "tasks"), "--group-by", "task_name"]) == 0
    assert "groups: chosen: --group-by task_name" in capsys.readouterr().err
    table = rollout_io.read(tmp_path / "tasks")
    assert table["trajectory_id"].to_pylist() == ["a_0", "a_1", "b_0", "b_1"]
    assert run([*arguments, str(tmp_path / "jobs"), "--group-by", "job,task_checksum"]) == 0
    assert set(rollout_io.read(tmp_path / "jobs")["instance_id"].to_pylist()) == {
        "job/sum-of-a",
        "job/sum-of-b",
    }
    assert run([*arguments, str(tmp_path / "no"), "--group-by", "task"]) == 1
    assert "[group_by]" in (said := capsys.readouterr().err)
    assert "the run has no label 'task' (and " in said
    assert "Hint: did you mean task_name? Otherwise omit --group-by" in said
    assert "use one of task_name, " in said
    assert not (tmp_path / "no").exists()


def test_a_damaged_trial_of_a_job_hides_none_of_the_others(tmp_path, trial):
    for name in ("t1", "t2", "t3"):
        directory = write_trial(tmp_path / "job", trial(name))
    result = directory / "result.json"
    result.write_bytes(result.read_bytes()[:50])
    counts = {"id": "j", "n_total_trials": 3, "stats": {}}
    (tmp_path / "job" / "result.json").write_text(json.dumps(counts), encoding="utf-8")
    choices = Keywords(format="harbor", on_error="skip")
    done = convert([tmp_path / "job"], tmp_path / "ds", **choices).summary
    assert (done.num_records, done.num_written, done.num_rejected) == (3, 2, 1)
    assert rejected_in(tmp_path / "ds")[0]["where"] == str(result)
    assert refusal([tmp_path / "job"], tmp_path / "x", format="harbor").where == str(result)


def test_a_job_that_was_stopped_gives_its_trials_and_says_that_some_are_missing(tmp_path, trial):
    write_trial(tmp_path / "job", trial("t1"))
    counts = {"id": "j", "n_total_trials": 3, "stats": {}}
    (tmp_path / "job" / "result.json").write_text(json.dumps(counts), encoding="utf-8")
    choices = Keywords(format="harbor", on_error="skip")
    done = convert([tmp_path / "job"], tmp_path / "ds", **choices).summary
    assert (done.num_written, done.num_rejected) == (1, 1)
    assert rejected_in(tmp_path / "ds")[0]["rule"] == "missing_trials"


def test_a_directory_of_jobs_that_have_no_result_yet_gives_their_trials(tmp_path, trial):
    for job in ("j1", "j2"):
        write_trial(tmp_path / "jobs" / job, trial(job, task=job))
    assert convert([tmp_path / "jobs"], tmp_path / "ds").summary.num_records == 2


def test_a_rewards_file_wins_over_the_log(tmp_path):
    log = write(tmp_path / "log", call("a/0", reward=0.25), call("a/1", reward=0.5))
    rewards = write(tmp_path / "rewards", {"session": "a/0", "reward": 1.0, "style": "x"})
    convert([log], tmp_path / "ds", rewards=str(rewards))
    table = rollout_io.read(tmp_path / "ds")
    assert table["reward"].to_pylist() == [1.0, 0.5]
    assert table["metrics"].to_pylist() == [[{"key": "logged_reward", "value": 0.25}], None]
    assert table["style"].to_pylist() == ["x", None]


@pytest.mark.parametrize(
    ("num_bad", "num_rewards", "counted"),
    [
        (3, 2, "(and 2 more records and 2 rewards rejected: "),
        (1, 1, "(and 1 reward rejected: "),
        (0, 3, "(and 2 more rewards rejected: "),
        (2, 0, "(and 1 more record rejected: "),
    ],
)
def test_further_rewards_are_counted_apart_from_records_of_the_log(
    num_bad, num_rewards, counted, tmp_path
):
    bad = [b"not a call %d" % i for i in range(num_bad)]
    log = write(tmp_path / "log", call("a/0"), *bad)
    lines = [{"session": f"b/{i}", "reward": 1.0} for i in range(num_rewards)]
    rewards = write(tmp_path / "rewards", {"session": "a/0", "reward": 1.0}, *lines)
    choices = Keywords(format="calls", rewards=str(rewards))
    assert counted in refusal([log], tmp_path / "ds", **choices).sentence
    with pytest.raises(RolloutError) as caught:
        rollout_io.read_log([log], **choices)
    assert counted in caught.value.sentence


@pytest.mark.parametrize(
    ("with_some", "consequence"),
    [
        (True, "1 row without log-probabilities, so `train` rejects the dataset unless"),
        (False, "1 row without log-probabilities, so `train` applies no importance weights"),
    ],
)
def test_the_consequence_of_missing_logprobs_for_training_is_named(
    with_some, consequence, tmp_path
):
    known = call("b/0")
    known["response"]["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}]}
    log = write(tmp_path / "log", call("a/0"), *([known] if with_some else []))
    assert consequence in convert([log], tmp_path / "ds").summary.text("ds")


def test_an_outcome_of_no_run_is_a_record_that_cannot_be_used_and_hides_no_other(tmp_path):
    log = write(tmp_path / "log", call("a/0"), b"not a call of a/1", call("b/1"))
    lines = [{"session": f"{name}", "reward": 1.0} for name in ("a/0", "a/1", "b/0")]
    rewards = write(tmp_path / "rewards", *lines)
    chosen = {"format": "calls", "rewards": str(rewards)}
    error = refusal([log], tmp_path / "ds", **chosen)
    assert (error.rule, error.where) == ("json_line", f"{log}:2")
    assert "(and 2 rewards rejected: 2 [" in error.sentence
    done = convert([log], tmp_path / "ds", **chosen, on_error="skip").summary
    assert (done.num_records, done.num_written, done.num_rejected) == (5, 2, 3)
    assert [r["source"] for r in rejected_in(tmp_path / "ds")] == [
        *(f"{log}:2", f"{rewards}:2", f"{rewards}:3"),
    ]
    assert rollout_io.read(tmp_path / "ds")["reward"].to_pylist() == [1.0, None]


def test_an_outcome_that_cannot_be_written_is_refused_and_never_dropped(tmp_path):
    log = write(tmp_path / "log", call("a/0"))
    for name in (b'"\\ud800/1"', b'"\\u0000/1"', b'"' + b"x" * 100_000 + b'/1"'):
        rewards = write(tmp_path / "rewards", b'{"session": %s, "error": "x"}' % name)
        out = tmp_path / f"ds{len(name)}"
        try:
            done = convert([log], out, rewards=str(rewards), on_error="skip")
        except RolloutError:
            assert not out.exists()
        else:
            assert rollout_io.read(out).num_rows == done.summary.num_rows == 2


def test_what_is_said_in_json_adds_up(tmp_path, capsys):
    log, out = damaged_shop(tmp_path), tmp_path / "ds"
    arguments = ["--on-error", "skip", "--rewards", str(REWARDS), "--out", str(out), "--json"]
    assert run(["convert", str(log), "--format", "calls", *arguments]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = pl.DataFrame(pl.from_arrow(rollout_io.read(out).drop_columns("metrics")))
    last = rows.filter("is_last_step")
    assert said["num_records"] == said["num_written"] + said["num_rejected"] == 206
    assert said["num_rejected"] == len(rejected_in(out))
    assert said["num_written"] == said["num_calls"] == rows["source"].n_unique()
    assert (said["num_rows"], said["num_trajectories"]) == (len(rows), len(last))
    assert said["num_groups"] == rows["instance_id"].n_unique()
    assert said["reward_mean"] == pytest.approx(last["reward"].mean())
    assert said["num_without_reward"] == last["reward"].null_count()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_each_byte_twice_and_each_row_once(workers, tmp_path):
    seen = []
    sizes = {"workers": workers, "chunk_bytes": SMALL_CHUNKS}
    convert([SHOP], tmp_path / "ds", **sizes, progress=lambda *counts: seen.append(counts))
    assert sum(num_bytes for num_bytes, _ in seen) == 2 * SHOP.stat().st_size
    assert sum(num_rows for _, num_rows in seen) == 205


@pytest.mark.parametrize(
    "call",
    [
        lambda ds: rollout_io.convert([], ds),
        lambda ds: rollout_io.convert(SHOP, ds, workers=0),
        lambda ds: rollout_io.convert(SHOP, ds, on_error="ignore"),
        lambda ds: rollout_io.convert(SHOP, ds, timeouts="zero"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(call, tmp_path):
    with pytest.raises(RolloutError, match=r"choices|input_file"):
        call(tmp_path / "ds")
    assert not (tmp_path / "ds").exists()


def reader_that_raises(error, log):
    """A reader of runs, of which that of `a` raises, and the runs."""

    def read(run, options):
        if run.instance_id == "a":
            raise error
        return read_session(run, options)

    adapter = dataclasses.replace(ADAPTER, read=read)
    metadata = DatasetMetadata()
    settings = Settings(
        adapter=adapter, options=Options(), retokenizer=None, layout="prefix", metadata=metadata
    )
    found = adapter.find([Input(log.name, log)], lambda _: None)
    return Reader(settings, {}), [item for item in found if hasattr(item, "places")]


NO_INTEGER = msgspec.ValidationError("Expected `int`, got `str` - at `$.a`")


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        *(
            (error, "unreadable_record")
            for error in (MemoryError(), zlib.error("x"), TypeError("x"))
        ),
        *((RecursionError(), "json_line"), (OverflowError("x"), "record_type")),
        (NO_INTEGER, "record_type"),
    ],
)
def test_whatever_a_record_makes_its_reader_raise_rejects_it_alone(error, rule, tmp_path):
    log = write(tmp_path / "log", call("a/0"), call("b/0"))
    reader, runs = reader_that_raises(error, log)
    (part,) = reader.parts(runs)
    assert part.table.column("trajectory_id").to_pylist() == ["b_0"]
    assert [(r.place.where, r.error.rule) for r in reader.rejected] == [("log:1", rule)]


def test_an_error_of_the_disk_is_no_records(tmp_path):
    reader, runs = reader_that_raises(
        OSError(5, "Input/output error"), write(tmp_path / "log", call("a/0"))
    )
    with pytest.raises(OSError, match="Input/output"):
        list(reader.parts(runs))


def test_a_record_stays_readable_while_another_thread_clears_the_open_files(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"one\ntwo\n")
    pread = os.pread

    def cleared_first(*arguments):
        records._descriptor.cache_clear()
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", cleared_first)
    assert records.read_record(Place(log, "log.jsonl:2", 4, 3)) == b"two"
