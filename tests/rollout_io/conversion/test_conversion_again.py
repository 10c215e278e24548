import gzip
import json
import os
import shutil
import signal
from pathlib import Path

import fsspec
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas.errors import InputError
from tests.helpers.conversion_helpers import (
    SHOP,
    SMALL_CHUNKS,
    call,
    damaged_shop,
    files_in,
    in_subprocess,
    refusal,
    rejected_in,
    table_of,
    write,
)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return table_of(SHOP, out=tmp_path_factory.mktemp("wanted") / "ds")


def test_a_second_run_of_a_finished_conversion_does_nothing(tmp_path, capsys):
    out = tmp_path / "ds"
    log = damaged_shop(tmp_path)
    arguments = ["convert", str(log), "--format", "calls", "--on-error", "skip", "--out", str(out)]
    assert run([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    before, times = files_in(out), {p: p.stat().st_mtime_ns for p in [out, *out.iterdir()]}
    assert run([*arguments, "--workers", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first | {"was_done": True}
    assert run(arguments) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert files_in(out) == before
    assert {p: p.stat().st_mtime_ns for p in [out, *out.iterdir()] if p != out} == {
        p: t for p, t in times.items() if p != out
    }


def changed_input(log):
    write(log, call("a/0"), call("a/1", 8))
    return {}


@pytest.mark.parametrize(
    "change",
    [
        changed_input,
        lambda _: {"layout": "full"},
        lambda _: {"on_error": "skip"},
        lambda _: {"timeouts": "keep"},
    ],
)
def test_another_conversion_into_a_dataset_is_refused_and_leaves_it_alone(change, tmp_path):
    log, out = write(tmp_path / "log", call("a/0")), tmp_path / "ds"
    convert([log], out)
    before = files_in(out)
    error = refusal([log], out, **change(log))
    assert (error.rule, error.where) == ("out_is_free", str(out))
    assert files_in(out) == before


def test_a_log_that_was_only_touched_is_the_same(tmp_path):
    log, out = write(tmp_path / "log", call("a/0")), tmp_path / "ds"
    convert([log], out)
    os.utime(log, ns=(1, 1))
    assert convert([log], out).was_done


def test_a_dataset_that_lost_a_shard_is_not_taken_for_done(tmp_path):
    log, out = write(tmp_path / "log", call("a/0"), call("b/0")), tmp_path / "ds"
    convert([log], out, chunk_bytes=1)
    (out / "part-00001.parquet").unlink()
    assert refusal([log], out, chunk_bytes=1).rule == "out_is_free"


def without_record(folder):
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata(None), path)


def damaged(folder):
    for path in folder.glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)


def with_shard_of_another(folder):
    log = write(folder.parent / "more", call("b/0"))
    convert([log], folder.parent / "more-ds")
    (folder.parent / "more-ds" / "part-00000.parquet").rename(folder / "part-00009.parquet")


@pytest.mark.parametrize("change", [without_record, damaged, with_shard_of_another])
def test_a_dataset_that_is_no_longer_as_it_was_converted_is_refused(change, tmp_path):
    log, out = write(tmp_path / "log", call("a/0")), tmp_path / "ds"
    convert([log], out)
    change(out)
    assert refusal([log], out).rule == "out_is_free"


def test_a_dataset_has_shards_and_nothing_else_and_any_reader_of_parquet_opens_it(tmp_path):
    log, out = damaged_shop(tmp_path), tmp_path / "ds"
    choices = Keywords(format="calls", on_error="skip")
    first = convert([log], out, **choices, chunk_bytes=SMALL_CHUNKS)
    assert all(path.suffix == ".parquet" for path in out.rglob("*"))
    assert len(list(out.iterdir())) > 1
    assert len(rejected_in(out)) == first.summary.num_rejected > 0
    again = convert([log], out, **choices, chunk_bytes=SMALL_CHUNKS)
    assert again.was_done
    assert (again.summary, again.about) == (first.summary, first.about)
    assert pl.scan_parquet(out).select(pl.len()).collect().item() == first.summary.num_rows
    assert ds.dataset(out).count_rows() == first.summary.num_rows


def test_a_dataset_on_any_filesystem_has_its_rejected_records_beside_it(tmp_path):
    out = f"memory://{tmp_path.name}/ds"
    done = convert([damaged_shop(tmp_path)], out, format="calls", on_error="skip")
    fs = fsspec.filesystem("memory")
    assert all(name.endswith(".parquet") for name in fs.find(out))
    assert len(fs.cat(f"{out}.rejected.jsonl").splitlines()) == done.summary.num_rejected


def stop_in_the_middle(log, out):
    """A conversion of chunks of one run each that is killed at its third row."""
    code = """
import os, sys, rollout_io
rows = []
def count(_, num_rows):
    rows.extend(range(num_rows))
    if len(rows) > 2:
        os.kill(os.getpid(), 9)
rollout_io.convert([sys.argv[1]], sys.argv[2], format="calls", chunk_bytes=1, progress=count)
"""
    assert in_subprocess("-c", code, log, out).returncode == -signal.SIGKILL
    assert list(out.glob(".converting/chunk-00001.*/report.json"))


def test_an_unfinished_conversion_of_other_inputs_is_discarded(tmp_path):
    log = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(6)))
    stop_in_the_middle(log, tmp_path / "ds")
    write(log, *(call(f"b/{i}", 6) for i in range(3)))
    done = convert([log], tmp_path / "ds", format="calls", chunk_bytes=1)
    assert done.num_resumed == 0
    assert rollout_io.read(tmp_path / "ds")["instance_id"].to_pylist() == ["b"] * 3
    assert ".converting" not in files_in(tmp_path / "ds")


def test_what_an_earlier_release_left_unfinished_is_removed(tmp_path):
    log, staging = write(tmp_path / "log", call("a/0")), tmp_path / "ds" / ".converting"
    for name in ("chunk-00000", "chunk-00001.0123abcd.tmp"):
        (staging / name).mkdir(parents=True)
        (staging / name / "report.json").write_text('{"num_shards": 1, "report": {}}')
    (staging / "plan.json").write_text("{}")
    assert convert([log], tmp_path / "ds", format="calls").num_resumed == 0
    assert not staging.exists()


def test_an_unfinished_conversion_goes_on_where_it_was_stopped(tmp_path):
    log = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(6)))
    stop_in_the_middle(log, tmp_path / "ds")
    done = convert([log], tmp_path / "ds", format="calls", chunk_bytes=1)
    assert done.num_resumed == 2
    assert done.summary.num_rows == rollout_io.read(tmp_path / "ds").num_rows == 6


def test_of_two_conversions_at_once_the_second_is_refused_by_name(tmp_path):
    log, out = write(tmp_path / "log", call("a/0")), tmp_path / "ds"
    refused = []

    def try_too(*_):
        if not refused:
            refused.append(refusal([log], out))

    convert([log], out, progress=try_too)
    assert refused[0].rule == "out_is_free"
    assert refused[0].got == "another process is writing to this directory"
    assert rollout_io.read(out).num_rows == 1
    assert ".converting" not in files_in(out)


def test_a_dataset_may_be_written_to_any_filesystem(wanted, tmp_path):
    out = f"memory://{tmp_path.name}/ds"
    convert([SHOP], out, chunk_bytes=SMALL_CHUNKS)
    table = rollout_io.read(out).drop_columns("source").replace_schema_metadata(None)
    assert table.equals(wanted.cast(table.schema))
    assert convert([SHOP], out, chunk_bytes=SMALL_CHUNKS).was_done
    assert not fsspec.filesystem("memory").exists(f"{out}/.converting")


@pytest.mark.slow
def test_processes_that_do_not_share_a_filesystem_are_refused(tmp_path):
    out = f"memory://{tmp_path.name}/ds"
    error = refusal([SHOP], out, workers=2, chunk_bytes=SMALL_CHUNKS)
    assert (error.rule, error.where) == ("shared_storage", out)
    assert error.hint == "write to storage that all nodes share, or use --workers 1"
    assert not fsspec.filesystem("memory").exists(out)


def test_a_place_where_nothing_can_be_written_is_one_message(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "ds", Path("/proc/nowhere/ds")):
        assert run(["convert", str(SHOP), "--out", str(out)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("Error: ")
        assert str(out) in said
        assert len(said.split("\nHint: ")) == 2


def convert_on_a_small_disk(log, out):
    """No file there may be larger than 20 kB."""
    code = (
        "import resource, signal, sys; from rollout_io.cli.main import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "main(sys.argv[1:])"
    )
    return in_subprocess("-c", code, "convert", log, "--out", out)


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_another_attempt_goes_on(tmp_path):
    out = tmp_path / "ds"
    done = convert_on_a_small_disk(SHOP, out)
    assert done.returncode == 1
    assert done.stderr.count("Error: ") == 1
    assert "[output_file]" in done.stderr
    assert ": file too large. [output_file]" in done.stderr
    assert "Error: cannot write " in done.stderr
    assert not list(out.glob("*.parquet"))
    assert convert([SHOP], out).summary.num_rows == 205
    assert ".converting" not in files_in(out)


@pytest.mark.slow
def test_a_full_disk_while_a_log_is_unpacked_is_not_called_a_damaged_log(tmp_path):
    log = tmp_path / "shop.gz"
    log.write_bytes(gzip.compress(SHOP.read_bytes()))
    done = convert_on_a_small_disk(log, tmp_path / "ds")
    assert done.returncode == 1
    assert "[output_file]" in done.stderr
    assert "damaged" not in done.stderr


NUM_BYTES = 100_000_000
_LINE = b'{"session": "b/0", "request": {"messages": %b}, "response": {%b, "choices": [%b]}}'
_CHOICE = b'{"token_ids": [7]}'
_PROMPT = b'"prompt_token_ids": [1]'


def long_line(kind):
    """A call of 100 MB, or what is no call."""
    text = b'["' + b"x" * NUM_BYTES + b'"]'
    ids = b'"prompt_token_ids": [' + b"12345, " * (NUM_BYTES // 7) + b"7]"
    if kind == "ids":
        return _LINE % (b"[]", ids, _CHOICE)
    if kind == "nested":
        return _LINE % (b"[" * NUM_BYTES, _PROMPT, _CHOICE)
    line = _LINE % (text, _PROMPT, _CHOICE)
    return line[: -NUM_BYTES // 2] if kind == "cut" else line


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "rules"),
    [("text", []), ("ids", []), ("cut", ["json_line"]), ("nested", ["json_line"])],
)
def test_a_line_of_100_mb_gives_its_row_or_a_named_error_in_less_than_2_gb(kind, rules, tmp_path):
    log, out = write(tmp_path / "log", call("a/0"), long_line(kind)), tmp_path / "ds"
    code = (
        "import resource, sys; from rollout_io.cli.main import run; code = run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    arguments = ["convert", str(log), "--format", "calls", "--out", str(out), "--on-error", "skip"]
    done = in_subprocess("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 2 << 30
    assert rollout_io.read(out).num_rows == 2 - len(rules)
    found = rejected_in(out) if rules else []
    assert [record["rule"] for record in found] == rules


def test_a_chunk_whose_worker_died_after_writing_it_is_written_again(tmp_path, monkeypatch):
    """Ray runs such a task again, at the same path."""
    from rollout_io.conversion import driver
    from rollout_io.conversion.chunk import convert_chunk

    def twice(*arguments, **options):
        convert_chunk(*arguments, **options)
        return convert_chunk(*arguments, **options)

    convert(SHOP, tmp_path / "once", chunk_bytes=SMALL_CHUNKS)
    monkeypatch.setattr(driver, "convert_chunk", twice)
    convert(SHOP, tmp_path / "twice", chunk_bytes=SMALL_CHUNKS)
    assert files_in(tmp_path / "twice") == files_in(tmp_path / "once")


def test_a_document_that_was_replaced_is_read_again_by_the_same_process(tmp_path, smollm2_dir):
    log = tmp_path / "session-1.json"
    choices = Keywords(
        format="gemini_cli",
        tokenizer=str(smollm2_dir),
        chat_template="chatml_tools_thinking",
    )
    for number, answer in enumerate(("6", "7")):
        messages = [
            {"id": "1", "type": "user", "content": "1 + 5?"},
            {"id": "2", "type": "gemini", "content": answer},
        ]
        document = {"sessionId": "s", "projectHash": "p", "messages": messages}
        (tmp_path / "new").write_text(json.dumps(document))
        (tmp_path / "new").replace(log)
        convert([log], tmp_path / str(number), **choices)
        for found in (
            rollout_io.read(tmp_path / str(number)),
            rollout_io.read_log([log], **choices),
        ):
            assert found["response_text"].to_pylist() == [answer]


def replaced(log):
    write(log.with_name("new"), call("a/0", 9), call("a/1", 9))
    log.with_name("new").replace(log)


def rewritten(log):
    before = log.stat()
    write(log, call("a/0", 9), call("a/1", 9))
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert (log.stat().st_ino, log.stat().st_size) == (before.st_ino, before.st_size)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("num_rows_before", [0, 1])
def test_a_log_that_changes_during_its_conversion_is_refused(
    tmp_path, num_rows_before, change, workers
):
    """Otherwise the rows of the new file would stand under the names that the old one gave.

    A change before the first row is noticed before it: chunks are kept if the process is killed.
    """
    log = write(tmp_path / "log.jsonl", call("a/0", 8), call("a/1", 8))
    changes, rows = iter([change]), []

    def progress(_num_bytes, num_rows):
        rows.append(num_rows)
        if sum(rows) >= num_rows_before:
            next(changes, lambda _log: None)(log)

    with pytest.raises(InputError, match=f"{change.__name__}.*\\[input_file\\]") as error:
        convert(log, tmp_path / "ds", workers=workers, progress=progress, chunk_bytes=1)
    assert error.value.where == str(log)
    assert (sum(rows) == 0) == (num_rows_before == 0)
    assert not (tmp_path / "ds").exists()


def test_another_inode_alone_is_no_change(tmp_path):
    """Some network file systems number a file anew."""
    log = write(tmp_path / "log.jsonl", call("a/0", 8))

    def progress(_num_bytes, _num_rows):
        shutil.copy2(log, tmp_path / "copy")
        (tmp_path / "copy").replace(log)

    convert(log, tmp_path / "ds", progress=progress)
    assert rollout_io.read(tmp_path / "ds").num_rows == 1


def test_a_log_that_grows_during_its_conversion_keeps_the_records_that_were_found(tmp_path):
    log = write(tmp_path / "log.jsonl", call("a/0", 8))

    def progress(_num_bytes, _num_rows):
        with log.open("ab") as file:
            file.write(log.read_bytes())

    convert(log, tmp_path / "ds", progress=progress)
    assert rollout_io.read(tmp_path / "ds").num_rows == 1


def test_a_log_that_changes_while_it_is_read_to_a_table_is_refused(tmp_path, monkeypatch):
    from rollout_io.conversion import driver, plan

    log = write(tmp_path / "log.jsonl", call("a/0", 8), call("a/1", 8))

    def plan_logs(*arguments):
        planned = plan.plan_logs(*arguments)
        replaced(log)
        return planned

    monkeypatch.setattr(driver, "plan_logs", plan_logs)
    with pytest.raises(InputError, match="replaced during the conversion"):
        rollout_io.read_log(log)
