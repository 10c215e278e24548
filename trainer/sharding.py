"""Parameters that are spread over processes, and the same as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether a process holds a part of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; of a sharded one all of it. All processes must ask for it together."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor] | None:
    """All weights of a sharded model by name, tied ones as one tensor.

    Args:
        model: The model.
        keep: Whether this process needs them; others only help to gather them.

    Returns:
        None where nothing is sharded or kept: the model then has them.
    """
    if not is_sharded(model):
        return None
    state, found = model.state_dict(keep_vars=True), dict[int, Tensor]()
    for tensor in state.values():
        if id(tensor) not in found:
            gathered = whole(tensor)
            found[id(tensor)] = gathered if keep else gathered.new_empty(0)
    return {name: found[id(tensor)] for name, tensor in state.items()} if keep else None


def under(module: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a submodule, by their names in it.

    Example:
        >>> under("model", {"model.head": torch.zeros(1), "value_head.bias": torch.zeros(1)}).keys()
        dict_keys(['head'])
    """
    prefix = f"{module}."
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of an optimizer's tensor, where the parameter is sharded."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        mesh = parameter.device_mesh
        return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)
    return tensor


def without_reduction(model: nn.Module) -> AbstractContextManager[object]:
    """Accumulate gradients without exchanging them, where each process has room for all of them."""
    no_sync = getattr(model, "no_sync", nullcontext)
    context: AbstractContextManager[object] = no_sync()
    return context


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradient's L2 norm, over the shards of all processes; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
