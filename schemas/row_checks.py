"""Checks that look at one row at a time, vectorised over the flat arrays of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import COLUMNS, JOINED, Length
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths
from schemas.view import View

LOGPROB_SENTINEL = -9999.0
REWARD_TOLERANCE = 1e-6

ALIGNED_COLUMNS = tuple(c.name for c in COLUMNS if c.length is Length.RESPONSE)


def check_nonempty(view: View) -> Iterator[pl.DataFrame]:
    """nonempty_prompt, nonempty_response: where `error` is null."""
    healthy = view.is_null("error")
    for rule, name in (
        ("nonempty_prompt", "prompt_token_ids"),
        ("nonempty_response", "response_ids"),
    ):
        if view.has(name):
            rows = np.flatnonzero((view.ragged(name).lengths == 0) & healthy)
            yield view.breaches(rule, rows, name, ["0 tokens"] * len(rows), "at least 1 token")


def check_lengths_align(view: View) -> Iterator[pl.DataFrame]:
    """lengths_align: every per-token column has one element per response token."""
    if not view.has("response_ids"):
        return
    expected = view.ragged("response_ids").lengths
    for name in ALIGNED_COLUMNS:
        if view.has(name):
            column = view.ragged(name)
            rows = np.flatnonzero(column.valid & (column.lengths != expected))
            got = [f"{n} elements" for n in column.lengths[rows]]
            wanted = [f"{n}, as in response_ids" for n in expected[rows]]
            yield view.breaches("lengths_align", rows, name, got, wanted)


def check_token_range(view: View, vocab_size: int | None) -> Iterator[pl.DataFrame]:
    """token_range: ids >= 0, and below `vocab_size` where that is known."""
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    expected = "ids >= 0" if vocab_size is None else f"ids in 0..{top}"
    for name in ("prompt_token_ids", "prompt_suffix_ids", "response_ids"):
        if view.has(name):
            yield _outside(view, "token_range", name, 0, top, expected)


def check_logprobs(view: View) -> Iterator[pl.DataFrame]:
    """logprobs_finite and logprobs_nonpositive."""
    if not view.has("rollout_logprobs"):
        return
    column = view.ragged("rollout_logprobs")
    values = column.values
    if len(values) == 0 or LOGPROB_SENTINEL < values.min() <= values.max() <= 0.0:
        return
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(values) | (values <= LOGPROB_SENTINEL)
        positive = (values > 0) & ~bad
    name = "rollout_logprobs"
    yield _first_elements(view, "logprobs_finite", name, bad, "finite values above -9999")
    yield _first_elements(view, "logprobs_nonpositive", name, positive, "at most 0")


def check_rewards(view: View) -> Iterator[pl.DataFrame]:
    """reward_finite and reward_matches_rewards."""
    has_scalar, has_tokens = view.has("reward"), view.has("rewards")
    scalar = view.table.column("reward").to_numpy() if has_scalar else None
    known = ~view.is_null("reward")
    if scalar is not None:
        rows = np.flatnonzero(known & ~np.isfinite(scalar))
        got = [str(x) for x in scalar[rows]]
        yield view.breaches("reward_finite", rows, "reward", got, "a finite number or null")
    if scalar is not None and view.has("segments"):
        yield _step_rewards(view, np.where(known, scalar, np.nan))
    if not has_tokens:
        return
    column = view.ragged("rewards")
    bad = ~np.isfinite(column.values)
    yield _first_elements(view, "reward_finite", "rewards", bad, "finite numbers")
    if scalar is not None:
        yield _reward_sums(view, column, np.where(known, scalar, np.nan))


def _step_rewards(view: View, scalar: npt.NDArray[np.float64]) -> pl.DataFrame:
    """The rewards of the steps that a merge joined, beside the row's."""
    flat = pc.list_flatten(view.table.column("segments"))
    if any(flat.type.get_field_index(name) < 0 for name in (JOINED, "reward")):
        return view.breaches("reward_matches_rewards", np.zeros(0, np.int64), "reward", [], "")
    joined = np.asarray(pc.fill_null(pc.struct_field(flat, JOINED), False))
    earned = pc.struct_field(flat, "reward").cast(pa.float64()).to_numpy()
    row = SegmentSpans.of(view).row
    num_rows = len(scalar)
    sums = np.bincount(row, np.where(joined, earned, 0.0), num_rows)
    merged = np.bincount(row, joined, num_rows) > 0
    tolerance = REWARD_TOLERANCE * np.maximum(1.0, np.abs(np.nan_to_num(scalar)))
    differs = merged & np.isfinite(scalar) & np.isfinite(sums)
    rows = np.flatnonzero(differs & (np.abs(sums - np.nan_to_num(scalar)) > tolerance))
    got = [f"reward {scalar[r]:g} of steps that earned {sums[r]:g}" for r in rows]
    return view.breaches("reward_matches_rewards", rows, "reward", got, "their sum")


def _reward_sums(view: View, column: Ragged, scalar: npt.NDArray[np.float64]) -> pl.DataFrame:
    sums = row_sums(column)
    tolerance = REWARD_TOLERANCE * np.maximum(1.0, np.abs(np.nan_to_num(scalar)))
    with np.errstate(invalid="ignore"):
        differs = np.abs(sums - scalar) > tolerance
    unknown = view.is_null("reward")
    differs = (np.isfinite(sums) & np.isfinite(scalar) & differs) | (unknown & column.valid)
    rows = np.flatnonzero(differs & column.valid)
    got = [f"a sum of {x:g}" for x in sums[rows]]
    expected = ["null rewards" if unknown[r] else f"reward {scalar[r]:g}" for r in rows]
    return view.breaches("reward_matches_rewards", rows, "rewards", got, expected)


def check_segments(view: View) -> Iterator[pl.DataFrame]:
    """segments_in_range: inside the response, at least one token, ordered, no overlap."""
    if not view.has("segments", "response_ids"):
        return
    spans = SegmentSpans.of(view)
    limit = view.ragged("response_ids").lengths[spans.row]
    start, end = spans.start, spans.start + spans.length
    same_row = np.zeros(len(start), np.bool_)
    same_row[1:] = spans.row[1:] == spans.row[:-1]
    before_end = np.where(same_row, np.roll(end, 1), 0)
    before_step = np.where(same_row, np.roll(spans.step_index, 1), 0)
    bad = (start < before_end) | (spans.length < 1) | (end > limit)
    bad |= spans.step_index < before_step
    index, rows = _first_per_row(spans.row, bad)
    got = [f"{start[i]}..{end[i]} of step {spans.step_index[i]}" for i in index]
    expected = [f"ordered ranges inside 0..{limit[i]}" for i in index]
    yield view.breaches("segments_in_range", rows, "segments", got, expected)


@dataclass(frozen=True, slots=True)
class SegmentSpans:
    """All segments of a table, one after the other: [S] int64 each; nulls read as -1."""

    row: IntArray
    start: IntArray
    length: IntArray
    step_index: IntArray

    @classmethod
    def of(cls, view: View) -> SegmentSpans:
        """Unpack the `segments` column."""
        column = view.table.column("segments")
        lengths = list_lengths(column)
        flat = pc.list_flatten(column)

        def unpack(name: str) -> IntArray:
            values = pc.fill_null(pc.struct_field(flat, name), -1)
            return np.asarray(values.to_numpy(), np.int64)

        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(row, unpack("start"), unpack("length"), unpack("step_index"))


def check_routing(view: View) -> Iterator[pl.DataFrame]:
    """routing_shape: 1 to p+r rows of routes, each expert >= 0."""
    name = "rollout_expert_indices"
    if not view.has(name, "prompt_token_ids", "response_ids"):
        return
    column = view.table.column(name)
    lengths = list_lengths(column)
    limit = view.ragged("prompt_token_ids").lengths + view.ragged("response_ids").lengths
    outside = ~view.is_null(name) & ((lengths < 1) | (lengths > limit))
    rows = np.flatnonzero(outside)
    got = [f"routes of {n} tokens" for n in lengths[rows]]
    expected = [f"1 to {n} tokens" for n in limit[rows]]
    yield view.breaches("routing_shape", rows, name, got, expected)

    tokens = pc.list_flatten(column)
    experts = pc.list_flatten(pc.list_flatten(tokens)).to_numpy()
    if len(experts) and experts.min() < 0:
        per_token = len(experts) // len(tokens)
        token = np.flatnonzero((experts < 0).reshape(-1, per_token).any(axis=1))
        rows = np.unique(np.repeat(np.arange(len(lengths)), lengths)[token])
        yield view.breaches("routing_shape", rows, name, ["an expert below 0"] * len(rows), ">= 0")


RowCheck = Callable[[View], Iterator[pl.DataFrame]]

ROW_CHECKS: tuple[RowCheck, ...] = (
    check_nonempty,
    check_lengths_align,
    check_logprobs,
    check_rewards,
    check_segments,
    check_routing,
)


def row_sums(column: Ragged) -> npt.NDArray[np.float64]:
    """[N] sum of each row; 0 for an empty one."""
    sums = np.zeros(len(column.lengths), np.float64)
    filled = np.flatnonzero(column.lengths)
    if len(filled):
        sums[filled] = np.add.reduceat(column.values, column.offsets[filled])
    return sums


def _outside(view: View, rule: str, name: str, low: int, high: int, expected: str) -> pl.DataFrame:
    values = view.ragged(name).values
    if len(values) == 0 or (values.min() >= low and values.max() <= high):
        return _first_elements(view, rule, name, np.zeros(len(values), np.bool_), expected)
    return _first_elements(view, rule, name, (values < low) | (values > high), expected)


def _first_elements(
    view: View, rule: str, name: str, bad: BoolArray, expected: str
) -> pl.DataFrame:
    """One breach per row: its first bad element, and how many more there are."""
    column: Ragged = view.ragged(name)
    positions = np.flatnonzero(bad)
    rows, first, counts = np.unique(column.row_of(positions), return_index=True, return_counts=True)
    got = [
        _element(column, int(positions[i]), int(row), int(count))
        for row, i, count in zip(rows, first, counts, strict=True)
    ]
    return view.breaches(rule, rows, name, got, expected)


def _element(column: Ragged, position: int, row: int, count: int) -> str:
    value: Any = column.values[position]
    more = f" and {count - 1} more" if count > 1 else ""
    return f"{value} at index {position - column.offsets[row]}{more}"


def _first_per_row(row: IntArray, bad: BoolArray) -> tuple[IntArray, IntArray]:
    index = np.flatnonzero(bad)
    rows, first = np.unique(row[index], return_index=True)
    return index[first], rows
