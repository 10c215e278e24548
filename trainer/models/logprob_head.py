"""Log-probabilities and entropies of targets from logits, without copies of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.models.tree_attention import SYMBOLIC_SIZES

BLOCK_ELEMENTS = 2**22
"""Number of logits processed at once on a CPU, in float32. A GPU processes a chunk at once, because
its compiled functions copy no logits to float32."""


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

    The softmax is in float32, in blocks of rows; on a GPU, compiled to a few kernels that read the
    logits in their own precision. The backward pass overwrites the logits with their
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
    outputs: tuple[Tensor, Tensor] = apply(
        logits, token, temperature, scale, softcap, entropy_gradient
    )
    return outputs


def set_logprobs(
    logits: Tensor,
    token: Tensor,
    temperature: Tensor,
    ids: Tensor,
    sizes: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `target_logprobs` normalised over one set of ids per target, in float32.

    Only the logits of the sets are copied. No logit needs to be stored for the backward pass.

    Args:
        logits: [C, V] output of the head.
        token: [C] int64, each in its set.
        temperature: [C] float32 > 0.
        ids: Ids of all C sets, concatenated.
        sizes: [C] int64 > 0 sizes of the sets, on the CPU.
        scale: See `target_logprobs`.
        softcap: See `target_logprobs`.
        entropy_gradient: See `target_logprobs`.

    Example:
        >>> ids, sizes = torch.tensor([0, 2]), torch.tensor([2])
        >>> logits, one = torch.tensor([[0.0, 9.0, 0.0]]), torch.ones(1)
        >>> logprob, _ = set_logprobs(logits, torch.tensor([2]), one, ids, sizes)
        >>> round(logprob.item(), 4)  # log(1/2)
        -0.6931
    """
    row = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(logits.device)

    def scaled(values: Tensor, of: Tensor) -> Tensor:
        z = values.float() * scale
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[of]

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(sizes)).index_add(0, row, values)

    rows = torch.arange(len(sizes), device=logits.device)
    z, picked = scaled(logits[row, ids], row), scaled(logits[rows, token], rows)
    top = z.new_full(sizes.shape, -torch.inf).scatter_reduce(0, row, z.detach(), "amax")
    # Shifted by the largest, so that no exponential overflows; the shift cancels in both results.
    z, picked = z - top[row], picked - top
    p = z.exp()
    mass = total(p)
    entropy = mass.log() - total(p * z) / mass
    return picked - mass.log(), entropy if entropy_gradient else entropy.detach()


def teacher_divergence(
    logits: Tensor,
    temperature: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    sizes: Tensor,
    *,
    is_reverse: bool,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute the divergence of each target's distribution from a teacher's, over the teacher's ids.

    With p of the policy and q of the teacher, both normalised over the ids:

        reverse KL     sum(p * log(p / q))
        cross-entropy  -sum(q * log(p))

    Args:
        logits: [C, V] output of the head.
        temperature: [C] float32 > 0; divides the policy's logits.
        ids: The teacher's ids for all C targets, concatenated.
        teacher_logprobs: Log-probabilities of the ids, nats.
        sizes: [C] int64 number of ids of each target, on the CPU; 0: the divergence is 0.
        is_reverse: Compute the reverse KL divergence.
        scale: See `target_logprobs`.
        softcap: See `target_logprobs`.

    Returns:
        [C] float32 nats.
    """
    row = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(logits.device)
    z = logits[row, ids].float() * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[row]

    def normalised(values: Tensor) -> Tensor:
        top = values.new_full(sizes.shape, -torch.inf)
        values = values - top.scatter_reduce(0, row, values.detach(), "amax")[row]
        mass = values.new_zeros(len(sizes)).index_add(0, row, values.exp())
        return values - mass.log()[row]

    log_p, log_q = normalised(z), normalised(teacher_logprobs.float())
    terms = log_p.exp() * (log_p - log_q) if is_reverse else -log_q.exp() * log_p
    return terms.new_zeros(len(sizes)).index_add(0, row, terms)


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
        parts = [
            run_block(_summed, block, token[r], temperature[r], scale=scale, softcap=softcap)
            for r, block in _blocks(logits)
        ]
        normalizer, logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        # The logits themselves are saved, not a copy: `backward` overwrites them, and PyTorch raises an error
        # if another operation saved them too.
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
        for r, block in _blocks(logits):
            rows = temperature[r], normalizer[r], entropy[r], grad[r]
            columns = *rows, entropy_grad[r] if ctx.entropy_gradient else None
            settings = {"scale": ctx.scale, "softcap": ctx.softcap}
            # Read before the block is overwritten by its gradient.
            picked = block.gather(-1, token[r, None])
            of_token = _gradient(picked, *columns, **settings, is_token=True)
            block.copy_(run_block(_gradient, block, *columns, **settings, is_token=False))
            block.scatter_(-1, token[r, None], of_token)
        return logits, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, logits_tangent: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the derivatives of both outputs in the direction of the logits' tangent."""
        logits, token, temperature, normalizer, entropy = ctx.saved_tensors
        tangent, entropy_tangent = torch.empty_like(normalizer), torch.empty_like(normalizer)
        # d tanh(x) = 1 - tanh(x)^2, and `capped` is softcap * tanh(x / softcap).
        for rows, capped in scaled_blocks(logits, ctx.scale, ctx.softcap):
            change = logits_tangent[rows] * (ctx.scale / temperature[rows, None])
            if ctx.softcap is not None:
                change *= 1 - (capped / ctx.softcap) ** 2
            z = capped.div_(temperature[rows, None]).sub_(normalizer[rows, None])
            weighted = z.exp().mul_(change)
            tangent[rows] = change.gather(-1, token[rows, None])[:, 0] - weighted.sum(-1)
            entropy_tangent[rows] = -weighted.mul_(z.add_(entropy[rows, None])).sum(-1)
        return tangent, entropy_tangent if ctx.entropy_gradient else None


def _summed(
    logits: Tensor, token: Tensor, temperature: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the normalizer, log-probability and entropy of each row ([R] float32 each)."""
    z = _scaled(logits, scale, softcap).div_(temperature[:, None])
    picked, top = z.gather(-1, token[:, None])[:, 0], z.amax(-1)
    z -= top[:, None]
    p = z.exp()
    total = p.sum(-1)
    normalizer = top + total.log()
    return normalizer, picked - normalizer, total.log() - p.mul_(z).sum(-1) / total


def _gradient(
    logits: Tensor,
    temperature: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    is_token: bool,
) -> Tensor:
    """Compute the gradient of logits ([R, K], in their dtype) that are those of the tokens or not.

    The tokens' gradient overwrites that of all logits: to select them in one kernel would cost a
    comparison of each logit.
    """
    capped = _scaled(logits, scale, softcap)
    slope = None if softcap is None else 1 - (capped / softcap) ** 2
    z = capped.div_(temperature[:, None]).sub_(normalizer[:, None])
    p = z.exp()
    if entropy_grad is None:
        p.mul_(grad[:, None])
    else:
        p.mul_(z.add_(entropy[:, None]).mul_(entropy_grad[:, None]).add_(grad[:, None]))
    p = p.neg_() + grad[:, None] if is_token else p.neg_()
    p.mul_(scale / temperature[:, None])
    return (p if slope is None else p.mul_(slope)).to(logits.dtype)


def run_block(function: Any, logits: Tensor, *columns: Tensor | None, **settings: Any) -> Any:
    """Call a function of a block of logits and its columns; on a GPU, compiled once for all sizes.

    PyTorch would compile again for logits with and without gradient, for columns at other offsets
    of their storage, and where sizes are equal by chance.
    """
    if not is_gpu(logits):
        return function(logits, *columns, **settings)
    # Clones begin at offset 0 of their own storage, whatever slices the columns are.
    copies = [None if column is None else column.clone() for column in columns]
    with SYMBOLIC_SIZES():
        return _compiled(function)(logits.detach(), *copies, **settings)


def is_gpu(logits: Tensor) -> bool:
    """Whether the functions are compiled for the device of the logits."""
    return logits.is_cuda


@lru_cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of [C, V] logits: views, all rows at once on a GPU."""
    size = len(logits) if is_gpu(logits) else max(1, BLOCK_ELEMENTS // logits.shape[-1])
    for start in range(0, max(1, len(logits)), max(1, size)):
        rows = slice(start, start + size)
        yield rows, logits[rows]


def scaled_blocks(
    logits: Tensor, scale: float = 1.0, softcap: float | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of [C, V] logits, scaled and capped, as float32 copies."""
    for rows, block in _blocks(logits):
        yield rows, _scaled(block, scale, softcap)


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return a scaled and capped copy in float32."""
    scaled = logits.to(torch.float32, copy=True)
    if scale != 1:
        scaled *= scale
    return scaled if softcap is None else scaled.div_(softcap).tanh_().mul_(softcap)
