"""Numbers of each trajectory by which two datasets are compared."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.filtering.regions import MULTIPLIER, regions, sequence_hashes
from pipelines.filtering.verdicts import STEPS
from pipelines.merging.segments import sampled_lengths
from pipelines.rewards import Outcome
from pipelines.statistics.metrics import trajectories
from pipelines.tables import Frame, as_lazy
from rollout_io.dataset.trajectory_conditions import task_of
from rollout_io.dataset.trajectory_facts import (
    CALLED,
    count_calls,
    count_results,
    joined_steps,
    tool_calls,
)
from schemas.columns import TASK
from schemas.ragged import Ragged, offsets_of, ranges
from schemas.types import as_table, with_absent

MOST_NAMES = 8
"""Number of tools, stop reasons and environment metrics that are compared, the most frequent."""

_NGRAM = 4
_MOST_HASH = 1 << 40  # sums over a trajectory's rows stay below 2^64


def attempts(frame: Frame, outcome: Outcome = "last") -> pl.DataFrame:
    """Collect one line per trajectory, in one pass; merging changes no number.

    Returns:
        Columns instance_id (of the task: see `task_of`), trajectory_id, return and error as in
        `trajectory_returns`; version
        (the oldest policy_version); greedy (a digest of the responses if all rows were sampled at
        temperature 0 or top_k 1 and the trajectory did not fail, else null); and numbers, null where they are unknown or the
        trajectory failed: `steps`, `response tokens` (sampled ones: see `sampled_lengths`),
        `repeated 4-grams` (share of the sequences of four tokens of a response that occurred in it
        before, mean over steps), `tools` (names called, with repetitions; null without `messages`),
        `failed_tools` (names of the calls that failed; null where no result is known),
        `tool errors` (share of the calls with a result that failed: see `has_failed`), `stop_reason` (of the last
        row) and `environment` ({key, value}).

    Example:
        A trajectory of two steps, whose responses have 1 and 3 tokens:

        >>> attempts(steps).select("steps", "response tokens").rows()
        [(2, 4)]
    """
    optional = [TASK, "stop_reason", "policy_version", "segments", "temperature", "top_k", *CALLED]
    frame = with_absent(as_lazy(frame), optional)
    frame = frame.with_columns(joined_steps(frame).alias(STEPS))
    calls = pl.col("calls")
    one = calls.drop_nulls().explode()
    first = one.filter(one.struct.field("key").is_first_distinct())
    results = count_results(calls)
    bad = one.filter(one.struct.field("failed"))
    distinct = bad.struct.field("key").is_first_distinct()
    names_of_failed = bad.filter(distinct).struct.field("name").implode()
    more = (
        frame.select(
            *("instance_id", "trajectory_id", TASK, "stop_reason", "policy_version"),
            greedy=pl.when((pl.col("temperature") == 0) | (pl.col("top_k") == 1)).then(
                pl.col("response_ids").hash() % _MOST_HASH
            ),
            sampled=pl.struct("response_ids", "segments").map_batches(
                _sampled, return_dtype=pl.Int64, is_elementwise=True
            ),
            calls=tool_calls(),
            repeated=pl.struct("response_ids", STEPS).map_batches(
                _repeated, return_dtype=pl.List(pl.Float64), is_elementwise=True
            ),
        )
        .group_by("trajectory_id")
        .agg(
            pl.col("stop_reason").last(),
            task=task_of.last(),
            version=pl.col("policy_version").min(),
            greedy=pl.when(pl.col("greedy").is_not_null().all()).then(pl.col("greedy").sum()),
            tools=pl.when(calls.is_not_null().any()).then(first.struct.field("name").implode()),
            failed_tools=pl.when((results > 0) | (one.len() == 0)).then(names_of_failed),
            **{"tool errors": count_calls(calls, failed=True) / pl.when(results > 0).then(results)},
            sampled=pl.col("sampled").sum(),
            repeated=pl.col("repeated").explode(empty_as_null=True).mean(),
        )
    )
    healthy = pl.col("error").is_null()
    numbers = {
        "steps": pl.col("step_tokens").list.len(),
        "response tokens": pl.col("sampled"),
        "repeated 4-grams": pl.col("repeated"),
        "tool errors": pl.col("tool errors"),
    }
    return (
        trajectories(frame, outcome)
        .join(more, on="trajectory_id", how="left", maintain_order="left")
        .select(
            pl.col("task").alias("instance_id"),
            *("trajectory_id", "return", "error", "version"),
            pl.when(healthy).then(pl.col("greedy").cast(pl.String)),
            *(
                pl.when(healthy).then(value.cast(pl.Float64)).alias(n)
                for n, value in numbers.items()
            ),
            *("tools", "failed_tools", "stop_reason", "environment"),
        )
        .collect(engine="streaming")
    )


def _sampled(rows: pl.Series) -> pl.Series:
    """Count the sampled tokens of each row."""
    lengths = sampled_lengths(as_table(rows.struct.unnest()))
    return pl.Series(rows.name, lengths, pl.Int64)


def _repeated(rows: pl.Series) -> pl.Series:
    """Return, for each step of each row, the share of its 4-grams that occurred in it before."""
    sampled, owners = regions(rows, 0)
    lengths = np.maximum(sampled.lengths - _NGRAM + 1, 0)
    starts = ranges(sampled.offsets[:-1], lengths)
    steps = np.repeat(np.arange(len(lengths)), lengths)
    sequences = sequence_hashes(sampled.values.astype(np.uint64), _NGRAM)[starts]
    hashed = sequences ^ (steps.astype(np.uint64) + np.uint64(1)) * MULTIPLIER
    _, firsts = np.unique(hashed, return_index=True)
    distinct = np.bincount(steps[firsts], minlength=len(lengths))
    has_some = lengths > 0
    shares = 1 - distinct[has_some] / lengths[has_some]
    offsets = offsets_of(np.bincount(owners[has_some], minlength=len(rows)).astype(np.int64))
    column = Ragged(shares, offsets, np.ones(len(rows), np.bool_)).to_arrow(pa.float64())
    return pl.Series(rows.name, column)


def with_names(first: pl.DataFrame, second: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Turn tools, stop reasons and environment metrics into columns, the same for both tables.

    Of each kind, the `MOST_NAMES` most frequent names of both tables become columns: calls and
    failed calls per trajectory, 1 or 0, and the mean over a trajectory's steps. What is unknown is null.
    """
    tables = (first, second)
    tools = _frequent([table["tools"].explode(empty_as_null=True) for table in tables])
    failed = _frequent([table["failed_tools"].explode(empty_as_null=True) for table in tables])
    reasons = _frequent([table["stop_reason"] for table in tables])
    environments = [table["environment"].explode(empty_as_null=True) for table in tables]
    keys = _frequent([pairs.struct.field("key") for pairs in environments])
    healthy = pl.col("error").is_null()
    pairs = pl.col("environment").list
    columns = {f"calls of {name}": pl.col("tools").list.count_matches(name) for name in tools}
    columns |= {
        f"failed calls of {name}": pl.col("failed_tools").list.count_matches(name)
        for name in failed
    }
    columns |= {f"stopped: {reason}": pl.col("stop_reason") == reason for reason in reasons}
    for key in keys:
        same = pl.element().struct.field("key") == key
        value = pairs.eval(pl.element().filter(same).struct.field("value")).list.mean()
        columns[f"environment/{key}"] = value
    named = {n: pl.when(healthy).then(e.cast(pl.Float64)) for n, e in columns.items()}
    dropped = ("tools", "failed_tools", "stop_reason", "environment")
    left, right = (table.with_columns(**named).drop(dropped) for table in (first, second))
    return left, right


def _frequent(names: list[pl.Series]) -> list[str]:
    counts = pl.concat(names).drop_nulls().value_counts(sort=True)
    return sorted(counts[counts.columns[0]].head(MOST_NAMES))
