"""The first sampled token at which two attempts differ, and the prefixes that a trajectory breaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from pipelines.frames import as_lazy
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
from schemas.columns import JOINED, PICTURES, TASK
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import BoolArray, list_lengths
from schemas.types import with_absent


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

MOST_TASKS = 200
"""Maximum number of tasks whose attempts `greedy_partings` compares."""


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


def sampled_mask(num_tokens: int, segments: Segments) -> BoolArray:
    """Return the mask ([R] bool) of a response's sampled tokens: the tokens in its segments.

    Without segments, all R tokens were sampled.
    """
    mask = np.full(num_tokens, segments is None)
    for segment in segments or ():
        mask[segment["start"] : segment["start"] + segment["length"]] = True
    return mask


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
