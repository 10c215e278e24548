"""A list column as two flat NumPy arrays, the form that vectorised transforms and checks use."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.numpy_arrays import filled, to_arrow, to_numpy

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

# Above this mean range length, concatenating slices is faster than fancy indexing by element.
_LONG = 64


@dataclass(frozen=True, slots=True)
class Ragged:
    """A list column of N rows as flat values and offsets.

    Attributes:
        values: Elements of all rows, concatenated.
        offsets: [N + 1] int64; row i is `values[offsets[i]:offsets[i + 1]]`.
        valid: [N] bool; false where the list itself is null (its length is then 0).

    Example:
        >>> r = Ragged.from_arrow(pa.array([[5, 6], None, [7]], pa.list_(pa.int32())))
        >>> r.values.tolist(), r.offsets.tolist(), r.valid.tolist()
        ([5, 6, 7], [0, 2, 2, 3], [True, False, True])
    """

    values: npt.NDArray[Any]
    offsets: IntArray
    valid: BoolArray

    @classmethod
    def from_arrow(cls, column: pa.Array | pa.ChunkedArray) -> Ragged:
        """View a list, large-list or list-view column; copies only to join several chunks.

        Elements must not be null. Offsets have 64 bits, so there may be more than 2^31 elements.
        """
        values = to_numpy(pc.list_flatten(column))
        return cls(values, offsets_of(list_lengths(column)), to_numpy(column.is_valid()))

    @property
    def lengths(self) -> IntArray:
        """[N] number of elements of each row."""
        return np.diff(self.offsets)

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return the elements of one row, without a copy."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def row_of(self, positions: IntArray) -> IntArray:
        """Return the row that contains each flat position."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def take(self, rows: IntArray) -> Ragged:
        """Return the rows with the given indices, in that order."""
        joined = self.as_bytes().take(to_arrow(rows))
        return _of_bytes(joined, self.lengths[rows], self.valid[rows], self.values.dtype)

    def as_bytes(self) -> pa.Array:
        """View the rows as byte strings, [N]: Arrow copies these row by row, but lists by element."""
        validity = None if self.valid.all() else to_arrow(self.valid).buffers()[1]
        values = np.ascontiguousarray(self.values)
        buffers = [validity, pa.py_buffer(self.offsets * values.itemsize), pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.large_binary(), len(self.valid), buffers)

    def to_arrow(self, element_type: pa.DataType) -> pa.Array:
        """Convert to an Arrow list array (large if 32-bit offsets do not suffice)."""
        mask = None if self.valid.all() else to_arrow(~self.valid)
        values = to_arrow(self.values, element_type)
        if self.offsets[-1] > np.iinfo(np.int32).max:
            return pa.LargeListArray.from_arrays(to_arrow(self.offsets), values, mask=mask)
        return pa.ListArray.from_arrays(to_arrow(self.offsets, pa.int32()), values, mask=mask)


def list_lengths(column: pa.Array | pa.ChunkedArray) -> IntArray:
    """Return the number of elements of each list, [N]; 0 for a null list."""
    return filled(pc.list_value_length(column), 0).astype(np.int64, copy=False)


def relisted(column: pa.Array, values: pa.Array) -> pa.Array:
    """Return lists with the lengths and nulls of another column, of other values.

    Args:
        column: [N] lists.
        values: The new elements of all lists, concatenated.
    """
    mask = column.is_null() if column.null_count else None
    offsets = to_arrow(offsets_of(list_lengths(column)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, pa.list_(values.type), mask=mask)


def rows_of(lengths: IntArray) -> IntArray:
    """Return the row of each element of rows with the given lengths.

    Example:
        >>> rows_of(np.array([2, 0, 1])).tolist()
        [0, 0, 2]
    """
    return np.repeat(np.arange(len(lengths)), lengths)


def offsets_of(lengths: IntArray) -> IntArray:
    """Return the offsets of rows with the given lengths, [N + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate the integer ranges start..start + length.

    Example:
        >>> ranges(np.array([2, 0]), np.array([2, 1])).tolist()
        [2, 3, 0]
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    index = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    index += np.repeat(starts - (ends - lengths), lengths)
    return index


def gather(values: npt.NDArray[Any], starts: IntArray, lengths: IntArray) -> npt.NDArray[Any]:
    """Concatenate the ranges `values[start:start + length]`.

    Example:
        >>> gather(np.array([10, 11, 12, 13]), np.array([2, 0]), np.array([2, 1])).tolist()
        [12, 13, 10]
    """
    if len(starts) and lengths.sum() > _LONG * len(starts):
        ends = (starts + lengths).tolist()
        parts = [values[a:b] for a, b in zip(starts.tolist(), ends, strict=True)]
        return np.concatenate(parts)
    return values[ranges(starts, lengths)]


def zipped(*parts: Ragged) -> Ragged:
    """Concatenate the rows of several columns: row i of the result is row i of each part in turn.

    Null rows of a part are skipped, whatever their offsets are; a row of the result is null if it is
    null in all parts.

    Args:
        parts: Columns of N rows whose values have the same dtype.

    Example:
        >>> a = Ragged.from_arrow(pa.array([[1], [2, 3]]))
        >>> b = Ragged.from_arrow(pa.array([[7], []]))
        >>> zipped(a, b).values.tolist()
        [1, 7, 2, 3]
    """
    rows = map(Ragged.as_bytes, parts)
    joined = pc.binary_join_element_wise(*rows, _no_bytes(), null_handling="skip")
    lengths = np.sum([np.where(part.valid, part.lengths, 0) for part in parts], axis=0)
    valid = np.logical_or.reduce([part.valid for part in parts])
    return _of_bytes(joined, lengths, valid, parts[0].values.dtype)


def _no_bytes() -> pa.Scalar:
    # `pa.scalar` would import pandas.
    return Ragged(np.empty(0, np.uint8), np.zeros(2, np.int64), np.ones(1, np.bool_)).as_bytes()[0]


def _of_bytes(rows: pa.Array, lengths: IntArray, valid: BoolArray, dtype: np.dtype[Any]) -> Ragged:
    offsets = offsets_of(lengths)
    values = np.frombuffer(rows.buffers()[2] or b"", dtype, int(offsets[-1]))
    return Ragged(values, offsets, valid)


def ragged_array(
    rows: Sequence[npt.NDArray[Any] | array[float] | None], kind: pa.DataType
) -> pa.Array:
    """Return a list array of type `kind` from one 1-D array per row; None becomes null."""
    offsets = offsets_of(np.array([0 if row is None else len(row) for row in rows], np.int64))
    present = [row for row in rows if row is not None]
    values = _joined(present) if present else np.zeros(0, kind.value_type.to_pandas_dtype())
    valid = np.array([row is not None for row in rows], np.bool_)
    return Ragged(values, offsets, valid).to_arrow(kind.value_type)


def _joined(rows: Sequence[npt.NDArray[Any] | array[float]]) -> npt.NDArray[Any]:
    packed = [row for row in rows if isinstance(row, array) and row.typecode == "f"]
    # Packed floats are joined as bytes, which avoids one NumPy array per row.
    if len(packed) == len(rows):
        return np.frombuffer(b"".join(packed), np.float32)
    return np.concatenate([np.asarray(row) for row in rows])


def routing_array(rows: Sequence[npt.NDArray[Any] | None], num_layers: int, topk: int) -> pa.Array:
    """Return `rollout_expert_indices` from one [tokens, num_layers, topk] array or None per row."""
    flat = [np.zeros(0, np.int16), *(row.reshape(-1) for row in rows if row is not None)]
    values = to_arrow(np.concatenate(flat).astype(np.int16))
    for size in (topk, num_layers):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    tokens = [None if row is None else np.zeros(len(row), np.int16) for row in rows]
    return relisted(ragged_array(tokens, pa.list_(pa.int16())), values)
