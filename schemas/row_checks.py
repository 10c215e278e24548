"""Checks of single rows, vectorised over the flat arrays of a table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import (
    COLUMNS,
    JOINED,
    METRICS_TYPE,
    PICTURES,
    PICTURES_TYPE,
    SEGMENT_FIELDS,
    Length,
)
from schemas.numpy_arrays import filled, to_arrow, to_frame, to_numpy
from schemas.ragged import (
    BoolArray,
    FloatArray,
    IntArray,
    Ragged,
    list_lengths,
    offsets_of,
    rows_of,
)
from schemas.structure_checks import check_prefix, first_rows
from schemas.token_checks import (
    check_logprobs,
    check_support,
    check_teacher,
    check_token_range,
    check_versions,
    report_elements,
)
from schemas.view import View

# A prompt's last two tokens identify the assistant header ("<|im_start|>assistant\n").
HEADER_TOKENS = 2
# Shorter responses ("OK") can recur in a conversation by chance.
MIN_ANSWER_TOKENS = 16
# Tolerance for float64 rounding of reward sums: relative for rewards above 1, otherwise absolute.
REWARD_TOLERANCE = 1e-6

ALIGNED_COLUMNS = tuple(c.name for c in COLUMNS if c.length is Length.RESPONSE)


def check_nonempty(rule: str, name: str, view: View) -> None:
    """Check nonempty_prompt or nonempty_response on rows whose `error` is null."""
    view.report(rule, name, (view.lengths(name) == 0) & view.is_null("error"))


def check_lengths_align(view: View) -> None:
    """Check lengths_align: every per-token column has one element per response token."""
    size = view.lengths("response_ids")
    for name in filter(view.has, ALIGNED_COLUMNS):
        num = list_lengths(view.column(name))
        bad = ~view.is_null(name) & (num != size)
        view.report("lengths_align", name, bad, num=num, size=size)


def check_reward(view: View) -> None:
    """Check reward_finite, and reward_matches_rewards for the steps of merged rows."""
    reward, name = view.array("reward"), "reward"
    bad = ~view.is_null(name) & ~np.isfinite(reward)
    view.report("reward_finite", name, bad, reward=reward)
    sums = _step_rewards(view)
    view.report(
        "reward_matches_rewards.steps", name, _differ(sums, reward), reward=reward, sum=sums
    )


def check_rewards(view: View) -> None:
    """Check reward_finite and reward_matches_rewards for the rewards of tokens."""
    column = view.ragged("rewards")
    report_elements(view, "reward_finite.token", "rewards", ~np.isfinite(column.values))
    reward, unknown = view.array("reward"), view.is_null("reward")
    sums = np.bincount(rows_of(column.lengths), column.values, len(reward))

    def known(row: int) -> str:
        return "null" if unknown[row] else f"{reward[row]:g}"

    bad = column.valid & (unknown | _differ(sums, reward))
    view.report("reward_matches_rewards", "rewards", bad, sum=sums, reward=known)


def _step_rewards(view: View) -> FloatArray:
    """[N] Sums of the rewards of merged rows' steps; NaN for other rows."""
    row, steps = view.entries("segments")
    num_rows = view.table.num_rows
    if any(steps.type.get_field_index(name) < 0 for name in (JOINED, "reward")):
        return np.full(num_rows, np.nan)
    joined = filled(pc.struct_field(steps, JOINED), value=False)
    earned = to_numpy(pc.struct_field(steps, "reward").cast(pa.float64()))
    sums = np.bincount(row, np.where(joined, earned, 0.0), num_rows)
    return np.where(np.bincount(row, joined, num_rows) > 0, sums, np.nan)


def _differ(sums: npt.NDArray[Any], rewards: FloatArray) -> BoolArray:
    """True where the two values are finite and differ by more than a rounding error."""
    tolerance = REWARD_TOLERANCE * np.maximum(1.0, np.abs(rewards))
    is_known = np.isfinite(sums) & np.isfinite(rewards)
    with np.errstate(invalid="ignore"):
        differs: BoolArray = is_known & (np.abs(sums - rewards) > tolerance)
    return differs


def check_segments(view: View) -> None:
    """Check segments_in_range: segments are ordered, disjoint, non-empty and inside the response."""
    row, start, length, step = _segments(view)
    limit, end = view.lengths("response_ids")[row], start + length
    bad = (start < _before(row, end)) | (length < 1) | (end > limit) | (step < _before(row, step))
    values = {"start": start, "end": end, "step": step, "limit": limit}
    view.report("segments_in_range", "segments", bad, row, **values)


def _segments(view: View) -> list[IntArray]:
    """Return row, start, length and step_index of all segments, [S] each; nulls become -1."""
    row, entries = view.entries("segments")
    fields = (pc.struct_field(entries, field.name) for field in SEGMENT_FIELDS)
    return [row, *(filled(values, -1).astype(np.int64, copy=False) for values in fields)]


def _before(row: IntArray, values: IntArray) -> IntArray:
    """[S] Value of the entry before in the same row; 0 at a row's first entry."""
    before = np.zeros_like(values)
    before[1:] = np.where(row[1:] == row[:-1], values[:-1], 0)
    return before


def check_routing(view: View) -> None:
    """Check routing_shape: routing covers 1 to prompt + response tokens; experts are >= 0."""
    name = "rollout_expert_indices"
    prompts, (row, tokens) = view.lengths("prompt_token_ids"), view.entries(name)
    limit, num = prompts + view.lengths("response_ids"), list_lengths(view.column(name))
    # prefix_reference has already reported negative lengths.
    bad = ~view.is_null(name) & ((num < 1) | (num > limit)) & (prompts >= 0)
    view.report("routing_shape", name, bad, num=num, limit=limit)
    experts = to_numpy(pc.list_flatten(pc.list_flatten(tokens)))
    if len(experts) and experts.min() < 0:
        negative = np.any(experts.reshape(len(tokens), -1) < 0, axis=1)
        view.report("routing_shape.negative", name, negative, row)


BLOB = r"sha256:[0-9a-f]{64}"
"""Pattern of a reference to a file in `DS.blobs`."""


def check_pictures(view: View) -> None:
    """Check picture_reference and picture_spans: digests, and tokens of the row, in order."""
    row, entries = view.entries(PICTURES, PICTURES_TYPE)
    sha256, starts, lengths = (pc.struct_field(entries, n) for n in ("sha256", "start", "length"))
    bad = ~filled(pc.match_substring_regex(sha256, f"^{BLOB}$"), value=True)
    view.report("picture_reference", PICTURES, bad, row, sha256=sha256)
    size = (view.lengths("prompt_token_ids") + view.lengths("response_ids"))[row]
    has_start, has_length = to_numpy(starts.is_valid()), to_numpy(lengths.is_valid())
    at = np.flatnonzero(has_start | has_length)
    # Their sum may exceed 32 bits.
    start, length = (filled(v, n).astype(np.int64)[at] for v, n in ((starts, 0), (lengths, 1)))
    end = np.where(has_start[at], start + length, 0)
    good = has_start[at] & (length >= 1) & (end <= size[at]) & (start >= _before(row[at], end))
    view.report("picture_spans", PICTURES, at[~good], row, start=starts, length=lengths)


def check_redacted(view: View) -> None:
    """Check redacted_untrained: no token that was replaced is trained on."""
    marks, mask = view.ragged("redacted"), view.ragged("loss_mask")
    row = rows_of(marks.lengths)
    index = np.arange(len(row)) - marks.offsets[row]
    # Masks of another length are reported by lengths_align.
    trained = marks.values & (index < mask.lengths[row])
    trained[trained] = mask.values[(mask.offsets[row] + index)[trained]]
    view.report("redacted_untrained", "redacted", trained, row, index=index)


def check_metrics(view: View) -> None:
    """Check metrics_keys: each metric of a row has a value and a name that occurs once."""
    row, entries = view.entries("metrics", METRICS_TYPE)
    key, value = pc.struct_field(entries, "key"), pc.struct_field(entries, "value")
    frame = to_frame({"row": to_arrow(row), "key": key})
    repeated = ~frame.select(pl.struct("row", "key").is_first_distinct()).to_series().to_numpy()
    null = to_numpy(pc.or_(key.is_null(), value.is_null()))

    def entry(i: int) -> str:
        return "a null" if null[i] else f"{key[i].as_py()!r} twice"

    view.report("metrics_keys", "metrics", null | repeated, row, entry=entry)


def check_prompts(view: View) -> None:
    """Check response_in_prompt: no row's answer is the last assistant message of its own prompt.

    The answer is the row's first sampled range. A prompt ends with the header of the answer, and
    the last two tokens of the prompt identify this header. The last assistant message of the prompt
    therefore begins after the last earlier occurrence of these two tokens. A row breaks the rule if
    its answer is trained on, has at least `MIN_ANSWER_TOKENS` tokens, and occurs at the start of
    that message. A row is exempt if an earlier row of its trajectory sampled the same answer,
    because the model then repeated itself.
    """
    names = ("prompt_token_ids", "response_ids", "loss_mask")
    prompts, responses, masks = (view.ragged(name) for name in names)
    trajectory, (row, start, length) = first_rows(view), _sampled_ranges(view)

    def answer(index: int) -> IntArray:
        tokens: IntArray = responses.values[start[index] : start[index] + length[index]]
        return tokens

    def repeats(index: int) -> bool:
        mask, begin = masks.row(row[index]), start[index] - responses.offsets[row[index]]
        is_aligned = len(mask) == responses.lengths[row[index]]
        trains = is_aligned and mask[begin : begin + length[index]].any()
        return bool(trains) and _ends_with_message(prompts.row(row[index]), answer(index))

    long = length >= MIN_ANSWER_TOKENS
    long &= prompts.lengths[row] >= length + 2 * HEADER_TOKENS
    first = np.flatnonzero(long & (np.diff(row, prepend=-1) > 0))
    first = first[_begin_in_prompt(prompts, responses, row[first], start[first])]
    repeating = [index for index in first.tolist() if repeats(index)]
    earliest: dict[tuple[int, bytes], int] = {}
    of = trajectory[row]
    for index in np.flatnonzero(np.isin(of, of[repeating])).tolist():
        earliest.setdefault((of[index], answer(index).tobytes()), index)
    bad = np.intersect1d(repeating, list(earliest.values())).astype(np.int64)
    view.report("response_in_prompt", "prompt_token_ids", bad, row, num=length)


def _sampled_ranges(view: View) -> tuple[IntArray, IntArray, IntArray]:
    """Return the row, the start in the flat response and the length of each sampled range, by row.

    A row without segments has one range, its entire response. Ranges outside a response are left out.
    """
    response = view.ragged("response_ids")
    length = response.lengths
    row, start = np.arange(len(length)), np.zeros(len(length), np.int64)
    if view.has("segments"):
        spans = _segments(view)
        whole = np.setdiff1d(row, spans[0])
        ranges = zip((row, start, length), spans, strict=False)
        row, start, length = (np.concatenate([old[whole], new]) for old, new in ranges)
        order = np.argsort(row, kind="stable")
        row, start, length = row[order], start[order], length[order]
    inside = (start >= 0) & (length > 0) & (start + length <= response.lengths[row])
    return row[inside], (start + response.offsets[row])[inside], length[inside]


def _begin_in_prompt(
    prompts: Ragged, responses: Ragged, rows: IntArray, starts: IntArray
) -> BoolArray:
    """True for rows whose prompt repeats its last header, followed by the first tokens of the answer.

    Few rows do. The search is by bytes, so that a match may be at no token.
    """
    header = prompts.values[prompts.offsets[rows + 1, None] + np.arange(-HEADER_TOKENS, 0)]
    begin = responses.values[starts[:, None] + np.arange(MIN_ANSWER_TOKENS)]
    is_searched = np.isin(np.arange(len(prompts.valid)), rows)
    offsets = offsets_of(is_searched * (HEADER_TOKENS + MIN_ANSWER_TOKENS))
    wanted = Ragged(np.concatenate([header, begin], 1).ravel(), offsets, is_searched)
    texts, parts = (pl.Series(column.as_bytes()) for column in (prompts, wanted))
    return filled(texts.bin.contains(parts).to_arrow(), value=False)[rows]


def _ends_with_message(prompt: IntArray, answer: IntArray) -> bool:
    """True if the last message before the header of the answer begins with the answer."""
    prompt, header = prompt[:-HEADER_TOKENS], prompt[-HEADER_TOKENS:]
    windows = np.lib.stride_tricks.sliding_window_view(prompt, HEADER_TOKENS)
    headers = np.flatnonzero((windows == header).all(axis=1))
    begin = headers[-1] + HEADER_TOKENS if len(headers) else len(prompt)
    return np.array_equal(prompt[begin : begin + len(answer)], answer)


ROW_CHECKS: tuple[Callable[[View], None], ...] = (
    partial(check_nonempty, "nonempty_prompt", "prompt_token_ids"),
    partial(check_nonempty, "nonempty_response", "response_ids"),
    check_lengths_align,
    check_logprobs,
    check_versions,
    check_support,
    check_teacher,
    check_reward,
    check_rewards,
    check_segments,
    check_routing,
    check_metrics,
    check_pictures,
    check_redacted,
    check_prompts,
    check_token_range,
    check_prefix,
)
"""The checks in the order of their breaches."""
