"""Check Arrow types against the declared types, and cast to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS, SEGMENT_FIELDS, Column
from schemas.errors import InvariantError
from schemas.numpy_arrays import to_arrow
from schemas.ragged import list_lengths, offsets_of

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
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    import polars as pl

    if isinstance(data, pl.LazyFrame):
        data = data.collect()
    if isinstance(data, pl.DataFrame):
        return _to_arrow(data)
    return pa.table(data)


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


def _to_arrow(data: pl.DataFrame) -> pa.Table:
    try:
        return data.to_arrow()
    except pa.ArrowException as error:
        finding = f"Arrow cannot store a column: {error}"
        hint = "cast the column to a type that Arrow supports, or drop it"
        raise InvariantError("columns_and_types", "table", finding, "", hint) from None


def is_list(kind: pa.DataType) -> bool:
    """True for any list type of variable length."""
    t = pa.types
    return bool(
        t.is_list(kind)
        or t.is_large_list(kind)
        or t.is_list_view(kind)
        or t.is_large_list_view(kind)
    )


def is_string(kind: pa.DataType) -> bool:
    """True for any string type."""
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def accepts(declared: pa.DataType, actual: pa.DataType) -> bool:
    """True if `actual` equals `declared` up to large and view variants.

    A map is accepted for a list of {key, value} structs, and a struct may have additional fields.

    Example:
        >>> accepts(pa.list_(pa.int32()), pa.large_list(pa.int32()))
        True
        >>> accepts(pa.list_(pa.int32()), pa.list_(pa.int64()))
        False
    """
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


def is_routing(kind: pa.DataType) -> bool:
    """True for list<fixed list<fixed list<int16>>>."""
    if not is_list(kind) or not pa.types.is_fixed_size_list(kind.value_type):
        return False
    inner = kind.value_type.value_type
    return bool(pa.types.is_fixed_size_list(inner) and inner.value_type == pa.int16())


def accepts_column(column: Column, actual: pa.DataType) -> bool:
    """True if `actual` is an acceptable type for the declared column."""
    return is_routing(actual) if column.type is None else accepts(column.type, actual)


def cast_table(table: pa.Table) -> pa.Table:
    """Cast declared columns to their declared types; replace large and view types in user columns.

    Metadata of fields inside a type (of a list's elements, of a struct's fields) is dropped.
    The table must have passed `columns_and_types`. Slice a table of more than 2^31 list elements
    first: the declared lists have 32-bit offsets.
    """
    names = table.column_names
    kinds = [_target(f.name, f.type) for f in table.schema]
    columns = [cast_column(table.column(n), kind) for n, kind in zip(names, kinds, strict=True)]
    fields = [
        pa.field(n, kind, is_nullable(n), table.schema.field(n).metadata)
        for n, kind in zip(names, kinds, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def without_null_elements(schema: pa.Schema) -> pa.Schema:
    """Declare the elements of declared lists of numbers as not null, as the invariants require.

    This saves Parquet one level per element, in files and in time. Readers return the declared types.

    Args:
        schema: A schema with the declared types, as in tables from `cast_table`.
    """
    declared = COLUMN_BY_NAME.keys() | PREFIX_TYPES.keys()
    for index, field in enumerate(schema):
        kind = field.type
        if field.name in declared and pa.types.is_list(kind) and not kind.value_type.num_fields:
            element = pa.field("element", kind.value_type, nullable=False)
            schema = schema.set(index, field.with_type(pa.list_(element)))
    return schema


def _target(name: str, actual: pa.DataType) -> pa.DataType:
    if name in PREFIX_TYPES:
        return PREFIX_TYPES[name]
    column = COLUMN_BY_NAME.get(name)
    if column is None:
        return _plain(actual)
    if column.type is None:
        return pa.list_(actual.value_type)
    return _segments_type(actual) if name == "segments" else column.type


def _segments_type(actual: pa.DataType) -> pa.DataType:
    declared = {field.name for field in SEGMENT_FIELDS}
    extra = [pa.field(f.name, _plain(f.type)) for f in actual.value_type if f.name not in declared]
    return pa.list_(pa.struct([*SEGMENT_FIELDS, *extra]))


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
    for index, field in enumerate(table.schema):
        if _has_view(field.type):
            column = cast_column(table.column(index), _plain(field.type))
            table = table.set_column(index, field.with_type(column.type), column)
    return table


def plain_table(table: pa.Table) -> pa.Table:
    """Cast declared columns from large and view variants, and views in user columns to plain types.

    Columns of an unacceptable type are left unchanged: `columns_and_types` reports them.
    """
    for index, field in enumerate(table.schema):
        target = _plain(field.type) if _has_view(field.type) else field.type
        column = COLUMN_BY_NAME.get(field.name)
        if column is not None and accepts_column(column, field.type):
            target = _target(field.name, field.type)
        elif field.name in PREFIX_TYPES and accepts(PREFIX_TYPES[field.name], field.type):
            target = PREFIX_TYPES[field.name]
        if target != field.type:
            values = cast_column(table.column(index), target)
            table = table.set_column(index, field.with_type(target), values)
    return table


def _has_view(kind: pa.DataType) -> bool:
    t = pa.types
    is_view = (t.is_string_view, t.is_binary_view, t.is_list_view, t.is_large_list_view)
    children = (kind.field(i).type for i in range(kind.num_fields))
    return any(test(kind) for test in is_view) or any(_has_view(child) for child in children)


def is_nullable(name: str) -> bool:
    """True if a declared, prefix or user column may contain nulls."""
    column = COLUMN_BY_NAME.get(name)
    if column is not None:
        return column.nullable
    return name not in PREFIX_TYPES or name == "parent_step_index"


def cast_column(
    column: pa.Array | pa.ChunkedArray, target: pa.DataType
) -> pa.Array | pa.ChunkedArray:
    """Cast a column. List views are supported; a map becomes a list of {key, value} structs."""
    if column.type == target:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([cast_column(chunk, target) for chunk in column.chunks], target)
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        column = _without_view(column)
    return column.cast(target)


def _without_view(lists: pa.Array) -> pa.Array:
    """Convert list views without Arrow's cast, which produces invalid arrays."""
    values = pc.list_flatten(lists)
    if _has_view(values.type):
        values = cast_column(values, _plain(values.type))
    mask = lists.is_null() if lists.null_count else None
    offsets = to_arrow(offsets_of(list_lengths(lists)))
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)
