"""Conversion between Arrow columns and NumPy arrays without importing pandas.

`pa.array`, `pa.scalar`, `to_numpy` and `np.asarray` import pandas on their first call if it is
installed, to recognise its objects. The import takes longer than `rollouts stats` needs to read a
dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    import polars as pl


def to_numpy(column: pa.Array | pa.ChunkedArray, fill: float | None = None) -> npt.NDArray[Any]:
    """Convert a column of numbers or booleans to NumPy, like `column.to_numpy()`.

    Nulls become `fill` in the dtype of the column; without it, NaN, or None in a boolean column. A
    single chunk of numbers without nulls is not copied.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [_chunk(chunk, fill) for chunk in chunks] or [_chunk(column, fill)]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def filled(column: pa.Array | pa.ChunkedArray, value: float) -> npt.NDArray[Any]:
    """Convert a column like `to_numpy`, but replace nulls with `value` and keep the dtype."""
    return to_numpy(column, value)


def _chunk(chunk: pa.Array, fill: float | None) -> npt.NDArray[Any]:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    is_plain = len(chunk) > 0 and any(is_kind(chunk.type) for is_kind in kinds)
    if not is_plain or (fill is None and chunk.null_count):
        series = _series(chunk)
        return (series if fill is None else series.fill_null(fill)).to_numpy()
    slots = _slots(chunk)
    if not chunk.null_count:
        return slots
    return np.where(_bits(chunk.buffers()[0], chunk), slots, slots.dtype.type(fill))


def _slots(chunk: pa.Array) -> npt.NDArray[Any]:
    """[N] Values of a chunk of numbers or booleans, undefined at nulls; numbers are not copied."""
    data = chunk.buffers()[1]
    dtype = np.dtype(chunk.type.to_pandas_dtype())
    if data is None:
        return np.empty(0, dtype)
    if dtype == np.bool_:
        return _bits(data, chunk)
    values = np.frombuffer(data, dtype, len(chunk), chunk.offset * dtype.itemsize)
    values.flags.writeable = False
    return values


def _bits(buffer: pa.Buffer, chunk: pa.Array) -> npt.NDArray[np.bool_]:
    """[N] Unpack a bitmap of a chunk, ten times faster than Polars."""
    begin, end = chunk.offset, chunk.offset + len(chunk)
    packed = np.frombuffer(buffer, np.uint8)[begin // 8 :]
    unpacked = np.unpackbits(packed, count=end - begin // 8 * 8, bitorder="little")
    return unpacked[begin % 8 :].view(np.bool_)


def to_arrow(
    values: npt.NDArray[Any], kind: pa.DataType | None = None, mask: npt.NDArray[Any] | None = None
) -> pa.Array:
    """Convert numbers or booleans like `pa.array`; numbers in native byte order are not copied.

    Args:
        values: One-dimensional array.
        kind: Arrow type of the result; None keeps the type of `values`.
        mask: True where the result is null.

    Raises:
        pa.ArrowInvalid: A value does not fit the type.
    """
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    validity = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    is_bool = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bool else np.ascontiguousarray(values)
    stored_kind = pa.from_numpy_dtype(values.dtype)
    array = pa.Array.from_buffers(stored_kind, len(values), [validity, pa.py_buffer(data)])
    return array if kind is None or kind == stored_kind else array.cast(kind)


def to_frame(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> pl.DataFrame:
    """Build a polars frame from Arrow columns (NumPy arrays would make polars import `numpy.ma`)."""
    import polars as pl

    return pl.DataFrame(pa.table(dict(columns)))


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows, like `schema.empty_table()`."""
    return pa.Table.from_batches([], schema)


def _series(column: pa.Array | pa.ChunkedArray) -> pl.Series:
    import polars as pl

    return pl.Series(column)
