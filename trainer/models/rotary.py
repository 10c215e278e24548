"""Make rotary frequencies depend only on the configuration, not on what is packed together.

For LongRoPE and dynamic NTK, Transformers bases the frequencies on the largest position in a
forward pass, so one long row would affect all other rows in it. vLLM chooses the frequencies once,
for the longest row that it may serve. We do the same, so that log-probabilities are comparable.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def fix_frequencies(model: Any) -> None:
    """Fix the frequencies of a model's rotary modules at the values for its longest possible row.

    - LongRoPE: the long factors if `max_position_embeddings` (vLLM's default `max_model_len`) is
      above `original_max_position_embeddings`, else the short ones.
    - Dynamic NTK with a factor: the base for `max_position_embeddings * factor` positions.
    """
    for module in model.modules():
        longest = longest_row(module)
        if longest is not None:
            _see_position(module, longest - 1)


def longest_row(module: nn.Module) -> int | None:
    """Return the row length that determines a module's frequencies, or None if they are fixed."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "rope_type"):
        return None
    rope = config.rope_parameters or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]
    factors = [factor for kind in kinds if (factor := _stretch(kind))]
    return int(config.max_position_embeddings * max(factors)) if factors else None


def _stretch(kind: Mapping[str, Any]) -> float | None:
    """Return the longest row's length as a multiple of `max_position_embeddings`.

    Returns None if the frequencies do not depend on the length.
    """
    if kind["rope_type"] == "longrope":
        return 1.0
    if kind["rope_type"] == "dynamic" and not kind.get("alpha"):  # alpha fixes the base
        return float(kind["factor"])
    return None


def _see_position(module: nn.Module, position: int) -> None:
    """Hook a rotary module: append `position` to its inputs, and drop the extra output."""
    signature = inspect.signature(module.forward)

    def more(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        ids: Tensor = bound.arguments["position_ids"]
        far = torch.full_like(ids[..., :1], position)
        bound.arguments["position_ids"] = torch.cat([ids, far], -1)
        return bound.args, bound.kwargs

    def less(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(part[..., :-1, :] for part in output)

    module.register_forward_pre_hook(more, with_kwargs=True)
    module.register_forward_hook(less)
