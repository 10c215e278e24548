"""Log-probabilities and entropies of targets from logits, without copies of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**22
"""Number of logits processed at once, in float32."""


def target_logprobs(
    logits: Tensor,
    token: Tensor,
    temperature: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability and entropy of each target in a chunk of logits.

        z = cap(scale * logits) / temperature,  cap(x) = softcap * tanh(x / softcap)
        logprob = z[token] - log(sum(exp(z)))
        entropy = -sum(p * log(p)),  p = softmax(z)

    With g and h the gradients of logprob and entropy, the gradient is

        dz_j = g * (1[j = token] - p_j) - h * p_j * (log(p_j) + entropy)

    The softmax is in float32, in blocks of rows. The backward pass overwrites the logits with their
    gradient, so that both passes store a chunk's logits only once, in their original precision. No
    other operation may therefore need the logits in its backward pass; PyTorch raises an error if
    one does.

    Args:
        logits: [C, V] output of the head.
        token: [C] int64.
        temperature: [C] float32 > 0.
        scale: Factor of the logits before capping.
        softcap: Bound of the logits; None: no capping.
        entropy_gradient: Whether the entropy has a gradient.

    Returns:
        Log-probabilities and entropies, [C] float32 nats.

    Example:
        >>> logprob, entropy = target_logprobs(torch.zeros(1, 4), torch.tensor([2]), torch.ones(1))
        >>> round(logprob.item(), 4), round(entropy.item(), 4)  # log(1/4) and log(4)
        (-1.3863, 1.3863)
    """
    apply: Any = _TargetLogprobs.apply
    found: tuple[Tensor, Tensor] = apply(
        logits, token, temperature, scale, softcap, entropy_gradient
    )
    return found


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token: Tensor,
        temperature: Tensor,
        scale: float,
        softcap: float | None,
        entropy_gradient: bool,  # noqa: FBT001 - `apply` takes no keywords
    ) -> tuple[Tensor, Tensor]:
        normalizer, logprobs, entropy = (
            torch.empty_like(temperature, dtype=torch.float32) for _ in range(3)
        )
        for rows, z in scaled_blocks(logits, scale, softcap):
            z.div_(temperature[rows, None])
            picked, top = z.gather(-1, token[rows, None])[:, 0], z.amax(-1)
            z -= top[:, None]
            p = z.exp()
            total = p.sum(-1)
            normalizer[rows] = top + total.log()
            logprobs[rows] = picked - normalizer[rows]
            entropy[rows] = total.log() - p.mul_(z).sum(-1) / total
        ctx.save_for_backward(logits, token, temperature, normalizer, entropy)
        ctx.save_for_forward(logits, token, temperature, normalizer, entropy)
        ctx.scale, ctx.softcap, ctx.entropy_gradient = scale, softcap, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, token, temperature, normalizer, entropy = ctx.saved_tensors
        for rows, capped in scaled_blocks(logits, ctx.scale, ctx.softcap):
            slope = None if ctx.softcap is None else 1 - (capped / ctx.softcap) ** 2
            z = capped.div_(temperature[rows, None]).sub_(normalizer[rows, None])
            p = z.exp()
            if ctx.entropy_gradient:
                z.add_(entropy[rows, None]).mul_(entropy_grad[rows, None]).add_(grad[rows, None])
                p.mul_(z)
            else:
                p.mul_(grad[rows, None])
            p.neg_().scatter_add_(-1, token[rows, None], grad[rows, None])
            p.mul_(ctx.scale / temperature[rows, None])
            logits[rows] = p if slope is None else p.mul_(slope)
        return logits, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, logits_tangent: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the derivatives of both outputs in the direction of the logits' tangent."""
        logits, token, temperature, normalizer, entropy = ctx.saved_tensors
        found, entropy_found = torch.empty_like(normalizer), torch.empty_like(normalizer)
        for rows, capped in scaled_blocks(logits, ctx.scale, ctx.softcap):
            change = logits_tangent[rows] * (ctx.scale / temperature[rows, None])
            if ctx.softcap is not None:
                change *= 1 - (capped / ctx.softcap) ** 2
            z = capped.div_(temperature[rows, None]).sub_(normalizer[rows, None])
            weighted = z.exp().mul_(change)
            found[rows] = change.gather(-1, token[rows, None])[:, 0] - weighted.sum(-1)
            entropy_found[rows] = -weighted.mul_(z.add_(entropy[rows, None])).sum(-1)
        return found, entropy_found if ctx.entropy_gradient else None


def scaled_blocks(
    logits: Tensor, scale: float = 1.0, softcap: float | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of [C, V] logits, scaled and capped, as float32 copies."""
    size = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, _scaled(logits[rows], scale, softcap)


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return a scaled and capped copy in float32."""
    scaled = logits.to(torch.float32, copy=True)
    if scale != 1:
        scaled *= scale
    return scaled if softcap is None else scaled.div_(softcap).tanh_().mul_(softcap)
