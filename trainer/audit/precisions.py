"""Round the weights of a policy as engines with a lower precision store them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.models.policy import Policy

LARGEST_E4M3, LARGEST_INT8 = 448.0, 127.0
_SMALLEST = 1e-12


@torch.no_grad()
def rounded(policy: Policy, precision: str) -> Policy:
    """Return a copy of a policy with rounded weights.

    Args:
        policy: Policy with float32 weights.
        precision: A key of `PRECISIONS`.
    """
    found = copy.deepcopy(policy)
    head = found.model.get_output_embeddings().weight
    ends = {id(head), id(found.model.get_input_embeddings().weight)}
    for weights in found.parameters():
        weights.copy_(PRECISIONS[precision](weights, id(weights) in ends))
    return found


def _bfloat16(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001 - called by position
    return weights.bfloat16().float()


def _float16(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001
    return weights.half().float()


def _int8(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001
    if weights.ndim != 2:
        return weights
    step = (weights.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp(min=_SMALLEST)
    return (weights / step).round() * step


def _int8_layers(weights: Tensor, is_end: bool) -> Tensor:  # noqa: FBT001
    return weights if is_end else _int8(weights, is_end)


def _float8_layers(weights: Tensor, is_end: bool) -> Tensor:  # noqa: FBT001
    if weights.ndim != 2 or is_end:
        return weights
    step = (weights.abs().amax(1, keepdim=True) / LARGEST_E4M3).clamp(min=_SMALLEST)
    return (weights / step).to(torch.float8_e4m3fn).float() * step


PRECISIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "bfloat16": _bfloat16,
    "float16": _float16,
    "8-bit integers": _int8,
    "8-bit integers except embeddings": _int8_layers,
    "8-bit floats except embeddings": _float8_layers,
}
"""Functions that round a tensor, given whether it is an embedding or the head.

8-bit formats have one scale for each row of a matrix.
"""

COMPUTED = ("bfloat16", "float16")
"""Precisions in which engines also compute. Rounded weights then explain only a part of the
differences. For SmolLM2, this part is about a tenth of the log-likelihood per token."""
