"""Checks of columns by token: ids, log-probabilities, versions, and sets of ids with their probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from schemas.columns import LOGPROB_SENTINEL
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import BoolArray, IntArray, list_lengths, offsets_of, rows_of
from schemas.view import View

SUPPORT = "sampling_support"
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_token_ids", "teacher_logprobs"


def check_logprobs(view: View) -> None:
    """Check logprobs_finite and logprobs_nonpositive."""
    for name in filter(view.has, ("rollout_logprobs", "trainer_logprobs")):
        values = view.ragged(name).values
        # Fast path without temporary arrays for valid values; NaN makes the comparison false.
        if len(values) == 0 or LOGPROB_SENTINEL < values.min() <= values.max() <= 0.0:
            continue
        with np.errstate(invalid="ignore"):
            bad = ~np.isfinite(values) | (values <= LOGPROB_SENTINEL)
            positive = (values > 0) & ~bad
        report_elements(view, "logprobs_finite", name, bad)
        report_elements(view, "logprobs_nonpositive", name, positive)


def check_versions(view: View) -> None:
    """Check versions_of_tokens: versions are >= 0, and the oldest is the row's `policy_version`."""
    name = "policy_versions"
    column = view.ragged(name)
    values, row = column.values, rows_of(column.lengths)
    report_elements(view, "versions_of_tokens.negative", name, values < 0)
    oldest = filled(view.column("policy_version"), -1).astype(np.int64)

    def some(is_so: BoolArray) -> BoolArray:
        return np.bincount(row, is_so, len(oldest)) > 0

    # A version of 0 may also mean that the token was not sampled.
    is_known = ~view.is_null("policy_version") & some(values > 0)
    older = some((values > 0) & (values < oldest[row]))
    bad = is_known & (~some(values == oldest[row]) | older)

    def versions(i: int) -> str:
        return str(np.unique(column.row(i)).tolist())

    view.report("versions_of_tokens", name, bad, versions=versions, oldest=oldest)


def check_token_range(view: View) -> None:
    """Check token_range: ids are >= 0, and below the size of the vocabulary if it is known."""
    size = view.vocab_size
    top = np.iinfo(np.int32).max if size is None else size - 1
    allowed = "ids >= 0" if size is None else f"ids in 0..{top}"
    for name in filter(view.has, ("prompt_token_ids", "prompt_suffix_ids", "response_ids")):
        ids = view.ragged(name).values
        if len(ids) and (ids.min() < 0 or ids.max() > top):
            bad = (ids < 0) | (ids > top)
            report_elements(view, "token_range", name, bad, ids=lambda _: allowed)
    for name in filter(view.has, (SUPPORT, TEACHER_IDS)):
        sets = _Sets.of(view, name)
        bad = (sets.ids < 0) | (sets.ids > top)
        texts = {"element": lambda _: "an id out of range", "ids": lambda _: allowed}
        view.report("token_range", name, bad, sets.row, **texts)


def report_elements(view: View, finding: str, name: str, bad: BoolArray, **values: Any) -> None:
    """Report the first invalid element of each row, and the number of further ones."""
    column, at = view.ragged(name), np.flatnonzero(bad)
    row = column.row_of(at)

    def element(i: int) -> str:
        num_more = np.searchsorted(row, row[i], side="right") - i - 1
        more = f" (and {num_more} more)" if num_more else ""
        return f"{column.values[at[i]]} at index {at[i] - column.offsets[row[i]]}{more}"

    view.report(finding, name, np.arange(len(at)), row, element=element, **values)


@dataclass(frozen=True, slots=True)
class _Sets:
    """The elements of all sets of a column, concatenated, as [S] arrays.

    Attributes:
        ids: The ids, or their log-probabilities.
        token: Index of each id's token, over the tokens of all sets.
        row: Row of each id.
        position: Index of each id's token in its row.
    """

    ids: npt.NDArray[Any]
    token: IntArray
    row: IntArray
    position: IntArray

    @classmethod
    def of(cls, view: View, name: str) -> _Sets:
        """Unpack a column of a table."""
        rows, sets = view.entries(name)
        token = rows_of(list_lengths(sets))
        row = rows[token]
        position = token - offsets_of(list_lengths(view.column(name)))[row]
        return cls(to_numpy(pc.list_flatten(sets)), token, row, position)

    def repeats(self) -> BoolArray:
        """[S] True where a set has the same id again."""
        order = np.lexsort((self.ids, self.token))
        is_repeated = np.zeros(len(order), np.bool_)
        is_repeated[order[1:]] = (np.diff(self.ids[order]) == 0) & (np.diff(self.token[order]) == 0)
        return is_repeated


def check_support(view: View) -> None:
    """Check support_has_token: a set contains the sampled token, and no id twice."""
    sets, responses = _Sets.of(view, SUPPORT), view.ragged("response_ids")
    inside = sets.position < responses.lengths[sets.row]  # else lengths_align reports it
    at = np.where(inside, responses.offsets[sets.row] + sets.position, 0)
    is_sampled = inside & (sets.ids == responses.values[at]) if len(at) else inside
    lacks = inside & ~(np.bincount(sets.token, is_sampled) > 0)[sets.token]
    view.report("support_has_token", SUPPORT, lacks, sets.row, position=sets.position)
    repeated = sets.repeats()
    view.report("support_has_token.twice", SUPPORT, repeated, sets.row, position=sets.position)


def check_teacher(view: View) -> None:
    """Check teacher_shape: ids and log-probabilities of a teacher belong together."""
    sets = {n: _Sets.of(view, n) for n in (TEACHER_IDS, TEACHER_LOGPROBS) if view.has(n)}
    if not sets:
        return
    ids, values, rows = sets.get(TEACHER_IDS), sets.get(TEACHER_LOGPROBS), list[IntArray]()
    if ids is not None:
        rows.append(ids.row[ids.repeats()])
    if values is not None:
        rows.append(values.row[~(np.isfinite(values.ids) & (values.ids <= 0))])
    # A token's ids and values have the same place in both columns; all others are of one only.
    both = [(one.row, one.position) for one in sets.values()]
    size = min(len(row) for row, _ in both) if len(both) == 2 else 0
    differs = np.any([a[:size] != b[:size] for a, b in zip(both[0], both[-1], strict=True)], axis=0)
    rows += [both[0][0][:size][differs], *(row[size:] for row, _ in both)]
    row = np.concatenate(rows)
    view.report("teacher_shape", next(iter(sets)), np.arange(len(row)), row)
