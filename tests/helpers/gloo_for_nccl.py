"""Gloo instead of NCCL, so that vLLM's own weight transfer runs on CPUs.

`install` replaces the parts of vLLM's `nccl` backend that need a GPU: the communicator, and the packing
of tensors into messages. A server runs it as a vLLM plugin, and a test calls it in its own process.
Everything else is vLLM's code.
"""

from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

PATIENCE = timedelta(seconds=60)
ENTRY_POINTS = """[vllm.general_plugins]
gloo_for_nccl = gloo_for_nccl:install
"""


class Communicator:
    def __init__(self, address, port, rank, world_size):
        self._store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=PATIENCE)
        self._group = ProcessGroupGloo(self._store, rank, world_size, PATIENCE)

    def broadcast(self, tensor):
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def destroy(self):
        self._group = self._store = None


def send(iterator, group, post_iter_func, **_):
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous())


def receive(iterator, group, post_unpack_func, **_):
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor)
        post_unpack_func([(name, tensor)])


def of_trainer(info):
    return Communicator(info.master_address, info.master_port, 0, info.world_size)


def of_worker(info, parallel_config):
    rank = info.rank_offset + parallel_config.rank
    return Communicator(info.master_address, info.master_port, rank, info.world_size)


def install():
    from vllm.distributed.weight_transfer import nccl_engine

    nccl_engine.open_trainer_endpoint = of_trainer
    nccl_engine.worker_init_process_group = of_worker
    nccl_engine.packed_nccl_broadcast_producer = send
    nccl_engine.packed_nccl_broadcast_consumer = receive
    torch.accelerator.synchronize = lambda *_: None


def as_plugin(folder):
    """Write the plugin to a folder for a server's PYTHONPATH."""
    found = folder / "gloo_for_nccl-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-for-nccl\nVersion: 0\n")
    (found / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "gloo_for_nccl.py").write_text(Path(__file__).read_text())
    return str(folder)


if __name__ == "__main__":  # rollouts, in a process that sends weights
    import sys

    from rollout_io.cli.main import run

    install()
    sys.exit(run(sys.argv[1:]))
