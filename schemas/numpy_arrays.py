"""Conversion between Arrow columns and NumPy arrays without importing pandas.

`pa.array`, `pa.scalar`, `to_numpy` and `np.asarray` import pandas on their first call if it is
installed, to recognise its objects. The import takes longer than `rollouts stats` needs to read a
dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa


def to_numpy(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Convert a column of numbers or booleans to NumPy, like `column.to_numpy()`.

    Nulls become NaN, or None in a boolean column. A single chunk of numbers without nulls is not
    copied.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [_series(chunk).to_numpy() for chunk in chunks]
    if len(arrays) == 1:
        only: npt.NDArray[Any] = arrays[0]
        return only
    return np.concatenate(arrays) if arrays else _series(column).to_numpy()


def filled(column: pa.Array | pa.ChunkedArray, value: float) -> npt.NDArray[Any]:
    """Convert a column like `to_numpy`, but replace nulls with `value` and keep the dtype."""
    if not column.null_count:
        return to_numpy(column)
    return _series(column).fill_null(value).to_numpy()


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
    own = pa.from_numpy_dtype(values.dtype)
    array = pa.Array.from_buffers(own, len(values), [validity, pa.py_buffer(data)])
    return array if kind is None or kind == own else array.cast(kind)


def to_frame(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> pl.DataFrame:
    """Build a polars frame from Arrow columns (NumPy arrays would make polars import `numpy.ma`)."""
    frame = pl.from_arrow(pa.table(dict(columns)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows, like `schema.empty_table()`."""
    return pa.Table.from_batches([], schema)


def _series(column: pa.Array | pa.ChunkedArray) -> pl.Series:
    series = pl.from_arrow(column)
    assert isinstance(series, pl.Series)
    return series
