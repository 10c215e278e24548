"""Arrow list arrays built from one array per row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.columns import routing_type
from schemas.numpy_arrays import to_arrow
from schemas.ragged import Ragged, offsets_of


def ragged_array(
    rows: Sequence[npt.NDArray[Any] | array[float] | None], kind: pa.DataType
) -> pa.Array:
    """Return a list array of type `kind` from one 1-D array per row; None becomes null."""
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = offsets_of(np.array(lengths, np.int64))
    known = [row for row in rows if row is not None]
    values = _joined(known) if known else np.zeros(0, kind.value_type.to_pandas_dtype())
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
    values = pa.FixedSizeListArray.from_arrays(values, topk)
    values = pa.FixedSizeListArray.from_arrays(values, num_layers)
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = to_arrow(offsets_of(np.array(lengths, np.int64)), pa.int32())
    mask = to_arrow(np.array([row is None for row in rows], np.bool_))
    kind = routing_type(num_layers, topk)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=mask)
