"""`check` lists every breach of the named invariants as data; `validate` is `check` + raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.columns import COLUMN_BY_NAME, REQUIRED_COLUMNS, TOKEN_SOURCES
from schemas.errors import RolloutError
from schemas.row_checks import ROW_CHECKS, check_token_range
from schemas.rules import RULES
from schemas.structure_checks import (
    STRUCTURE_COLUMNS,
    Runs,
    check_outcome,
    check_prefix,
    check_structure,
    check_whole,
)
from schemas.types import PREFIX_TYPES, accepts, accepts_column, as_table, is_list
from schemas.view import View, breach_frame, joined

DECODE_COLUMNS = (*PREFIX_TYPES, "response_ids", "trajectory_id", "step_index")
"""What the prompts of the `prefix` layout are decoded from."""


class ValidationError(RolloutError):
    """A table breaks named invariants; `.breaches` holds all of them (see `BREACH_SCHEMA`)."""

    def __init__(self, breaches: pl.DataFrame, where: str = "table") -> None:
        self.breaches, self._source = breaches, where
        first = breaches.row(0, named=True)
        super().__init__(
            first["rule"],
            _place(first, where),
            first["got"],
            first["expected"] + _others(breaches),
            RULES[first["rule"]].hint,
        )

    def __reduce__(self) -> tuple[type[ValidationError], tuple[pl.DataFrame, str]]:
        """Rebuild it in another process."""
        return ValidationError, (self.breaches, self._source)


def _place(breach: dict[str, Any], where: str) -> str:
    parts = [where]
    if breach["row"] is not None:
        parts.append(f"row {breach['row']}")
    if breach["trajectory_id"] is not None:
        parts.append(f"trajectory {breach['trajectory_id']!r}")
    if breach["column"] is not None:
        parts.append(f"column {breach['column']!r}")
    return ", ".join(parts)


def _others(breaches: pl.DataFrame) -> str:
    count = len(breaches) - 1
    return f" (and {count} more breaches)" if count else ""


class Checker:
    """Checks a dataset table by table, each cut at trajectory boundaries.

    Attributes:
        num_rows: Rows seen so far.
        trajectory_ids: Trajectories seen so far.
        open_end: The trajectory whose rows ended without one that is marked last, if any.

    Example:
        >>> checker = Checker()
        >>> for table in tables:
        ...     breaches = checker.check(table)
        >>> breaches = checker.finish()
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self.trajectory_ids: set[str] = set()
        self.num_rows = 0
        self.open_end: str | None = None
        self._trains = False
        self._has_healthy_rows = False

    @classmethod
    def after(cls, parts: Sequence[Checker]) -> Checker:
        """The checker that has seen what these have, one after the other."""
        whole = cls()
        whole.num_rows = sum(part.num_rows for part in parts)
        whole.trajectory_ids = set().union(*(part.trajectory_ids for part in parts))
        whole.open_end = parts[-1].open_end if parts else None
        whole._trains = any(part._trains for part in parts)
        whole._has_healthy_rows = any(part._has_healthy_rows for part in parts)
        return whole

    def check(self, data: Any) -> pl.DataFrame:
        """Breaches of the next table; rows are counted over all tables so far.

        Args:
            data: Anything that speaks Arrow, with `prompt_token_ids` or the prefix columns.
        """
        table = as_table(data)
        found = [misnamed_columns(table)]
        table = _first_of_each_name(table)
        types, unusable = check_types(table, self.num_rows)
        view = View(table, self.num_rows, unusable)
        found.append(types)
        for check in ROW_CHECKS:
            found += check(view)
        found += check_token_range(view, self._vocab_size)
        found += check_prefix(view)
        if view.has(*STRUCTURE_COLUMNS) and table.num_rows:
            found += self._structure(view)
        self._note_training(view)
        self.num_rows += table.num_rows
        return joined(found)

    def finish(self) -> pl.DataFrame:
        """Breaches that only the end of the dataset shows."""
        found = []
        if self.open_end is not None:
            found.append(self._unfinished("final_row_is_last"))
        if self._has_healthy_rows and not self._trains:
            name, expected = "mask_trains_something", "some true"
            found.append(breach_frame(name, [None], [None], "loss_mask", ["all false"], [expected]))
        return joined(found)

    def _structure(self, view: View) -> Iterator[pl.DataFrame]:
        if self.open_end is not None:
            yield self._unfinished("boundary_alignment")
        last = view.array("is_last_step")
        runs = Runs.of(view.strings("trajectory_id"), view.array("step_index"), last)
        yield from check_structure(view, runs, self.trajectory_ids)
        yield from check_outcome(view, runs)
        self.open_end = None if last[-1] else view.table.column("trajectory_id")[-1].as_py()

    def _unfinished(self, rule: str) -> pl.DataFrame:
        row = self.num_rows - 1
        return breach_frame(rule, [row], [self.open_end], "is_last_step", ["false"], ["true"])

    def _note_training(self, view: View) -> None:
        if view.has("loss_mask"):
            self._trains = self._trains or bool(view.ragged("loss_mask").values.any())
            self._has_healthy_rows = self._has_healthy_rows or bool(view.is_null("error").any())


def check(data: Any, *, vocab_size: int | None = None) -> pl.DataFrame:
    """Every breach of the named invariants in a whole table.

    Args:
        data: Anything that speaks Arrow.
        vocab_size: Upper bound (exclusive) of token ids; None: unknown.

    Returns:
        One row per breach: rule, severity, row, trajectory_id, column, got, expected.

    Example:
        >>> check(table)["rule"].to_list()  # loss_mask is one element short in row 3
        ['lengths_align']
    """
    checker = Checker(vocab_size)
    return joined([checker.check(data), checker.finish()])


def validate(data: Any, *, vocab_size: int | None = None) -> None:
    """Raise on the errors (not the warnings) that `check` finds.

    Raises:
        ValidationError: With all breaches of severity `error`.
    """
    raise_errors(check(data, vocab_size=vocab_size))


def raise_errors(breaches: pl.DataFrame, where: str = "table") -> None:
    """Raise a `ValidationError` if any breach is of severity `error`."""
    errors = breaches.filter(pl.col("severity") == "error")
    if len(errors):
        raise ValidationError(errors, where)


def check_types(table: pa.Table, row_offset: int = 0) -> tuple[pl.DataFrame, frozenset[str]]:
    """columns_and_types, and the columns that later checks must leave alone.

    Returns:
        Breaches, and the names of the columns at fault.
    """
    found = []
    encoded = PREFIX_TYPES.keys() <= set(table.column_names)
    stands_in = {"prompt_token_ids"} if encoded else set()
    missing = set(REQUIRED_COLUMNS) - stands_in - set(table.column_names)
    found += [_wrong(name, "no such column", "a required column") for name in sorted(missing)]
    declared = [n for n in table.column_names if n in COLUMN_BY_NAME or n in PREFIX_TYPES]
    misfits = [frame for name in declared for frame in _check_type(table, name)]
    unfit = frozenset(frame["column"].item() for frame in misfits)
    view = View(table, row_offset, unfit)
    for name in declared:
        found += [] if name in unfit else _check_nulls(view, name)
    breaches = joined([*found, *misfits])
    return breaches, frozenset(breaches["column"].to_list())


def misnamed_columns(table: pa.Table) -> pl.DataFrame:
    """columns_and_types: names that several columns have, and the empty name."""
    counts = Counter(table.column_names)
    found = [_wrong(n, f"{count} columns", "one") for n, count in counts.items() if count > 1]
    found += [_wrong("", "a column without a name", "a name")] if "" in counts else []
    return joined(found)


def _first_of_each_name(table: pa.Table) -> pa.Table:
    names = table.column_names
    return table.select([names.index(name) for name in dict.fromkeys(names)])


def check_references(table: pa.Table) -> pl.DataFrame:
    """Breaches of all that decoding relies on, in a row group of the `prefix` layout."""
    needs = frozenset(DECODE_COLUMNS)
    known = table.select([name for name in table.column_names if name in needs])
    types, unusable = check_types(known)
    found, view = [types.filter(pl.col("column").is_in(needs))], View(known, 0, unusable)
    if view.has(*needs):
        found += [check_whole(view), *check_prefix(view)]
    return joined(found)


def _check_type(table: pa.Table, name: str) -> list[pl.DataFrame]:
    column, actual = COLUMN_BY_NAME.get(name), table.schema.field(name).type
    if column is None:
        fits, expected = accepts(PREFIX_TYPES[name], actual), PREFIX_TYPES[name]
    else:
        fits, expected = accepts_column(column, actual), column.type
    routing = "list<fixed list<fixed list<int16>>>"
    return [] if fits else [_wrong(name, str(actual), str(expected or routing))]


def _check_nulls(view: View, name: str) -> list[pl.DataFrame]:
    column, values = COLUMN_BY_NAME.get(name), view.table.column(name)
    nullable = name == "parent_step_index" if column is None else column.nullable
    rule, found = "columns_and_types", []
    if not nullable and values.null_count:
        rows = np.flatnonzero(np.asarray(values.is_null()))
        found.append(view.breaches(rule, rows, name, ["null"] * len(rows), "a value"))
    rows = _rows_with_null_elements(values)
    if len(rows):
        found.append(view.breaches(rule, rows, name, ["a null element"] * len(rows), "no null"))
    if name == "token_source":
        known = pa.compute.is_in(
            values.cast(pa.large_string()), pa.array(TOKEN_SOURCES, pa.large_string())
        )
        rows = np.flatnonzero(~np.asarray(known) & np.asarray(values.is_valid()))
        got = [repr(v) for v in values.cast(pa.large_string()).take(pa.array(rows)).to_pylist()]
        found.append(view.breaches(rule, rows, name, got, " or ".join(TOKEN_SOURCES)))
    return found


def _rows_with_null_elements(values: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    nested = is_list(values.type) and not pa.types.is_struct(values.type.value_type)
    lists, flat = [], values
    while nested and (is_list(flat.type) or pa.types.is_fixed_size_list(flat.type)):
        lists.append(flat)
        flat = pa.compute.list_flatten(flat)
        if flat.null_count:
            rows = np.flatnonzero(np.asarray(flat.is_null()))
            for parents in reversed(lists):
                rows = np.asarray(pa.compute.list_parent_indices(parents), np.int64)[rows]
            return np.unique(rows)
    return np.zeros(0, np.int64)


def _wrong(name: str, got: str, expected: str) -> pl.DataFrame:
    return breach_frame("columns_and_types", [None], [None], name, [got], [expected])
