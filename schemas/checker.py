"""Validation against the named invariants: `check` returns all breaches, `validate` raises them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.columns import DECLARED, REQUIRED_COLUMNS, ROUTING, TOKEN_SOURCES
from schemas.errors import InvariantError, count
from schemas.numpy_arrays import to_numpy
from schemas.row_checks import ROW_CHECKS, check_token_range
from schemas.rules import RULES
from schemas.structure_checks import (
    STRUCTURE_COLUMNS,
    UNMARKED_END,
    Runs,
    check_outcome,
    check_prefix,
    check_structure,
    check_whole,
)
from schemas.types import (
    PREFIX_TYPES,
    accepts_column,
    as_table,
    is_list,
    is_nullable,
    is_string,
    types_in,
)
from schemas.view import View, breach_frame, joined

DECODE_COLUMNS = (*PREFIX_TYPES, "response_ids", "trajectory_id", "step_index")
"""Columns needed to decode the prompts of the `prefix` layout."""


class ValidationError(InvariantError):
    """A table breaks one or more named invariants.

    Attributes:
        breaches: All breaches (see `BREACH_SCHEMA`).
        source: Path of the dataset, or "table".
    """

    breaches: pl.DataFrame
    source: str

    @classmethod
    def of(cls, breaches: pl.DataFrame, source: str = "table") -> ValidationError:
        """Build the error from one or more breaches; its message describes the first one."""
        first, more = breaches.row(0, named=True), len(breaches) - 1
        where = f"{source}, {row_place(first)}" if first["row"] is not None else source
        others = f" (and {count(more, 'more error')})" if more else ""
        error = cls(
            first["rule"],
            where,
            first["got"],
            first["expected"],
            RULES[first["rule"]].hint,
            message=f"{where}: {first['message']}{others}",
        )
        error.breaches, error.source = breaches, source
        return error


def row_place(breach: Mapping[str, Any]) -> str:
    """Format the row of a breach for a message: `row 3 (trajectory shop-1_0, step 2)`."""
    named = {"trajectory": breach["trajectory_id"], "step": breach["step_index"]}
    parts = [f"{name} {value}" for name, value in named.items() if value is not None]
    return f"row {breach['row']}" + (f" ({', '.join(parts)})" if parts else "")


class Checker:
    """Check a dataset table by table, in order; each table must contain complete trajectories.

    Attributes:
        num_rows: Number of rows checked so far.
        trajectory_ids: Ids of the trajectories checked so far.
        open_end: Id of the last trajectory if its final row is not marked last; otherwise None.

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
        self._open_step = 0
        self._trains = False
        self._has_healthy_rows = False

    @classmethod
    def after(cls, parts: Sequence[Checker]) -> Checker:
        """Combine checkers of consecutive parts into one, as if it had checked all their tables."""
        whole = cls()
        for part in parts:
            whole.follow(part)
        return whole

    def follow(self, part: Checker) -> None:
        """Count the tables of the next part, which another checker has checked."""
        self.num_rows += part.num_rows
        self.trajectory_ids |= part.trajectory_ids
        self.open_end, self._open_step = part.open_end, part._open_step
        self._trains |= part._trains
        self._has_healthy_rows |= part._has_healthy_rows

    def check(self, data: Any) -> pl.DataFrame:
        """Return the breaches of the next table; rows are numbered from the start of the dataset.

        Args:
            data: Any Arrow-compatible table, with `prompt_token_ids` or the prefix columns.
        """
        table = as_table(data)
        breaches = [misnamed_columns(table)]
        table = _first_of_each_name(table)
        types, unusable = check_types(table, self.num_rows)
        view = View(table, self.num_rows, unusable)
        breaches.append(types)
        for check, names in ROW_CHECKS:
            breaches += check(view) if view.has(*names) else ()
        breaches += check_token_range(view, self._vocab_size)
        breaches += check_prefix(view)
        if view.has(*STRUCTURE_COLUMNS) and table.num_rows:
            breaches += self._structure(view)
        self._note_training(view)
        self.num_rows += table.num_rows
        return joined(breaches)

    def finish(self) -> pl.DataFrame:
        """Return the breaches that can only be found at the end of the dataset."""
        breaches = []
        if self.open_end is not None:
            breaches.append(self._unfinished("final_row_is_last"))
        if self._has_healthy_rows and not self._trains:
            texts = ["all false"], ["some true"], "loss_mask is false for every token"
            breaches.append(breach_frame("mask_trains_something", [None], "loss_mask", *texts))
        return joined(breaches)

    def _structure(self, view: View) -> Iterator[pl.DataFrame]:
        if self.open_end is not None:
            yield self._unfinished("boundary_alignment")
        last = view.array("is_last_step")
        runs = Runs.of(view.strings("trajectory_id"), view.array("step_index"), last)
        yield from check_structure(view, runs, self.trajectory_ids)
        yield from check_outcome(view, runs)
        self.open_end = None if last[-1] else view.table.column("trajectory_id")[-1].as_py()
        self._open_step = int(view.array("step_index")[-1])

    def _unfinished(self, rule: str) -> pl.DataFrame:
        assert self.open_end is not None
        texts, place = (["false"], ["true"], UNMARKED_END), ([self.open_end], [self._open_step])
        return breach_frame(rule, [self.num_rows - 1], "is_last_step", *texts, *place)

    def _note_training(self, view: View) -> None:
        if view.has("loss_mask"):
            self._trains = self._trains or bool(view.ragged("loss_mask").values.any())
            self._has_healthy_rows = self._has_healthy_rows or bool(view.is_null("error").any())


def check(data: Any, *, vocab_size: int | None = None) -> pl.DataFrame:
    """Return every breach of the named invariants in a table.

    Args:
        data: Any Arrow-compatible table.
        vocab_size: Exclusive upper bound of token ids; None if unknown.

    Returns:
        One row per breach, with the columns of `schemas.view.BREACH_SCHEMA`.

    Example:
        >>> check(table)["rule"].to_list()  # loss_mask is one element short in row 3
        ['lengths_align']
    """
    checker = Checker(vocab_size)
    return joined([checker.check(data), checker.finish()])


def validate(data: Any, *, vocab_size: int | None = None) -> None:
    """Raise an error if `check` finds errors; warnings are ignored.

    Raises:
        ValidationError: The table has breaches of severity `error`; its `breaches` lists them all.
    """
    raise_errors(check(data, vocab_size=vocab_size))


def raise_errors(breaches: pl.DataFrame, where: str = "table") -> None:
    """Raise a `ValidationError` if any breach is of severity `error`."""
    if breaches.is_empty():  # a filter costs far more, and most tables are valid
        return
    errors = breaches.filter(pl.col("severity") == "error")
    if len(errors):
        raise ValidationError.of(errors, where)


def check_types(
    table: pa.Table, row_offset: int = 0, required: Iterable[str] = REQUIRED_COLUMNS
) -> tuple[pl.DataFrame, frozenset[str]]:
    """Check columns_and_types, and return the columns that later checks must skip.

    Only the `required` columns must be there.

    Returns:
        The breaches, and the names of the columns that they concern.
    """
    missing = set(required) - set(table.column_names)
    if PREFIX_TYPES.keys() <= set(table.column_names):
        missing.discard("prompt_token_ids")
    sentence = "the required column {column} is missing"
    finding, expected = "no such column", "a required column"
    wrong = [_wrong(name, finding, expected, sentence) for name in sorted(missing)]
    declared = [name for name in table.column_names if name in DECLARED]
    misfits = {name: frame for name in declared for frame in _check_type(table, name)}
    unfit = frozenset(misfits)
    view = View(table, row_offset, unfit)
    for name in declared:
        wrong += [] if name in unfit else _check_nulls(view, name)
    breaches = joined([*wrong, *misfits.values(), unreadable_text(table, row_offset, unfit)])
    return breaches, frozenset(breaches["column"].to_list())


_NO_TYPE = (
    "the column {column} is {got}, for which Polars has no type; cast it (decimals: at most 38"
    " digits), or drop it"
)


def misnamed_columns(table: pa.Table) -> pl.DataFrame:
    """Check columns_and_types: names are unique and not empty, and Polars knows all types."""
    counts = Counter(table.column_names)
    sentence = "{got} are named {column!r}"
    breaches = [
        _wrong(n, f"{num} columns", "one", sentence) for n, num in counts.items() if num > 1
    ]
    sentence = "the name {column!r} contains a NUL character"
    breaches += [_wrong(n, "a NUL character", "none", sentence) for n in counts if "\0" in n]
    if "" in counts:
        breaches.append(_wrong("", "a column without a name", "a name", "a column has no name"))
    sentence = "the column {column} has {got}; field names must be unique, without NUL characters"
    breaches += [
        _wrong(column.name, f"{num} fields named {name!r}", "one", sentence)
        for column in table.schema
        for name, num in _repeated_fields(column.type)
    ]
    breaches += [
        _wrong(column.name, str(column.type), "a type that Polars can read", _NO_TYPE)
        for column in table.schema
        if column.name not in DECLARED and not _is_known(column.type)
    ]
    return joined(breaches)


@cache
def _is_known(kind: pa.DataType) -> bool:
    """True if Polars has a type for an Arrow type."""
    polars_errors = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
    try:
        pl.from_arrow(pa.nulls(0, kind))  # pa.array would import pandas
    except (*polars_errors, pa.ArrowException, TypeError, ValueError, NotImplementedError):
        return False
    return True


def unreadable_text(
    table: pa.Table, row_offset: int = 0, skipped: frozenset[str] = frozenset()
) -> pl.DataFrame:
    """Check columns_and_types: all texts are UTF-8, in columns and inside lists and structs.

    Polars aborts with a panic on any other text, and Arrow itself does not check it.
    """
    view, breaches = View(table, row_offset, frozenset(table.column_names)), []
    sentence = "the text in column {column} is not UTF-8"
    table = _first_of_each_name(table)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name not in skipped and any(map(is_string, types_in(column.type))):
            rows, texts = np.array(_garbled(column), np.int64), ("invalid UTF-8", "UTF-8", sentence)
            breaches.append(view.breaches("columns_and_types", rows, name, *texts))
    return joined(breaches)


def _garbled(values: pa.Array | pa.ChunkedArray, first: int = 0) -> list[int]:
    """Return the rows with text that is not UTF-8, by halving until only these are left."""
    try:
        values.validate(full=True)
    except (pa.ArrowInvalid, UnicodeError):
        half = len(values) // 2
        if not half:
            return [first] * len(values)
        below, above = values.slice(0, half), values.slice(half)
        return [*_garbled(below, first), *_garbled(above, first + half)]
    return []


def _repeated_fields(kind: pa.DataType) -> Iterator[tuple[str, int]]:
    """Yield the duplicate or unusable field names of every struct in a type, with their counts."""
    for nested in filter(pa.types.is_nested, types_in(kind)):
        counts = Counter(nested.field(i).name for i in range(nested.num_fields))
        yield from ((name, num) for name, num in counts.items() if num > 1 or "\0" in name)


def _first_of_each_name(table: pa.Table) -> pa.Table:
    names = table.column_names
    return table.select([names.index(name) for name in dict.fromkeys(names)])


def check_references(table: pa.Table) -> pl.DataFrame:
    """Return the breaches that would make decoding a `prefix` row group fail."""
    needs = frozenset(DECODE_COLUMNS)
    needed = table.select([name for name in table.column_names if name in needs])
    types, unusable = check_types(needed, required=needs.intersection(REQUIRED_COLUMNS))
    breaches, view = [types], View(needed, 0, unusable)
    if view.has(*needs):
        breaches += [check_whole(view), *check_prefix(view)]
    return joined(breaches)


def _check_type(table: pa.Table, name: str) -> list[pl.DataFrame]:
    column, actual = DECLARED[name], table.schema.field(name).type
    if accepts_column(column, actual):
        return []
    sentence = "the column {column} has type {got}; expected {expected}"
    return [_wrong(name, str(actual), str(column.type or ROUTING), sentence)]


def _check_nulls(view: View, name: str) -> list[pl.DataFrame]:
    rule, values, breaches = "columns_and_types", view.table.column(name), []
    if values.null_count and not is_nullable(name):
        bad = to_numpy(values.is_null())
        breaches.append(view.breaches(rule, bad, name, "null", "a value", "{column} is null"))
    rows = _rows_with_null_elements(values)
    sentence = "{column} contains a null element"
    breaches.append(view.breaches(rule, rows, name, "a null element", "no null", sentence))
    if name == "token_source":
        texts = pl.Series(view.strings(name))
        unknown = texts.is_not_null() & ~texts.is_in(TOKEN_SOURCES)
        finding = [repr(text) for text in texts.filter(unknown)]
        expected = " or ".join(TOKEN_SOURCES)
        breaches.append(view.breaches(rule, unknown.to_numpy(), name, finding, expected))
    return breaches


def _rows_with_null_elements(values: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    nested = is_list(values.type) and not pa.types.is_struct(values.type.value_type)
    lists, flat = [], values
    while nested and (is_list(flat.type) or pa.types.is_fixed_size_list(flat.type)):
        lists.append(flat)
        flat = pa.compute.list_flatten(flat)
        if flat.null_count:
            rows = np.flatnonzero(to_numpy(flat.is_null()))
            for parents in reversed(lists):
                rows = to_numpy(pa.compute.list_parent_indices(parents))[rows]
            return np.unique(rows)
    return np.zeros(0, np.int64)


def _wrong(name: str, got: str, expected: str, sentence: str) -> pl.DataFrame:
    return breach_frame("columns_and_types", [None], name, [got], [expected], sentence)
