"""Losses of the policy, and of the critic, per target (trained response token); not reduced.

In all equations l is `logprobs` (with gradient), l_old `old_logprobs`, l_roll `rollout_logprobs`,
A `advantages`, r = exp(l - l_old) with the exponent clamped to +-20, and sg[.] stops the gradient.
All tensors are [M], one element per target; without targets, the loss is empty. A token whose
`loss_mask` is false is never a target, so no masks are needed. `trainer.config.functions` lists the
losses by their names.

`clip_cov` and `kl_cov` (arXiv:2505.22617) restrain the tokens that reduce entropy most. These are
selected once per mini-batch, without gradient, from the policy's log-probabilities before the step,
so the selection does not depend on micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.config.sections import LossConfig

# exp(20) is about 5e8: far beyond any useful ratio, and far below float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0
KL_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """M targets of complete rows, all on one device.

    Attributes:
        logprobs: [M] nats under the current policy, with gradient.
        old_logprobs: [M] nats under the policy at the start of the batch.
        rollout_logprobs: [M] nats under the sampler's policy; NaN where unknown.
        advantages: [M].
        row: [M] int64 row of each target, 0..R-1.
        selected: [M] bool, targets that clip_cov leaves out or kl_cov penalises.
        weights: [M] float32 weights of `loss.reduction`.
        entropy: [M] nats, with gradient if the loss needs it.
        divergence: [M] nats from the teacher, with gradient.
        ref_logprobs: [M] nats under the reference; None without one.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor
    weights: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    ref_logprobs: Tensor | None = None


class TokenLoss(NamedTuple):
    """Result of a policy loss for M targets.

    Attributes:
        losses: [M] with gradient.
        clipped: [M] bool, targets restricted by the loss's own bounds. The metric `clip_ratio` is
            the fraction of targets that are clipped.
        metrics: [M] per name, without gradient; means over the mini-batch are reported.
    """

    losses: Tensor
    clipped: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """Compute PPO's clipped surrogate for any ratio; report targets without gradient as clipped.

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
    """Compute PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with separate bounds.

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
    """Compute the `regular` loss, capped where A < 0 (arXiv:1912.09729).

        loss = min(regular, -clip_ratio_c A)  where A < 0;  regular elsewhere

    Targets whose gradient is 0 because of the clipping or the cap are reported as `clipped`.
    """
    losses, clipped, _ = regular(
        logprobs,
        old_logprobs,
        advantages,
        eps_clip_low=eps_clip_low,
        eps_clip_high=eps_clip_high,
    )
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
    """Compute GSPO-token: PPO's clip applied to a row's ratio (arXiv:2507.18071, eqs. 14 and 15).

        s    = exp(min(l - sg[l] + sg[mean over the row of (l - l_old)], 10))
        loss = -min(s A, clip(s, 1 - eps_clip_low, 1 + eps_clip_high) A)

    The value of s is the geometric mean of the row's ratios, but its gradient flows only through the
    token's l. A row is one forwarded sequence, whose targets must all be there: with the layout `step`,
    each turn has its own ratio. The paper averages over rows (loss.reduction sequence_mean); its bounds
    are around 3e-4.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    counts = row_sums(torch.ones_like(log_ratio), row).clamp(min=1)  # rows without targets
    mean = row_sums(log_ratio, row) / counts
    log_s = logprobs - logprobs.detach() + mean[row]
    ratio = log_s.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return ppo_clip(ratio, advantages, eps_clip_low, eps_clip_high)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    cispo_eps_clip_low: float,
    cispo_eps_clip_high: float,
    cispo_anchor: Literal["old", "rollout"],
) -> TokenLoss:
    """Compute CISPO: the policy gradient with a clipped weight (arXiv:2506.13585).

        loss = -sg[clip(exp(l - anchor), 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)] A l

    Every target keeps a gradient; targets whose weight is clipped are reported as `clipped`. The anchor
    is l_old, or l_roll to correct for sampler mismatch as well.
    """
    anchor = rollout_logprobs if cispo_anchor == "rollout" else old_logprobs
    ratio = probability_ratio(logprobs, anchor).detach()
    weight = ratio.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    metrics = {"cispo/ratio": ratio, "cispo/ratio_clamped_mean": weight}
    return TokenLoss(-weight * advantages * logprobs, weight != ratio, metrics)


def rollout_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLoss:
    """Compute the policy-gradient loss, weighted by the ratio to the sampler (or 0 out of bounds).

        r    = exp(l - l_roll)
        loss = -sg[r if 1 - eps_clip_low < r < 1 + eps_clip_high else 0] A l

    This is a calibrated form of IcePop (arXiv:2510.18855). Targets with weight 0 are reported as
    `clipped`.
    """
    ratio = probability_ratio(logprobs, rollout_logprobs).detach()
    is_inside = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    return TokenLoss(-torch.where(is_inside, ratio, 0.0) * advantages * logprobs, ~is_inside)


def dppo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    dppo_type: Literal["binary_tv", "binary_kl"],
    dppo_delta_low: float,
    dppo_delta_high: float,
) -> TokenLoss:
    """Compute the DPPO loss: targets that diverge too far from the sampler are masked.

    Source: arXiv:2602.04879, eqs. 13 and 14.

        p = exp(l), q = exp(l_roll)
        D_tv = |p - q|
        D_kl = q (l_roll - l) + (1 - q) ln((1 - q + 1e-8) / (1 - p + 1e-8))
        loss = 0         where A > 0, p > q, D > dppo_delta_high
                         or    A < 0, p < q, D > dppo_delta_low
        loss = -(p/q) A  elsewhere

    Masked targets are reported as `clipped`. Targets that move back towards the sampler are never
    masked.
    """
    ratio = probability_ratio(logprobs, rollout_logprobs)
    p, q = logprobs.detach().exp(), rollout_logprobs.exp()
    size = (p - q).abs()
    if dppo_type == "binary_kl":
        others = torch.log((1 - q + KL_EPSILON) / (1 - p + KL_EPSILON))
        size = q * (rollout_logprobs - logprobs.detach()) + (1 - q) * others
    away_up = (advantages > 0) & (p > q) & (size > dppo_delta_high)
    away_down = (advantages < 0) & (p < q) & (size > dppo_delta_low)
    masked = away_up | away_down
    return TokenLoss(-torch.where(masked, 0.0, ratio * advantages), masked)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    sapo_tau_pos: float,
    sapo_tau_neg: float,
) -> TokenLoss:
    """Compute SAPO: a smooth gate instead of a clip (arXiv:2511.20347).

        tau  = sapo_tau_pos where A > 0, else sapo_tau_neg
        loss = -(4 / tau) sigmoid(tau (r - 1)) A

    At r = 1, the gradient of the loss is the policy gradient. No target is reported as `clipped`.
    The paper averages over rows (loss.reduction sequence_mean).
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    tau = torch.full_like(advantages, sapo_tau_neg).masked_fill(advantages > 0, sapo_tau_pos)
    losses = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return TokenLoss(losses, torch.zeros_like(advantages, dtype=torch.bool))


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """Compute the unclipped surrogate: loss = -r A."""
    ratio = probability_ratio(logprobs, old_logprobs)
    metrics = {"importance_ratio": ratio.detach()}
    clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLoss(-ratio * advantages, clipped, metrics)


def distill(logprobs: Tensor, divergence: Tensor) -> TokenLoss:
    """Compute the divergence from a teacher's stored distribution (`loss.distill_type`)."""
    return TokenLoss(divergence, torch.zeros_like(logprobs, dtype=torch.bool))


def cross_entropy(logprobs: Tensor) -> TokenLoss:
    """Compute the supervised loss -l: no advantages, no ratios, no clipping."""
    return TokenLoss(-logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio), with the exponent clamped to +-20 so that it stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Compute exp(logprobs - base_logprobs), with the exponent clamped to +-20."""
    return bounded_exp(logprobs - base_logprobs)


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Sum the targets of each row.

    Args:
        values: [M] one per target.
        row: [M] int64 row of each target, 0..R-1.

    Returns:
        [R], where R - 1 is the largest row index; rows without targets sum to 0.

    Example:
        >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist()
        [5.0, 2.0]
    """
    num_rows = int(row.max()) + 1 if len(row) else 0
    return values.new_zeros(num_rows).index_add(0, row, values)


def select(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss: LossConfig
) -> Tensor | None:
    """Select the targets of a mini-batch that clip_cov leaves out or kl_cov penalises ([M] bool).

    The result is None for other losses. clip_cov draws with torch's generator.
    """
    if loss.policy_loss_type == "kl_cov":
        covariance = covariances(advantages, logprobs)
        return kl_cov_selection(covariance, fraction=loss.kl_cov_frac)
    if loss.policy_loss_type != "clip_cov":
        return None
    low, high = loss.eps_clip_low, loss.eps_clip_high
    plain = regular(logprobs, old_logprobs, advantages, eps_clip_low=low, eps_clip_high=high)
    return clip_cov_selection(
        covariances(advantages, logprobs),
        plain.clipped,
        ratio=loss.clip_cov_ratio,
        low=loss.clip_cov_lb,
        high=loss.clip_cov_ub,
    )


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


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None
) -> Tensor:
    """Compute the critic's loss: the clipped squared error of values (as in OpenAI Baselines' ppo2).

        V' = V_old + clip(V - V_old, -clip, clip)
        loss = 0.5 * max((V - target)^2, (V' - target)^2)

    Args:
        values: [M] current values, with gradient.
        old_values: [M] values at the start of the batch.
        targets: [M] gae's A + V_old, before whitening.
        clip: Maximum change of a value before the loss is clipped; None: no clipping.

    Returns:
        [M] loss per target, not reduced.
    """
    losses = (values - targets) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (near - targets) ** 2)
    return 0.5 * losses
