"""Rows of Parquet files, and of the Arrow files that `datasets` saves, as records in JSON.

Nulls that Arrow adds to structs are left out, since a row's values may have different keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.opening import Version
from rollout_io.formats.base import Input, Place
from rollout_io.formats.parsing.lines import Record
from schemas.errors import InputError, RolloutError

_ARROW, _PARQUET = ".arrow", b"PAR1"
_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, NotImplementedError)
_STRIDE = 1 << 32
"""A row's index is its batch times this, plus its index in the batch."""


def is_table(path: Path) -> bool:
    """True for a file of rows."""
    try:
        with path.open("rb") as file:
            return path.name.endswith(_ARROW) or file.read(len(_PARQUET)) == _PARQUET
    except OSError:
        return False


def schema_of(path: Path) -> pa.Schema:
    """Return the columns of a table; none of a damaged one."""
    try:
        return _batches(path, Version.of(path)).schema if _is_arrow(path) else pq.read_schema(path)
    except _ERRORS:
        return pa.schema([])


def rows_of(log: Input, columns: frozenset[str]) -> Iterator[Record]:
    """Yield the rows of a table.

    Raises:
        InputError: `parquet_file`: the file is damaged, or lacks a column; no row was yielded.
    """
    path = log.path
    try:
        batches = [*_num_rows(path)]
        if missing := sorted(columns - {*schema_of(path).names}):
            raise ValueError(f"the column {missing[0]!r} is missing")
    except _ERRORS as error:
        raise _damaged(log.name, error) from None
    starts = [sum(batches[:i]) for i in range(len(batches))]
    size = path.stat().st_size // max(sum(batches), 1)
    for batch, (start, num_rows) in enumerate(zip(starts, batches, strict=True)):
        for i in range(num_rows):
            where = f"{log.name}, row {start + i}"
            place = Place(path, where, None, size, batch * _STRIDE + i)
            yield Record(place, read_row(place))


def read_row(place: Place) -> bytes:
    """Return a row as JSON.

    Raises:
        InputError: `parquet_file`: the file is damaged.
    """
    assert isinstance(place.part, int)
    batch, index = divmod(place.part, _STRIDE)
    try:
        row = _rows(place.path, Version.of(place.path), batch)[index]
        return msgspec.json.encode(_without_nulls(row))
    except (*_ERRORS, IndexError) as error:
        raise _damaged(place.where, error) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    is_infinite = isinstance(value, float) and math.isinf(value)
    return (
        msgspec.Raw(b"1e999") if is_infinite else value
    )  # refused as any JSON number of that size


def _is_arrow(path: Path) -> bool:
    return path.name.endswith(_ARROW)


def _num_rows(path: Path) -> Iterator[int]:
    """Yield the number of rows of each batch, after reading it: the whole file is sound."""
    if _is_arrow(path):
        yield from (batch.num_rows for batch in _batches(path, Version.of(path)).to_batches())
        return
    with pq.ParquetFile(path) as file:
        yield from (file.read_row_group(i).num_rows for i in range(file.num_row_groups))


@lru_cache(maxsize=2)
def _rows(path: Path, version: Version, batch: int) -> list[dict[str, Any]]:
    if _is_arrow(path):
        rows: list[dict[str, Any]] = _batches(path, version).to_batches()[batch].to_pylist()
        return rows
    with pq.ParquetFile(path) as file:
        rows = file.read_row_group(batch).to_pylist()
        return rows


@lru_cache(maxsize=2)
def _batches(path: Path, _: Version) -> Any:
    """Open the record batches of a memory-mapped Arrow file."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _damaged(where: str, error: Exception) -> RolloutError:
    finding = " ".join(f"cannot read the file: {str(error) or type(error).__name__}".split())
    return InputError("parquet_file", where, finding, hint="copy the file again, or write it again")
