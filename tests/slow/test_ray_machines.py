"""`--engine ray` on three machines that share nothing but a network, each with a copy of the dataset."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.machines import machines, unavailable
from tests.helpers.trainer_helpers import group_rows, write_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
RAY = str(Path(sys.executable).with_name("ray"))
ROLLOUTS = str(Path(sys.executable).with_name("rollouts"))
PORT = 6379
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three machines with a Ray node each, and a directory of their own at the same path.

    The first runs no tasks, so that each shard is read by another node than the one that asks.
    """
    pytest.importorskip("ray")
    private = tmp_path_factory.mktemp("private")
    with machines(3, private, Path("/tmp/ray")) as (head, *workers):
        start = [RAY, "start", "--object-store-memory", str(80 << 20), "--block", "--num-cpus"]
        address = f"{head.address}:{PORT}"
        first = [*start, "0", "--head", "--port", str(PORT), "--node-ip-address", head.address]
        head.start(*first, "--include-dashboard", "false", **ENVIRONMENT)
        for machine in workers:
            machine.start(
                *start,
                "1",
                "--address",
                address,
                "--node-ip-address",
                machine.address,
                **ENVIRONMENT,
            )
        status = "import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))"
        ends = time.monotonic() + 180
        while time.monotonic() < ends:
            asked = head.start(sys.executable, "-c", status, RAY_ADDRESS=address, **ENVIRONMENT)
            if asked.wait() == 0 and asked.output().split()[-1] == "3":
                break
        else:
            pytest.fail(asked.output())
        yield private, [head, *workers], address


def dataset_on(machine, private, shards, reward):
    """Write the same shards on a machine, with another reward in the last one."""
    folder = machine.path(private) / "ds"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(shards):
        rows = group_rows(4, (1.0, 0.0))
        for row in rows:
            row["instance_id"] = f"s{number}-{row['instance_id']}"
            row["trajectory_id"] = f"{row['instance_id']}_{row['repetition_id']}"
        if number == shards - 1:
            rows[-1]["reward"] = reward
        made = Path(write_dataset(machine.path(private) / "one", rows))
        (made / "part-00000.parquet").rename(folder / f"part-{number:05d}.parquet")
        shutil.rmtree(made)


def run_stats(cluster):
    private, (head, *_), address = cluster
    command = [
        ROLLOUTS,
        "stats",
        str(private / "ds"),
        "--engine",
        "ray",
        "--workers",
        "3",
        "--json",
    ]
    started = head.start(*command, RAY_ADDRESS=address, **ENVIRONMENT)
    return started.wait(), started.output()


def test_three_nodes_with_copies_of_a_dataset_count_it_as_one_machine(cluster):
    private, every, _ = cluster
    for machine in every:
        dataset_on(machine, private, 6, 0.0)
    code, output = run_stats(cluster)
    assert code == 0, output
    numbers = json.loads(output[output.index("{") :])
    assert numbers["num_groups"] == 24
    assert numbers["num_trajectories"] == 48


def test_another_version_of_a_shard_on_two_of_three_nodes_is_refused_by_name(cluster):
    private, (head, *workers), _ = cluster
    for machine in (head, *workers):
        dataset_on(machine, private, 6, 0.0)
    for machine in workers:
        dataset_on(machine, private, 6, 0.5)
    code, output = run_stats(cluster)
    assert code == 1
    assert "part-00005.parquet" in output
    assert "has another version of this file than machine0" in output
    assert any(machine.name in output for machine in workers)
    assert "[shared_storage]" in output


def test_a_node_without_the_dataset_is_named(cluster):
    private, (head, *workers), _ = cluster
    dataset_on(head, private, 12, 0.0)
    for machine in workers:
        shutil.rmtree(machine.path(private) / "ds", ignore_errors=True)
    code, output = run_stats(cluster)
    assert code == 1, output
    assert any(f"on {machine.name}: the path does not exist" in output for machine in workers)
    assert "[dataset_exists]" in output
