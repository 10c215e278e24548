"""A table as the checks see it: flat arrays, made once, and breaches as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from schemas.ragged import BoolArray, IntArray, Ragged
from schemas.rules import RULES

BREACH_SCHEMA: dict[str, Any] = {
    "rule": pl.String,
    "severity": pl.String,
    "row": pl.Int64,
    "trajectory_id": pl.String,
    "column": pl.String,
    "got": pl.String,
    "expected": pl.String,
}
"""A breach: which rule, which row of the dataset (null: the whole table), what was found."""

_NONE = pl.DataFrame(schema=BREACH_SCHEMA)


@dataclass(slots=True)
class View:
    """Columns of one table, unpacked on demand.

    Attributes:
        table: The table, at most one of `prompt_token_ids` and the prefix columns in it.
        row_offset: Rows of the dataset before this table.
        unusable: Columns that are missing, of a wrong type or with forbidden nulls.
    """

    table: pa.Table
    row_offset: int = 0
    unusable: frozenset[str] = frozenset()
    _ragged: dict[str, Ragged] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """Whether all these columns are there and usable."""
        return all(n in self.table.column_names and n not in self.unusable for n in names)

    def ragged(self, name: str) -> Ragged:
        """A list column."""
        if name not in self._ragged:
            self._ragged[name] = Ragged.from_arrow(self.table.column(name))
        return self._ragged[name]

    def array(self, name: str) -> npt.NDArray[Any]:
        """A column of scalars without nulls."""
        values: npt.NDArray[Any] = self.table.column(name).to_numpy()
        return values

    def strings(self, name: str) -> pa.ChunkedArray:
        """A string column, whatever variant it comes in."""
        return self.table.column(name).cast(pa.large_string())

    def is_null(self, name: str) -> BoolArray:
        """Where a column is null; all true for a column that is absent."""
        if not self.has(name):
            return np.ones(self.table.num_rows, np.bool_)
        return np.asarray(self.table.column(name).is_null())

    def breaches(
        self,
        rule: str,
        rows: IntArray,
        column: str | None,
        got: Sequence[str],
        expected: str | Sequence[str],
    ) -> pl.DataFrame:
        """One breach per row of `rows` (rows of this table; reported as rows of the dataset)."""
        if not len(rows):
            return _NONE
        ids = [None] * len(rows)
        if self.has("trajectory_id"):
            ids = self.strings("trajectory_id").take(pa.array(rows)).to_pylist()
        wanted = [expected] * len(rows) if isinstance(expected, str) else list(expected)
        return breach_frame(rule, (rows + self.row_offset).tolist(), ids, column, got, wanted)


def joined(breaches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """All breaches, one frame after the other."""
    return pl.concat([_NONE, *(found for found in breaches if len(found))])


def breach_frame(
    rule: str,
    rows: Sequence[int | None],
    trajectory_ids: Sequence[str | None],
    column: str | None,
    got: Sequence[str],
    expected: Sequence[str],
) -> pl.DataFrame:
    """Breaches of one rule as a frame of `BREACH_SCHEMA`."""
    return pl.DataFrame(
        {
            "rule": [rule] * len(rows),
            "severity": [RULES[rule].severity] * len(rows),
            "row": list(rows),
            "trajectory_id": list(trajectory_ids),
            "column": [column] * len(rows),
            "got": list(got),
            "expected": list(expected),
        },
        schema=BREACH_SCHEMA,
    )
