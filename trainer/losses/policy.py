"""Policy losses: one number per target, not reduced, not yet corrected for the sampler.

In all equations l are `logprobs` (with gradient), l_old `old_logprobs`, l_roll `rollout_logprobs`,
A `advantages`, r = exp(l - l_old) with the exponent clamped to +-20, sg[.] is taken without
gradient. All tensors are [M], one element per target; no targets give an empty loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.losses.ratios import probability_ratio, row_counts, row_sums

MAX_LOG_SEQUENCE_RATIO = 10.0
KL_EPSILON = 1e-8


class TokenLoss(NamedTuple):
    """What a policy loss makes of M targets.

    Attributes:
        losses: [M] with gradient.
        clipped: [M] bool: targets that the loss's own bounds hold back.
    """

    losses: Tensor
    clipped: Tensor


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """PPO's clipped surrogate for any ratio; `clipped` are targets without gradient.

    loss = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
    """
    plain, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return TokenLoss(-torch.minimum(plain, bounded), bounded < plain)


def regular(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with separate bounds.

    loss = -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A)
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    return ppo_clip(ratio, advantages, eps_clip_low, eps_clip_high)


def dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    clip_ratio_c: float,
) -> TokenLoss:
    """`regular`, its loss bounded above where A < 0 (arXiv:1912.09729).

        loss = min(regular, -clip_ratio_c A)  where A < 0;  regular elsewhere

    `clipped` are targets without gradient, by either bound.
    """
    bounds = {"eps_clip_low": eps_clip_low, "eps_clip_high": eps_clip_high}
    losses, clipped = regular(logprobs, old_logprobs, advantages, **bounds)
    cap = -clip_ratio_c * advantages
    capped = (advantages < 0) & (cap < losses)
    return TokenLoss(torch.where(capped, cap, losses), clipped | capped)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    row: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """GSPO-token: PPO's clip of a row's ratio (arXiv:2507.18071, eqs. 14 and 15).

        s    = exp(min(l - sg[l] + sg[mean over the row of (l - l_old)], 10))
        loss = -min(s A, clip(s, 1 - eps_clip_low, 1 + eps_clip_high) A)

    The value of s is the geometric mean of the row's ratios, its gradient that of the token. A row
    is what is forwarded as one: step by step, each turn has its own ratio. The paper averages over
    rows (loss_reduction sequence_mean); its bounds are around 3e-4.

    Args:
        logprobs: [M].
        old_logprobs: [M].
        advantages: [M].
        row: [M] int64 row of each target, 0..R-1; all targets of a row must be there.
        eps_clip_low: Distance of the lower bound from 1.
        eps_clip_high: Distance of the upper bound from 1.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    mean = row_sums(log_ratio, row) / row_counts(row, log_ratio)
    log_s = logprobs - logprobs.detach() + mean[row]
    ratio = log_s.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return ppo_clip(ratio, advantages, eps_clip_low, eps_clip_high)


def cispo(
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """CISPO: the policy gradient with a clipped weight (arXiv:2506.13585).

        loss = -sg[clip(exp(l - anchor), 1 - eps_clip_low, 1 + eps_clip_high)] A l

    Every target keeps a gradient; `clipped` are those whose weight is a bound. The anchor is
    l_old, or l_roll for a policy that was not the sampler.
    """
    ratio = probability_ratio(logprobs, anchor_logprobs).detach()
    weight = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    return TokenLoss(-weight * advantages * logprobs, weight != ratio)


def rollout_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """The policy gradient weighted by the ratio to the sampler, 0 where that is out of bounds.

        r    = exp(l - l_roll)
        loss = -sg[r if 1 - eps_clip_low < r < 1 + eps_clip_high else 0] A l

    A calibrated form of IcePop (arXiv:2510.18855); `clipped` are the targets left out.
    """
    ratio = probability_ratio(logprobs, rollout_logprobs).detach()
    kept = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    return TokenLoss(-torch.where(kept, ratio, 0.0) * advantages * logprobs, ~kept)


def dppo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["binary_tv", "binary_kl"],
    delta_low: float,
    delta_high: float,
) -> TokenLoss:
    """DPPO: targets masked by the divergence from the sampler (arXiv:2602.04879, eqs. 13 and 14).

        p = exp(l), q = exp(l_roll)
        D_tv = |p - q|
        D_kl = q (l_roll - l) + (1 - q) ln((1 - q + 1e-8) / (1 - p + 1e-8))
        loss = 0         where A > 0, p > q, D > delta_high  or  A < 0, p < q, D > delta_low
        loss = -(p/q) A  elsewhere

    `clipped` are the targets masked. Those that move back towards the sampler are not.
    """
    ratio = probability_ratio(logprobs, rollout_logprobs)
    p, q = logprobs.detach().exp(), rollout_logprobs.exp()
    size = (p - q).abs()
    if divergence == "binary_kl":
        others = torch.log((1 - q + KL_EPSILON) / (1 - p + KL_EPSILON))
        size = q * (rollout_logprobs - logprobs.detach()) + (1 - q) * others
    away_up = (advantages > 0) & (p > q) & (size > delta_high)
    away_down = (advantages < 0) & (p < q) & (size > delta_low)
    masked = away_up | away_down
    return TokenLoss(-torch.where(masked, 0.0, ratio * advantages), masked)


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float
) -> TokenLoss:
    """SAPO: a smooth gate instead of a clip (arXiv:2511.20347).

        tau  = tau_pos where A > 0, else tau_neg
        loss = -(4 / tau) sigmoid(tau (r - 1)) A

    At r = 1 its gradient is the policy gradient's. Nothing is `clipped`. The paper averages over
    rows (loss_reduction sequence_mean).
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    losses = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return TokenLoss(losses, torch.zeros_like(advantages, dtype=torch.bool))


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """The plain surrogate, never clipped: loss = -r A."""
    ratio = probability_ratio(logprobs, old_logprobs)
    return TokenLoss(-ratio * advantages, torch.zeros_like(advantages, dtype=torch.bool))


def cross_entropy(logprobs: Tensor) -> TokenLoss:
    """Supervised: loss = -l. No advantage, no ratio, nothing clipped."""
    return TokenLoss(-logprobs, torch.zeros_like(logprobs, dtype=torch.bool))
