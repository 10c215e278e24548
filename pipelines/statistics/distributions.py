"""Distributions of lengths and rewards: quantiles and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipelines.rewards import are_equal, mean_of
from pipelines.statistics.summary import Summary

_MOST_DISTINCT = 6
NUM_BINS = 12


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of some values, and a histogram with `NUM_BINS` equal bins from min to max.

    Attributes:
        mean: Mean; None, like all other statistics, if there are no values.
        median: Median; the lower middle value if the number of values is even.
        p95: Smallest value that at least 95% of the values do not exceed.
        min: Smallest value.
        max: Largest value.
        counts: Number of values per bin; empty if there are no values.

    Example:
        >>> Distribution.of(pl.Series([1, 2, 3, 10])).p95
        10
    """

    mean: float | None
    median: int | None
    p95: int | None
    min: int | None
    max: int | None
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: pl.Series) -> Distribution:
        """Compute the distribution of a series of integers."""
        if values.is_empty():
            return cls(None, None, None, None, None, ())
        ordered = values.sort().to_list()
        counts, _ = np.histogram(ordered, bins=NUM_BINS)
        return cls(
            mean=sum(ordered) / len(ordered),
            median=ordered[(len(ordered) - 1) // 2],
            p95=ordered[-(-95 * len(ordered) // 100) - 1],
            min=ordered[0],
            max=ordered[-1],
            counts=tuple(counts.tolist()),
        )


def length_distributions(summary: Summary) -> dict[str, Distribution]:
    """Return the distributions of lengths in tokens, and of rows per trajectory, by label."""
    rows = summary.lengths
    of_trajectory = rows.group_by("trajectory_id").agg(
        pl.len(),
        response=pl.col("sampled").sum(),
        longest=(pl.col("prompt") + pl.col("response")).max(),
    )
    return {
        "prompt of a row": Distribution.of(rows["prompt"]),
        "response of a row": Distribution.of(rows["response"]),
        "responses of a trajectory": Distribution.of(of_trajectory["response"]),
        "longest row of a trajectory": Distribution.of(of_trajectory["longest"]),
        "rows of a trajectory": Distribution.of(of_trajectory["len"]),
    }


@dataclass(frozen=True, slots=True)
class Rewards:
    """Returns of the trajectories that did not fail.

    Attributes:
        num_known: Trajectories with a known return.
        mean: Mean of the known returns; None if there are none.
        solved: Fraction of known returns that are 1; None unless all are 0 or 1.
        bars: Pairs of a label (a value or a range) and the number of trajectories.
        num_varied: Groups with different returns.
        num_equal: Groups of two or more known returns that are all equal.
        num_single: Groups with fewer than two known returns.
    """

    num_known: int
    mean: float | None
    solved: float | None
    bars: tuple[tuple[str, int], ...]
    num_varied: int
    num_equal: int
    num_single: int


def reward_distribution(summary: Summary) -> Rewards:
    """Return the distribution of a dataset's returns."""
    returns = pl.col("return").fill_nan(None)
    groups = summary.returns.group_by("instance_id").agg(
        equal=are_equal(pl.col("return")), single=returns.count() < 2
    )
    values = summary.returns.select(returns).to_series().drop_nulls().to_list()
    is_binary = bool(values) and set(values) <= {0.0, 1.0}
    num_equal, num_single = int(groups["equal"].sum()), int(groups["single"].sum())
    return Rewards(
        num_known=len(values),
        mean=mean_of(pl.Series(values, dtype=pl.Float64)),
        solved=sum(values) / len(values) if is_binary else None,
        bars=_bars(values),
        num_varied=len(groups) - num_equal - num_single,
        num_equal=num_equal,
        num_single=num_single,
    )


def _bars(values: Sequence[float]) -> tuple[tuple[str, int], ...]:
    """Count each distinct value if there are few, otherwise the values in equal ranges.

    Example:
        >>> _bars([0.0, 1.0, 1.0])
        (('0', 1), ('1', 2))
    """
    shown = Counter(f"{value + 0.0:g}" for value in sorted(values))  # + 0.0: -0 is 0
    if len(shown) <= _MOST_DISTINCT or not np.isfinite(values).all():
        return tuple(shown.items())[:_MOST_DISTINCT]
    scale = np.abs(values).max()  # the range of large values would overflow
    counts, edges = np.histogram(np.divide(values, scale), bins=_MOST_DISTINCT)
    edges *= scale
    ranges = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    labels = [f"{low:.3g} to {high:.3g}" for low, high in ranges]
    return tuple(zip(labels, counts.tolist(), strict=True))
