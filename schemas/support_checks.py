"""Checks of `sampling_support`: the set of ids that could have been drawn at each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.compute as pc

from schemas.numpy_arrays import to_numpy
from schemas.ragged import IntArray, list_lengths, offsets_of
from schemas.view import View

SUPPORT = "sampling_support"


@dataclass(frozen=True, slots=True)
class _Sets:
    """The ids of all sets of `sampling_support`, concatenated, as [S] arrays.

    Attributes:
        ids: The ids.
        token: Index of each id's token, over the tokens of all sets.
        row: Row of each id.
        position: Index of each id's token in its row.
        num_tokens: Number of sets, empty ones included.
    """

    ids: npt.NDArray[np.int32]
    token: IntArray
    row: IntArray
    position: IntArray
    num_tokens: int

    @classmethod
    def of(cls, view: View) -> _Sets:
        """Unpack the column of a table."""
        column = view.table.column(SUPPORT)
        sets, num_sets = pc.list_flatten(column), list_lengths(column)
        token = np.repeat(np.arange(len(sets)), list_lengths(sets))
        row = np.repeat(np.arange(len(num_sets)), num_sets)[token]
        position = token - offsets_of(num_sets)[row]
        return cls(to_numpy(pc.list_flatten(sets)), token, row, position, len(sets))


def check_support(view: View) -> Iterator[pl.DataFrame]:
    """Check support_has_token: a set contains the sampled token, and no id twice."""
    if not view.has(SUPPORT, "response_ids"):
        return
    sets, responses = _Sets.of(view), view.ragged("response_ids")
    inside = sets.position < responses.lengths[sets.row]  # else lengths_align reports it
    at = np.where(inside, responses.offsets[sets.row] + sets.position, 0)
    is_sampled = inside & (sets.ids == responses.values[at]) if len(at) else inside
    has_token = np.bincount(sets.token, is_sampled, sets.num_tokens) > 0
    order = np.lexsort((sets.ids, sets.token))
    ids, token = sets.ids[order], sets.token[order]
    again = np.zeros(len(ids), np.bool_)
    again[order[1:]] = (np.diff(ids) == 0) & (np.diff(token) == 0)
    lacks = inside & ~has_token[sets.token]
    sentence = "at token {got}, {column} {expected}"
    for bad, expected in ((lacks, "lacks the sampled id"), (again, "has an id twice")):
        rows, first = np.unique(sets.row[bad], return_index=True)
        got = [str(number) for number in sets.position[bad][first]]
        yield view.breaches("support_has_token", rows, SUPPORT, got, expected, sentence)


def check_set_range(view: View, top: int, expected: str) -> Iterator[pl.DataFrame]:
    """Check token_range: the ids of the sets are in 0..top."""
    if view.has(SUPPORT):
        sets = _Sets.of(view)
        rows = np.unique(sets.row[(sets.ids < 0) | (sets.ids > top)])
        got = ["an id out of range"] * len(rows)
        sentence = "{column} contains {got}; expected {expected}"
        yield view.breaches("token_range", rows, SUPPORT, got, expected, sentence)
