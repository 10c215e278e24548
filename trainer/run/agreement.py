"""Compare the log-probabilities of the trainer and the sampler for the same tokens."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainer.algorithms.losses.ratios import bounded_exp


def agreement(difference: Tensor) -> dict[str, float]:
    """Compute metrics of a mini-batch's log-probability differences; see `schemas.run_metrics`.

    The effective share of the tokens is Kish's effective sample size divided by the number of
    tokens. With the ratios r = exp(difference), it equals (sum of r)^2 / (M x sum of r^2). It is 1
    if all ratios are equal and 1/M if one token has all the weight. Source: Kish, "Survey sampling"
    (1965), section 11.2.

    Args:
        difference: [M] float64 nats, the trainer's minus the sampler's log-probability of each
            trained token.

    Returns:
        Metrics by name; empty without tokens, or if any log-probability is NaN.

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
