"""Numbers of each trajectory by which two datasets are compared, of its findings, and where two part.

Two attempts part at the first sampled token at which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.filtering import STEPS
from pipelines.frames import Frame, as_lazy
from pipelines.merging.segments import sampled_lengths
from pipelines.rewards import Outcome
from pipelines.similarity import MULTIPLIER, regions, sequence_hashes
from pipelines.statistics.metrics import trajectories
from rollout_io.dataset.prefix_layout import (
    Tokens,
    common_prefix,
    encode_prefixes,
    is_encoded,
    trajectory_starts,
)
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_conditions import task_of
from rollout_io.dataset.trajectory_facts import (
    CALLED,
    count_calls,
    count_results,
    joined_steps,
    tool_calls,
)
from rollout_io.dataset.versions import FINDINGS, read_current, read_version, version_names
from schemas.columns import JOINED, PICTURES, TASK
from schemas.errors import InputError
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import Ragged, list_lengths, offsets_of, ranges
from schemas.types import as_table, with_absent

MOST_NAMES = 8
"""Number of tools, stop reasons and environment metrics that are compared, the most frequent."""

_NGRAM = 4
_MOST_HASH = 1 << 40  # sums over a trajectory's rows stay below 2^64

MOST_TASKS = 200
"""Maximum number of tasks whose attempts `greedy_partings` compares."""


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


def _exploded(dataset: str, name: str) -> pl.DataFrame:
    """Return a line per finding of a version: trajectory_id, name and the finding's fields."""
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
            findings = _exploded(dataset, name)
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


class SampledRange(NamedTuple):
    """Sampled tokens of a row.

    Attributes:
        row: The row.
        place: Position of the first token in the row's prompt + response.
        tokens: The ids.
    """

    row: int
    place: int
    tokens: Tokens


Sampled = list[SampledRange]
Segments = list[dict[str, Any]] | None


def greedy_partings(a: pl.LazyFrame, b: pl.LazyFrame) -> pl.DataFrame:
    """Find where greedy attempts at the same task begin to differ.

    Greedy are attempts of which all rows were sampled at temperature 0; of each task, the first one
    on each side is compared, for up to 200 tasks.

    Returns:
        One line per task: instance_id, trajectory_a, trajectory_b, row (index in the trajectory of
        B) and token (position in that row's prompt + response); both null if all sampled tokens of
        B are those of A.
    """
    first, second = (_greedy(one) for one in (a, b))
    lines = []
    for instance in list(first)[:MOST_TASKS]:
        if instance in second:
            (name, rows), (other, other_rows) = first[instance], second[instance]
            found = parting(rows, other_rows) or {}
            lines.append((instance, name, other, found.get("row"), found.get("token")))
    schema = {"instance_id": pl.String, "trajectory_a": pl.String, "trajectory_b": pl.String}
    return pl.DataFrame(lines, {**schema, "row": pl.Int64, "token": pl.Int64}, orient="row")


def _greedy(frame: pl.LazyFrame) -> dict[str, tuple[str, Sampled]]:
    """Return the first greedy attempt at each of the first tasks that have one, sorted by id."""
    frame = with_absent(as_lazy(frame), ["temperature", "segments", TASK])
    frame = frame.with_columns(task_of.alias("instance_id"))
    ids = (
        frame.group_by("instance_id", "trajectory_id")
        .agg((pl.col("temperature") == 0).all() & pl.col("temperature").is_not_null().all())
        .filter("temperature")
        .sort("instance_id", "trajectory_id")
        .unique("instance_id", keep="first", maintain_order=True)
        .head(MOST_TASKS)
        .collect(engine="streaming")
    )
    rows = frame.filter(pl.col("trajectory_id").is_in(ids["trajectory_id"].implode())).select(
        *("instance_id", "trajectory_id", "response_ids", "segments"),
        num_prompt=pl.col("prompt_token_ids").list.len(),
    )
    found: dict[str, tuple[str, list[tuple[int, Tokens, Segments]]]] = {}
    for instance, name, ids_of_row, segments, num_prompt in rows.collect().iter_rows():
        response = np.array(ids_of_row, np.int32)
        found.setdefault(instance, (name, []))[1].append((num_prompt, response, segments))
    return {task: (name, sampled_ranges(own)) for task, (name, own) in sorted(found.items())}


def broken_prefixes(dataset: PathLike) -> pl.DataFrame:
    """Count the rows that share only a part of the earlier row that they share most with (drift).

    Returns:
        Columns trajectory_id and `broken prefixes`.
    """
    parts = []
    present = scan(dataset).collect_schema()
    names = ["trajectory_id", "prompt_token_ids", "response_ids"]
    names += [PICTURES] if PICTURES in present else []
    for piece in iter_tables(dataset, names, decode=False):
        table = piece if is_encoded(piece) else encode_prefixes(piece)
        starts = trajectory_starts(table)
        parent = filled(table.column("parent_step_index"), -1).astype(np.int64)
        shared = to_numpy(table.column("prefix_length")).astype(np.int64)
        lengths = [list_lengths(table.column(n)) for n in ("prompt_suffix_ids", "response_ids")]
        whole = shared + lengths[0] + lengths[1]
        first = np.repeat(starts, np.diff(starts, append=table.num_rows))
        is_broken = (parent >= 0) & (shared < whole[first + np.maximum(parent, 0)])
        ids = pl.DataFrame({"trajectory_id": pl.Series(table.column("trajectory_id"))})
        counted = ids.with_columns(pl.Series("broken prefixes", is_broken))
        parts.append(counted.group_by("trajectory_id", maintain_order=True).agg(pl.all().sum()))
    return pl.concat(parts)


def sampled_ranges(rows: Iterable[tuple[int, Tokens, Segments]]) -> Sampled:
    """List the sampled ranges of a trajectory in the order of its steps.

    Args:
        rows: For each row: number of prompt tokens, response ids, and `segments`; None: the entire
            response was sampled.
    """
    found: list[tuple[int | None, SampledRange]] = []
    for row, (num_prompt, response, segments) in enumerate(rows):
        for segment in [{"start": 0, "length": len(response)}] if segments is None else segments:
            start, step = segment["start"], segment["step_index"] if segment.get(JOINED) else None
            tokens = response[start : start + segment["length"]]
            found.append((step, SampledRange(row, num_prompt + start, tokens)))
    if all(step is not None for step, _ in found):  # merged rows may interleave
        found.sort(key=lambda one: one[0] or 0)
    return [one for _, one in found]


def parting(first: Sampled, other: Sampled) -> dict[str, int | None] | None:
    """Find the first sampled token at which `other` differs from `first`.

    Their sampled tokens are compared as two sequences, so merging rows changes no result.

    Returns:
        `row` in `other`, and `token`, counted from the start of the row's prompt; `first_row` and
        `first_token`: the place of the other token in `first`, None if `first` ended before. None
        if the sampled tokens of `other` are a prefix of those of `first`.
    """
    wanted = np.concatenate([one.tokens for one in first]) if first else np.zeros(0, np.int32)
    at = 0
    for row, place, tokens in other:
        common = common_prefix(wanted[at : at + len(tokens)], tokens)
        at += common
        if common < len(tokens):
            first_row, first_token = _place_of(first, at)
            found = {"first_row": first_row, "first_token": first_token}
            return {"row": row, "token": place + common, **found}
    return None


def _place_of(ranges: Sampled, at: int) -> tuple[int, int] | tuple[None, None]:
    """Return the row and place of a sampled token; (None, None) beyond the last."""
    for row, place, tokens in ranges:
        if at < len(tokens):
            return row, place + at
        at -= len(tokens)
    return None, None
