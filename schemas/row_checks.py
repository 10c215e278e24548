"""Checks of single rows, vectorised over the flat arrays of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import COLUMNS, JOINED, METRICS_TYPE, PICTURES, PICTURES_TYPE, Length
from schemas.numpy_arrays import filled, to_arrow, to_frame, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths
from schemas.structure_checks import first_rows
from schemas.token_checks import (
    check_logprobs,
    check_set_range,
    check_support,
    check_teacher,
    check_versions,
    first_elements,
)
from schemas.types import cast_column
from schemas.view import View

# A prompt's last two tokens identify the assistant header ("<|im_start|>assistant\n").
HEADER_TOKENS = 2
# Shorter responses ("OK") can recur in a conversation by chance.
MIN_ANSWER_TOKENS = 16
# Tolerance for float64 rounding of reward sums: relative for rewards above 1, otherwise absolute.
REWARD_TOLERANCE = 1e-6

ALIGNED_COLUMNS = tuple(c.name for c in COLUMNS if c.length is Length.RESPONSE)


def check_nonempty(view: View) -> Iterator[pl.DataFrame]:
    """Check nonempty_prompt and nonempty_response on rows whose `error` is null."""
    healthy = view.is_null("error")
    responses = view.ragged("response_ids").lengths if view.has("response_ids") else None
    for rule, name, lengths in (
        ("nonempty_prompt", "prompt_token_ids", view.prompt_lengths()),
        ("nonempty_response", "response_ids", responses),
    ):
        if lengths is not None:
            rows = np.flatnonzero((lengths == 0) & healthy)
            sentence = "{column} is empty"
            yield view.breaches(rule, rows, name, "0 tokens", "at least 1 token", sentence)


def check_lengths_align(view: View) -> Iterator[pl.DataFrame]:
    """Check lengths_align: every per-token column has one element per response token."""
    if not view.has("response_ids"):
        return
    expected = view.ragged("response_ids").lengths
    for name in ALIGNED_COLUMNS:
        if view.has(name):
            lengths = list_lengths(view.table.column(name))
            rows = np.flatnonzero(~view.is_null(name) & (lengths != expected))
            finding, wanted = [f"{n} values" for n in lengths[rows]], expected[rows].astype(str)
            sentence = "{column} has {got} but response_ids has {expected}"
            yield view.breaches("lengths_align", rows, name, finding, list(wanted), sentence)


def check_token_range(view: View, vocab_size: int | None) -> Iterator[pl.DataFrame]:
    """Check token_range: ids are >= 0, and below `vocab_size` if it is known."""
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    expected = "ids >= 0" if vocab_size is None else f"ids in 0..{top}"
    for name in ("prompt_token_ids", "prompt_suffix_ids", "response_ids"):
        if view.has(name):
            ids = view.ragged(name).values
            if len(ids) and (ids.min() < 0 or ids.max() > top):
                yield first_elements(view, "token_range", name, (ids < 0) | (ids > top), expected)
    yield from check_set_range(view, top, expected)


def check_rewards(view: View) -> Iterator[pl.DataFrame]:
    """Check reward_finite and reward_matches_rewards."""
    scalar = to_numpy(view.table.column("reward")) if view.has("reward") else None
    has_reward = ~view.is_null("reward")
    if scalar is not None:
        rows = np.flatnonzero(has_reward & ~np.isfinite(scalar))
        finding = [str(x) for x in scalar[rows]]
        expected, sentence = "a finite number or null", "reward is {got}; it must be finite or null"
        yield view.breaches("reward_finite", rows, "reward", finding, expected, sentence)
        scalar = np.where(has_reward, scalar, np.nan)
        if view.has("segments"):
            yield _step_rewards(view, scalar)
    if not view.has("rewards"):
        return
    column = view.ragged("rewards")
    bad = ~np.isfinite(column.values)
    yield first_elements(view, "reward_finite", "rewards", bad, "finite numbers")
    if scalar is not None:
        yield _reward_sums(view, column, scalar)


def _step_rewards(view: View, scalar: npt.NDArray[np.float64]) -> pl.DataFrame:
    """Compare a merged row's reward with the sum of its steps' rewards."""
    flat = pc.list_flatten(view.table.column("segments"))
    if any(flat.type.get_field_index(name) < 0 for name in (JOINED, "reward")):
        return view.breaches("reward_matches_rewards", np.zeros(0, np.int64), "reward", [], "")
    joined = filled(pc.struct_field(flat, JOINED), value=False)
    earned = to_numpy(pc.struct_field(flat, "reward").cast(pa.float64()))
    row = SegmentSpans.of(view).row
    sums = np.bincount(row, np.where(joined, earned, 0.0), len(scalar))
    merged = np.bincount(row, joined, len(scalar)) > 0
    rows = np.flatnonzero(merged & _differ(sums, scalar))
    finding, expected = [f"{scalar[r]:g}" for r in rows], [f"{sums[r]:g}" for r in rows]
    sentence = "reward is {got} but the rewards of the row's steps sum to {expected}"
    return view.breaches("reward_matches_rewards", rows, "reward", finding, expected, sentence)


def _reward_sums(view: View, column: Ragged, scalar: npt.NDArray[np.float64]) -> pl.DataFrame:
    sums, unknown = row_sums(column), view.is_null("reward")
    rows = np.flatnonzero(column.valid & (unknown | _differ(sums, scalar)))
    finding = [f"{x:g}" for x in sums[rows]]
    expected = ["null" if unknown[r] else f"{scalar[r]:g}" for r in rows]
    sentence = "rewards sum to {got} but reward is {expected}"
    return view.breaches("reward_matches_rewards", rows, "rewards", finding, expected, sentence)


def _differ(sums: npt.NDArray[Any], rewards: npt.NDArray[Any]) -> BoolArray:
    """True where the two values are finite and differ by more than a rounding error."""
    tolerance = REWARD_TOLERANCE * np.maximum(1.0, np.abs(rewards))
    is_known = np.isfinite(sums) & np.isfinite(rewards)
    with np.errstate(invalid="ignore"):
        differs: BoolArray = is_known & (np.abs(sums - rewards) > tolerance)
    return differs


def check_segments(view: View) -> Iterator[pl.DataFrame]:
    """Check segments_in_range: segments are ordered, disjoint, non-empty and inside the response."""
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
    finding = [f"the range {start[i]}..{end[i]} of step {spans.step_index[i]}" for i in index]
    expected = [f"ordered, disjoint ranges inside 0..{limit[i]}" for i in index]
    sentence = "{column} contains {got}; expected {expected}"
    yield view.breaches("segments_in_range", rows, "segments", finding, expected, sentence)


@dataclass(frozen=True, slots=True)
class SegmentSpans:
    """All segments of a table, concatenated, as [S] int64 arrays; nulls become -1."""

    row: IntArray
    start: IntArray
    length: IntArray
    step_index: IntArray

    @classmethod
    def of(cls, view: View) -> SegmentSpans:
        """Unpack the `segments` column of a table."""
        column = view.table.column("segments")
        lengths = list_lengths(column)
        flat = pc.list_flatten(column)

        def unpack(name: str) -> IntArray:
            return filled(pc.struct_field(flat, name), -1).astype(np.int64, copy=False)

        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(row, unpack("start"), unpack("length"), unpack("step_index"))


def check_routing(view: View) -> Iterator[pl.DataFrame]:
    """Check routing_shape: routing covers 1 to prompt + response tokens; experts are >= 0."""
    name = "rollout_expert_indices"
    prompts = view.prompt_lengths()
    if prompts is None or not view.has(name, "response_ids"):
        return
    column = view.table.column(name)
    lengths = list_lengths(column)
    limit = prompts + view.ragged("response_ids").lengths
    # prefix_reference has already reported negative lengths.
    outside = ~view.is_null(name) & ((lengths < 1) | (lengths > limit)) & (prompts >= 0)
    rows = np.flatnonzero(outside)
    finding, expected = [f"{n}" for n in lengths[rows]], [f"1 to {n}" for n in limit[rows]]
    sentence = "{column} covers {got} tokens; it must cover {expected} (prompt + response)"
    yield view.breaches("routing_shape", rows, name, finding, expected, sentence)

    tokens = pc.list_flatten(column)
    experts = to_numpy(pc.list_flatten(pc.list_flatten(tokens)))
    if len(experts) and experts.min() < 0:
        per_token = len(experts) // len(tokens)
        token = np.flatnonzero((experts < 0).reshape(-1, per_token).any(axis=1))
        rows = np.unique(np.repeat(np.arange(len(lengths)), lengths)[token])
        sentence = "{column} contains a negative expert index"
        yield view.breaches("routing_shape", rows, name, "an expert below 0", ">= 0", sentence)


BLOB = r"sha256:[0-9a-f]{64}"
"""Pattern of a reference to a file in `DS.blobs`."""


def check_pictures(view: View) -> Iterator[pl.DataFrame]:
    """Check picture_reference and picture_spans: digests, and tokens of the row, in order."""
    if not view.has(PICTURES):
        return
    column = cast_column(view.table.column(PICTURES), PICTURES_TYPE)
    lengths, entries = list_lengths(column), pc.list_flatten(column)
    row = np.repeat(np.arange(len(lengths)), lengths)
    names = ("sha256", "start", "length")
    flat = to_frame({n: pc.struct_field(entries, n) for n in names} | {"row": to_arrow(row)})
    flat = flat.cast({"start": pl.Int64, "length": pl.Int64})  # their sum may exceed 32 bits
    named = pl.col("sha256").str.contains(f"^{BLOB}$").fill_null(value=True)
    bad = flat.filter(~named).unique("row", keep="first", maintain_order=True)
    sentence = "an entry of {column} has the reference {got}; expected {expected}"
    expected, rows = "sha256: and 64 hexadecimal digits", bad["row"].to_numpy()
    yield view.breaches(
        "picture_reference", rows, PICTURES, bad["sha256"].to_list(), expected, sentence
    )
    prompts = view.prompt_lengths()
    if prompts is None or not view.has("response_ids"):
        return
    sizes = prompts + view.ragged("response_ids").lengths
    spans = flat.with_columns(size=pl.Series(sizes[row])).filter(
        pl.col("start").is_not_null() | pl.col("length").is_not_null()
    )
    spans = spans.with_columns(end=pl.col("start") + pl.col("length").fill_null(1))
    before = pl.col("end").shift(fill_value=0).over("row").fill_null(0)
    is_span = (
        (pl.col("start") >= before)
        & (pl.col("length").fill_null(1) >= 1)
        & (pl.col("end") <= pl.col("size"))
    )
    bad = spans.filter(~is_span.fill_null(value=False))
    bad = bad.unique("row", keep="first", maintain_order=True)
    finding = [f"start {s}, length {n}" for s, n in bad.select("start", "length").iter_rows()]
    expected = "1 or more tokens inside prompt + response, after the picture before"
    sentence = "an entry of {column} has {got}; expected {expected}"
    yield view.breaches(
        "picture_spans", bad["row"].to_numpy(), PICTURES, finding, expected, sentence
    )


def check_redacted(view: View) -> Iterator[pl.DataFrame]:
    """Check redacted_untrained: no token that was replaced is trained on."""
    if not view.has("redacted", "loss_mask"):
        return
    marks, mask = view.ragged("redacted"), view.ragged("loss_mask")
    row = np.repeat(np.arange(len(marks.valid)), marks.lengths)
    inside = np.arange(len(row)) - marks.offsets[row]
    # Masks of another length are reported by lengths_align.
    within = np.flatnonzero(marks.values & (inside < mask.lengths[row]))
    trained = within[mask.values[mask.offsets[row[within]] + inside[within]]]
    rows, first = np.unique(row[trained], return_index=True)
    finding = [f"token {at}" for at in inside[trained][first]]
    sentence = "{column} is true at {got}, which loss_mask trains on; expected {expected}"
    expected = "loss_mask false at redacted tokens"
    yield view.breaches("redacted_untrained", rows, "redacted", finding, expected, sentence)


def check_metrics(view: View) -> Iterator[pl.DataFrame]:
    """Check metrics_keys: each metric of a row has a value and a name that occurs once."""
    if not view.has("metrics"):
        return
    column = cast_column(view.table.column("metrics"), METRICS_TYPE)
    entries = pc.list_flatten(column)
    key, value = pc.struct_field(entries, "key"), pc.struct_field(entries, "value")
    rows = to_arrow(np.repeat(np.arange(len(column)), list_lengths(column)))
    is_null = pc.or_(key.is_null(), value.is_null())
    frame = to_frame({"row": rows, "key": key.cast(pa.string()), "is_null": is_null})
    repeated = pl.struct("row", "key").is_first_distinct().not_()
    bad = frame.filter(pl.col("is_null") | repeated).unique("row", keep="first").sort("row")
    finding = [
        "a null" if is_null else f"{name!r} twice"
        for name, is_null in bad.select("key", "is_null").iter_rows()
    ]
    expected = "each name once, without nulls"
    sentence = "{column} contains {got}; expected {expected}"
    yield view.breaches(
        "metrics_keys", bad["row"].to_numpy(), "metrics", finding, expected, sentence
    )


def check_prompts(view: View) -> Iterator[pl.DataFrame]:
    """Check response_in_prompt: no row's answer is the last assistant message of its own prompt.

    The answer is the row's first sampled range. A prompt ends with the header of the answer, and
    the last two tokens of the prompt identify this header. The last assistant message of the prompt
    therefore begins after the last earlier occurrence of these two tokens. A row breaks the rule if
    its answer is trained on, has at least `MIN_ANSWER_TOKENS` tokens, and occurs at the start of
    that message. A row is exempt if an earlier row of its trajectory sampled the same answer,
    because the model then repeated itself.
    """
    if not view.has("prompt_token_ids", "response_ids", "loss_mask", "trajectory_id"):
        return
    prompt, ranges = view.ragged("prompt_token_ids"), _SampledRanges.of(view)
    answer = np.full(len(prompt.lengths), -1)
    first = np.flatnonzero(np.diff(ranges.row, prepend=-1))
    row, length = ranges.row[first], ranges.length[first]
    fits = (length >= MIN_ANSWER_TOKENS) & (prompt.lengths[row] >= length + 2 * HEADER_TOKENS)
    answer[row[fits]] = first[fits]
    rows, message = _last_messages(prompt, answer >= 0)
    answer = answer[rows]
    inside = message + ranges.length[answer] <= prompt.offsets[rows + 1] - HEADER_TOKENS
    answer, message = answer[inside], message[inside]
    begins = prompt.values[message] == ranges.response.values[ranges.start[answer]]
    answer, message = answer[begins], message[begins]
    leading = np.arange(MIN_ANSWER_TOKENS)
    sampled = ranges.response.values[ranges.start[answer][:, None] + leading]
    alike = (prompt.values[message[:, None] + leading] == sampled).all(axis=1)
    repeated = [
        index
        for index, at in zip(answer[alike].tolist(), message[alike].tolist(), strict=True)
        if ranges.trains(index) and ranges.begins(index, prompt.values[at:])
    ]
    repeating = list(_unexplained(ranges, repeated, first_rows(view)))
    finding = [
        f"its {ranges.length[i]} sampled tokens as the last assistant message" for i in repeating
    ]
    expected = "a prompt that ends before its response"
    rows = ranges.row[np.array(repeating, np.int64)]
    sentence = "the last assistant message of the prompt is the response itself"
    yield view.breaches("response_in_prompt", rows, "prompt_token_ids", finding, expected, sentence)


@dataclass(frozen=True, slots=True)
class _SampledRanges:
    """The sampled ranges of all responses, ordered by row; ranges outside a response are excluded.

    Attributes:
        row, start, length: [S] int64 each; `start` is a position in the flat response.
    """

    row: IntArray
    start: IntArray
    length: IntArray
    response: Ragged
    mask: Ragged

    @classmethod
    def of(cls, view: View) -> _SampledRanges:
        """Collect the ranges; a row without segments has one range, its entire response."""
        response = view.ragged("response_ids")
        length = response.lengths
        row, start = np.arange(len(length)), np.zeros(len(length), np.int64)
        if view.has("segments"):
            spans = SegmentSpans.of(view)
            whole = np.setdiff1d(row, spans.row)
            row = np.concatenate([whole, spans.row])
            start = np.concatenate([np.zeros_like(whole), spans.start])
            length = np.concatenate([length[whole], spans.length])
            order = np.argsort(row, kind="stable")
            row, start, length = row[order], start[order], length[order]
        inside = (start >= 0) & (length > 0) & (start + length <= response.lengths[row])
        start = (start + response.offsets[row])[inside]
        return cls(row[inside], start, length[inside], response, view.ragged("loss_mask"))

    def tokens(self, index: int) -> npt.NDArray[Any]:
        """Return the ids of a range."""
        return self.response.values[self.start[index] : self.start[index] + self.length[index]]

    def begins(self, index: int, values: npt.NDArray[Any]) -> bool:
        """True if `values` starts with the ids of the range."""
        return bool(np.array_equal(values[: self.length[index]], self.tokens(index)))

    def trains(self, index: int) -> bool:
        """True if a token of the range is trained on; false if the mask has the wrong length."""
        row = self.row[index]
        mask, start = self.mask.row(row), self.start[index] - self.response.offsets[row]
        is_aligned = len(mask) == len(self.response.row(row))
        return bool(is_aligned and mask[start : start + self.length[index]].any())


def _last_messages(prompt: Ragged, wanted: BoolArray) -> tuple[IntArray, IntArray]:
    """Find the last assistant message of each prompt."""
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return rows, rows
    header = prompt.values[prompt.offsets[rows + 1][:, None] - [HEADER_TOKENS, 1]]
    first, second = header[0]
    # Prompts nearly always end with the same header, and comparing with a scalar is faster.
    if (header != header[0]).any():
        pairs = np.full((len(wanted), HEADER_TOKENS), -1, header.dtype)
        pairs[rows] = header
        first, second = np.repeat(pairs, prompt.lengths, axis=0)[1:].T
    at = np.flatnonzero(prompt.values[1:] == second)
    at = at[prompt.values[at] == np.broadcast_to(first, len(prompt.values) - 1)[at]]
    row = prompt.row_of(at)
    is_earlier = wanted[row] & (at + 2 * HEADER_TOKENS <= prompt.offsets[row + 1])
    at, row = at[is_earlier], row[is_earlier]
    is_last = np.diff(row, append=-1) != 0
    return row[is_last], at[is_last] + HEADER_TOKENS


def _unexplained(
    ranges: _SampledRanges, answers: Sequence[int], first_row: IntArray
) -> Iterator[int]:
    """Yield the answers that no earlier row of their trajectory sampled, reading each range once."""
    sampled: set[bytes] = set()
    trajectory, end = -1, 0
    for index in answers:
        first = int(first_row[ranges.row[index]])
        if first != trajectory:
            trajectory, end, sampled = first, int(np.searchsorted(ranges.row, first)), set()
        sampled |= {ranges.tokens(i).tobytes() for i in range(end, index)}
        end = index
        if ranges.tokens(index).tobytes() not in sampled:
            yield index


RowCheck = Callable[[View], Iterator[pl.DataFrame]]

ROW_CHECKS: tuple[RowCheck, ...] = (
    check_nonempty,
    check_lengths_align,
    check_logprobs,
    check_versions,
    check_support,
    check_teacher,
    check_rewards,
    check_segments,
    check_routing,
    check_metrics,
    check_pictures,
    check_redacted,
    check_prompts,
)


def row_sums(column: Ragged) -> npt.NDArray[np.float64]:
    """Return the sum of each row, [N]; 0 for an empty row."""
    sums = np.zeros(len(column.lengths), np.float64)
    filled = np.flatnonzero(column.lengths)
    # reduceat returns the next row's first element for an empty row: skip empty rows.
    if len(filled):
        sums[filled] = np.add.reduceat(column.values, column.offsets[filled])
    return sums


def _first_per_row(row: IntArray, bad: BoolArray) -> tuple[IntArray, IntArray]:
    index = np.flatnonzero(bad)
    rows, first = np.unique(row[index], return_index=True)
    return index[first], rows
