"""Transfer of weights to vLLM servers over NCCL, from GPU to GPU, with vLLM's own classes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import safe_open
from torch import Tensor

from pipelines.generation.engines.weight_transfer import Post, WeightSender
from schemas.errors import MissingExtra

_INDEX = "model.safetensors.index.json"


class Described(NamedTuple):
    """Name, dtype and shape of a tensor, like `vllm.distributed.weight_transfer.ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ModelTensors:
    """The tensors of a model directory, with the interface of vLLM's `WeightSource`.

    The files are memory-mapped, so each tensor is read only once, when it is sent.

    Args:
        directory: A Hugging Face model directory with *.safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def metadata(self) -> list[Described]:
        """Describe all tensors, in the order of iteration, without reading them."""
        return [Described(name, t.dtype, tuple(t.shape)) for name, t in self._mapped()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return ((name, tensor.to(device)) for name, tensor in self._mapped())

    def _mapped(self) -> Iterator[tuple[str, Tensor]]:
        index = self.directory / _INDEX
        files = {file.name for file in self.directory.glob("*.safetensors")}
        if index.is_file():  # other files may hold the same weights in another format
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for file in sorted(files):
            with safe_open(self.directory / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dictionary
                    yield name, opened.get_tensor(name)


class _Client:
    """Makes the requests of vLLM's sender, with the interface of its `VLLMWeightSyncClient`."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.weight_version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version or self.weight_version  # `send_weights` passes no version
        self._post("/finish_weight_update", {"weight_version": version})


class _NcclSender:
    def __init__(self, engine: Any, client: _Client, source: ModelTensors) -> None:
        self._engine, self._client, self._source = engine, client, source

    def send(self, directory: Path, policy_version: int) -> None:
        self._source.directory = directory
        self._client.weight_version = str(policy_version)
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


def open_nccl_sender(url: str, post: Post) -> WeightSender:
    """Connect to a server that was started with `--weight-transfer-config '{"backend": "nccl"}'`.

    This process becomes rank 0 of a group with the server's workers. It must not share a GPU with
    them, and they must be able to reach it on a port that is chosen here.

    Raises:
        MissingExtra: `extra_installed`: vLLM cannot be imported in this process.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        finding = f"transferring weights to {url} needs vLLM in the trainer's environment: {error}"
        hint = "install the servers' version of vLLM there, or start the servers without"
        hint = f"{hint} --weight-transfer-config to send weights as files"
        raise MissingExtra("extra_installed", url, finding, hint=hint, message=finding) from None
    num_workers = json.loads(post("/get_world_size", None))["world_size"]
    address, port = _reachable_from(url)
    source, client = ModelTensors(Path()), _Client(post)
    info = NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=num_workers + 1, rank=0
    )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return _NcclSender(engine, client, source)


def _reachable_from(url: str) -> tuple[str, int]:
    """Return this machine's address as a server sees it, and a free port there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port)) as connection:
        address = str(connection.getsockname()[0])
    with socket.socket() as free:
        free.bind((address, 0))
        return address, int(free.getsockname()[1])
