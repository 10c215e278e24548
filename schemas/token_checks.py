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
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, offsets_of
from schemas.view import View


def check_logprobs(view: View) -> Iterator[pl.DataFrame]:
    """Check logprobs_finite and logprobs_nonpositive."""
    for name in ("rollout_logprobs", "trainer_logprobs"):
        if not view.has(name):
            continue
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
    if not view.has(name):
        return
    column = view.ragged(name)
    values, lengths = column.values, column.lengths
    yield first_elements(view, rule, name, values < 0, "versions >= 0")
    if not view.has("policy_version"):
        return
    oldest = filled(view.table.column("policy_version"), -1).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    # A version of 0 may also mean that the token was not sampled.
    older = (values > 0) & (values < oldest[row])
    has_oldest = np.bincount(row, values == oldest[row], len(lengths)) > 0
    is_known = ~view.is_null("policy_version") & (np.bincount(row, values > 0, len(lengths)) > 0)
    differs = is_known & (~has_oldest | (np.bincount(row, older, len(lengths)) > 0))
    rows = np.flatnonzero(differs)
    finding = [str(np.unique(column.row(int(r))).tolist()) for r in rows]
    sentence = "{column} are {got}, but policy_version, the oldest, is {expected}"
    yield view.breaches(rule, rows, name, finding, list(oldest[rows].astype(str)), sentence)


def first_elements(view: View, rule: str, name: str, bad: BoolArray, expected: str) -> pl.DataFrame:
    """Report one breach per row: the first invalid element, and the number of further ones."""
    column: Ragged = view.ragged(name)
    positions = np.flatnonzero(bad)
    rows, first, counts = np.unique(column.row_of(positions), return_index=True, return_counts=True)
    finding = [
        _element(column, int(positions[i]), int(row), int(count))
        for row, i, count in zip(rows, first, counts, strict=True)
    ]
    sentence = "{column} contains {got}; expected {expected}"
    return view.breaches(rule, rows, name, finding, expected, sentence)


def _element(column: Ragged, position: int, row: int, count: int) -> str:
    value: Any = column.values[position]
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{value} at index {position - column.offsets[row]}{more}"


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
        token = np.repeat(np.arange(len(sets)), list_lengths(sets))
        row = np.repeat(np.arange(len(num_sets)), num_sets)[token]
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
    if not view.has(SUPPORT, "response_ids"):
        return
    sets, responses = _Sets.of(view), view.ragged("response_ids")
    inside = sets.position < responses.lengths[sets.row]  # else lengths_align reports it
    at = np.where(inside, responses.offsets[sets.row] + sets.position, 0)
    is_sampled = inside & (sets.ids == responses.values[at]) if len(at) else inside
    has_token = np.bincount(sets.token, is_sampled, sets.num_tokens) > 0
    again = sets.repeats()
    lacks = inside & ~has_token[sets.token]
    sentence = "at token {got}, {column} {expected}"
    for bad, expected in ((lacks, "lacks the sampled id"), (again, "has an id twice")):
        rows, first = np.unique(sets.row[bad], return_index=True)
        finding = [str(number) for number in sets.position[bad][first]]
        yield view.breaches("support_has_token", rows, SUPPORT, finding, expected, sentence)


def check_teacher(view: View) -> Iterator[pl.DataFrame]:
    """Check teacher_shape: ids and log-probabilities of a teacher belong together."""
    names = [name for name in (TEACHER_IDS, TEACHER_LOGPROBS) if view.has(name)]
    if not names:
        return
    sets = {name: _Sets.of(view, name) for name in names}
    bad: list[IntArray] = []
    if TEACHER_IDS in sets:
        bad.append(sets[TEACHER_IDS].row[sets[TEACHER_IDS].repeats()])
    if TEACHER_LOGPROBS in sets:
        values = sets[TEACHER_LOGPROBS]
        bad.append(values.row[~(np.isfinite(values.ids) & (values.ids <= 0))])
    if len(names) == 1:
        bad.append(sets[names[0]].row)
    else:
        ids, values = (sets[name] for name in names)
        # Ranges of equal elements: a token's ids and values have the same place in both.
        size = min(len(ids.token), len(values.token))
        differs = (ids.row[:size] != values.row[:size]) | (
            ids.position[:size] != values.position[:size]
        )
        bad += [ids.row[:size][differs], ids.row[size:], values.row[size:]]
    rows = np.unique(np.concatenate(bad))
    finding = "ids and log-probabilities that do not belong together"
    expected = "one finite log-probability of at most 0 per id, no id twice"
    sentence = f"{TEACHER_IDS} and {TEACHER_LOGPROBS} have {{got}}; expected {{expected}}"
    yield view.breaches("teacher_shape", rows, names[0], finding, expected, sentence)


def check_set_range(view: View, top: int, expected: str) -> Iterator[pl.DataFrame]:
    """Check token_range: the ids of the sets are in 0..top."""
    for name in (SUPPORT, TEACHER_IDS):
        if view.has(name):
            sets = _Sets.of(view, name)
            rows = np.unique(sets.row[(sets.ids < 0) | (sets.ids > top)])
            sentence = "{column} contains {got}; expected {expected}"
            yield view.breaches("token_range", rows, name, "an id out of range", expected, sentence)
