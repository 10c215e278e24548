"""Access to a table for the checks: columns as flat arrays, and breaches as a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged
from schemas.rules import RULES

BREACH_SCHEMA: dict[str, Any] = {
    "rule": pl.String,
    "severity": pl.String,
    "row": pl.Int64,
    "trajectory_id": pl.String,
    "step_index": pl.Int64,
    "column": pl.String,
    "got": pl.String,
    "expected": pl.String,
    "message": pl.String,
}
"""Columns of a frame of breaches: rule, location (`row` is null if the breach concerns the entire
table), found value, expected value and message."""

CONTAINS = "{column} contains {got}; expected {expected}"

_NONE = pl.DataFrame(schema=BREACH_SCHEMA)


@dataclass(slots=True)
class View:
    """Columns of one table, unpacked on demand.

    Attributes:
        table: The table, with `prompt_token_ids` or the prefix columns.
        row_offset: Number of rows of the dataset before this table.
        unusable: Columns that are missing, have the wrong type, or contain forbidden nulls.
    """

    table: pa.Table
    row_offset: int = 0
    unusable: frozenset[str] = frozenset()
    _ragged: dict[str, Ragged] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """True if all these columns are present and usable."""
        return all(n in self.table.column_names and n not in self.unusable for n in names)

    def ragged(self, name: str) -> Ragged:
        """Return a list column as flat arrays, which are cached."""
        if name not in self._ragged:
            self._ragged[name] = Ragged.from_arrow(self.table.column(name))
        return self._ragged[name]

    def prompt_lengths(self) -> IntArray | None:
        """Return prompt lengths in either layout, [N]; None if the columns are unusable.

        A length is -1 where `prefix_length` is negative; prefix_reference reports such rows.
        """
        if self.has("prompt_token_ids"):
            return self.ragged("prompt_token_ids").lengths
        if self.has("prefix_length", "prompt_suffix_ids"):
            prefix, suffix = self.array("prefix_length"), self.ragged("prompt_suffix_ids").lengths
            return np.where(prefix < 0, -1, prefix + suffix)
        return None

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a scalar column that has no nulls."""
        return to_numpy(self.table.column(name))

    def strings(self, name: str) -> pa.ChunkedArray:
        """Return a column of any string type as large strings."""
        return self.table.column(name).cast(pa.large_string())

    def is_null(self, name: str) -> BoolArray:
        """Return the null mask of a column, [N] bool; all true for an absent column."""
        if not self.has(name):
            return np.ones(self.table.num_rows, np.bool_)
        return to_numpy(self.table.column(name).is_null())

    def breaches(
        self,
        rule: str,
        bad: IntArray | BoolArray,
        column: str | None,
        got: str | Sequence[str],
        expected: str | Sequence[str],
        sentence: str = "{column} is {got}; expected {expected}",
    ) -> pl.DataFrame:
        """Report one breach per bad row: indices into this table, or a mask, [N] bool.

        `got` and `expected` are texts for all bad rows, or one per bad row; `sentence` is a format
        string with the fields `column`, `got` and `expected`.
        """
        rows = np.flatnonzero(bad) if bad.dtype == np.bool_ else bad
        if not len(rows):
            return _NONE
        got, expected = ([x] * len(rows) if isinstance(x, str) else x for x in (got, expected))
        index, ids, steps = to_arrow(rows), None, None
        if self.has("trajectory_id"):
            ids = self.strings("trajectory_id").take(index).to_pylist()
        if self.has("step_index"):
            steps = self.table.column("step_index").take(index).to_pylist()
        place = (rows + self.row_offset).tolist()
        return breach_frame(rule, place, column, got, expected, sentence, ids, steps)

    def first_breaches(
        self,
        rule: str,
        row: IntArray,
        bad: BoolArray,
        column: str,
        got: Callable[[int], str],
        expected: str | Callable[[int], str],
        sentence: str = CONTAINS,
    ) -> pl.DataFrame:
        """Report one breach per row that has a bad entry; the texts are of the first of these.

        `row` and `bad`, [S], are the row of each entry, and whether it is bad. `got` and `expected`
        return the text for an entry, by its index.
        """
        index = np.flatnonzero(bad)
        rows, first = np.unique(row[index], return_index=True)
        at = index[first].tolist()
        wanted = expected if isinstance(expected, str) else [expected(i) for i in at]
        return self.breaches(rule, rows, column, [got(i) for i in at], wanted, sentence)


def joined(breaches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate breaches into one frame."""
    return pl.concat([_NONE, *(frame for frame in breaches if len(frame))])


def breach_frame(
    rule: str,
    rows: Sequence[int | None],
    column: str | None,
    got: Sequence[str],
    expected: Sequence[str],
    sentence: str,
    trajectory_id: Sequence[str] | None = None,
    step_index: Sequence[int] | None = None,
) -> pl.DataFrame:
    """Return breaches of one rule as a frame of `BREACH_SCHEMA` (see `View.breaches`)."""
    return pl.DataFrame(
        {
            "rule": rule,
            "severity": RULES[rule].severity,
            "row": rows,
            "trajectory_id": trajectory_id,
            "step_index": step_index,
            "column": column,
            "got": got,
            "expected": expected,
            "message": [
                sentence.format(column=column, got=value, expected=wanted)
                for value, wanted in zip(got, expected, strict=True)
            ],
        },
        schema=BREACH_SCHEMA,
    )
