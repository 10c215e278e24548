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
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, rows_of
from schemas.structure_checks import first_rows
from schemas.token_checks import (
    SUPPORT,
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
    responses = view.ragged("response_ids").lengths if view.has("response_ids") else None
    for rule, name, lengths in (
        ("nonempty_prompt", "prompt_token_ids", view.prompt_lengths()),
        ("nonempty_response", "response_ids", responses),
    ):
        if lengths is not None:
            bad, expected = (lengths == 0) & view.is_null("error"), "at least 1 token"
            yield view.breaches(rule, bad, name, "0 tokens", expected, "{column} is empty")


def check_lengths_align(view: View) -> Iterator[pl.DataFrame]:
    """Check lengths_align: every per-token column has one element per response token."""
    expected = view.ragged("response_ids").lengths
    sentence = "{column} has {got} but response_ids has {expected}"
    for name in filter(view.has, ALIGNED_COLUMNS):
        lengths = list_lengths(view.table.column(name))
        bad = ~view.is_null(name) & (lengths != expected)
        finding, wanted = [f"{n} values" for n in lengths[bad]], expected[bad].astype(str)
        yield view.breaches("lengths_align", bad, name, finding, list(wanted), sentence)


def check_token_range(view: View, vocab_size: int | None) -> Iterator[pl.DataFrame]:
    """Check token_range: ids are >= 0, and below `vocab_size` if it is known."""
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    expected = "ids >= 0" if vocab_size is None else f"ids in 0..{top}"
    for name in filter(view.has, ("prompt_token_ids", "prompt_suffix_ids", "response_ids")):
        ids = view.ragged(name).values
        if len(ids) and (ids.min() < 0 or ids.max() > top):
            yield first_elements(view, "token_range", name, (ids < 0) | (ids > top), expected)
    yield from check_set_range(view, top, expected)


def check_rewards(view: View) -> Iterator[pl.DataFrame]:
    """Check reward_finite and reward_matches_rewards."""
    unknown, rule = view.is_null("reward"), "reward_matches_rewards"
    scalar = np.full(len(unknown), np.nan)
    if has_scalar := view.has("reward"):
        reward = to_numpy(view.table.column("reward"))
        expected, sentence = "a finite number or null", "reward is {got}; it must be finite or null"
        bad = ~unknown & ~np.isfinite(reward)
        finding = [str(value) for value in reward[bad]]
        yield view.breaches("reward_finite", bad, "reward", finding, expected, sentence)
        scalar = np.where(unknown, np.nan, reward)
    if has_scalar and view.has("segments"):
        sums = _step_rewards(view)
        bad = _differ(sums, scalar)
        finding, wanted = ([f"{value:g}" for value in values[bad]] for values in (scalar, sums))
        sentence = "reward is {got} but the rewards of the row's steps sum to {expected}"
        yield view.breaches(rule, bad, "reward", finding, wanted, sentence)
    if view.has("rewards"):
        column = view.ragged("rewards")
        infinite = ~np.isfinite(column.values)
        yield first_elements(view, "reward_finite", "rewards", infinite, "finite numbers")
        sums = row_sums(column)
        bad = has_scalar & column.valid & (unknown | _differ(sums, scalar))
        finding = [f"{value:g}" for value in sums[bad]]
        wanted = ["null" if np.isnan(value) else f"{value:g}" for value in scalar[bad]]
        sentence = "rewards sum to {got} but reward is {expected}"
        yield view.breaches(rule, bad, "rewards", finding, wanted, sentence)


def _step_rewards(view: View) -> npt.NDArray[np.float64]:
    """[N] Sums of the rewards of merged rows' steps; NaN for other rows."""
    flat, row = pc.list_flatten(view.table.column("segments")), SegmentSpans.of(view).row
    num_rows = view.table.num_rows
    if any(flat.type.get_field_index(name) < 0 for name in (JOINED, "reward")):
        return np.full(num_rows, np.nan)
    joined = filled(pc.struct_field(flat, JOINED), value=False)
    earned = to_numpy(pc.struct_field(flat, "reward").cast(pa.float64()))
    sums = np.bincount(row, np.where(joined, earned, 0.0), num_rows)
    return np.where(np.bincount(row, joined, num_rows) > 0, sums, np.nan)


def _differ(sums: npt.NDArray[Any], rewards: npt.NDArray[Any]) -> BoolArray:
    """True where the two values are finite and differ by more than a rounding error."""
    tolerance = REWARD_TOLERANCE * np.maximum(1.0, np.abs(rewards))
    is_known = np.isfinite(sums) & np.isfinite(rewards)
    with np.errstate(invalid="ignore"):
        differs: BoolArray = is_known & (np.abs(sums - rewards) > tolerance)
    return differs


def check_segments(view: View) -> Iterator[pl.DataFrame]:
    """Check segments_in_range: segments are ordered, disjoint, non-empty and inside the response."""
    spans = SegmentSpans.of(view)
    limit = view.ragged("response_ids").lengths[spans.row]
    start, end = spans.start, spans.start + spans.length
    bad = (start < _before(spans.row, end)) | (spans.length < 1) | (end > limit)
    bad |= spans.step_index < _before(spans.row, spans.step_index)
    yield view.first_breaches(
        "segments_in_range",
        spans.row,
        bad,
        "segments",
        lambda i: f"the range {start[i]}..{end[i]} of step {spans.step_index[i]}",
        lambda i: f"ordered, disjoint ranges inside 0..{limit[i]}",
    )


def _before(row: IntArray, values: IntArray) -> IntArray:
    """[S] Value of the entry before in the same row; 0 at a row's first entry."""
    before = np.zeros_like(values)
    before[1:] = np.where(row[1:] == row[:-1], values[:-1], 0)
    return before


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
        flat = pc.list_flatten(column)
        fields = (pc.struct_field(flat, name) for name in ("start", "length", "step_index"))
        arrays = (filled(values, -1).astype(np.int64, copy=False) for values in fields)
        return cls(rows_of(list_lengths(column)), *arrays)


def check_routing(view: View) -> Iterator[pl.DataFrame]:
    """Check routing_shape: routing covers 1 to prompt + response tokens; experts are >= 0."""
    name = "rollout_expert_indices"
    prompts = view.prompt_lengths()
    if prompts is None:
        return
    column = view.table.column(name)
    lengths = list_lengths(column)
    limit = prompts + view.ragged("response_ids").lengths
    # prefix_reference has already reported negative lengths.
    bad = ~view.is_null(name) & ((lengths < 1) | (lengths > limit)) & (prompts >= 0)
    finding, expected = [f"{n}" for n in lengths[bad]], [f"1 to {n}" for n in limit[bad]]
    sentence = "{column} covers {got} tokens; it must cover {expected} (prompt + response)"
    yield view.breaches("routing_shape", bad, name, finding, expected, sentence)

    tokens = pc.list_flatten(column)
    experts = to_numpy(pc.list_flatten(pc.list_flatten(tokens)))
    if len(experts) and experts.min() < 0:
        negative = (experts < 0).reshape(len(tokens), -1).any(axis=1)
        rows = np.unique(rows_of(lengths)[negative])
        sentence = "{column} contains a negative expert index"
        yield view.breaches("routing_shape", rows, name, "an expert below 0", ">= 0", sentence)


BLOB = r"sha256:[0-9a-f]{64}"
"""Pattern of a reference to a file in `DS.blobs`."""


def check_pictures(view: View) -> Iterator[pl.DataFrame]:
    """Check picture_reference and picture_spans: digests, and tokens of the row, in order."""
    column = cast_column(view.table.column(PICTURES), PICTURES_TYPE)
    row, entries = rows_of(list_lengths(column)), pc.list_flatten(column)
    sha256, starts, lengths = (pc.struct_field(entries, n) for n in ("sha256", "start", "length"))
    bad = ~filled(pc.match_substring_regex(sha256, f"^{BLOB}$"), value=True)
    sentence = "an entry of {column} has the reference {got}; expected {expected}"
    expected = "sha256: and 64 hexadecimal digits"
    yield view.first_breaches(
        "picture_reference", row, bad, PICTURES, lambda i: sha256[i].as_py(), expected, sentence
    )
    prompts = view.prompt_lengths()
    if prompts is None or not view.has("response_ids"):
        return
    size = (prompts + view.ragged("response_ids").lengths)[row]
    has_start, has_length = to_numpy(starts.is_valid()), to_numpy(lengths.is_valid())
    at = np.flatnonzero(has_start | has_length)
    # Their sum may exceed 32 bits.
    start, length = (filled(v, n).astype(np.int64)[at] for v, n in ((starts, 0), (lengths, 1)))
    end = np.where(has_start[at], start + length, 0)
    good = has_start[at] & (length >= 1) & (end <= size[at])
    good &= start >= _before(row[at], end)
    expected = "1 or more tokens inside prompt + response, after the picture before"
    sentence = "an entry of {column} has {got}; expected {expected}"

    def finding(i: int) -> str:
        return f"start {starts[at[i]].as_py()}, length {lengths[at[i]].as_py()}"

    yield view.first_breaches(
        "picture_spans", row[at], ~good, PICTURES, finding, expected, sentence
    )


def check_redacted(view: View) -> Iterator[pl.DataFrame]:
    """Check redacted_untrained: no token that was replaced is trained on."""
    marks, mask = view.ragged("redacted"), view.ragged("loss_mask")
    row = rows_of(marks.lengths)
    inside = np.arange(len(row)) - marks.offsets[row]
    # Masks of another length are reported by lengths_align.
    trained = marks.values & (inside < mask.lengths[row])
    trained[trained] = mask.values[(mask.offsets[row] + inside)[trained]]
    sentence = "{column} is true at {got}, which loss_mask trains on; expected {expected}"
    expected = "loss_mask false at redacted tokens"
    yield view.first_breaches(
        "redacted_untrained",
        row,
        trained,
        "redacted",
        lambda i: f"token {inside[i]}",
        expected,
        sentence,
    )


def check_metrics(view: View) -> Iterator[pl.DataFrame]:
    """Check metrics_keys: each metric of a row has a value and a name that occurs once."""
    column = cast_column(view.table.column("metrics"), METRICS_TYPE)
    row, entries = rows_of(list_lengths(column)), pc.list_flatten(column)
    key, value = pc.struct_field(entries, "key"), pc.struct_field(entries, "value")
    frame = to_frame({"row": to_arrow(row), "key": key})
    repeated = ~frame.select(pl.struct("row", "key").is_first_distinct()).to_series().to_numpy()
    null = to_numpy(pc.or_(key.is_null(), value.is_null()))
    yield view.first_breaches(
        "metrics_keys",
        row,
        null | repeated,
        "metrics",
        lambda i: "a null" if null[i] else f"{key[i].as_py()!r} twice",
        "each name once, without nulls",
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
    prompt, ranges = view.ragged("prompt_token_ids"), _SampledRanges.of(view)
    first = np.flatnonzero(np.diff(ranges.row, prepend=-1))
    row, length = ranges.row[first], ranges.length[first]
    fits = (length >= MIN_ANSWER_TOKENS) & (prompt.lengths[row] >= length + 2 * HEADER_TOKENS)
    bounds, header_bytes = prompt.offsets.tolist(), HEADER_TOKENS * prompt.values.itemsize
    repeated = []
    for index, at in zip(first[fits].tolist(), row[fits].tolist(), strict=True):
        text = prompt.values[bounds[at] : bounds[at + 1]].tobytes()
        begin = _last_message(text, header_bytes)
        if begin > 0 and text.startswith(ranges.tokens(index).tobytes(), begin, -header_bytes):
            repeated += [index] * ranges.trains(index)
    repeating = list(_unexplained(ranges, repeated, first_rows(view)))
    finding = [
        f"its {ranges.length[i]} sampled tokens as the last assistant message" for i in repeating
    ]
    rows, expected = ranges.row[repeating], "a prompt that ends before its response"
    sentence = "the last assistant message of the prompt is the response itself"
    yield view.breaches("response_in_prompt", rows, "prompt_token_ids", finding, expected, sentence)


def _last_message(prompt: bytes, header_bytes: int) -> int:
    """Return the index at which the last message with the header of the answer begins, 0 if none does."""
    header = prompt[-header_bytes:]
    at = prompt.rfind(header, 0, -header_bytes)
    while at > 0 and at % (header_bytes // HEADER_TOKENS):  # across the bounds of tokens
        at = prompt.rfind(header, 0, at + header_bytes - 1)
    return 0 if at < 0 else at + header_bytes


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

    def trains(self, index: int) -> bool:
        """True if a token of the range is trained on; false if the mask has the wrong length."""
        row = self.row[index]
        mask, start = self.mask.row(row), self.start[index] - self.response.offsets[row]
        is_aligned = len(mask) == len(self.response.row(row))
        return bool(is_aligned and mask[start : start + self.length[index]].any())


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

ROW_CHECKS: tuple[tuple[RowCheck, tuple[str, ...]], ...] = (
    (check_nonempty, ()),
    (check_lengths_align, ("response_ids",)),
    (check_logprobs, ()),
    (check_versions, ("policy_versions",)),
    (check_support, (SUPPORT, "response_ids")),
    (check_teacher, ()),
    (check_rewards, ()),
    (check_segments, ("segments", "response_ids")),
    (check_routing, ("rollout_expert_indices", "response_ids")),
    (check_metrics, ("metrics",)),
    (check_pictures, (PICTURES,)),
    (check_redacted, ("redacted", "loss_mask")),
    (check_prompts, ("prompt_token_ids", "response_ids", "loss_mask", "trajectory_id")),
)
"""The checks, each with the columns without which it is left out."""


def row_sums(column: Ragged) -> npt.NDArray[np.float64]:
    """Return the sum of each row, [N]; 0 for an empty row."""
    sums = np.zeros(len(column.lengths), np.float64)
    filled = np.flatnonzero(column.lengths)
    # reduceat returns the next row's first element for an empty row: skip empty rows.
    if len(filled):
        sums[filled] = np.add.reduceat(column.values, column.offsets[filled])
    return sums
