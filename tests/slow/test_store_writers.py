"""Of several writers to one prefix of an object store one wins, and is told so: `make test-s3`."""

import importlib.util
import signal
import socket
import subprocess
import sys
import time

import pytest

import rollout_io
from rollout_io.dataset import locking
from rollout_io.dataset.locking import StoreLock
from rollout_io.dataset.storage import Location
from schemas.errors import InputError
from tests.helpers.conversion_helpers import call, write
from tests.helpers.faulty_store import CUT, empty_bucket
from tests.helpers.refusals import refused

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))), reason="run `make test-s3`"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("store"),
]
CONVERT = "import sys; from rollout_io.cli.main import run; sys.exit(run(sys.argv[1:]))"
NUM_TRAJECTORIES = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with empty_bucket(tmp_path_factory.mktemp("moto") / "log") as proxy:
        yield proxy


def started(log, out):
    command = [sys.executable, "-c", CONVERT, "convert", str(log), "--format", "calls"]
    return subprocess.Popen(
        [*command, "--out", out], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def names_in(url):
    found = Location.of(url)
    found.fs.invalidate_cache()
    return {path.rsplit("/", 1)[-1] for path in found.fs.find(found.path)}


@pytest.mark.parametrize("trial", range(3))
def test_of_three_converters_of_one_prefix_one_wins_and_the_others_are_refused_by_its_name(
    trial, tmp_path
):
    out = f"s3://bucket/race-{trial}"
    logs = [
        write(tmp_path / f"log{k}", *(call(f"{k}/{i}", 5) for i in range(NUM_TRAJECTORIES)))
        for k in range(3)
    ]
    racing = [started(log, out) for log in logs]
    said = [process.communicate(timeout=300)[1] for process in racing]
    codes = [process.returncode for process in racing]
    assert sorted(codes) == [0, 1, 1], said
    for process, text in zip(racing, said, strict=True):
        winner = f"process {racing[codes.index(0)].pid} on {socket.gethostname()} is writing"
        is_named = winner in text or "already contains a dataset (1 shard)" in text
        assert process.returncode == 0 or (is_named and "[out_is_free]" in text), said
    ids = rollout_io.scan(out).select("instance_id").collect()["instance_id"]
    assert set(ids) == {str(codes.index(0))}
    assert len(ids) == NUM_TRAJECTORIES
    assert names_in(out) == {"part-00000.parquet"}
    assert not [name for name in names_in("s3://bucket") if ".lock." in name]


def test_a_writer_is_refused_by_the_name_of_the_one_that_holds_the_prefix(monkeypatch):
    monkeypatch.setattr(locking, "_PROCESS", "of another process")
    holder = StoreLock(Location.of("s3://bucket/held"))
    monkeypatch.undo()
    try:
        with refused("out_is_free", got=f"{holder.holder} is writing"):
            rollout_io.RolloutWriter("s3://bucket/held")
    finally:
        holder.release()
    rollout_io.RolloutWriter("s3://bucket/held").abort()


def test_a_killed_writer_frees_the_prefix_and_the_same_command_completes_the_dataset(tmp_path):
    out = "s3://bucket/killed"
    log = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(NUM_TRAJECTORIES)))
    first = started(log, out)
    while not any(".lock." in name for name in names_in("s3://bucket")):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = started(log, out)
    assert second.communicate(timeout=120)[1]
    assert second.returncode == 0
    assert len(rollout_io.read(out)) == NUM_TRAJECTORIES


def test_a_paused_writer_whose_prefix_was_taken_publishes_nothing(monkeypatch):
    monkeypatch.setattr(locking, "BEAT_S", 3600.0)  # never writes again
    monkeypatch.setattr(locking, "LEASE_S", 1.0)
    monkeypatch.setattr(locking, "_PROCESS", "of another process")
    paused = StoreLock(Location.of("s3://bucket/paused"))
    monkeypatch.setattr(locking, "_PROCESS", "this process")
    second = StoreLock(Location.of("s3://bucket/paused"))
    assert second.is_held
    second.refuse_lost()
    with pytest.raises(InputError, match="another process took over"):
        paused.refuse_lost()
    second.release()


def test_a_lost_answer_to_the_winning_put_is_no_refusal(store):
    puts = []

    def first_is_cut(asked):
        if asked.method == "PUT" and ".lock." in asked.target:
            puts.append(asked)
            return CUT if len(puts) == 1 else None
        return None

    store.become(first_is_cut)
    lock = StoreLock(Location.of("s3://bucket/answered"))
    assert lock.is_held
    assert len(puts) >= 1
    lock.release()
