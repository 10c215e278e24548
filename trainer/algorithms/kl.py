"""KL divergence from a reference policy, estimated at sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config.sections import KLEstimator

MAX_K3 = 10.0
MAX_LOG_RATIO = 20.0
MAX_CHANGE = 0.2


def kl_estimates(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token (Schulman, joschu.net/blog/kl-approx.html).

        d  = l - l_ref
        k1 = d        abs = |d|        k2 = d^2 / 2        k3 = exp(-d) + d - 1

    k3 clamps d to +-20 and its result to at most 10; beyond these bounds it has no gradient. As a
    loss on the policy's own samples, only k2 has the gradient of the divergence; the expected
    gradient of k1 is 0.

    Args:
        logprobs: [M] nats, with or without gradient.
        ref_logprobs: [M] nats of the reference, at the same temperature.
        estimator: Name of the estimator.

    Returns:
        [M] nats; 0 where the log-probabilities are equal.

    Example:
        >>> policy, reference = torch.tensor([-1.0]), torch.tensor([-3.0])
        >>> kl_estimates(policy, reference, "k2").item()
        2.0
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.exp(-bounded) + bounded - 1).clamp(max=MAX_K3)


def rewards_less_kl(rewards: Tensor, estimates: Tensor, coef: float) -> Tensor:
    """Subtract max(coef, 0) * estimates from rewards (arXiv:1909.08593, eq. 2); [M] each."""
    return rewards - max(coef, 0.0) * estimates


def adapted_kl_coef(
    coef: float, *, kl: float, target: float, num_sequences: int, horizon: int
) -> float:
    """Adapt the KL coefficient with the controller of arXiv:1909.08593, section 2.2.

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    Args:
        coef: Current coefficient.
        kl: Mean divergence of the batch, nats.
        target: Target divergence, > 0.
        num_sequences: Number of sequences in the batch.
        horizon: Number of sequences over which the coefficient may change by 20%; > 0.

    Example:
        >>> adapted_kl_coef(0.1, kl=6.0, target=3.0, num_sequences=50, horizon=100)
        0.11000000000000001
    """
    change = min(max(kl / target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coef * (1 + change * num_sequences / horizon)
