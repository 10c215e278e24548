"""Short columns of a table's rows: scalars, with long texts cut, and numbers of tokens."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from pipelines.statistics.summary import row_lengths
from schemas.numpy_arrays import to_frame
from schemas.types import PREFIX_TYPES, is_string

MAX_TEXT = 200
"""Characters that the index keeps of a longer text, followed by its length and a hash."""

LENGTHS = frozenset(f"num tokens: {name}" for name in ("prompt", "response", "sampled", "trained"))
"""Columns that the index adds to rows; the dataset's columns with these names are not kept."""
_NOT_KEPT = frozenset({"messages", "response_text", "source", "sampling_extra"})


def kind_of(kind: pa.DataType) -> str:
    """Classify the type of a column for the page: number, text, bool or other."""
    types = pa.types
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    return "text" if is_string(kind) else "other"


def kept_columns(schema: pa.Schema) -> list[str]:
    """List the columns that the index keeps for each row: scalars, except long texts."""
    left_out = {*_NOT_KEPT, *PREFIX_TYPES, *LENGTHS}
    return [f.name for f in schema if kind_of(f.type) != "other" and f.name not in left_out]


def short_rows(table: pa.Table, names: list[str], cut: set[str]) -> pl.DataFrame:
    """Return the columns `names` of a table's rows, and numbers of tokens; add cut columns to `cut`."""
    rows = to_frame({name: table.column(name) for name in names})
    rows = rows.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    for name in set(names) - {"instance_id", "trajectory_id"}:
        column = rows[name]
        if column.dtype == pl.String and (column.str.len_bytes() > MAX_TEXT).any():
            shown = cut_texts(column)
            if not shown.equals(column, null_equal=True):
                cut.add(name)
                rows = rows.with_columns(shown.alias(name))
    lengths = row_lengths(table).select(
        pl.col("prompt", "response", "sampled", "trained")
        .cast(pl.Int32)
        .name.prefix("num tokens: ")
    )
    return rows.hstack(lengths)


def cut_texts(texts: pl.Series) -> pl.Series:
    """Truncate long texts; the appended length and hash distinguish texts that begin alike."""
    length, number = texts.str.len_chars(), texts.hash(0) % 10**12
    marks = pl.format(
        "{}\u2026 [cut: {} characters, #{}]", texts.str.head(MAX_TEXT), length, number
    )
    return pl.select(pl.when(length > MAX_TEXT).then(marks).otherwise(texts)).to_series()
