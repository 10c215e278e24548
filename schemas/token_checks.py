"""Checks of columns by token: log-probabilities, versions, and sets of ids with their probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.compute as pc

from schemas.columns import LOGPROB_SENTINEL
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import BoolArray, IntArray, list_lengths, offsets_of, rows_of
from schemas.view import CONTAINS, View


def check_logprobs(view: View) -> Iterator[pl.DataFrame]:
    """Check logprobs_finite and logprobs_nonpositive."""
    for name in filter(view.has, ("rollout_logprobs", "trainer_logprobs")):
        values = view.ragged(name).values
        # Fast path without temporary arrays for valid values; NaN makes the comparison false.
        if len(values) == 0 or LOGPROB_SENTINEL < values.min() <= values.max() <= 0.0:
            continue
        with np.errstate(invalid="ignore"):
            bad = ~np.isfinite(values) | (values <= LOGPROB_SENTINEL)
            positive = (values > 0) & ~bad
        yield first_elements(view, "logprobs_finite", name, bad, "finite values above -9999")
        yield first_elements(view, "logprobs_nonpositive", name, positive, "values <= 0")


def check_versions(view: View) -> Iterator[pl.DataFrame]:
    """Check versions_of_tokens: versions are >= 0, and the oldest is the row's `policy_version`."""
    rule, name = "versions_of_tokens", "policy_versions"
    column = view.ragged(name)
    values, lengths = column.values, column.lengths
    yield first_elements(view, rule, name, values < 0, "versions >= 0")
    if not view.has("policy_version"):
        return
    oldest = filled(view.table.column("policy_version"), -1).astype(np.int64)
    row = rows_of(lengths)

    def some(is_so: BoolArray) -> BoolArray:
        return np.bincount(row, is_so, len(lengths)) > 0

    # A version of 0 may also mean that the token was not sampled.
    is_known = ~view.is_null("policy_version") & some(values > 0)
    older = some((values > 0) & (values < oldest[row]))
    bad = is_known & (~some(values == oldest[row]) | older)
    finding = [str(np.unique(column.row(int(r))).tolist()) for r in np.flatnonzero(bad)]
    sentence = "{column} are {got}, but policy_version, the oldest, is {expected}"
    yield view.breaches(rule, bad, name, finding, list(oldest[bad].astype(str)), sentence)


def first_elements(view: View, rule: str, name: str, bad: BoolArray, expected: str) -> pl.DataFrame:
    """Report one breach per row: the first invalid element, and the number of further ones."""
    column = view.ragged(name)
    at = np.flatnonzero(bad)
    rows, first, counts = np.unique(column.row_of(at), return_index=True, return_counts=True)
    finding = [
        f"{column.values[i]} at index {i - column.offsets[row]}"
        + (f" (and {count - 1} more)" if count > 1 else "")
        for row, i, count in zip(rows, at[first], counts, strict=True)
    ]
    return view.breaches(rule, rows, name, finding, expected, CONTAINS)


SUPPORT = "sampling_support"
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_token_ids", "teacher_logprobs"


@dataclass(frozen=True, slots=True)
class _Sets:
    """The elements of all sets of a column, concatenated, as [S] arrays.

    Attributes:
        ids: The ids, or their log-probabilities.
        token: Index of each id's token, over the tokens of all sets.
        row: Row of each id.
        position: Index of each id's token in its row.
        num_tokens: Number of sets, empty ones included.
    """

    ids: npt.NDArray[Any]
    token: IntArray
    row: IntArray
    position: IntArray
    num_tokens: int

    @classmethod
    def of(cls, view: View, name: str = SUPPORT) -> _Sets:
        """Unpack a column of a table."""
        column = view.table.column(name)
        sets, num_sets = pc.list_flatten(column), list_lengths(column)
        token = rows_of(list_lengths(sets))
        row = rows_of(num_sets)[token]
        position = token - offsets_of(num_sets)[row]
        return cls(to_numpy(pc.list_flatten(sets)), token, row, position, len(sets))

    def repeats(self) -> BoolArray:
        """[S] True where a set has the same id again."""
        order = np.lexsort((self.ids, self.token))
        is_repeated = np.zeros(len(order), np.bool_)
        is_repeated[order[1:]] = (np.diff(self.ids[order]) == 0) & (np.diff(self.token[order]) == 0)
        return is_repeated


def check_support(view: View) -> Iterator[pl.DataFrame]:
    """Check support_has_token: a set contains the sampled token, and no id twice."""
    sets, responses = _Sets.of(view), view.ragged("response_ids")
    inside = sets.position < responses.lengths[sets.row]  # else lengths_align reports it
    at = np.where(inside, responses.offsets[sets.row] + sets.position, 0)
    is_sampled = inside & (sets.ids == responses.values[at]) if len(at) else inside
    lacks = inside & ~(np.bincount(sets.token, is_sampled, sets.num_tokens) > 0)[sets.token]
    sentence = "at token {got}, {column} {expected}"
    for bad, expected in ((lacks, "lacks the sampled id"), (sets.repeats(), "has an id twice")):
        yield view.first_breaches(
            "support_has_token",
            sets.row,
            bad,
            SUPPORT,
            lambda i: str(sets.position[i]),
            expected,
            sentence,
        )


def check_teacher(view: View) -> Iterator[pl.DataFrame]:
    """Check teacher_shape: ids and log-probabilities of a teacher belong together."""
    names = list(filter(view.has, (TEACHER_IDS, TEACHER_LOGPROBS)))
    if not names:
        return
    sets = {name: _Sets.of(view, name) for name in names}
    bad: list[IntArray] = []
    if TEACHER_IDS in sets:
        bad.append(sets[TEACHER_IDS].row[sets[TEACHER_IDS].repeats()])
    if TEACHER_LOGPROBS in sets:
        values = sets[TEACHER_LOGPROBS]
        bad.append(values.row[~(np.isfinite(values.ids) & (values.ids <= 0))])
    # Ranges of equal elements: a token's ids and values have the same place in both.
    places = [np.stack([one.row, one.position]) for one in sets.values()]
    size = min(place.shape[1] for place in places) if len(names) == 2 else 0
    differs = (places[0][:, :size] != places[-1][:, :size]).any(axis=0)
    bad += [places[0][0, :size][differs], *(place[0, size:] for place in places)]
    finding = "ids and log-probabilities that do not belong together"
    expected = "one finite log-probability of at most 0 per id, no id twice"
    sentence = f"{TEACHER_IDS} and {TEACHER_LOGPROBS} have {{got}}; expected {{expected}}"
    rows = np.unique(np.concatenate(bad))
    yield view.breaches("teacher_shape", rows, names[0], finding, expected, sentence)


def check_set_range(view: View, top: int, expected: str) -> Iterator[pl.DataFrame]:
    """Check token_range: the ids of the sets are in 0..top."""
    for name in filter(view.has, (SUPPORT, TEACHER_IDS)):
        sets = _Sets.of(view, name)
        rows = np.unique(sets.row[(sets.ids < 0) | (sets.ids > top)])
        yield view.breaches("token_range", rows, name, "an id out of range", expected, CONTAINS)
