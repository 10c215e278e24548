"""Correct for the mismatch with the sampler: weights and masks from rho = exp(l_old - l_roll).

The trainer's numerics, and sometimes its weights, differ from the sampler's. Corrections carry no
gradient. Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training" (fengyao.notion.site/off-policy-rl); Liu et al. 2025, "When speed kills stability"
(richardli.xyz/rl-collapse); IcePop's token mask: arXiv:2510.18855.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.losses.ratios import bounded_exp, row_sums

Range = tuple[float | None, float | None]
"""Lower and upper bound; None: unbounded."""
UNBOUNDED: Range = (None, None)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """Settings of the corrections for sampler mismatch.

    Attributes:
        weights: Use importance weights per token, or per row; None: all weights are 1.
        max_weight: Larger weights are truncated to this value.
        outliers: Leave out rows with a token whose ratio is outside this range.
        tokens: Leave out tokens whose ratio is outside this range.
        row_metric: Leave out rows based on the product or the geometric mean of their ratios; None:
            keep all rows.
        rows: Range of `row_metric` in which rows are kept.
    """

    weights: Literal["token", "sequence"] | None
    max_weight: float
    outliers: Range
    tokens: Range
    row_metric: Literal["product", "geometric"] | None
    rows: Range


def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, row: Tensor, settings: CorrectionSettings
) -> Correction:
    """Apply all corrections of `settings`.

    The corrections are applied in this order: leave out rows with an outlier, leave out tokens,
    apply importance weights, leave out rows based on their ratio. Each correction uses only the
    targets that are still kept. Targets left out still count in denominators.

    Args:
        old_logprobs: [M] nats.
        rollout_logprobs: [M] nats, finite.
        row: [M] int64 row of each target, 0..R-1; must include all targets of a row.
        settings: The corrections and their bounds.
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    ratio = bounded_exp(log_ratio)
    per_target: dict[str, Tensor] = {"is_ratio": ratio}
    per_row: dict[str, Tensor] = {}
    outliers = bounds(ratio, *settings.outliers)
    over, under = (row_sums(flags.float(), row) > 0 for flags in outliers)
    kept = ~(over | under)[row]
    if settings.outliers != UNBOUNDED:
        per_row |= _row_metrics("outlier_seq", Bounds(over, under))
    if settings.tokens != UNBOUNDED:
        inside = bounds(ratio, *settings.tokens).inside
        per_target["token_mask_ratio"] = ~inside[kept]
        kept = kept & inside
    weights = torch.ones_like(ratio)
    if settings.weights == "token":
        weights = token_weights(log_ratio, settings.max_weight)
        per_target["tis_token_clip_high_ratio"] = ratio[kept] > settings.max_weight
    elif settings.weights == "sequence":
        product = row_ratios(log_ratio, kept, row, "product")
        weights = product.clamp(max=settings.max_weight)[row]
        per_row["tis_seq_clip_high_ratio"] = product > settings.max_weight
    if settings.row_metric is not None:
        found = bounds(row_ratios(log_ratio, kept, row, settings.row_metric), *settings.rows)
        name = "geo" if settings.row_metric == "geometric" else "product"
        per_row |= _row_metrics(f"{name}_sequence_mask", found)
        kept = kept & found.inside[row]
    return Correction(torch.where(kept, weights, 0.0), per_target, per_row)


def _row_metrics(name: str, found: Bounds) -> dict[str, Tensor]:
    return {
        f"{name}_masked_ratio": ~found.inside,
        f"{name}_over_high_ratio": found.over,
        f"{name}_under_low_ratio": found.under,
    }
