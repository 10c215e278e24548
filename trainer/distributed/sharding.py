"""Place models on the processes, replicated or sharded, and convert shards to full tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from schemas.errors import ConfigError
from trainer.models.pictures import without_encoder


def is_sharded(model: nn.Module) -> bool:
    """True if this process stores only part of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gathered(tensor: Tensor) -> Tensor:
    """Gather the shards of a tensor. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, gathering its shards. All processes must call this together."""
    return gathered(tensor.detach()).cpu()


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor] | None:
    """Gather all weights of a sharded model by name; tied weights share one tensor.

    Processes that do not `keep` the weights only help to gather them, and get None. All processes
    get None if the model is not sharded.
    """
    if not is_sharded(model):
        return None
    state, tensors = model.state_dict(keep_vars=True), dict[int, Tensor]()
    for tensor in state.values():
        if id(tensor) not in tensors:
            gathered = whole(tensor)
            tensors[id(tensor)] = gathered if keep else gathered.new_empty(0)
    return {name: tensors[id(tensor)] for name, tensor in state.items()} if keep else None


def under(module: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the weights of a submodule, keyed by their names within it.

    Example:
        >>> under("model", {"model.head": torch.zeros(1), "value_head.bias": torch.zeros(1)}).keys()
        dict_keys(['head'])
    """
    prefix = f"{module}."
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard an optimizer's tensor like its parameter; unchanged if the parameter is not sharded."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        mesh = parameter.device_mesh
        return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)
    return tensor


def without_reduction(model: nn.Module) -> AbstractContextManager[object]:
    """Accumulate gradients without exchanging them, if the model supports it."""
    no_sync = getattr(model, "no_sync", nullcontext)
    context: AbstractContextManager[object] = no_sync()
    return context


def wrap(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Place a policy or critic, and replicate or shard its parameters over the processes.

    Raises:
        ConfigError: The launch requests sharded parameters but they are not sharded.
    """
    with _whole_encoder(accelerator, model):
        model, optimizer = accelerator.prepare(model, optimizer)
    if is_on("ACCELERATE_USE_FSDP") and not is_sharded(model):
        finding = f"FSDP does not shard parameters on {accelerator.device.type}"
        hint = "launch without --use_fsdp: FSDP needs GPUs"
        raise ConfigError("launch", "accelerate launch", finding, hint=hint)
    return model, optimizer


def wrap_frozen(accelerator: Accelerator, model: nn.Module) -> Any:
    """Place a model that is only evaluated; shard it if the trained models are sharded."""
    model.requires_grad_(requires_grad=False)
    if accelerator.is_fsdp2:
        with _whole_encoder(accelerator, model):
            return fsdp2_prepare_model(accelerator, model)
    return accelerator.prepare_model(model, evaluation_mode=True)


@contextmanager
def _whole_encoder(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Keep the encoder of pictures out of FSDP in this context: each process has all of it.

    Only some processes have pictures to encode at a time, so a sharded encoder would wait forever
    for the others.
    """
    if not accelerator.is_fsdp2:
        yield
        return
    with without_encoder(model.model) as parts:
        yield
    for part in parts:
        part.to(accelerator.device)
        part.forward = accelerator.autocast()(part.forward)


def is_on(variable: str) -> bool:
    """True if an environment variable of Accelerate is set to true."""
    return os.environ.get(variable, "").lower() in ("1", "true")
