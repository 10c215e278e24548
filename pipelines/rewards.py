"""Rewards: where they are placed, and the return of a trajectory."""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.segments import segment_rewards, split_points
from pipelines.tables import Frame, as_lazy, over_tables, set_column
from schemas.errors import RolloutError
from schemas.ragged import Ragged, gather, offsets_of

Outcome = Literal["last", "sum"]


def place_outcomes(frame: Frame, outcomes: Frame) -> pl.LazyFrame:
    """Give each trajectory its outcome on the last step, and 0.0 on the steps before.

    Args:
        frame: Step rows.
        outcomes: Columns `trajectory_id` (each once) and `reward`. A trajectory without a row
            there, and one that failed, gets null: unknown is not 0.

    Example:
        Outcome 1.0 for a trajectory of three steps:

        >>> place_outcomes(steps, outcomes).select("reward").collect().to_series().to_list()
        [0.0, 0.0, 1.0]
    """
    frame = as_lazy(frame)
    outcome = as_lazy(outcomes).select("trajectory_id", pl.col("reward").cast(pl.Float64))
    failed = pl.col("error").is_not_null() if _has(frame, "error") else pl.lit(value=False)
    value = pl.when("is_last_step").then("reward").otherwise(pl.col("reward") * 0.0)
    joined = frame.drop("reward", strict=False).join(
        outcome, on="trajectory_id", how="left", maintain_order="left", validate="m:1"
    )
    return joined.with_columns(pl.when(failed).then(None).otherwise(value).alias("reward"))


def place_rewards(frame: Frame) -> pl.LazyFrame:
    """Spread each scalar `reward` over `rewards`: on the last token of the step that earned it.

    A merged row puts each step's reward at the end of that step's segment. A null reward gives null
    `rewards`.

    Example:
        A merged row with response [3, 9, 4], whose two steps earned 0.5 and 1.0:

        >>> place_rewards(row).select("rewards").collect().item().to_list()
        [0.5, 0.0, 1.0]
    """
    return over_tables(frame, place_rewards_table)


def place_rewards_table(table: pa.Table) -> pa.Table:
    """`place_rewards` for an Arrow table."""
    if "reward" not in table.column_names:
        hint = "place_outcomes(frame, outcomes) makes it"
        raise RolloutError("columns_and_types", "table", "no column 'reward'", "rewards", hint)
    responses = Ragged.from_arrow(table.column("response_ids"))
    reward = table.column("reward")
    known = np.asarray(reward.is_valid()) & (responses.lengths > 0)
    split = split_points(table) if "segments" in table.column_names else np.zeros_like(known)

    values = np.zeros(len(responses.values), np.float64)
    single = known & ~split
    values[responses.offsets[1:][single] - 1] = reward.to_numpy()[single]
    if split.any():
        ends, earned, row = segment_rewards(table, responses)
        inside = (known & split)[row]
        values[ends[inside]] = earned[inside]
    lengths = np.where(known, responses.lengths, 0)
    kept = gather(values, responses.offsets[:-1], lengths)
    column = Ragged(kept, offsets_of(lengths), known).to_arrow(pa.float64())
    return set_column(table, "rewards", column)


def trajectory_returns(frame: Frame, outcome: Outcome = "last") -> pl.LazyFrame:
    """The return of each trajectory, in order of appearance.

    Defined on steps, so that merging changes nothing: `last` is the last step's reward, also where
    that step ends a merged row; `sum` is the sum over all steps.

    Returns:
        Columns instance_id, trajectory_id, return (null where unknown or failed), error.

    Example:
        A merged row whose steps earned 0.5 and 1.0 (its `reward` is 1.5):

        >>> trajectory_returns(row, "last").collect()["return"].to_list()
        [1.0]
        >>> trajectory_returns(row, "sum").collect()["return"].to_list()
        [1.5]
    """
    frame = as_lazy(frame)
    reward = pl.col("reward") if _has(frame, "reward") else pl.lit(None, pl.Float64)
    error = pl.col("error") if _has(frame, "error") else pl.lit(None, pl.String)
    final = reward
    if outcome == "last" and _has_segment(frame, "reward"):
        earned = pl.col("segments").list.last().struct.field("reward")
        final = pl.when(_is_merged()).then(earned).otherwise(reward)
    value = pl.col("return").last() if outcome == "last" else _strict_sum(pl.col("return"))
    return (
        frame.select("instance_id", "trajectory_id", final.alias("return"), error.alias("error"))
        .group_by("instance_id", "trajectory_id", maintain_order=True)
        .agg(value, pl.col("error").drop_nulls().first())
        .with_columns(pl.when(pl.col("error").is_null()).then("return").alias("return"))
    )


def _strict_sum(reward: pl.Expr) -> pl.Expr:
    return pl.when(reward.is_null().any()).then(None).otherwise(reward.sum()).alias("return")


def _is_merged() -> pl.Expr:
    """Whether a row's segments are those of several steps."""
    steps = pl.col("segments").list.eval(pl.element().struct.field("step_index"))
    return (steps.list.n_unique() > 1).fill_null(value=False)


def _has(frame: pl.LazyFrame, name: str) -> bool:
    return name in frame.collect_schema()


def _has_segment(frame: pl.LazyFrame, name: str) -> bool:
    kind = frame.collect_schema().get("segments")
    inner = kind.inner if isinstance(kind, pl.List) else None
    return isinstance(inner, pl.Struct) and name in {field.name for field in inner.fields}
