"""Train over the nodes of a Ray cluster, with one `torchrun` on each.

    python examples/cluster/ray_train.py --nodes 2 --per-node 8 -- DS --model DIR --out RUN

RAY_ADDRESS names the cluster. Every node needs rollout-io, DS and DIR at the same paths; the node of
the first worker writes RUN. Needs `pip install "ray[train]"`.
"""

import argparse
import socket
import subprocess
import sys
from contextlib import closing

from ray.train import ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer
from ray.util import get_node_ip_address


def worker(settings: dict) -> None:
    """Run the command on this node; the first worker's address is where all nodes meet."""
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        mine = get_node_ip_address(), free.getsockname()[1]
    host, port = broadcast_from_rank_zero(mine)
    rank, number = get_context().get_world_rank(), get_context().get_world_size()
    command = ["torchrun", "--nnodes", str(number), "--node-rank", str(rank)]
    command += ["--nproc-per-node", str(settings["per_node"])]
    command += ["--master-addr", host, "--master-port", str(port)]
    subprocess.run(
        [*command, "--no-python", "rollouts", "train", *settings["arguments"]], check=True
    )


def main() -> None:
    """Start a worker on each node, and wait for all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each node")
    parser.add_argument("arguments", nargs="+", help="arguments of `rollouts train`, after --")
    given = parser.parse_args()
    resources = {"CPU": 1.0} | ({"GPU": given.gpus} if given.gpus else {})
    TorchTrainer(
        worker,
        train_loop_config={"per_node": given.per_node, "arguments": given.arguments},
        scaling_config=ScalingConfig(
            num_workers=given.nodes,
            use_gpu=given.gpus > 0,
            resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD",
        ),
    ).fit()


if __name__ == "__main__":
    sys.exit(main())
