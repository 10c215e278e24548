"""Sharded parameters, and their conversion to full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


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
