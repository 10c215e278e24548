"""Correct for the mismatch with the sampler: weights and masks from rho = exp(l_old - l_roll).

The trainer's numerics, and sometimes its weights, differ from the sampler's. Corrections carry no
gradient. Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training" (fengyao.notion.site/off-policy-rl); Liu et al. 2025, "When speed kills stability"
(richardli.xyz/rl-collapse); IcePop's token mask: arXiv:2510.18855.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.losses import bounded_exp, row_sums
from trainer.config.sections import LossConfig


class Bounds(NamedTuple):
    """Boolean masks: elements above the upper bound, and elements below the lower bound."""

    over: Tensor
    under: Tensor

    @property
    def inside(self) -> Tensor:
        """Boolean mask of the elements within both bounds."""
        return ~(self.over | self.under)


class Correction(NamedTuple):
    """Weights that correct the losses of M targets (in R rows) for sampler mismatch, with metrics.

    Attributes:
        weights: [M] factor of each target's loss; 0 for targets that are left out.
        per_target: For each metric, one number per target that the earlier corrections kept; the
            run reports the mean over the mini-batch.
        per_row: For each metric, [R] numbers; the run reports their mean over the mini-batch.
    """

    weights: Tensor
    per_target: dict[str, Tensor]
    per_row: dict[str, Tensor]


def bounds(values: Tensor, low: float | None, high: float | None) -> Bounds:
    """Find the values outside two inclusive bounds; a bound of None is not checked."""
    nothing = torch.zeros_like(values, dtype=torch.bool)
    over = nothing if high is None else values > high
    return Bounds(over, nothing if low is None else values < low)


def token_weights(log_ratio: Tensor, cap: float) -> Tensor:
    """Compute truncated importance weights: min(exp(clamp(log_ratio, -20, 20)), cap).

    Only large weights are truncated.

    Args:
        log_ratio: [M] l_old - l_roll.
        cap: Maximum weight.

    Returns:
        [M] in (0, cap].
    """
    return bounded_exp(log_ratio).clamp(max=cap)


def row_ratios(
    log_ratio: Tensor, is_included: Tensor, row: Tensor, metric: Literal["product", "geometric"]
) -> Tensor:
    """Compute the product or geometric mean of the ratios of each row's kept targets.

        product    exp(clamp(sum of log_ratio, -20, 20))
        geometric  exp(clamp(mean of log_ratio, -20, 20))

    Args:
        log_ratio: [M] l_old - l_roll.
        is_included: [M] bool, targets to include.
        row: [M] int64 row of each target, 0..R-1; must include all targets of a row.
        metric: Product or geometric mean.

    Returns:
        [R]; 1 for a row without kept targets.
    """
    total = row_sums(torch.where(is_included, log_ratio, 0.0), row)
    if metric == "product":
        return bounded_exp(total)
    return bounded_exp(total / row_sums(is_included.to(total.dtype), row).clamp(min=1))


def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, row: Tensor, loss: LossConfig
) -> Correction:
    """Apply all corrections that the section `[loss]` enables.

    The corrections are applied in this order: leave out rows with an outlier, leave out tokens,
    apply importance weights, leave out rows based on their ratio. Each correction uses only the
    targets that are still kept. Targets left out still count in denominators.

    Args:
        old_logprobs: [M] nats.
        rollout_logprobs: [M] nats, finite.
        row: [M] int64 row of each target, 0..R-1; must include all targets of a row.
        loss: The corrections and their bounds.
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    ratio = bounded_exp(log_ratio)
    per_target: dict[str, Tensor] = {"is_ratio": ratio}
    per_row: dict[str, Tensor] = {}
    low, high = loss.outlier_token_is_threshold_low, loss.outlier_token_is_threshold_high
    over, under = (row_sums(flags.float(), row) > 0 for flags in bounds(ratio, low, high))
    is_included = ~(over | under)[row]
    if (low, high) != (None, None):
        per_row |= _row_metrics("outlier_seq", Bounds(over, under))
    low, high = loss.token_mask_is_threshold_low, loss.token_mask_is_threshold_high
    if (low, high) != (None, None):
        inside = bounds(ratio, low, high).inside
        per_target["token_mask_ratio"] = ~inside[is_included]
        is_included = is_included & inside
    weights = torch.ones_like(ratio)
    if loss.importance_weights == "token":
        cap = loss.token_tis_ratio_clip_high
        weights = token_weights(log_ratio, cap)
        per_target["tis_token_clip_high_ratio"] = ratio[is_included] > cap
    elif loss.importance_weights == "sequence":
        cap = loss.sequence_tis_ratio_clip_high
        product = row_ratios(log_ratio, is_included, row, "product")
        weights = product.clamp(max=cap)[row]
        per_row["tis_seq_clip_high_ratio"] = product > cap
    if loss.sequence_mask_metric is not None:
        is_mean = loss.sequence_mask_metric == "geometric"
        low, high = (
            (loss.geo_mask_low, loss.geo_mask_high)
            if is_mean
            else (loss.product_mask_low, loss.product_mask_high)
        )
        bounded = bounds(
            row_ratios(log_ratio, is_included, row, loss.sequence_mask_metric), low, high
        )
        per_row |= _row_metrics(f"{'geo' if is_mean else 'product'}_sequence_mask", bounded)
        is_included = is_included & bounded.inside[row]
    return Correction(torch.where(is_included, weights, 0.0), per_target, per_row)


def _row_metrics(name: str, bounded: Bounds) -> dict[str, Tensor]:
    return {
        f"{name}_masked_ratio": ~bounded.inside,
        f"{name}_over_high_ratio": bounded.over,
        f"{name}_under_low_ratio": bounded.under,
    }
