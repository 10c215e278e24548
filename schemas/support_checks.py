"""Checks of columns with a set of ids per token: the sampler's, and a teacher's most likely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.compute as pc

from schemas.numpy_arrays import to_numpy
from schemas.ragged import BoolArray, IntArray, list_lengths, offsets_of
from schemas.view import View

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
    finding = ["ids and log-probabilities that do not belong together"] * len(rows)
    expected = "one finite log-probability of at most 0 per id, no id twice"
    sentence = f"{TEACHER_IDS} and {TEACHER_LOGPROBS} have {{got}}; expected {{expected}}"
    yield view.breaches("teacher_shape", rows, names[0], finding, expected, sentence)


def check_set_range(view: View, top: int, expected: str) -> Iterator[pl.DataFrame]:
    """Check token_range: the ids of the sets are in 0..top."""
    for name in (SUPPORT, TEACHER_IDS):
        if view.has(name):
            sets = _Sets.of(view, name)
            rows = np.unique(sets.row[(sets.ids < 0) | (sets.ids > top)])
            finding = ["an id out of range"] * len(rows)
            sentence = "{column} contains {got}; expected {expected}"
            yield view.breaches("token_range", rows, name, finding, expected, sentence)
