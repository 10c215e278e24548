"""Losses that restrain the tokens that reduce entropy most: Clip-Cov, KL-Cov (arXiv:2505.22617).

The tokens are selected once per mini-batch, without gradient, from the policy's log-probabilities
before the step, so the selection does not depend on micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.losses.policy import TokenLoss, regular
from trainer.algorithms.losses.ratios import probability_ratio


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Compute each target's contribution to the covariance of advantage and log-probability.

        cov = (A - mean A) (l - mean l)          means over the M targets

    Args:
        advantages: [M] advantages from the estimator.
        logprobs: [M] nats.

    Returns:
        [M]; 0 for a single target.
    """
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(
    covariance: Tensor, clipped: Tensor, *, ratio: float, low: float, high: float
) -> Tensor:
    """Select the targets that Clip-Cov leaves out of the loss.

    The candidates are the targets with low < cov < high that PPO does not clip. Of these,
    max(int(ratio M), 1) are drawn with torch's generator on the CPU, or all if there are fewer.

    Args:
        covariance: [M].
        clipped: [M] bool, true where PPO's clipped term is the larger loss.
        ratio: Fraction of the M targets.
        low: Lower bound, exclusive.
        high: Upper bound, exclusive.

    Returns:
        [M] bool.
    """
    candidates = ((covariance > low) & (covariance < high) & ~clipped).nonzero()[:, 0]
    drawn = torch.randperm(len(candidates))[: max(int(ratio * len(covariance)), 1)]
    selected = torch.zeros_like(clipped)
    selected[candidates[drawn.to(candidates.device)]] = True
    return selected


def kl_cov_selection(covariance: Tensor, *, fraction: float) -> Tensor:
    """Select the targets that KL-Cov penalises: max(int(fraction M), 1), by largest covariance.

    Among equal covariances, the first targets are selected.

    Returns:
        [M] bool.
    """
    order = covariance.argsort(descending=True, stable=True)
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[order[: max(int(fraction * len(covariance)), 1)]] = True
    return selected


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """Compute the Clip-Cov loss: 0 for selected targets, `regular` for all others.

    Selected targets are reported as `clipped`.
    """
    losses, _, _ = regular(
        logprobs,
        old_logprobs,
        advantages,
        eps_clip_low=eps_clip_low,
        eps_clip_high=eps_clip_high,
    )
    return TokenLoss(torch.where(selected, 0.0, losses), selected)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    ppo_kl_coef: float,
) -> TokenLoss:
    """Compute the KL-Cov loss: the unclipped surrogate, plus a penalty for selected targets.

        loss = -r A + ppo_kl_coef |l - l_old| where selected

    No target is reported as `clipped`. The penalty has no gradient at l = l_old, so it has no
    effect on the first update of a batch.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    penalty = torch.where(selected, ppo_kl_coef * (logprobs - old_logprobs).abs(), 0.0)
    return TokenLoss(penalty - ratio * advantages, torch.zeros_like(selected))
