import gzip
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.conftest import EXAMPLES, ROOT

SHOP = EXAMPLES / "shop.calls.jsonl"
NUM_CHUNKS, NUM_KILLS = 20, 20
CHUNK_BYTES = 85_000
CHILD = """
import os, signal, sys

import rollout_io

log, out, workers, last_event = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
num_events = 0


def count(event, arguments):
    global num_events
    events = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
    if event in events and str(arguments[0]).startswith(out):
        num_events += 1
        if num_events == last_event:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(count)
    rollout_io.convert([log], out, format="calls", on_error="skip", workers=workers, chunk_bytes=CHUNK_BYTES)
    print(num_events)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """A conversion in a process of its own, which can be told to die at its nth file."""
    script = tmp_path_factory.mktemp("child") / "convert_log.py"
    script.write_text(CHILD.replace("CHUNK_BYTES", str(CHUNK_BYTES)))

    def start(log, out, workers, last_event=0):
        command = [sys.executable, script, log, out, workers, last_event]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.PIPE)

    return start


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The shop's calls, packed, two of them damaged."""
    lines = SHOP.read_bytes().splitlines(keepends=True)
    for at in (40, 170):
        lines[at] = lines[at][:900] + b"\n"
    path = tmp_path_factory.mktemp("log") / "shop.calls.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(lines), 1))
    return path


class Undisturbed:
    """What a conversion that nobody stops leaves, and how long it takes."""

    def __init__(self, child, log, out, workers):
        start = time.monotonic()
        process = child(log, out, workers)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        self.num_events, self.seconds = int(printed), time.monotonic() - start
        self.files = files_in(out) | rejected_beside(out)


@pytest.fixture(scope="module")
def undisturbed(child, log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {n: Undisturbed(child, log, folder / f"ds{n}", n) for n in (1, 2)}


def files_in(folder):
    """Everything in a directory, hidden or not."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.is_file() and path.read_bytes() for name, path in found.items()}


def rejected_beside(out):
    """The rejected records, which are beside the dataset."""
    return {
        path.name.removeprefix(out.name): path.read_bytes()
        for path in out.parent.glob(f"{out.name}.*")
    }


def stopped(process, seconds):
    """The exit code of a process that is killed after so many seconds, if it lives so long."""
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode


def stop_somewhere(start, undisturbed, rng):
    """Kill a conversion at a random moment, at a random file, or at one of the last."""
    kind, num_events = rng.randrange(3), undisturbed.num_events
    if kind == 0:
        return stopped(start(), rng.uniform(0.3, 1) * undisturbed.seconds)
    first = num_events * 3 // 4 if kind == 1 else 1
    return stopped(start(last_event=rng.randint(first, num_events)), 120)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_undisturbed_conversion_has_many_chunks_and_leaves_nothing_hidden(undisturbed, workers):
    files = undisturbed[workers].files
    assert len([name for name in files if name.endswith(".parquet")]) >= NUM_CHUNKS
    assert ".rejected.jsonl" in files
    shards = [name for name in files if name != ".rejected.jsonl"]
    assert all(name.endswith(".parquet") and not name.startswith(".") for name in shards)


def check_kills(child, log, undisturbed, out, workers, seed):
    """Kill a conversion twice, let the third end; how many it took."""
    wanted, rng = undisturbed[workers], random.Random(seed)
    start = partial(child, log, out, workers)
    codes = [stop_somewhere(start, wanted, rng) for _ in range(2)]
    assert set(codes) <= {0, -signal.SIGKILL}
    assert stopped(start(), 120) == 0
    found = files_in(out) | rejected_beside(out)
    assert found.keys() == wanted.files.keys()
    assert found == wanted.files
    return codes.count(-signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_conversion_that_is_killed_and_begun_again_makes_the_same_bytes(
    workers, child, log, undisturbed, tmp_path
):
    num_kills = [
        check_kills(child, log, undisturbed, tmp_path / str(seed), workers, seed)
        for seed in range(2)
    ]
    assert any(num_kills)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 100 + NUM_KILLS))
@pytest.mark.parametrize("workers", [1, 2])
def test_wherever_a_conversion_is_killed_the_next_one_makes_the_same_bytes(
    workers, seed, child, log, undisturbed, tmp_path
):
    check_kills(child, log, undisturbed, tmp_path / "ds", workers, seed)


TOLD = """
import os, signal, sys

from rollout_io.cli.main import main


told = False


def end(event, arguments):
    global told
    if event == "os.mkdir" and str(arguments[0]).endswith(".converting") and not told:
        told = True
        os.kill(os.getpid(), signal.SIGTERM)


sys.addaudithook(end)
main()
"""


@pytest.mark.slow
def test_a_conversion_that_is_told_to_end_as_it_creates_its_directory_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", TOLD, "convert", str(SHOP), "--out", str(tmp_path / "ds")]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ended.returncode == 143
    assert not (tmp_path / "ds").exists()
