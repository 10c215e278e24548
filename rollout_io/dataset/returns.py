"""The return and the number of steps of a trajectory, from its rows, merged or not."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from rollout_io.dataset.reader import read_metadata
from rollout_io.dataset.storage import PathLike
from schemas.columns import JOINED
from schemas.metadata import Outcome

Fold = Callable[[pl.Expr], pl.Expr]


def dataset_outcome(path: PathLike, chosen: Outcome | None = None) -> Outcome:
    """Choose how returns are computed: `chosen`, else the dataset's metadata, else `last`."""
    return chosen or read_metadata(path).outcome or "last"


def has_segment(frame: pl.LazyFrame, name: str) -> bool:
    """True if the frame has a `segments` column with this field."""
    kind = frame.collect_schema().get("segments")
    inner = kind.inner if isinstance(kind, pl.List) else None
    return isinstance(inner, pl.Struct) and name in {field.name for field in inner.fields}


def joined(frame: pl.LazyFrame) -> pl.Expr:
    """Build an expression that is true if a row was merged from several steps."""
    if not has_segment(frame, JOINED):
        return pl.lit(value=False)
    return pl.col("segments").list.first().struct.field(JOINED).fill_null(value=False)


def joined_steps(frame: pl.LazyFrame) -> pl.Expr:
    """Select the {start, length} of each step of a merged row; null if a row is one step."""
    spans = pl.List(pl.Struct({"start": pl.Int32(), "length": pl.Int32()}))
    if not has_segment(frame, "start"):
        return pl.lit(None, dtype=spans)
    fields = (pl.element().struct.field(name) for name in ("start", "length"))
    return pl.when(joined(frame)).then(pl.col("segments").list.eval(pl.struct(fields)).cast(spans))


def num_steps(frame: pl.LazyFrame) -> pl.Expr:
    """Count the steps of each row: those in its `segments`, merged or of a log's turns; else 1."""
    if not has_segment(frame, "step_index"):
        return pl.lit(1, pl.Int64)
    numbers = pl.col("segments").list.eval(pl.element().struct.field("step_index"))
    return numbers.list.n_unique().cast(pl.Int64).clip(lower_bound=1).fill_null(1)


def num_sampled_tokens(frame: pl.LazyFrame) -> pl.Expr:
    """Count the sampled tokens of each row's response: of a merged row, those in its `segments`."""
    whole = pl.col("response_ids").list.len().cast(pl.Int64)
    if not has_segment(frame, "length"):
        return whole
    lengths = pl.col("segments").list.eval(pl.element().struct.field("length")).list.sum()
    return pl.when(pl.col("segments").is_not_null()).then(lengths).otherwise(whole)


def earned_reward(frame: pl.LazyFrame, outcome: Outcome) -> pl.Expr:
    """Select the part of each row's reward that counts in the return.

    For `last`, that is the reward of the row's last step; for `sum`, the row's reward.
    """
    has_reward = "reward" in frame.collect_schema()
    reward = pl.col("reward") if has_reward else pl.lit(None, pl.Float64)
    if outcome == "sum" or not has_segment(frame, "reward"):
        return reward
    earned = pl.col("segments").list.last().struct.field("reward")
    return pl.when(joined(frame)).then(earned).otherwise(reward)


def metric_of(frame: pl.LazyFrame, name: str) -> pl.Expr:
    """Select an environment metric of each row; of a merged row, that of the last step with it."""
    if "metrics" not in frame.collect_schema():
        return pl.lit(None, pl.Float64)
    entries = pl.col("metrics")
    if has_segment(frame, "metrics"):
        inner = pl.col("segments").list.eval(pl.element().struct.field("metrics").list.explode())
        entries = pl.when(joined(frame)).then(inner).otherwise(entries)
    field = pl.element().struct.field
    return entries.list.eval(field("value").filter(field("key") == name)).list.last()


def fold_return(earned: pl.Expr, outcome: Outcome) -> pl.Expr:
    """Combine `earned_reward` of a trajectory's rows into its return; null if a part is null."""
    if outcome == "last":
        return earned.last()
    return pl.when(earned.is_null().any()).then(None).otherwise(earned.sum()).alias("return")
