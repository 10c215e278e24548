"""Arrow transforms as Polars ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import polars as pl
import pyarrow as pa

from schemas.types import as_table

Frame: TypeAlias = pl.LazyFrame | pl.DataFrame | pa.Table
"""What the transforms of this package take; they give back a LazyFrame."""


def as_lazy(frame: Frame) -> pl.LazyFrame:
    """A LazyFrame of a LazyFrame, DataFrame or Arrow table."""
    if isinstance(frame, pl.LazyFrame):
        return frame
    data = frame if isinstance(frame, pl.DataFrame) else pl.from_arrow(frame)
    assert isinstance(data, pl.DataFrame)
    return data.lazy()


def over_tables(frame: Frame, transform: Callable[[pa.Table], pa.Table]) -> pl.LazyFrame:
    """Apply a transform of whole Arrow tables inside a lazy query."""
    frame = as_lazy(frame)

    def apply(data: pl.DataFrame) -> pl.DataFrame:
        result = pl.from_arrow(transform(as_table(data)))
        assert isinstance(result, pl.DataFrame)
        return result

    schema = apply(pl.DataFrame(schema=frame.collect_schema())).schema
    return frame.map_batches(
        apply,
        predicate_pushdown=False,
        projection_pushdown=False,
        slice_pushdown=False,
        schema=schema,
    )


def set_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """Replace a column, or append it."""
    chunked = pa.chunked_array([column])
    if name not in table.column_names:
        return table.append_column(pa.field(name, column.type), chunked)
    index = table.column_names.index(name)
    field = pa.field(name, column.type, table.schema.field(name).nullable)
    return table.set_column(index, field, chunked)
