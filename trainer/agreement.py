"""Does the sampler say what the trainer says? Their log-probabilities of the same tokens, compared."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainer.losses.ratios import bounded_exp


def agreement(difference: Tensor) -> dict[str, float]:
    """Metrics of a mini-batch's differences; their meaning: `trainer.metrics`.

    The effective share is Kish's effective sample size over the number of tokens: with the ratios
    r = exp(difference), (sum of r)^2 / (M x sum of r^2). It is 1 where all ratios are equal and 1/M
    where one token has all the weight. Source: Kish, "Survey sampling" (1965), section 11.2.

    Args:
        difference: [M] float64 nats, the trainer's less the sampler's log-probability of each trained
            token.

    Returns:
        Nothing where there is no token, or one whose sampler said nothing (NaN).

    Example:
        >>> found = agreement(torch.tensor([0.0, 0.0, -0.5, 0.1], dtype=torch.float64))
        >>> found["rollout_logprobs_diff_mean"], found["rollout_logprobs_abs_diff_mean"]
        (-0.1, 0.15)
    """
    if not len(difference) or difference.isnan().any():
        return {}
    distance, ratio = difference.abs(), bounded_exp(difference)
    percentiles = (50, 90, 99)
    found = np.percentile(distance.numpy(), percentiles)
    named = {f"p{p}": value for p, value in zip(percentiles, found, strict=True)}
    spread = distance.std() if len(distance) > 1 else 0.0
    named |= {"mean": distance.mean(), "std": spread, "max": distance.max(), "min": distance.min()}
    return {
        **{f"rollout_logprobs_abs_diff_{name}": float(value) for name, value in named.items()},
        "rollout_logprobs_diff_mean": float(difference.mean()),
        "is_effective_share": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }
