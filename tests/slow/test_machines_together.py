"""One run on 1, 2 and 4 machines, replicated and sharded, by each launcher: the same losses."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.helpers.machines import PORT, Lab, Started, laboratory
from tests.helpers.trainer_helpers import group_rows, write_dataset

pytestmark = pytest.mark.slow
SHARDED = "tests.helpers.sharded_rollouts"
NUM_GROUPS = 320
MODULES = {"replicated": "rollout_io", "sharded": SHARDED}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with laboratory(tmp_path_factory.mktemp("lab"), 4) as opened:
        yield opened


def train(lab: Lab, *arguments: str, num_machines: int, each: int = 1, kind: str) -> None:
    size, module = num_machines * each, MODULES[kind]
    started = [
        lab.start(rank, "train", *arguments, size=size, each=each, module=module)
        for rank in range(size)
    ]
    for process in started:
        assert process.wait() == 0, process.output()


def losses(lab: Lab, name: str) -> list[float]:
    return losses_of(lab.machines[0].path(lab.private / name))


def losses_of(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "policy_entropy")]


@pytest.fixture(scope="module")
def alone(lab: Lab) -> list[float]:
    train(lab, *lab.arguments("alone"), num_machines=1, kind="replicated")
    return losses(lab, "alone")


@pytest.mark.parametrize(
    ("kind", "num_machines", "each"),
    [
        ("replicated", 2, 1),
        pytest.param("replicated", 4, 1, marks=pytest.mark.nightly),
        pytest.param("sharded", 4, 1, marks=pytest.mark.nightly),
    ],
)
def test_machines_train_as_one_process_does(
    kind: str, num_machines: int, each: int, lab: Lab, alone: list[float]
) -> None:
    name = f"{kind}-{num_machines}-{each}"
    train(lab, *lab.arguments(name), num_machines=num_machines, each=each, kind=kind)
    assert losses(lab, name) == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert not lab.files(1, name)


def test_sharded_parameters_on_two_machines_of_two_processes_resume_on_others(
    lab: Lab, alone: list[float]
) -> None:
    """Two updates on two machines with two processes each, three more on one, the rest on four."""
    first = [*lab.arguments("moved"), "--max-updates=2"]
    train(lab, *first, num_machines=2, each=2, kind="sharded")
    resume = f"--resume={lab.private / 'moved'}"
    train(lab, resume, "--max-updates=5", num_machines=1, kind="replicated")
    train(lab, resume, "--max-updates=8", num_machines=4, kind="sharded")
    assert losses(lab, "moved") == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_accelerate_launches_one_run_on_two_machines(lab: Lab, alone: list[float]) -> None:
    """Also on CPUs, `--multi_gpu` starts processes that know of each other."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_machines=2", "--num_processes=2", f"--main_process_port={PORT}"]
    command += [f"--main_process_ip={lab.machines[0].address}", "--mixed_precision=no"]
    command += ["--dynamo_backend=no"]
    verb = ["--no_python", sys.executable, "-P", "-m", "rollout_io", "train"]
    started = [
        machine.start(*command, f"--machine_rank={rank}", *verb, *lab.arguments("accelerate"))
        for rank, machine in enumerate(lab.machines[:2])
    ]
    for process in started:
        assert process.wait() == 0, process.output()
    assert losses(lab, "accelerate") == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert not lab.files(1, "accelerate")


def test_processes_that_accelerate_starts_without_each_other_are_refused(lab: Lab) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines=2"]
    command += ["--num_processes=2", f"--main_process_port={PORT}", "--machine_rank=0"]
    command += [f"--main_process_ip={lab.machines[0].address}", "--mixed_precision=no"]
    verb = ["--no_python", sys.executable, "-P", "-m", "rollout_io", "train"]
    started = lab.machines[0].start(*command, *verb, *lab.arguments("strangers"))
    assert started.wait() == 1
    assert "MASTER_ADDR is set without WORLD_SIZE, RANK, LOCAL_RANK" in started.output()
    assert not lab.files(0, "strangers")


def slurm_in(lab: Lab, folder: Path) -> Path:
    """Write stand-ins for SLURM, which start the step on each machine as `srun` does, for a PATH."""
    step = " ".join(
        f'env SLURM_NODEID={number} {shlex.join(machine.command("env"))} "$@" &'
        for number, machine in enumerate(lab.machines[:2])
    )
    shims = {
        "scontrol": f"echo {lab.machines[0].address}",
        "srun": f"while [[ $1 == -* ]]; do shift; done; {step} wait %1 && wait %2",
        "torchrun": f'exec {sys.executable} -P -m torch.distributed.run "$@"',
        "rollouts": f'exec {sys.executable} -P -m rollout_io "$@"',
    }
    (folder / "bin").mkdir()
    for name, text in shims.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


def test_the_script_for_slurm_stops_with_a_checkpoint_and_continues(
    lab: Lab, tmp_path: Path
) -> None:
    dataset = write_dataset(lab.folder / "many", group_rows(NUM_GROUPS, (1.0, 0.0, 0.5)))
    usual = [dataset, f"--model={lab.model}", "--lr=3e-4", f"--out={lab.private / 'usual'}"]
    train(lab, *usual, num_machines=1, kind="replicated")
    script, out = str(ROOT / "examples" / "cluster" / "slurm.sbatch"), tmp_path / "run"
    begin = ["bash", script, dataset, f"--model={lab.model}", "--lr=3e-4", f"--out={out}"]
    environment = {
        "PATH": f"{slurm_in(lab, tmp_path)}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "machines",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with Started(begin, environment) as job:
        until = time.monotonic() + 200
        metrics = out / "metrics.jsonl"  # exists before the first update
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
            time.sleep(0.001)
        for process in job.processes():  # `scancel` signals the processes of the step
            with suppress(psutil.NoSuchProcess):
                if "rollout_io" in process.cmdline():
                    process.terminate()
        job.wait()
        said = job.output()
    num_made = len((out / "metrics.jsonl").read_text().splitlines())
    latest = (out / "checkpoints" / "latest").read_text().strip()
    assert latest == f"global_step_{num_made}", said
    assert 0 < num_made < NUM_GROUPS // 8, said
    with Started(["bash", script, f"--resume={out}"], environment) as job:
        assert job.wait() == 0, job.output()
    assert losses_of(out) == pytest.approx(losses(lab, "usual"), rel=1e-4, abs=1e-6)
