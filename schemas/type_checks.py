"""Checks of columns_and_types: names and types of columns, nulls, and texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import DECLARED, REQUIRED_COLUMNS, ROUTING, TOKEN_SOURCES
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import IntArray
from schemas.types import PREFIX_TYPES, accepts, is_list, is_nullable, is_string, types_in
from schemas.view import View, breach


def check_names(view: View) -> None:
    """Check that names are unique and not empty, and that Polars knows all types."""
    counts = Counter(view.schema.names)
    repeated = {name: num for name, num in counts.items() if num > 1}
    view.breaches += [
        breach("columns_and_types.repeated_name", n, num=num) for n, num in repeated.items()
    ]
    view.breaches += [breach("columns_and_types.nul", name) for name in counts if "\0" in name]
    view.breaches += [breach("columns_and_types.no_name", name) for name in counts if not name]
    view.breaches += [
        breach("columns_and_types.fields", column.name, name=name, num=num)
        for column in view.schema
        for name, num in _unusable_fields(column.type)
    ]
    view.breaches += [
        breach("columns_and_types.unknown", column.name, kind=column.type)
        for column in view.schema
        if column.name not in DECLARED and not _is_known(column.type)
    ]


def _unusable_fields(kind: pa.DataType) -> Iterator[tuple[str, int]]:
    """Yield the duplicate or unusable field names of every struct in a type, with their counts."""
    for nested in filter(pa.types.is_nested, types_in(kind)):
        counts = Counter(nested.field(i).name for i in range(nested.num_fields))
        yield from ((name, num) for name, num in counts.items() if num > 1 or "\0" in name)


@cache
def _is_known(kind: pa.DataType) -> bool:
    """True if Polars has a type for an Arrow type."""
    polars_errors = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
    try:
        pl.from_arrow(pa.nulls(0, kind))  # pa.array would import pandas
    except (*polars_errors, pa.ArrowException, TypeError, ValueError, NotImplementedError):
        return False
    return True


def check_types(view: View, required: Iterable[str] = REQUIRED_COLUMNS) -> None:
    """Check that the `required` columns exist, that types are as declared, and nulls are allowed.

    Columns that are reported here become unusable: later checks leave them out.
    """
    num_before, types = len(view.breaches), view.table.schema
    missing = set(required) - set(types.names)
    if PREFIX_TYPES.keys() <= set(types.names):
        missing.discard("prompt_token_ids")
    view.breaches += [breach("columns_and_types.missing", name) for name in sorted(missing)]
    declared = {name: DECLARED[name] for name in types.names if name in DECLARED}
    misfits = [n for n in declared if not accepts(declared[n].type, types.field(n).type)]
    view.usable -= set(misfits)
    for name in filter(view.has, declared):
        _check_values(view, name)
    for name in misfits:
        kinds = {"kind": types.field(name).type, "declared": declared[name].type or ROUTING}
        view.breaches.append(breach("columns_and_types.type", name, **kinds))
    check_texts(view)
    view.usable -= {breach["column"] for breach in view.breaches[num_before:]}


def check_texts(view: View) -> None:
    """Check that all texts are UTF-8, in columns and inside lists and structs.

    Polars aborts with a panic on any other text, and Arrow itself does not check it.
    """
    for name in filter(view.has, view.table.column_names):
        column = view.column(name)
        if any(map(is_string, types_in(column.type))):
            # Without an id, whose text may be invalid too.
            rows = _garbled(column, view.row_offset)
            view.breaches += [breach("columns_and_types.text", name, row) for row in rows]


def _garbled(values: pa.Array | pa.ChunkedArray, first: int) -> list[int]:
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


def _check_values(view: View, name: str) -> None:
    """Check that a column of the declared type has nulls only where allowed, and known values."""
    values = view.column(name)
    if values.null_count and not is_nullable(name):
        view.report("columns_and_types.null", name, view.is_null(name))
    view.report("columns_and_types.null_element", name, _null_elements(values))
    if name == "token_source":
        texts, pattern = view.strings(name), f"^({'|'.join(TOKEN_SOURCES)})$"
        unknown = ~filled(pc.match_substring_regex(texts, pattern), value=True)
        view.report(
            "columns_and_types.token_source", name, unknown, text=lambda i: texts[i].as_py()
        )


def _null_elements(values: pa.ChunkedArray) -> IntArray:
    """Return the rows with a null in a list, at any depth; fields of structs may be null."""
    nested = is_list(values.type) and not pa.types.is_struct(values.type.value_type)
    lists, flat = [], values
    while nested and (is_list(flat.type) or pa.types.is_fixed_size_list(flat.type)):
        lists.append(flat)
        flat = pc.list_flatten(flat)
        if flat.null_count:
            rows = np.flatnonzero(to_numpy(flat.is_null()))
            for parents in reversed(lists):
                rows = to_numpy(pc.list_parent_indices(parents))[rows]
            return rows
    return np.zeros(0, np.int64)
