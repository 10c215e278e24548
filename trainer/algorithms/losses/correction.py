"""Correction for the sampler: importance weights and masks from rho = exp(l_old - l_roll).

The trainer's numerics, and sometimes its weights, differ from the sampler's. Corrections carry no
gradient. Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training" (fengyao.notion.site/off-policy-rl); Liu et al. 2025, "When speed kills stability"
(richardli.xyz/rl-collapse); IcePop's token mask: arXiv:2510.18855.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.losses.ratios import bounded_exp, row_sums
from trainer.config.loss_config import LossConfig


class Bounds(NamedTuple):
    """Bool tensors: elements above the upper bound, and below the lower bound."""

    over: Tensor
    under: Tensor

    @property
    def inside(self) -> Tensor:
        """Elements within both bounds."""
        return ~(self.over | self.under)


class Correction(NamedTuple):
    """Correction of M targets in R rows.

    Attributes:
        weights: [M] factor of each target's loss; 0 if it is left out.
        per_target: Per metric, up to [M] numbers, for targets that earlier corrections kept. Their
            means over the mini-batch are reported.
        per_row: Per metric, [R] numbers, reported likewise.
    """

    weights: Tensor
    per_target: dict[str, Tensor]
    per_row: dict[str, Tensor]


def bounds(values: Tensor, low: float | None, high: float | None) -> Bounds:
    """Compare with two bounds, either of which may be None; a bound itself is inside."""
    nothing = torch.zeros_like(values, dtype=torch.bool)
    over = nothing if high is None else values > high
    return Bounds(over, nothing if low is None else values < low)


def token_weights(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling per token: min(exp(clamp(log_ratio, -20, 20)), cap).

    Only large weights are truncated.

    Args:
        log_ratio: [M] l_old - l_roll.
        cap: Maximum weight.

    Returns:
        [M] in (0, cap].
    """
    return bounded_exp(log_ratio).clamp(max=cap)


def row_ratios(
    log_ratio: Tensor, kept: Tensor, row: Tensor, metric: Literal["product", "geometric"]
) -> Tensor:
    """Compute the product or geometric mean of the ratios of each row's kept targets.

        product    exp(clamp(sum of log_ratio, -20, 20))
        geometric  exp(clamp(mean of log_ratio, -20, 20))

    Args:
        log_ratio: [M] l_old - l_roll.
        kept: [M] bool, targets to include.
        row: [M] int64 row of each target, 0..R-1; must include all targets of a row.
        metric: Product or geometric mean.

    Returns:
        [R]; 1 for a row without kept targets.
    """
    total = row_sums(torch.where(kept, log_ratio, 0.0), row)
    if metric == "product":
        return bounded_exp(total)
    return bounded_exp(total / row_sums(kept.to(total.dtype), row).clamp(min=1))


def any_in_row(flags: Tensor, row: Tensor) -> Tensor:
    """[R] bool: True for rows with a flagged target."""
    return row_sums(flags.float(), row) > 0


def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, row: Tensor, c: LossConfig
) -> Correction:
    """Apply all configured corrections.

    In this order, each to the targets that the earlier ones kept: rows with an outlier, tokens,
    importance weights, rows by their ratio. Targets left out still count in denominators.

    Args:
        old_logprobs: [M] nats.
        rollout_logprobs: [M] nats, finite.
        row: [M] int64 row of each target, 0..R-1; must include all targets of a row.
        c: Loss configuration.
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    ratio = bounded_exp(log_ratio)
    per_target: dict[str, Tensor] = {"is_ratio": ratio}
    per_row: dict[str, Tensor] = {}
    outliers = bounds(ratio, c.outlier_token_is_threshold_low, c.outlier_token_is_threshold_high)
    over, under = (any_in_row(flags, row) for flags in outliers)
    kept = ~(over | under)[row]
    if (c.outlier_token_is_threshold_low, c.outlier_token_is_threshold_high) != (None, None):
        per_row |= _row_metrics("outlier_seq", Bounds(over, under))
    if c.token_mask_is_threshold_low is not None:
        inside = bounds(ratio, c.token_mask_is_threshold_low, c.token_mask_is_threshold_high).inside
        per_target["token_mask_ratio"] = ~inside[kept]
        kept = kept & inside
    weights = torch.ones_like(ratio)
    if c.importance_weights == "token":
        weights = token_weights(log_ratio, c.token_tis_ratio_clip_high)
        per_target["tis_token_clip_high_ratio"] = ratio[kept] > c.token_tis_ratio_clip_high
    elif c.importance_weights == "sequence":
        product = row_ratios(log_ratio, kept, row, "product")
        weights = product.clamp(max=c.sequence_tis_ratio_clip_high)[row]
        per_row["tis_seq_clip_high_ratio"] = product > c.sequence_tis_ratio_clip_high
    if c.sequence_mask_metric is not None:
        found = _row_bounds(row_ratios(log_ratio, kept, row, c.sequence_mask_metric), c)
        name = "geo" if c.sequence_mask_metric == "geometric" else "product"
        per_row |= _row_metrics(f"{name}_sequence_mask", found)
        kept = kept & found.inside[row]
    return Correction(torch.where(kept, weights, 0.0), per_target, per_row)


def _row_bounds(ratios: Tensor, c: LossConfig) -> Bounds:
    if c.sequence_mask_metric == "geometric":
        return bounds(ratios, c.geo_mask_low, c.geo_mask_high)
    return bounds(ratios, c.product_mask_low, c.product_mask_high)


def _row_metrics(name: str, found: Bounds) -> dict[str, Tensor]:
    return {
        f"{name}_masked_ratio": ~found.inside,
        f"{name}_over_high_ratio": found.over,
        f"{name}_under_low_ratio": found.under,
    }
