"""Numbers of each trajectory by which two datasets are compared, and of its findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.filtering.similarity import MULTIPLIER, regions, sequence_hashes
from pipelines.filtering.verdicts import STEPS
from pipelines.frames import Frame, as_lazy
from pipelines.merging.segments import sampled_lengths
from pipelines.rewards import Outcome
from pipelines.statistics.metrics import trajectories
from rollout_io.dataset.message_facts import CALLED, count_calls, count_results, tool_calls
from rollout_io.dataset.returns import joined_steps
from rollout_io.dataset.trajectory_conditions import task_of
from rollout_io.dataset.versions import FINDINGS, read_current, read_version, version_names
from schemas.columns import TASK
from schemas.errors import InputError
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


def exploded(dataset: str, name: str) -> pl.DataFrame:
    """Return a line per finding of a version: trajectory_id, name and the finding's fields.

    Raises:
        InputError: `reward_version`: see `read_current`.
    """
    values = read_current(dataset, name, FINDINGS).drop_nulls("findings")
    lines = values.select("trajectory_id", pl.lit(name).alias("name"), "findings")
    return lines.explode("findings", empty_as_null=False).unnest("findings")


def finding_numbers(dataset: str) -> list[dict[str, Any]]:
    """Count a dataset's findings by version and label, and the trajectories that have them.

    Returns:
        name, label, num_findings, num_trajectories, problem: null, or why a version cannot be used.
        A version that found nothing has one line, without a label.
    """
    numbers: list[dict[str, Any]] = []
    for name in version_names(dataset, FINDINGS):
        empty = {"name": name, "label": None, "num_findings": 0, "num_trajectories": 0}
        unknown = {"name": name, "label": None, "num_findings": None, "num_trajectories": None}
        try:
            findings = exploded(dataset, name)
        except InputError as error:
            numbers.append(unknown | {"problem": str(error)})
            continue
        values, _ = read_version(dataset, name, FINDINGS)
        if len(values) and values["findings"].null_count() == len(values):
            numbers.append(unknown | {"problem": "the function failed for every trajectory"})
            continue
        counts = findings.group_by("name", "label").agg(
            num_findings=pl.len(), num_trajectories=pl.col("trajectory_id").n_unique()
        )
        lines = counts.sort("num_findings", "label", descending=[True, False]).to_dicts()
        numbers += [line | {"problem": None} for line in lines or [empty]]
    return numbers


def with_findings(
    a: str, b: str, lines_a: pl.DataFrame, lines_b: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """Add the numbers of findings that both datasets have, to one line per attempt.

    Args:
        a: Path of a dataset.
        b: The other one.
        lines_a: Its attempts (`pipelines.statistics.attempts.attempts`).
        lines_b: Those of the other one.

    Returns:
        Both with a column per label, such as `findings loops` or `findings judge/rude`, null where
        the finder failed; and the versions that different functions made, which are left out.

    Raises:
        InputError: `reward_version`: a dataset has changed since.
    """
    tables, others = [lines_a, lines_b], []
    for name in sorted({*version_names(a, FINDINGS)} & {*version_names(b, FINDINGS)}):
        how = [read_version(path, name, FINDINGS)[1] for path in (a, b)]
        if any(how[0].get(key) != how[1].get(key) for key in ("function", "sources")):
            others.append(name)
            continue
        values = [read_current(path, name, FINDINGS) for path in (a, b)]
        labels = pl.concat(values)["findings"].drop_nulls().explode(empty_as_null=False)
        for label in labels.struct.field("label").unique().sort():
            title = f"findings {name}" if label == name else f"findings {name}/{label}"
            number = pl.col("findings").list.eval(pl.element().struct.field("label") == label)
            for side, side_values in enumerate(values):
                counted = side_values.select(
                    "trajectory_id", number.list.sum().cast(pl.Float64).alias(title)
                )
                tables[side] = tables[side].join(
                    counted, on="trajectory_id", how="left", maintain_order="left"
                )
    return tables[0], tables[1], others
