"""Access to a table for the checks: columns as flat arrays, and the breaches that the checks report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, rows_of
from schemas.rules import FINDINGS, RULES
from schemas.types import cast_column

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

Breach = dict[str, Any]


class UnusableColumn(LookupError):
    """The table lacks a column, or `columns_and_types` has reported it: a check that needs it ends."""


def breach(
    finding: str,
    column: str,
    row: int | None = None,
    trajectory_id: str | None = None,
    step_index: int | None = None,
    **values: Any,
) -> Breach:
    """Return a row of `BREACH_SCHEMA`, with the texts of one of `FINDINGS`."""
    rule, texts = finding.partition(".")[0], FINDINGS[finding]
    got, expected = (text.format(**values) for text in texts[:2])
    message = texts[2].format(column=column, got=got, expected=expected, **values)
    place = (row, trajectory_id, step_index)
    cells = (rule, RULES[rule].severity, *place, column, got, expected, message)
    return dict(zip(BREACH_SCHEMA, cells, strict=True))


@dataclass(slots=True)
class View:
    """Columns of one table, unpacked on demand, and the breaches that checks have found in it.

    Attributes:
        table: The table, with `prompt_token_ids` or the prefix columns.
        row_offset: Number of rows of the dataset before this table.
        vocab_size: Exclusive upper bound of token ids; None if unknown.
        breaches: What `report` has collected.
        usable: Columns that are not missing, do not have the wrong type or forbidden nulls.
        schema: Schema of the table before columns that share a name were reduced to the first one.
    """

    table: pa.Table
    row_offset: int = 0
    vocab_size: int | None = None
    breaches: list[Breach] = field(default_factory=list)
    usable: frozenset[str] = field(init=False)
    schema: pa.Schema = field(init=False)
    _ragged: dict[str, Ragged] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.schema = self.table.schema
        names = self.schema.names
        self.usable = frozenset(names)
        if len(self.usable) < len(names):
            self.table = self.table.select([names.index(name) for name in dict.fromkeys(names)])

    def run(self, *checks: Callable[[View], None]) -> pl.DataFrame:
        """Run checks, and return all breaches so far.

        A check ends where it needs a column that is missing or unusable.
        """
        for check in checks:
            with suppress(UnusableColumn):
                check(self)
        return pl.DataFrame(self.breaches, BREACH_SCHEMA)

    def has(self, *names: str) -> bool:
        """True if all these columns are present and usable."""
        return self.usable.issuperset(names)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a usable column.

        Raises:
            UnusableColumn: The column is missing or unusable, here and in the methods below.
        """
        if not self.has(name):
            raise UnusableColumn(name)
        return self.table.column(name)

    def ragged(self, name: str) -> Ragged:
        """Return a list column as flat arrays, which are cached."""
        if name not in self._ragged:
            self._ragged[name] = Ragged.from_arrow(self.column(name))
        return self._ragged[name]

    def entries(self, name: str, kind: pa.DataType | None = None) -> tuple[IntArray, pa.Array]:
        """Return the elements of a list column, cast to `kind`, and the row of each, [S]."""
        column = self.column(name)
        column = column if kind is None else cast_column(column, kind)
        return rows_of(list_lengths(column)), pc.list_flatten(column)

    def lengths(self, name: str) -> IntArray:
        """Return the lengths of a list column, [N]; of `prompt_token_ids` in either layout.

        That of a prompt is -1 where `prefix_length` is negative; prefix_reference reports such rows.
        """
        if name != "prompt_token_ids" or self.has(name):
            return self.ragged(name).lengths
        prefix, suffix = self.array("prefix_length"), self.lengths("prompt_suffix_ids")
        return np.where(prefix < 0, -1, prefix + suffix)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers or booleans; nulls of numbers become NaN."""
        return to_numpy(self.column(name))

    def strings(self, name: str) -> pa.ChunkedArray:
        """Return a column of any string type as large strings."""
        return self.column(name).cast(pa.large_string())

    def is_null(self, name: str) -> BoolArray:
        """Return the null mask of a column, [N] bool; all true for an absent column."""
        if not self.has(name):
            return np.ones(self.table.num_rows, np.bool_)
        return to_numpy(self.table.column(name).is_null())

    def report(
        self,
        finding: str | Callable[[int], str],
        column: str,
        bad: IntArray | BoolArray,
        row: IntArray | None = None,
        **values: Any,
    ) -> None:
        """Report one breach per row that has a bad entry; it describes the first one.

        Args:
            finding: One of `FINDINGS`, or a function that returns that of an entry.
            column: The column that breaks the rule.
            bad: Indices of bad entries, or a mask of all entries.
            row: Row of each entry, [S]; None: entries are rows.
            values: Values of the texts' fields: one per entry, [S], or a function of the entry.
        """
        at = np.flatnonzero(bad) if bad.dtype == np.bool_ else bad
        if not len(at):
            return
        rows, first = np.unique(at if row is None else row[at], return_index=True)
        places = (
            read(name).take(to_arrow(rows)).to_pylist() if self.has(name) else repeat(None)
            for name, read in (("trajectory_id", self.strings), ("step_index", self.column))
        )
        numbers = (rows + self.row_offset).tolist()
        for entry, *place in zip(at[first].tolist(), numbers, *places, strict=False):
            name = finding if isinstance(finding, str) else finding(entry)
            facts = {n: v(entry) if callable(v) else v[entry] for n, v in values.items()}
            self.breaches.append(breach(name, column, *place, **facts))
