"""Sample tokens from logits, with their exact log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipelines.generation.engines.base import Sampling


def sampled_distribution(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Compute the log-probabilities of the distributions to sample from.

    p = softmax(logits / temperature), restricted by min_p, then top_k, then top_p (vLLM's order),
    and renormalised. Ties at a threshold of min_p or top_k are kept. Temperature 0 is treated as
    1 here; `sample_tokens` then takes the most likely token.

    Args:
        logits: [B, V] logits of the next token of each row.
        settings: Sampling settings of each row.

    Returns:
        [B, V] float32 nats; -inf at tokens that cannot be sampled.

    Example:
        >>> p = torch.tensor([[0.5, 0.3, 0.2]])
        >>> sampled_distribution(p.log(), [Sampling(top_k=2)]).exp().tolist()
        [[0.625, 0.375, 0.0]]
    """
    num_tokens = logits.shape[-1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device)[:, None]

    logits = logits.float() / column([s.temperature or 1.0 for s in settings])
    if any(s.min_p > 0 for s in settings):
        least = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in settings]
        lowest = logits.amax(-1, keepdim=True) + column(least)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    top_k = [min(s.top_k or num_tokens, num_tokens) for s in settings]
    if any(k < num_tokens for k in top_k):
        limited = [k for k in top_k if k < num_tokens]
        largest = logits.topk(max(limited)).values
        last = [k - 1 if k < num_tokens else 0 for k in top_k]
        lowest = largest.gather(-1, torch.tensor(last, device=logits.device)[:, None])
        every = torch.tensor([k == num_tokens for k in top_k], device=logits.device)[:, None]
        logits = logits.masked_fill((logits < lowest) & ~every, -torch.inf)
    if any(s.top_p < 1 for s in settings):
        ordered, order = logits.log_softmax(-1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        top_p = column([s.top_p if s.top_p < 1 else math.inf for s in settings])
        beyond = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        logits = logits.masked_fill(beyond, -torch.inf)
    return logits.log_softmax(-1)


def sample_tokens(
    logits: Tensor, settings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float], list[list[int] | None]]:
    """Sample one token for each row, with one transfer from the device.

    Each row's generator (of the CPU) draws one number u, and the token is the first whose
    cumulative probability exceeds u, so that a row's samples do not depend on the batch.

    Args:
        logits: [B, V] logits of the next token of each row.
        settings: Sampling settings of each row.
        generators: Random number generator of each row.

    Returns:
        The ids of the tokens, their log-probabilities in nats, and the ids that could have been
        sampled, None without truncation ([B] each).

    Raises:
        RuntimeError: Logits are not finite.
    """
    logprobs = sampled_distribution(logits, settings)
    draws = [float(torch.rand((), dtype=torch.float64, generator=g)) for g in generators]
    # The largest draw, 1 - 2^-53, times a sum could be rounded up to the sum.
    wanted = torch.tensor(draws, dtype=torch.float64) * (1 - 2.0**-52)
    cumulative = logprobs.double().exp().cumsum(-1)
    wanted = wanted.to(logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True)
    drawn = drawn.clamp(max=logits.shape[-1] - 1)  # beyond the end if logits are not finite
    greedy = torch.tensor([s.temperature == 0 for s in settings], device=logits.device)
    token = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), drawn)
    sampled = torch.cat([token.double(), logprobs.gather(-1, token).double()], -1).tolist()
    if not all(math.isfinite(logprob) for _, logprob in sampled):
        raise RuntimeError("the model's logits are not finite: its weights may have diverged")
    sets = [
        logprobs[row].isfinite().nonzero()[:, 0].tolist() if one.truncates else None
        for row, one in enumerate(settings)
    ]
    return [int(token) for token, _ in sampled], [logprob for _, logprob in sampled], sets
