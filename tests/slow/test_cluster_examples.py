"""The files of examples/cluster start one run over several machines.

`ssh`, `srun` and `scontrol` are replaced by scripts that run a command in the namespaces of a machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import trainer
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.machines import machines, unavailable
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset

pytestmark = pytest.mark.slow
needs_machines = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
EXAMPLES, BIN = ROOT / "examples" / "cluster", Path(sys.executable).parent
INSIDE = "nsenter --target {pid} --user --net --mount --uts --preserve-credentials --wd={here}"
STAND_INS = {
    "ssh": """case "$2" in {cases} esac\nexec $inside bash -c "$3" """,
    "scontrol": "printf '%s\\n' {addresses}",
    "srun": """shift; export SLURM_NODEID=0
        for inside in {insides}; do $inside "$@" & SLURM_NODEID=$((SLURM_NODEID + 1)); done
        for one in {addresses}; do wait -n || exit $?; done""",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    model = save_tiny_model(folder / "model")
    return {"dataset": write_dataset(folder / "ds", group_rows(4, (1.0, 0.0))), "model": model}


@pytest.fixture(scope="module")
def norms_alone(paths, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 2, "learning_rate": 1e-3}
    trainer.train(train_config(**paths, out=str(out), **settings, tis_ratio_type=None))
    return norms_of(out)


def norms_of(run):
    return [
        json.loads(line)["grad_norm"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def arguments(paths, out):
    settings = ("batch.groups_per_batch=2", "batch.groups_per_mini_batch=2")
    chosen = [part for one in (*settings, "loss.tis_ratio_type=none") for part in ("--set", one)]
    return [paths["dataset"], "--model", paths["model"], "--out", str(out), "--lr", "1e-3", *chosen]


def stand_ins(folder, every):
    """Write the stand-ins to a folder, for the PATH of a script."""
    inside = {m.address: INSIDE.format(pid=m.pid, here=ROOT) for m in every}
    facts = {
        "cases": " ".join(f'{name}) inside="{command}" ;;' for name, command in inside.items()),
        "addresses": " ".join(inside),
        "insides": " ".join(f'"{command}"' for command in inside.values()),
    }
    folder.mkdir()
    for name, text in STAND_INS.items():
        for key, value in facts.items():
            text = text.replace(f"{{{key}}}", value)
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@needs_machines
@pytest.mark.parametrize("script", ["ssh.sh", "slurm.sbatch"])
def test_a_script_trains_over_two_machines_as_one_process_does(
    script, paths, norms_alone, tmp_path
):
    with machines(2) as every:
        job = {"SLURM_JOB_NODELIST": "machines", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
        environment = (
            os.environ
            | job
            | {
                "PATH": f"{stand_ins(tmp_path / 'bin', every)}:{BIN}:{os.environ['PATH']}",
                "HOSTS": " ".join(machine.address for machine in every),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        )
        out = tmp_path / "run"
        done = subprocess.run(
            ["bash", str(EXAMPLES / script), *arguments(paths, out)],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert norms_of(out) == pytest.approx(norms_alone, rel=1e-4, abs=1e-6)


def test_the_kubernetes_file_starts_one_pod_for_each_node_that_torchrun_waits_for():
    (job,) = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"][-1]
    assert f"--nnodes {spec['parallelism']} " in command
    assert spec["parallelism"] == spec["completions"]
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
