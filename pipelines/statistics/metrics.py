"""Metrics of a rollout table per step, per trajectory and per group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import Frame, as_lazy
from pipelines.merging.segments import Steps, is_joined, step_columns, steps_of
from pipelines.rewards import Outcome, is_above, mean_of, trajectory_returns
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.reader import pieces, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_facts import dataset_outcome
from schemas.columns import METRICS_TYPE
from schemas.numpy_arrays import to_arrow, to_frame, to_numpy
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of
from schemas.types import as_table, cast_column

Per = Literal["step", "trajectory", "group"]

USED = (
    *("instance_id", "trajectory_id", "step_index", "response_ids", "loss_mask"),
    *("segments", "metrics", "reward", "error"),
)
"""Columns from which the metrics are computed."""
_LIST = pl.List(pl.Int64)
_ROW_SCHEMA: dict[str, pl.DataType] = {
    "instance_id": pl.String(),
    "trajectory_id": pl.String(),
    "step_tokens": _LIST,
    "step_assistant_tokens": _LIST,
    "turn_tokens": _LIST,
    "environment": pl.List(pl.Struct({"key": pl.String(), "value": pl.Float64()})),
}
_LISTS = tuple(_ROW_SCHEMA)[2:]

METRIC_SCHEMA: dict[str, pl.DataType] = {
    "per": pl.String(),
    "metric": pl.String(),
    "value": pl.Float64(),
    "num": pl.Int64(),
    "num_left_out": pl.Int64(),
}


class Metric(NamedTuple):
    """One line of `dataset_metrics`.

    Attributes:
        per: Unit that the metric averages over.
        name: SkyRL's name of the metric.
        value: Value of the metric; None if no unit was counted.
        num: Number of units counted.
        num_left_out: Number of units not counted: failed, without a known return, or in groups that
            are too small.
    """

    per: Per
    name: str
    value: float | None
    num: int
    num_left_out: int


def dataset_metrics(frame: Frame, outcome: Outcome = "last") -> pl.LazyFrame:
    """Compute the metrics of a table of step rows or merged rows; formulas are in docs/metrics.md.

    A step is one LLM call, even inside a merged row, so merging changes no metric. Failed
    trajectories are included only in counts of failures, and trajectories with an unknown
    return are excluded from metrics that need one; `num_left_out` includes both. Standard
    deviations have the divisor n (population).

    Returns:
        Columns `per` (step, trajectory or group), `metric`, `value` (null if no unit was counted),
        `num` (units counted) and `num_left_out`.

    Example:
        One trajectory of two steps, whose responses have 1 and 3 tokens:

        >>> table = dataset_metrics(steps).filter(metric="generate/avg_num_tokens").collect()
        >>> table.select("per", "value").rows()
        [('step', 2.0), ('trajectory', 4.0)]
    """
    return trajectories(frame, outcome).map_batches(_all_metrics, schema=METRIC_SCHEMA)


def rollout_metrics(
    frame: Frame, *, per: Literal["step", "trajectory"], outcome: Outcome = "last"
) -> dict[str, float]:
    """Compute the metrics by name, like SkyRL's `rollout_metrics`; null values are omitted.

    Args:
        frame: Rows of complete trajectories, merged or not.
        per: Unit that takes precedence if a metric exists both per step and per trajectory.
        outcome: How returns are computed.

    Example:
        One trajectory of two steps, whose responses have 1 and 3 tokens:

        >>> rollout_metrics(steps, per="step")["generate/avg_num_tokens"]
        2.0
    """
    metrics = dataset_metrics(frame, outcome).filter(pl.col("value").is_not_null()).collect()
    last = metrics.sort(pl.col("per") == per, maintain_order=True)  # dict() keeps the last value
    return dict(last.select("metric", "value").rows())


def read_metrics(
    path: PathLike, outcome: Outcome | None = None, workers: Workers | None = None
) -> pl.DataFrame:
    """Compute `dataset_metrics` of a dataset; by default, with the `outcome` in its metadata."""
    outcome = dataset_outcome(path, outcome)
    if workers is None or workers == Workers():
        return dataset_metrics(scan(path), outcome).collect(engine="streaming")
    parts = workers.map_in_order(partial(_read_trajectories, outcome), pieces(path))
    return _all_metrics(pl.concat(parts))


def _read_trajectories(outcome: Outcome, path: PathLike) -> pl.DataFrame:
    return trajectories(scan(path), outcome).collect(engine="streaming")


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """Estimate the chance that at least one of k attempts of a group is correct.

        pass@k = 1 - C(n - c, k) / C(n, k)

    This is the chance for k of the n attempts drawn without replacement, an unbiased estimate for k
    independent attempts (Chen et al. 2021, arXiv 2107.03374). It is 0 if no attempt is correct, and
    1 if fewer than k are wrong.

    Args:
        num: n, the number of attempts, at least k.
        num_correct: c, the number of correct attempts.
        k: Number of attempts to draw, at least 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    assert 1 <= k <= num, (num, k)
    assert 0 <= num_correct <= num, (num, num_correct)
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def trajectories(frame: Frame, outcome: Outcome = "last") -> pl.LazyFrame:
    """Collect the inputs of the metrics, one row per trajectory, in order of appearance.

    Returns:
        Columns instance_id, trajectory_id, return (null if unknown or failed), error, and lists:
        step_tokens (response tokens of each step), step_assistant_tokens (trained tokens of each
        step), turn_tokens (length of each sampled range) and environment ({key, value} of every
        step's `metrics`).

    Example:
        Steps of one trajectory with responses [3] and [4, 5, 6]; the token 4 is masked:

        >>> row = trajectories(steps).collect()
        >>> row["step_tokens"].to_list(), row["step_assistant_tokens"].to_list()
        ([[1, 3]], [[1, 2]])
    """
    frame = as_lazy(frame)
    names = [name for name in USED if name in frame.collect_schema()]
    rows = frame.select(names).map_batches(_per_row, schema=_ROW_SCHEMA, streamable=True)
    lists = rows.group_by("instance_id", "trajectory_id").agg(
        pl.col(name).explode().drop_nulls() for name in _LISTS
    )
    return trajectory_returns(frame, outcome).join(
        lists, on=["instance_id", "trajectory_id"], how="left", maintain_order="left"
    )


def _per_row(rows: pl.DataFrame) -> pl.DataFrame:
    """Compute the list columns of `trajectories` for each row."""
    table = as_table(rows)
    steps = _steps(table)
    responses, masks = (Ragged.from_arrow(table.column(n)) for n in ("response_ids", "loss_mask"))
    length = np.where(steps.length < 0, responses.lengths[steps.row], steps.length)
    trained = offsets_of(masks.values)
    begin = masks.offsets[steps.row] + steps.start
    end = begin + length
    offsets = np.searchsorted(steps.row, np.arange(table.num_rows + 1))
    columns = {
        "step_tokens": _lists(length, offsets),
        "step_assistant_tokens": _lists(trained[end] - trained[begin], offsets),
        "turn_tokens": _turns(table, masks, begin),
        "environment": _environment(table, steps, offsets),
    }
    ids = rows.select("instance_id", "trajectory_id")
    return ids.hstack(to_frame(columns)).cast(pl.Schema(_ROW_SCHEMA))


def _steps(table: pa.Table) -> Steps:
    if "segments" in table.column_names:
        return steps_of(table, is_joined(table))
    rows = np.arange(table.num_rows)
    return Steps(rows, np.zeros_like(rows), np.full_like(rows, -1), np.full_like(rows, -1))


def _lists(values: IntArray, offsets: IntArray) -> pa.Array:
    return Ragged(values, offsets, np.ones(len(offsets) - 1, np.bool_)).to_arrow(pa.int64())


def _turns(table: pa.Table, masks: Ragged, begin: IntArray) -> pa.Array:
    """Return the lengths of each row's turns.

    These are the sampled ranges in `segments`, else the runs of the loss mask in each step.
    """
    runs = _runs(masks, begin)
    if "segments" not in table.column_names:
        return runs.to_arrow(pa.int64())
    column = table.column("segments")
    has = to_numpy(column.is_valid()) & ~is_joined(table)
    lengths = list_lengths(column)
    counts = np.where(has, lengths, runs.lengths)
    of_segments = np.repeat(has, counts)
    values = np.zeros(int(counts.sum()), np.int64)
    segment_lengths = to_numpy(pc.struct_field(pc.list_flatten(column), "length"))
    values[of_segments] = segment_lengths[np.repeat(has, lengths)]
    values[~of_segments] = runs.values[np.repeat(~has, runs.lengths)]
    return _lists(values, offsets_of(counts))


def _runs(masks: Ragged, begin: IntArray) -> Ragged:
    """Return the lengths of the runs of true values in each row of a mask; steps end runs.

    Example:
        >>> mask = Ragged(np.array([1, 1, 0, 1, 1], bool), np.array([0, 4, 5]), np.ones(2, bool))
        >>> found = _runs(mask, np.array([0, 1, 4]))
        >>> found.values.tolist(), found.lengths.tolist()
        ([1, 1, 1, 1], [3, 1])
    """
    mask, num_rows = masks.values.astype(np.bool_), len(masks.offsets) - 1
    row = np.repeat(np.arange(num_rows), masks.lengths)
    starts_run = mask.copy()
    starts_run[1:] &= ~mask[:-1]
    cuts = begin[begin < len(mask)]
    starts_run[cuts] = mask[cuts]
    run = np.cumsum(starts_run)[mask] - 1
    lengths = np.bincount(run, minlength=int(starts_run.sum())).astype(np.int64)
    counts = np.bincount(row[starts_run], minlength=num_rows)
    return Ragged(lengths, offsets_of(counts), np.ones(num_rows, np.bool_))


def _environment(table: pa.Table, steps: Steps, offsets: IntArray) -> pa.Array:
    """[N] Collect the {key, value} pairs of all steps of each row."""
    if "metrics" not in table.column_names:
        return pa.nulls(table.num_rows, METRICS_TYPE)
    if "segments" in table.column_names:
        table = step_columns(table.select(["step_index", "segments", "metrics"]), steps)
    column = cast_column(table.column("metrics"), METRICS_TYPE)
    ends = offsets_of(list_lengths(column))
    pairs = pc.list_flatten(column)
    flat = pairs.combine_chunks() if isinstance(pairs, pa.ChunkedArray) else pairs
    return pa.ListArray.from_arrays(to_arrow(ends[offsets], pa.int32()), flat)


def _all_metrics(rows: pl.DataFrame) -> pl.DataFrame:
    failed = rows.filter(pl.col("error").is_not_null())
    healthy = rows.filter(pl.col("error").is_null())
    metrics = [
        *_step_metrics(healthy, failed),
        *_trajectory_metrics(healthy, len(failed)),
        *_environment_metrics(healthy),
        *_group_metrics(rows),
    ]
    return pl.DataFrame(metrics, schema=METRIC_SCHEMA, orient="row")


def _step_metrics(healthy: pl.DataFrame, failed: pl.DataFrame) -> Iterator[Metric]:
    left_out = {name: int(failed[name].list.len().sum()) for name in _LISTS}
    tokens = _flat(healthy, "step_tokens")
    yield from _token_metrics("step", "num_tokens", tokens, left_out["step_tokens"])
    yield _metric("step", "generate/avg_response_length", tokens, left_out["step_tokens"])
    name = "step_assistant_tokens"
    yield from _token_metrics("step", "assistant_tokens", _flat(healthy, name), left_out[name])
    turns, missing = _flat(healthy, "turn_tokens"), left_out["turn_tokens"]
    for statistic, value in _statistics(turns).items():
        if statistic != "min":
            label = "mean" if statistic == "avg" else statistic
            yield Metric("step", f"generate/tokens_per_turn_{label}", value, len(turns), missing)


def _trajectory_metrics(healthy: pl.DataFrame, num_failed: int) -> Iterator[Metric]:
    tokens = healthy["step_tokens"].list.sum()
    trained = healthy["step_assistant_tokens"].list.sum()
    yield from _token_metrics("trajectory", "num_tokens", tokens, num_failed)
    yield from _token_metrics("trajectory", "assistant_tokens", trained, num_failed)
    yield _metric("trajectory", "generate/avg_response_length", tokens, num_failed)
    turns = healthy["step_tokens"].list.len()
    yield _metric("trajectory", "generate/avg_num_turns", turns, num_failed)

    value = healthy["return"]
    returns = value.drop_nulls()
    left_out = num_failed + value.null_count()
    for name, which in (("non_zero", value != 0.0), ("zero", value == 0.0)):
        chosen = tokens.filter(which.fill_null(value=False))
        yield _metric("trajectory", f"generate/avg_tokens_{name}_rewards", chosen, left_out)
    yield _metric("trajectory", "avg_score", returns, left_out)
    yield _metric("trajectory", "mean_positive_reward", returns.clip(lower_bound=0.0), left_out)
    total = len(healthy) + num_failed
    yield Metric("trajectory", "generate/num_error_trajectories", float(num_failed), total, 0)
    unknown = float(value.null_count())
    yield Metric("trajectory", "num_unknown_reward", unknown, len(healthy), num_failed)


def _environment_metrics(healthy: pl.DataFrame) -> Iterator[Metric]:
    pairs = healthy.select("trajectory_id", "environment").explode("environment").drop_nulls()
    by_key = pairs.unnest("environment").group_by("trajectory_id", "key")
    of_trajectory = by_key.agg(pl.col("value").mean())
    means = of_trajectory.group_by("key").agg(pl.col("value").mean(), num=pl.len()).sort("key")
    for key, value, num in means.rows():
        left_out = len(healthy) - num
        yield Metric("trajectory", f"environment/{key}", value, num, left_out)


def _group_metrics(rows: pl.DataFrame) -> Iterator[Metric]:
    groups = rows.group_by("instance_id").agg(
        num=pl.col("return").count(),
        num_correct=is_above(pl.col("return"), 0.0).sum(),
        failed=pl.col("error").is_not_null().any(),
    )
    scored = groups.filter(pl.col("num") > 0)
    solved = scored["num_correct"] > 0
    yield _metric("group", "pass_at_n", solved.cast(pl.Float64), len(groups) - len(scored))
    counts = scored.group_by("num", "num_correct").len().rows()
    for k in _attempts(max((num for num, _, _ in counts), default=0)):
        entered = [(times, pass_at_k(n, c, k)) for n, c, times in counts if n >= k]
        total = sum(times for times, _ in entered)
        value = sum(times * chance for times, chance in entered) / total
        yield Metric("group", f"pass@{k}", value, total, len(groups) - total)
    masked = float(groups["failed"].sum())
    yield Metric("group", "generate/num_masked_instances", masked, len(groups), 0)


def _attempts(largest: int) -> list[int]:
    """List 1, 2, 4, ... up to `largest`, and `largest` itself."""
    return sorted({1 << i for i in range(largest.bit_length())} | ({largest} - {0}))


def _token_metrics(per: Per, name: str, values: pl.Series, left_out: int) -> Iterator[Metric]:
    for statistic, value in _statistics(values).items():
        yield Metric(per, f"generate/{statistic}_{name}", value, len(values), left_out)


def _statistics(values: pl.Series) -> dict[str, float | None]:
    numbers = values.cast(pl.Float64)
    extremes = {"min": numbers.min(), "max": numbers.max(), "avg": mean_of(numbers)}
    return {**extremes, "std": numbers.std(ddof=0)}  # type: ignore[dict-item]


def _metric(per: Per, name: str, values: pl.Series, left_out: int) -> Metric:
    return Metric(per, name, _statistics(values)["avg"], len(values), left_out)


def _flat(rows: pl.DataFrame, name: str) -> pl.Series:
    return rows[name].explode().drop_nulls()
