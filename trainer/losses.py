"""Losses per target token, and the sum that turns them into one number.

Everything here is elementwise over targets (response tokens that train): a token whose
`loss_mask` is false is never a target, so no mask appears below. Denominators are arguments,
because they count over the global mini-batch, of which a call sees one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), the exponent clamped to +-20 so that it stays finite."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with separate bounds.

        r = exp(logprobs - old_logprobs)
        loss = -min(r * A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) * A)

    Args:
        logprobs: [M] of the policy now, with gradient.
        old_logprobs: [M] of the policy at the start of the update.
        advantages: [M].
        eps_clip_low: Distance of the lower bound from 1.
        eps_clip_high: Distance of the upper bound from 1.

    Returns:
        [M] loss per target, not reduced.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    clipped = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Tensor:
    """[M] bool: targets whose clipped term is the smaller one, so that no gradient flows."""
    ratio = probability_ratio(logprobs, old_logprobs)
    clipped = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    return clipped * advantages < ratio * advantages


def tis_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance sampling: corrects for the sampler's other numerics.

        w = min(exp(clamp(old_logprobs - rollout_logprobs, -20, 20)), cap)

    Truncated above only; no gradient flows through it. Source: Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl).

    Returns:
        [M] weights in (0, cap].
    """
    return probability_ratio(old_logprobs.detach(), rollout_logprobs).clamp(max=cap)


def token_mean(losses: Tensor, num_trained_tokens: int) -> Tensor:
    """Sum of `losses` over max(num_trained_tokens, 1).

    Args:
        losses: [M] losses of one micro-batch's targets; empty gives 0.
        num_trained_tokens: Targets of the whole mini-batch, over all micro-batches and processes;
            the micro-batches' results add up to the mean over the mini-batch.
    """
    return losses.sum() / max(num_trained_tokens, 1)
