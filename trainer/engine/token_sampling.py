"""Sample tokens from logits, with their exact log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipelines.generation.engines.base import Sampling


def sampled_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Compute the log-probabilities of the distribution to sample from.

    p = softmax(logits / temperature), restricted by min_p, then top_k, then top_p (vLLM's order),
    and renormalised. Ties at a threshold of min_p or top_k are kept. Temperature 0 is treated as
    1 here; `sample_token` then takes the most likely token.

    Args:
        logits: [V] logits of the next token.
        sampling: Sampling settings.

    Returns:
        [V] float32 nats; -inf at tokens that cannot be sampled.

    Example:
        >>> p = torch.tensor([0.5, 0.3, 0.2])
        >>> sampled_distribution(p.log(), Sampling(top_k=2)).exp().tolist()
        [0.625, 0.375, 0.0]
    """
    logits = logits.float() / (sampling.temperature or 1.0)
    if sampling.min_p > 0:
        least = logits.max() + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.log_softmax(-1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        logits = logits.index_fill(-1, order[before >= sampling.top_p], -torch.inf)
    return logits.log_softmax(-1)


def sample_token(
    logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float]:
    """Sample a token from [V] logits, and return it with its log-probability in nats."""
    logprobs = sampled_distribution(logits, sampling)
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
