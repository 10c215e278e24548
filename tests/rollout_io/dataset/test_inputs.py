"""Inputs are what they hold: whatever they are, however often they are given."""

import json
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from rollout_io import RolloutWriter, convert, read, read_log
from rollout_io.cli.main import run
from rollout_io.conversion.opened_logs import Log, Opened
from rollout_io.conversion.plan import Choices, Keywords, identity_of
from rollout_io.dataset.opening import read_input
from rollout_io.dataset.rewriting import rewrite
from rollout_io.formats.calls import ADAPTER
from rollout_io.formats.parsing import jsonl
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.conversion_helpers import (
    call,
    files_in,
    in_subprocess,
    refusal,
    rejected_in,
    write,
)
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import STEPS

FIRST, SECOND = (json.dumps(call("a/0", token)).encode() + b"\n" for token in (5, 6))
FD = 200  # a number that is free, so that each pipe has the same name


@contextmanager
def piped(content):
    """The name of a pipe's end that is open, as a shell's `<(...)` gives it."""
    reading, writing = os.pipe()
    os.dup2(reading, FD)
    os.close(reading)

    def send():
        with os.fdopen(writing, "wb") as file:
            file.write(content)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield f"/dev/fd/{FD}"
    finally:
        os.close(FD)
        thread.join()


def convert_pipe(content, out):
    with piped(content) as name:
        return convert(name, out, format="calls")


def test_another_log_through_a_pipe_of_the_same_name_is_another_log(tmp_path):
    assert not convert_pipe(FIRST, tmp_path / "ds").was_done
    assert convert_pipe(FIRST, tmp_path / "ds").was_done
    with pytest.raises(RolloutError, match="out_is_free"):
        convert_pipe(SECOND, tmp_path / "ds")


def convert_rewarded(reward, log, out):
    with piped(json.dumps({"session": "a/0", "reward": reward}).encode()) as name:
        return convert(log, out, format="calls", rewards=name)


def test_other_rewards_through_a_pipe_of_the_same_name_are_other_rewards(tmp_path):
    log = write(tmp_path / "log", FIRST.rstrip())
    assert not convert_rewarded(0.25, log, tmp_path / "ds").was_done
    assert read(tmp_path / "ds").column("reward").to_pylist() == [0.25]
    assert convert_rewarded(0.25, log, tmp_path / "ds").was_done
    with pytest.raises(RolloutError, match="out_is_free"):
        convert_rewarded(0.75, log, tmp_path / "ds")


@pytest.mark.slow
def test_a_shell_substitutes_processes_for_logs_and_rewards(tmp_path):
    files = {"log": FIRST, "other": SECOND, "rewards": b'{"session": "a/0", "reward": 1}'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rollouts = f"PYTHONPATH={ROOT} {sys.executable} -m rollout_io convert --out ds"
    script = " && ! ".join(
        f"{rollouts} <(cat {log}) --rewards <(cat rewards)" for log in ("log", "other")
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[out_is_free]" in done.stderr
    assert read(tmp_path / "ds").column("reward").to_pylist() == [1.0]


def replaced(path, content):
    """Write something else, of the same size and at the same time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("changed", ["log", "rewards"])
def test_inputs_of_the_same_size_and_time_are_distinguished_by_content(changed, tmp_path):
    log = write(tmp_path / "log", call("a/0", 5))
    rewards = write(tmp_path / "rewards", {"session": "a/0", "reward": 1})
    choices = Keywords(format="calls", rewards=str(rewards))
    convert(log, tmp_path / "ds", **choices)
    assert convert(log, tmp_path / "ds", **choices).was_done
    path = tmp_path / changed
    replaced(path, path.read_bytes().replace(b"[5]", b"[6]").replace(b"1}", b"2}"))
    assert refusal(log, tmp_path / "ds", **choices).rule == "out_is_free"


def test_a_tokenizer_and_a_chat_template_are_identified_by_their_contents_without_the_weights(
    tmp_path,
):
    tokenizer = tmp_path / "tokenizer"
    write(tokenizer / "tokenizer.json", {"a": 1})
    (tokenizer / "model.safetensors").write_bytes(b"weights")
    template = write(tmp_path / "template.jinja", {"b": 1})
    named = Choices(format="calls", tokenizer=str(tokenizer), chat_template=str(template))
    log = Log("calls", ADAPTER, [])
    first = identity_of(Opened([log]), None, named, 1)
    (tokenizer / "model.safetensors").write_bytes(b"others!")
    assert identity_of(Opened([log]), None, named, 1) == first
    for path in (tokenizer / "tokenizer.json", template):
        replaced(path, path.read_bytes().replace(b"1", b"2"))
        assert identity_of(Opened([log]), None, named, 1) != first
        replaced(path, path.read_bytes().replace(b"2", b"1"))


def step_table(name):
    table = pa.table(STEPS)
    columns = {"instance_id": [name] * 2, "trajectory_id": [f"{name}_0"] * 2}
    for column, values in columns.items():
        index = table.column_names.index(column)
        table = table.set_column(index, column, pa.array(values))
    return table


def stop_at_second(seen, table):
    seen.append(table)
    if len(seen) == 2:
        raise KeyboardInterrupt
    return table


def test_shards_of_the_same_size_and_time_are_distinguished_by_content(tmp_path):
    dataset, others = tmp_path / "ds", tmp_path / "others"
    for path, name in ((dataset, "a"), (dataset, "b"), (dataset, "c"), (others, "d")):
        with RolloutWriter(path, append=True) as writer:
            writer.write(step_table(name))
    metadata = DatasetMetadata().made("merge", parents=["ds"])
    with pytest.raises(KeyboardInterrupt):
        rewrite(str(dataset), str(tmp_path / "out"), partial(stop_at_second, []), metadata)
    (other,) = others.iterdir()
    replaced(min(dataset.iterdir()), other.read_bytes())
    rewrite(str(dataset), str(tmp_path / "out"), partial(stop_at_second, [0, 0]), metadata)
    assert set(read(tmp_path / "out").column("instance_id").to_pylist()) == {"d", "b", "c"}


PIPES = """
import os, sys
from pipelines.generation.tasks import read_tasks
from rollout_io.cli.main import run
from schemas.errors import RolloutError
folder, log, dataset = sys.argv[1:]
pipe, device = f"{folder}/pipe", f"{folder}/device"
os.mkfifo(pipe)
os.symlink("/dev/zero", device)
for path in (pipe, device):
    os.mkdir(f"{path}-model")
    os.symlink(path, f"{path}-model/config.json")
    os.symlink(path, f"{path}-model/tokenizer.json")
for path in (pipe, device):
    for arguments in (
        ["formats", path],
        ["convert", path, "--out", f"{folder}/out"],
        ["convert", path, "--format", "harbor", "--out", f"{folder}/out"],
        ["convert", log, "--rewards", path, "--out", f"{folder}/out"],
        ["validate", path],
        ["stats", path],
        ["stats", dataset, "--model", f"{path}-model"],
        ["plot", path],
        ["generate", path],
        ["train", dataset, "--model", folder, "--out", f"{folder}/run", "--config", path],
        ["rl", path],
        ["drift", dataset, "--tokenizer", f"{path}-model"],
    ):
        print(run(arguments), *arguments, file=sys.stderr)
    try:
        read_tasks(path, 1)
    except RolloutError as error:
        print("1 tasks", error, file=sys.stderr)
"""


@pytest.mark.slow
def test_no_input_of_any_verb_is_waited_for_or_read_without_an_end(tmp_path, shop_dataset):
    log = EXAMPLES / "shop.calls.jsonl"
    done = in_subprocess("-c", PIPES, tmp_path, log, shop_dataset, timeout=120)
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stderr.splitlines() if line[:2] in {"0 ", "1 ", "2 "}]
    assert len(codes) == 26
    assert all(line.startswith("1 ") for line in codes), done.stderr
    kinds = ("a pipe, which may block forever", "a character device, which may never end")
    for kind in kinds:
        assert done.stderr.count(f": it is {kind}. [input_file]") == 13, done.stderr


def test_a_directory_with_pipes_and_devices_is_looked_through(tmp_path):
    folder = tmp_path / "logs"
    for name in ("result.json", "trial/result.json", "agent/trajectory.json", "a.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)
    (folder / "zero.json").symlink_to("/dev/zero")
    write(folder / "b.calls.jsonl", call("a/0"))
    assert run(["formats", str(folder)]) == 0
    convert(folder, tmp_path / "ds", format="calls")
    assert read(tmp_path / "ds").num_rows == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_standard_input_that_is_a_device_is_refused(device, tmp_path):
    with Path(device).open("rb") as file:
        done = in_subprocess("-m", "rollout_io", "convert", "-", "--out", tmp_path, stdin=file)
    assert done.returncode == 1
    assert "a character device" in done.stderr
    assert "[input_file]" in done.stderr


def test_a_file_larger_than_is_read_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    with refused("input_file", got="larger than 10 bytes"):
        read_input(tmp_path / "large", 10)


def test_a_line_without_an_end_is_one_rejected_record(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    long = json.dumps(call("b/0") | {"padding": "x" * 5000}).encode()
    log = write(tmp_path / "log", call("a/0"), long, call("c/0"))
    done = convert(log, tmp_path / "ds", format="calls", on_error="skip")
    counts = done.summary
    assert (counts.num_records, counts.num_written, counts.num_rejected) == (3, 2, 1)
    (rejected,) = rejected_in(tmp_path / "ds")
    assert (rejected["rule"], rejected["source"]) == ("json_line", f"{log}:2")
    assert read(tmp_path / "ds").column("source").to_pylist() == [f"{log}:1", f"{log}:3"]


@pytest.mark.slow
def test_a_copy_of_a_pipe_that_does_not_fit_on_the_disk_is_removed(tmp_path):
    command = "ulimit -f 64; head -c 1000000 /dev/zero | $0 -m rollout_io convert - --out $1"
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, tmp_path / "ds"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[output_file]" in done.stderr
    assert not any(content for content in files_in(tmp_path).values())


def test_rewards_that_are_packed_are_unpacked(tmp_path):
    log = write(tmp_path / "log", call("a/0"))
    rewards = write(tmp_path / "rewards.jsonl", {"session": "a/0", "reward": 0.5})
    subprocess.run([shutil.which("gzip"), rewards], check=True)
    table = read_log(log, format="calls", rewards=f"{rewards}.gz")
    assert table.column("reward").to_pylist() == [0.5]


def test_a_small_document_is_read_without_reserving_its_limit(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"{}")
    tracemalloc.start()
    assert read_input(file) == b"{}"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_document_above_its_limit_is_refused_and_one_of_that_size_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"x" * 100)
    assert read_input(file, 100) == b"x" * 100
    with refused("input_file", got="larger than 99 bytes"):
        read_input(file, 99)
