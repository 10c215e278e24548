"""Check Arrow types against the declared types, and cast to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import COLUMN_BY_NAME, DECLARED, PREFIX_FIELDS, SEGMENT_FIELDS
from schemas.errors import InvariantError
from schemas.ragged import relisted

if TYPE_CHECKING:
    import polars as pl

PREFIX_TYPES: dict[str, pa.DataType] = {field.name: field.type for field in PREFIX_FIELDS}


def as_table(data: Any) -> pa.Table:
    """Convert Arrow-compatible data (RecordBatch, Polars frame, stream, ...) to a table.

    Raises:
        InvariantError: `columns_and_types`: Arrow has no type for one of the columns.
    """
    if isinstance(data, pa.Table):
        return data
    import polars as pl

    if isinstance(data, pl.LazyFrame):
        data = data.collect()
    if not isinstance(data, pl.DataFrame):
        return pa.table(data)
    try:
        return data.to_arrow()
    except pa.ArrowException as error:
        finding = f"Arrow cannot store a column: {error}"
        hint = "cast the column to a type that Arrow supports, or drop it"
        raise InvariantError("columns_and_types", "table", finding, "", hint) from None


def with_absent(frame: pl.LazyFrame, names: Iterable[str]) -> pl.LazyFrame:
    """Add the named optional columns that the frame lacks, filled with nulls.

    Example:
        A dataset without failed trajectories has no column `error`.

        >>> with_absent(frame, ["reward", "error"]).select("error").unique().collect().rows()
        [(None,)]
    """
    there = frame.collect_schema()
    absent = {
        name: pa.nulls(0, column.type)
        for name in names
        if name not in there and (column := COLUMN_BY_NAME.get(name)) and column.nullable
    }
    import polars as pl

    kinds = pl.DataFrame(pa.table(absent)).schema
    return frame.with_columns(**{name: pl.lit(None, kind) for name, kind in kinds.items()})


def is_list(kind: pa.DataType) -> bool:
    """True for any list type of variable length."""
    t = pa.types
    tests = (t.is_list, t.is_large_list, t.is_list_view, t.is_large_list_view)
    return any(test(kind) for test in tests)


def is_string(kind: pa.DataType) -> bool:
    """True for any string type."""
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def accepts(declared: pa.DataType | None, actual: pa.DataType) -> bool:
    """True if `actual` equals `declared` up to large and view variants.

    A map is accepted for a list of {key, value} structs, and a struct may have additional fields.
    Routing, whose declared type is None, is a list<fixed list<fixed list<int16>>>.

    Example:
        >>> accepts(pa.list_(pa.int32()), pa.large_list(pa.int32()))
        True
        >>> accepts(pa.list_(pa.int32()), pa.list_(pa.int64()))
        False
    """
    if declared is None:
        kinds = list(types_in(actual))
        are_fixed = [pa.types.is_fixed_size_list(kind) for kind in kinds]
        return (
            are_fixed == [False, True, True, False] and is_list(actual) and kinds[3] == pa.int16()
        )
    if pa.types.is_map(actual):
        fields = {"key": actual.key_type, "value": actual.item_type}
        return accepts(declared, pa.list_(pa.struct(fields)))
    if pa.types.is_list(declared):
        return is_list(actual) and accepts(declared.value_type, actual.value_type)
    if pa.types.is_struct(declared):
        return pa.types.is_struct(actual) and all(
            actual.get_field_index(field.name) >= 0
            and accepts(field.type, actual.field(field.name).type)
            for field in declared
        )
    if pa.types.is_string(declared):
        return is_string(actual)
    return bool(actual == declared)


def cast_table(table: pa.Table) -> pa.Table:
    """Cast declared columns to their declared types; replace large and view types in user columns.

    Metadata of fields inside a type (of a list's elements, of a struct's fields) is dropped.
    The table must have passed `columns_and_types`. Slice a table of more than 2^31 list elements
    first: the declared lists have 32-bit offsets.
    """
    fields = [
        pa.field(f.name, _target(f.name, f.type), is_nullable(f.name), f.metadata)
        for f in table.schema
    ]
    columns = [cast_column(c, f.type) for c, f in zip(table.columns, fields, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def without_null_elements(schema: pa.Schema) -> pa.Schema:
    """Declare the elements of declared lists of numbers as not null, as the invariants require.

    This saves Parquet one level per element, in files and in time. Readers return the declared types.

    Args:
        schema: A schema with the declared types, as in tables from `cast_table`.
    """
    for index, field in enumerate(schema):
        kind = field.type
        if field.name in DECLARED and pa.types.is_list(kind) and not kind.value_type.num_fields:
            element = pa.field("element", kind.value_type, nullable=False)
            schema = schema.set(index, field.with_type(pa.list_(element)))
    return schema


def _target(name: str, actual: pa.DataType) -> pa.DataType:
    column = DECLARED.get(name)
    if column is None:
        return _plain(actual)
    if column.type is None:
        return pa.list_(actual.value_type)
    if name != "segments":
        return column.type
    declared = {field.name: field for field in SEGMENT_FIELDS}
    fields = {f.name: pa.field(f.name, _plain(f.type)) for f in actual.value_type}
    return pa.list_(pa.struct([*(declared | fields | declared).values()]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the plain type for a large or view variant, as Parquet readers do."""
    if is_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _plain(f.type)) for f in kind])
    return kind


def without_views(table: pa.Table) -> pa.Table:
    """Return the table with plain types instead of views, which few Arrow kernels support."""
    return _retyped(table, _viewless)


def plain_table(table: pa.Table) -> pa.Table:
    """Cast declared columns from large and view variants, and views in user columns to plain types.

    Columns of an unacceptable type are left unchanged: `columns_and_types` reports them.
    """

    def target(name: str, kind: pa.DataType) -> pa.DataType:
        fits = name in DECLARED and accepts(DECLARED[name].type, kind)
        return _target(name, kind) if fits else _viewless(name, kind)

    return _retyped(table, target)


def _retyped(table: pa.Table, target: Callable[[str, pa.DataType], pa.DataType]) -> pa.Table:
    for index, field in enumerate(table.schema):
        kind = target(field.name, field.type)
        if kind != field.type:
            values = cast_column(table.column(index), kind)
            table = table.set_column(index, field.with_type(kind), values)
    return table


def _viewless(_: str, kind: pa.DataType) -> pa.DataType:
    t = pa.types
    tests = (t.is_string_view, t.is_binary_view, t.is_list_view, t.is_large_list_view)
    has_view = any(test(inner) for inner in types_in(kind) for test in tests)
    return _plain(kind) if has_view else kind


def types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types inside it: of elements, fields and dictionary values."""
    yield kind
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    for child in [kind.value_type] if pa.types.is_dictionary(kind) else inner:
        yield from types_in(child)


def is_nullable(name: str) -> bool:
    """True if a declared, prefix or user column may contain nulls."""
    return name not in DECLARED or DECLARED[name].nullable


def cast_column(
    column: pa.Array | pa.ChunkedArray, target: pa.DataType
) -> pa.Array | pa.ChunkedArray:
    """Cast a column. List views are supported; a map becomes a list of {key, value} structs."""
    if column.type == target:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([cast_column(chunk, target) for chunk in column.chunks], target)
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        # Arrow's cast of list views produces invalid arrays.
        values = pc.list_flatten(column)
        column = relisted(column, cast_column(values, _viewless("", values.type)))
    return column.cast(target)
