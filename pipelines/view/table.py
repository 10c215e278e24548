"""Windows of the table of trajectories, and histograms of its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from pipelines.view.answers import Answer, arrow_answer, json_answer
from pipelines.view.trajectory_index import TrajectoryIndex
from schemas.ragged import BoolArray

NUM_VALUES = 30
"""Maximum number of values that a histogram of a text column lists."""
MAX_BINS = 1000
MAX_LIMIT = 10_000


def window(
    index: TrajectoryIndex,
    *,
    where: str | None,
    sort: str | None,
    descending: bool,
    offset: int,
    limit: int,
) -> Answer:
    """Return a window of the filtered and sorted table.

    `total` is the number of trajectories that match, and `all` the number in the dataset.
    """
    mask = index.matching(where)
    if sort is None:
        kept = np.arange(len(index)) if mask is None else np.flatnonzero(mask)
    else:
        order = index.order(sort, descending=descending)
        kept = order if mask is None else order[mask[order]]
    shown = kept[offset : offset + min(limit, MAX_LIMIT)]
    lines = index.trajectories[shown.astype(np.int64)]
    return arrow_answer(lines, total=len(kept), all=len(index))


def histogram(index: TrajectoryIndex, column: str, where: str | None, bins: int) -> Answer:
    """Count the values of a column, among the selected trajectories and among all.

    Nulls, and numbers that are not finite, are counted separately. Edges have the precision of the
    column, so that a filter on the range of a bin finds as many trajectories as the bin counts.
    """
    index.refuse_unknown(column)
    mask, values = index.matching(where), index.trajectories[column]
    if values.dtype.is_numeric():
        return json_answer(_of_numbers(values, mask, max(1, min(bins, MAX_BINS))))
    return json_answer(_of_values(values, mask))


def _of_numbers(values: pl.Series, mask: BoolArray | None, bins: int) -> dict[str, Any]:
    kind = pl.Float32 if values.dtype == pl.Float32 else pl.Float64
    numbers = values.cast(kind).fill_null(float("nan")).to_numpy()
    known, kept = np.isfinite(numbers), np.True_ if mask is None else mask
    inside, is_null = known & kept, values.is_null().to_numpy()
    left_out = {
        "nulls": int((is_null & kept).sum()),
        "not_finite": int((~known & ~is_null & kept).sum()),
    }
    if not known.any():
        return {"edges": [], "counts": [], "counts_all": [], **left_out}
    low, high = float(numbers[known].min()), float(numbers[known].max())
    # In quarters, the difference of two numbers cannot overflow.
    edges = 4 * np.linspace(low / 4, high / 4, bins + 1) if high > low else np.array([low, high])
    edges = edges.astype(numbers.dtype)
    whole = np.histogram(numbers[known], edges)[0]
    part = whole if mask is None else np.histogram(numbers[inside], edges)[0]
    return {
        "edges": edges.tolist(),
        "counts": part.tolist(),
        "counts_all": whole.tolist(),
        **left_out,
    }


def _of_values(values: pl.Series, mask: BoolArray | None) -> dict[str, Any]:
    name = pl.col("value")
    frame = pl.DataFrame({"value": values}).with_columns(
        kept=pl.lit(value=True) if mask is None else pl.Series(mask)
    )
    num_nulls = frame.filter(name.is_null() & pl.col("kept")).height
    counted = (
        frame.filter(name.is_not_null())
        .group_by("value")
        .agg(counts=pl.col("kept").sum(), counts_all=pl.len())
        .sort("counts_all", "value", descending=[True, False])
    )
    shown, rest = counted.head(NUM_VALUES), counted.slice(NUM_VALUES)
    return {
        "values": shown["value"].to_list(),
        "counts": shown["counts"].to_list(),
        "counts_all": shown["counts_all"].to_list(),
        "nulls": num_nulls,
        "others": int(rest["counts"].sum()),
    }
