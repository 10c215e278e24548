"""Losses that single out the tokens which lower entropy most (arXiv:2505.22617).

Which tokens is a question to the whole mini-batch: it is answered once, without gradient, by the
log-probabilities the policy has before the step. So the answer does not depend on micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.policy import TokenLoss, regular
from trainer.losses.ratios import probability_ratio


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """What each target adds to the covariance of advantage and log-probability, centred.

        cov = (A - mean A) (l - mean l)          means over the M targets

    Args:
        advantages: [M] as the estimator gave them, divided by nothing.
        logprobs: [M] nats.

    Returns:
        [M]; empty for no targets, 0 for one.
    """
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(
    covariance: Tensor, clipped: Tensor, *, ratio: float, low: float, high: float
) -> Tensor:
    """Targets that Clip-Cov leaves out.

    max(int(ratio M), 1) of the targets with low < cov < high that PPO does not clip, drawn at
    random (torch's generator, on the CPU); fewer where there are fewer.

    Args:
        covariance: [M].
        clipped: [M] bool, where PPO's clipped term is the larger loss.
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
    """Targets that KL-Cov penalises: the max(int(fraction M), 1) greatest covariances.

    Of equal ones, the first.

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
    """Clip-Cov: loss = 0 where selected, `regular` elsewhere. `clipped` are the selected."""
    bounds = {"eps_clip_low": eps_clip_low, "eps_clip_high": eps_clip_high}
    losses, _ = regular(logprobs, old_logprobs, advantages, **bounds)
    return TokenLoss(torch.where(selected, 0.0, losses), selected)


def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, selected: Tensor, *, coef: float
) -> TokenLoss:
    """KL-Cov: the plain surrogate, and a penalty where selected. Nothing is `clipped`.

        loss = -r A + coef |l - l_old| where selected

    The penalty has no gradient at l = l_old, so none in the first update of a batch.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    penalty = torch.where(selected, coef * (logprobs - old_logprobs).abs(), 0.0)
    return TokenLoss(penalty - ratio * advantages, torch.zeros_like(selected))
