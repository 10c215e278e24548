"""Numbers of the trajectories that share a value: of a task, an agent, a stop reason, a length."""

from __future__ import annotations

import polars as pl

from pipelines.frames import Frame, as_lazy, exact_column
from pipelines.rewards import Outcome, are_equal, fold_trajectories
from rollout_io.dataset.trajectory_conditions import TRAJECTORY_COLUMNS, task_of, trajectory_columns
from rollout_io.dataset.trajectory_facts import CALLED, count_results, tool_calls
from schemas.columns import TASK
from schemas.errors import ConfigError
from schemas.types import with_absent

NUM_QUANTILES = 4
_MEANS = ("num_turns", "response_tokens", "longest_row_tokens", "num_tool_calls")


def grouped(
    frame: Frame, by: str, outcome: Outcome = "last", *, quantiles: bool = False
) -> pl.DataFrame:
    """Summarise trajectories by a column.

    Args:
        frame: Rows of complete trajectories, merged or not.
        by: A column of trajectories (see `rollout_io.dataset.trajectory_conditions`), or of rows, of
            which each trajectory has its last row's value.
        outcome: How returns are computed.
        quantiles: Split the trajectories by a number into `NUM_QUANTILES` ranges with about as many
            trajectories each, in place of one line per value.

    Returns:
        One line per value in order of appearance, or per range from the lowest: the column `by`,
        num_trajectories, num_failed, num_unknown_return; return_mean, return_min, return_max (of the
        known returns); has_variance (null: fewer than two known returns); num_turns_mean,
        response_tokens_mean, longest_row_tokens_mean, num_tool_calls_mean; tool_errors (share of the
        tool calls with a result that failed, null without one).

    Raises:
        ConfigError: `known_column`: there is no column `by`; `condition`: quantiles of a column that
            is not a number.

    Example:
        Two attempts at task a with returns 1 and 0, one at b with return 1:

        >>> grouped(frame, "instance_id").select("instance_id", "has_variance").rows()
        [('a', True), ('b', None)]
    """
    frame = with_absent(as_lazy(frame), ("error", TASK, *CALLED))
    computed = trajectory_columns(frame, outcome)
    columns = dict.fromkeys([*TRAJECTORY_COLUMNS, *frame.collect_schema()])
    if by not in columns:
        finding = f"there is no column {by!r}"
        raise ConfigError("known_column", "--by", finding, hint=f"use one of {', '.join(columns)}")
    features = {name: computed[name] for name in (*_MEANS, "num_tool_errors")}
    features["num_tool_results"] = tool_calls(), count_results
    if by not in {"instance_id", "trajectory_id", "error", "return"}:
        row = task_of if by == TASK else exact_column(by)
        features["by"] = computed.get(by) or (row, pl.Expr.last)
    lines = fold_trajectories(frame, outcome, features).collect(engine="streaming")
    value = pl.col("by" if "by" in features else by)
    if quantiles:
        if not lines.select(value).dtypes[0].is_numeric():
            finding = f"the column {by!r} is {lines.select(value).dtypes[0]}"
            raise ConfigError("condition", "--by-quantile", finding, "a number", "use --by")
        lines = lines.sort(value, nulls_last=True).with_columns(range=_ranges(value))
        value = pl.col("range")
    returns, results = pl.col("return").fill_nan(None), pl.col("num_tool_results").sum()
    groups = lines.group_by(value.alias(by), maintain_order=True).agg(
        num_trajectories=pl.len(),
        num_failed=pl.col("error").count(),
        num_unknown_return=(pl.col("error").is_null() & returns.is_null()).sum(),
        return_mean=returns.mean(),
        return_min=returns.min(),
        return_max=returns.max(),
        has_variance=pl.when(returns.count() > 1).then(~are_equal(pl.col("return"))),
        **{f"{name}_mean": pl.col(name).mean() for name in _MEANS},
        tool_errors=pl.col("num_tool_errors").sum() / pl.when(results > 0).then(results),
    )
    return groups.cast({pl.UInt32: pl.Int64})


def tools(frame: Frame) -> pl.DataFrame:
    """Count the tool calls of a dataset by tool, each once; most frequent first.

    Returns:
        Columns name, num_calls, num_failed (see `has_failed`; null if no call has a result) and
        num_trajectories; no line without `messages`.

    Example:
        >>> tools(frame).rows()
        [('bash', 12, 2, 4), ('edit', 3, 0, 2)]
    """
    calls = with_absent(as_lazy(frame), CALLED).select("trajectory_id", call=tool_calls())
    once = (
        calls.explode("call")
        .drop_nulls("call")
        .unnest("call")
        .group_by("trajectory_id", "key")
        .agg(pl.col("name").first(), pl.col("failed").max())
    )
    return (
        once.group_by("name")
        .agg(
            num_calls=pl.len().cast(pl.Int64),
            num_failed=pl.when(pl.col("failed").is_not_null().any())
            .then(pl.col("failed").sum())
            .cast(pl.Int64),
            num_trajectories=pl.col("trajectory_id").n_unique().cast(pl.Int64),
        )
        .sort("num_calls", "name", descending=[True, False])
        .collect(engine="streaming")
    )


def _ranges(value: pl.Expr) -> pl.Expr:
    """Name the quantile of each value by the smallest and the largest value in it: "3 to 17"."""
    # Equal values share their highest rank, and so their quantile.
    quantile = (value.rank("max") * NUM_QUANTILES - 1) // value.count()
    ends = (value.min().over(quantile), value.max().over(quantile))
    return pl.when(value.is_not_null()).then(pl.format("{} to {}", *ends))
