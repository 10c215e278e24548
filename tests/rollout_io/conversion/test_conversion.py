import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas import check
from tests.conftest import ROOT
from tests.helpers.conversion_helpers import (
    REWARDS,
    SHOP,
    SMALL_CHUNKS,
    call,
    files_in,
    in_subprocess,
    refusal,
    table_of,
    write,
)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return table_of(SHOP, out=tmp_path_factory.mktemp("wanted") / "ds")


@pytest.mark.slow
def test_one_process_and_two_write_the_same_bytes(tmp_path):
    choices = Keywords(rewards=str(REWARDS))
    for workers in (1, 2):
        out = tmp_path / str(workers)
        convert([SHOP], out, **choices, workers=workers, chunk_bytes=SMALL_CHUNKS)
    one, two = files_in(tmp_path / "1"), files_in(tmp_path / "2")
    assert len([name for name in one if name.endswith(".parquet")]) > 3
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [1, 50_000, 700_000])
def test_the_size_of_chunks_changes_files_but_not_the_table(chunk_bytes, tmp_path):
    choices = Keywords(rewards=str(REWARDS))
    convert([SHOP], tmp_path / "whole", **choices)
    done = convert([SHOP], tmp_path / "cut", **choices, chunk_bytes=chunk_bytes)
    whole, cut = rollout_io.read(tmp_path / "whole"), rollout_io.read(tmp_path / "cut")
    assert cut.equals(whole.cast(cut.schema))
    assert (
        done.summary.to_dict() == convert([SHOP], tmp_path / "whole", **choices).summary.to_dict()
    )
    assert len(list((tmp_path / "cut").glob("*.parquet"))) > 1
    assert check(cut).filter(severity="error").is_empty()


def test_a_column_that_only_one_chunk_has_is_null_elsewhere(tmp_path):
    log = write(tmp_path / "log", call("a/0"), call("b/0", reward=1.0), call("c/0"))
    convert([log], tmp_path / "ds", chunk_bytes=1)
    assert rollout_io.read(tmp_path / "ds")["reward"].to_pylist() == [None, 1.0, None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_by_processes_stops_at_once_and_goes_on_later(number, tmp_path):
    lines = SHOP.read_text(encoding="utf-8").splitlines()
    many = [line.replace('"shop-', f'"copy-{n}-shop-') for n in range(20) for line in lines]
    log = tmp_path / "many.jsonl"
    log.write_text("\n".join(many), encoding="utf-8")
    out = tmp_path / "ds"
    arguments = ["convert", str(log), "--out", str(out), "--workers", "2"]
    script = write(
        tmp_path / "script.py",
        b"import rollout_io.conversion.driver as driver, rollout_io.cli.main as cli",
        b"driver.convert.__kwdefaults__['chunk_bytes'] = 200_000",
        b"if __name__ == '__main__':",
        f"    cli.main({arguments})".encode(),
    )
    process = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not list(out.glob(".converting/chunk-00002.*/report.json")):
        assert process.poll() is None
        time.sleep(0.01)
    start = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert time.monotonic() - start < 10
    assert b"Traceback" not in said
    chunks = out.glob(".converting/chunk-*")
    assert sum(not (chunk / "report.json").exists() for chunk in chunks) < 8
    assert not list(out.glob("*.parquet"))
    again = convert([log], out, workers=1, chunk_bytes=200_000)
    assert 0 < again.num_resumed < 140
    assert again.summary.num_rows == 20 * 205


@pytest.mark.slow
def test_packed_logs_give_the_same_table(wanted, tmp_path):
    content = SHOP.read_bytes()
    half = content.index(b"\n", len(content) // 2) + 1
    packed = {
        "one.gz": gzip.compress(content),
        "members.gz": gzip.compress(content[:half]) + gzip.compress(content[half:]),
        "one.zst": pa.compress(content, "zstd", asbytes=True),
        "frames.zst": pa.compress(content[:half], "zstd", asbytes=True)
        + pa.compress(content[half:], "zstd", asbytes=True),
        "no_ending": gzip.compress(content),
    }
    for name, packing in packed.items():
        (tmp_path / name).write_bytes(packing)
        assert table_of(tmp_path / name, out=tmp_path / f"ds-{name}").equals(wanted), name
        assert not (tmp_path / f"ds-{name}" / ".converting").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
def test_standard_input_gives_the_same_table(is_packed, wanted, tmp_path):
    content = SHOP.read_bytes()
    packed = gzip.compress(content) if is_packed else content
    arguments = ("-m", "rollout_io", "convert", "-", "--out", tmp_path / "ds")
    done = in_subprocess(*arguments, input=packed)
    assert done.returncode == 0
    assert b"sessions (calls)\n" in done.stderr
    table = rollout_io.read(tmp_path / "ds")
    assert table["source"][0].as_py().startswith("-:")
    assert table.drop_columns("source").replace_schema_metadata(None).equals(wanted)


def test_several_files_and_a_directory_of_them_give_the_same_table(wanted, tmp_path):
    lines = SHOP.read_bytes().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    parts = {"a.jsonl": lines[:50], "deep/b.jsonl": lines[50:120], "deep/er/c": lines[120:]}
    for name, part in parts.items():
        (tmp_path / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "logs" / name).write_bytes(b"".join(part))
    (tmp_path / "logs" / ".hidden").write_bytes(b"no log")
    assert table_of(tmp_path / "logs", out=tmp_path / "whole").equals(wanted)
    files = [tmp_path / "logs" / name for name in reversed(parts)]
    assert table_of(*files, out=tmp_path / "files").equals(wanted)
    mixed = [tmp_path / "logs" / "a.jsonl", tmp_path / "logs" / "deep"]
    assert table_of(*mixed, out=tmp_path / "mixed").equals(wanted)


def test_several_files_have_rows_in_the_order_that_the_format_has(tmp_path):
    one = write(tmp_path / "1.jsonl", call("b/0"), call("a/10"), call("a/2"))
    two = write(tmp_path / "2.jsonl", call("a/0"), call("b2/0"), call("b10/0"))
    convert([two, one], tmp_path / "ds")
    names = rollout_io.read(tmp_path / "ds")["trajectory_id"].to_pylist()
    assert names == ["a_0", "a_2", "a_10", "b_0", "b2_0", "b10_0"]


@pytest.mark.parametrize("packing", ["gz", "zst"])
@pytest.mark.parametrize("cut", [6, 20_000, -5])
def test_a_packed_log_that_is_cut_off_is_refused_by_name(packing, cut, tmp_path):
    content = SHOP.read_bytes()
    packed = (
        gzip.compress(content) if packing == "gz" else pa.compress(content, "zstd", asbytes=True)
    )
    log = tmp_path / f"shop.{packing}"
    log.write_bytes(packed[:cut])
    error = refusal([log], tmp_path / "ds")
    assert (error.rule, error.where) == ("input_file", str(log))
    assert error.got.startswith("the file cannot be decompressed")
    assert not (tmp_path / "ds").exists()


def test_a_file_name_that_is_no_utf_8_is_refused_and_shown_with_its_bytes_escaped(tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    log = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")
    shutil.copy(SHOP, log)
    for given in (log, str(folder)):
        assert run(["convert", given, "--format", "calls", "--out", str(tmp_path / "ds")]) == 1
        said = capsys.readouterr().err
        assert f"Error: {folder}/caf\\xe9.jsonl: the file name is not valid UTF-8" in said
        assert not (tmp_path / "ds").exists()


def test_a_dataset_may_have_any_name_that_a_directory_may_have(tmp_path):
    log = write(tmp_path / "log", call("a/0"))
    for name in (b"caf\xe9", "h\u00e9 llo\u2028".encode(), b"a%20b", b"-", b"a:b"):
        out = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
        assert convert([log], out).summary.num_rows == 1
        assert convert([log], out).was_done
        assert Path(out, "part-00000.parquet").exists()
