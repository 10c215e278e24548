"""A conversion keeps the user's files and secrets, and loses none of a folder's logs."""

import gzip
import http.server
import json
import os
import threading
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion.opened_logs import open_log
from rollout_io.conversion.plan import Keywords
from rollout_io.dataset.storage import Location
from schemas.errors import RolloutError
from tests.helpers.conversion_helpers import OUTPUT, call, refusal, rejected_in, write

SKIP = Keywords(on_error="skip")


@pytest.mark.parametrize("choices", [Keywords(), SKIP])
def test_a_file_that_only_has_the_name_of_the_rejected_records_is_kept(tmp_path, choices):
    log = write(tmp_path / "log.jsonl", call("a/0"), *([b"{}"] if choices is SKIP else []))
    notes = tmp_path / "ds.rejected.jsonl"
    for content in (b"my notes\n", log.read_bytes()):
        notes.write_bytes(content)
        for given in (log, notes):
            error = refusal([given], tmp_path / "ds", **choices)
            assert (error.rule, error.where) == ("out_is_free", str(notes))
        assert notes.read_bytes() == content
    notes.unlink()
    (notes / "sub").mkdir(parents=True)
    assert refusal([log], tmp_path / "ds", **choices).rule == "out_is_free"
    assert (notes / "sub").is_dir()


def inputs_of(tmp_path, *paths):
    opened = open_log([str(path) for path in paths], "auto", tmp_path / "spool")
    found = [given.path for log in opened.logs for given in log.inputs]
    return sorted(str(path.relative_to(tmp_path)) for path in found), opened.left


def prime(number):
    row = {"run_id": "r", "sample_id": number, "problem_id": number, "step": 1}
    return row | {"prompt": "[]", "completion": "[]"}


def test_logs_below_a_directory_that_is_a_log_itself_are_found_too(tmp_path):
    logs = tmp_path / "logs"
    write(logs / "results.jsonl", prime(1))
    write(logs / "sub" / "results.jsonl", prime(2))
    write(logs / "calls" / "c.jsonl", call("c/0"))
    found, left = inputs_of(tmp_path, logs)
    assert (found, list(left)) == (["logs/calls/c.jsonl", "logs/results.jsonl", "logs/sub"], [])


def test_links_out_of_a_directory_and_pipes_in_it_are_left_and_counted(tmp_path):
    logs, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    write(logs / "runs" / "c.jsonl", call("c/0"))
    write(elsewhere / "d.jsonl", call("d/0"))
    (logs / "latest").symlink_to(logs / "runs")
    found, left = inputs_of(tmp_path, logs)
    assert (found, left) == (["logs/runs/c.jsonl"], [])
    (logs / "moved").symlink_to(elsewhere)
    (logs / "runs" / "gone.jsonl").symlink_to(tmp_path / "gone.jsonl")
    os.mkfifo(logs / "pipe.jsonl")
    found, left = inputs_of(tmp_path, logs)
    names = ["moved", "pipe.jsonl", "runs/gone.jsonl"]
    assert (found, left) == (["logs/runs/c.jsonl"], [str(logs / name) for name in names])
    error = refusal(logs, tmp_path / "ds", strict=True)
    assert (error.rule, error.where) == ("input_file", str(logs / "moved"))
    for choices in (Keywords(), Keywords(format="calls"), Keywords(strict=True, on_error="skip")):
        done = convert(logs, tmp_path / f"ds{len(choices)}", **choices)
        assert (done.summary.num_rows, len(done.left)) == (1, 3)
    found, left = inputs_of(tmp_path, logs / "moved", logs)
    assert found == ["logs/moved/d.jsonl", "logs/runs/c.jsonl"]


def test_evaluations_packed_or_in_folders_are_found_beside_others(tmp_path):
    logs = tmp_path / "ev"
    row = {"input_prompt": "p", "output_response": "r", "env_class": "g", "data_source": "x"}
    write(logs / "a.jsonl", row | {"score": 1.0})
    write(logs / "sub" / "c.jsonl", call("x/0"))
    (logs / "sub" / "d.jsonl.gz").write_bytes(gzip.compress(json.dumps(call("y/0")).encode()))
    opened = open_log([str(logs)], "auto", tmp_path / "spool")
    names = sorted(given.name for log in opened.logs for given in log.inputs)
    assert [Path(name).name for name in names] == ["a.jsonl", "c.jsonl", "d.jsonl.gz"]
    assert not opened.left


def test_a_trajectory_of_a_table_and_of_calls_is_refused(tmp_path):
    calls = write(tmp_path / "a.jsonl", call("shop/0"))
    (tmp_path / "b.json").write_text(json.dumps(OUTPUT))
    assert refusal([calls, tmp_path / "b.json"], tmp_path / "ds").rule == "unique_trajectory"


@pytest.mark.filterwarnings("ignore:GeneratorOutput fields without a matching column")
@pytest.mark.parametrize("chunk_bytes", [10, 1 << 20])
def test_a_column_of_two_types_is_refused_in_one_chunk_or_several(tmp_path, chunk_bytes):
    other = {"trajectory_ids": [{"instance_id": "t", "repetition_id": 0}], "foo": [3]}
    (tmp_path / "a.json").write_text(json.dumps(OUTPUT | {"foo": ["s"]}))
    (tmp_path / "b.json").write_text(json.dumps(OUTPUT | other))
    keep = Keywords(other_fields="keep")
    logs = [tmp_path / "a.json", tmp_path / "b.json"]
    assert (
        refusal(logs, tmp_path / "ds", **keep, chunk_bytes=chunk_bytes).rule == "columns_and_types"
    )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """The URL of a folder on a web server."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_credentials_of_a_url_are_in_no_file_and_no_message(served, tmp_path, capsys):
    folder, url = served
    write(folder / "a.jsonl", call("s/0"), b"{bad")
    out = tmp_path / "ds"
    for secret in ("FIRST", "SECOND"):  # the same log behind a new signature is up to date
        signed = f"{url}/a.jsonl?X-Amz-Signature={secret}"
        assert run(["convert", signed, "--on-error", "skip", "-o", str(out)]) == 0
    assert "up to date" in capsys.readouterr().err
    assert run(["convert", f"{url}/no.jsonl?key=FIRST", "-o", str(tmp_path / "b")]) == 1
    printed = capsys.readouterr()
    texts = [printed.out, printed.err, (tmp_path / "ds.rejected.jsonl").read_text()]
    texts += [str(pq.read_metadata(shard).metadata) for shard in out.glob("*.parquet")]
    texts += rollout_io.read(out)["source"].to_pylist()
    assert not [text for text in texts if "FIRST" in text or "SECOND" in text]
    assert rejected_in(out)[0]["source"] == f"{url}/a.jsonl:2"


def test_a_pattern_matches_no_output_rewards_or_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("logs/a.jsonl"), call("s/0"))
    write(Path("logs/b.jsonl"), call("t/0"), b"{bad")
    write(Path("logs/rewards.jsonl"), {"session": "s/0", "reward": 1.0})
    Path("logs/empty").mkdir()
    choices = Keywords(rewards="logs/rewards.jsonl", on_error="skip")
    for was_done in (False, True):
        done = convert("logs/*", "logs/ds", **choices)
        counts = done.summary.num_records, done.summary.num_rejected
        assert (done.was_done, *counts) == (was_done, 3, 1)


class _StopError(BaseException):
    pass


def test_a_packed_log_with_a_rejected_record_resumes_on_a_remote_filesystem(tmp_path):
    bad = call("s1/0", -1)
    lines = [json.dumps(bad if i == 1 else call(f"s{i}/0")).encode() + b"\n" for i in range(6)]
    log = tmp_path / "a.jsonl.gz"
    log.write_bytes(gzip.compress(b"".join(lines)))
    out, num_rows = f"memory://{tmp_path.name}/ds", 0

    def stop(_num_bytes, rows):
        nonlocal num_rows
        num_rows += rows
        if num_rows >= 3:
            raise _StopError

    with pytest.raises(_StopError):
        convert(log, out, **SKIP, chunk_bytes=100, progress=stop)
    done = convert(log, out, **SKIP, chunk_bytes=100)
    assert done.num_resumed > 0
    assert (done.summary.num_records, done.summary.num_written) == (6, 5)


def test_a_file_added_to_the_folder_is_a_new_conversion(tmp_path):
    logs = tmp_path / "l"
    write(logs / "a.jsonl", call("s/0"))
    (logs / "x.txt").write_text("hi")
    strict = Keywords(strict=True, on_error="skip")
    assert convert(logs, tmp_path / "ds", **strict).summary.num_rejected == 1
    (logs / "y.txt").write_text("more")
    assert refusal([logs], tmp_path / "ds", **strict).rule == "out_is_free"


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/x", "github://x", "zip://x"])
def test_a_url_that_no_filesystem_can_open_is_a_users_error(url):
    with pytest.raises(RolloutError):
        Location.of(url)
