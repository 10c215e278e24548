"""Encode the viewer's responses: JSON without NaN or lone surrogates, and Arrow of plain types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from starlette.responses import Response

from rollout_io.terminal import whole_characters
from schemas.types import as_table, is_string

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
MAX_CHARS = 20_000
"""Maximum number of characters of a text in a response."""

_INT32 = range(-(2**31), 2**31)
_EXACT = range(-(2**53), 2**53 + 1)


def json_response(value: Any) -> Response:
    """Encode a value as JSON; NaN and infinity become null, and lone surrogates become U+FFFD."""
    return Response(msgspec.json.encode(_plain(value)), media_type=JSON)


def arrow_response(data: pl.DataFrame | pa.Table, **totals: float | str) -> Response:
    """Encode a table as an Arrow IPC stream, with `totals` as schema metadata.

    Integer columns are cast to int32 if all values fit, else to float64 if that is exact; otherwise
    they are unchanged. Strings are truncated to `MAX_CHARS` characters.
    """
    table = as_table(data)
    columns = [_plain_column(column) for column in table.columns]
    fields = [pa.field(n, c.type) for n, c in zip(table.column_names, columns, strict=True)]
    metadata = {name: str(value) for name, value in totals.items()}
    plain = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain.combine_chunks())
    return Response(sink.getvalue().to_pybytes(), media_type=ARROW)


def shortened(text: str, max_chars: int = MAX_CHARS) -> str:
    """Cut a long text, and append its full length.

    Example:
        >>> shortened("abcdef", 3)
        'abc\u2026 [cut: 6 characters]'
    """
    if len(text) <= max_chars:
        return whole_characters(text)
    return f"{whole_characters(text[:max_chars])}\u2026 [cut: {len(text):,} characters]"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {whole_characters(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if is_string(kind):
        return _shortened(column.cast(pa.large_string())).cast(pa.string())
    if pa.types.is_integer(kind) and kind != pa.int32():
        bounds = pc.min_max(column).as_py()
        for small, values in ((pa.int32(), _INT32), (pa.float64(), _EXACT)):
            if all(value is None or value in values for value in bounds.values()):
                return column.cast(small)
        return column
    return column.cast(pa.float32()) if pa.types.is_float16(kind) else column


def _shortened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    longest = pc.max(pc.utf8_length(column)).as_py() or 0
    if longest <= MAX_CHARS:
        return column
    texts = [None if text is None else shortened(text) for text in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.large_string())])
