"""Signals at random moments of runs that a launcher started: every run ends at its current update."""

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.machines import Started
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from tests.trainer.run.test_resume import lines_of

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
NUM_UPDATES = 60
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TORCHRUN += ["--no-python", sys.executable, "-m", "rollout_io", "train"]
OURS = [sys.executable, "-m", "rollout_io", "train", "--num-processes=2"]
LAUNCHES = {"torchrun": TORCHRUN, "--num-processes": OURS}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("start")
    dataset = write_dataset(folder / "ds", group_rows(NUM_UPDATES, (1.0, 0.0, 0.5)))
    settings = ["groups_per_batch=2", "groups_per_mini_batch=1"]
    return [
        dataset,
        f"--model={save_tiny_model(folder / 'model')}",
        "--lr=3e-4",
        "--set=loss.tis_ratio_type=none",
        "--set=run.save_every_updates=none",
        *(f"--set=batch.{setting}" for setting in settings),
    ]


def launched(*command: str) -> Started:
    return Started(command, {"OMP_NUM_THREADS": "1"})


def run(*command: str) -> None:
    with launched(*command) as started:
        assert started.wait() == 0, started.output()


def checkpoint_of(out: Path) -> str:
    return (out / "checkpoints" / "latest").read_text().strip()


@pytest.fixture(scope="module")
def undisturbed(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run(*TORCHRUN, *arguments, f"--out={out}")
    assert checkpoint_of(out) == f"global_step_{NUM_UPDATES}"
    return out


def to_all(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """As `scancel` and `--signal` of SLURM send it; the launcher then passes it on again."""
    return list(processes)


def to_launcher(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [processes[0]]


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=SLOW if seed < 4 else NIGHTLY) for seed in range(20)]
)
def test_a_signal_at_a_random_moment_ends_the_run_at_its_current_update(
    seed: int, arguments: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    rng, out = random.Random(seed), tmp_path / "run"
    command = list(LAUNCHES.values())[seed % 2]
    number = rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
    whom: Callable[..., list[psutil.Process]] = rng.choice([to_all, to_all, to_launcher])
    with launched(*command, *arguments, f"--out={out}") as started:
        until = time.monotonic() + 120
        while not lines_so_far(out) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.8)
        num_before = lines_so_far(out)
        send(number, whom(started.processes()))
        started.wait(60)
        said = started.output()
    num_made = lines_so_far(out)
    assert 0 < num_before <= num_made < NUM_UPDATES, said
    assert checkpoint_of(out) == f"global_step_{num_made}", said
    assert "[process_lost]" not in said
    run(*command, f"--resume={out}")
    assert lines_of(out) == lines_of(undisturbed)
    files = [path / "checkpoints" / f"global_step_{NUM_UPDATES}" for path in (out, undisturbed)]
    digests = [json.loads((path / "state" / "files.json").read_text()) for path in files]
    assert digests[0] == digests[1]


def lines_so_far(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0
