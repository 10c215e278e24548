"""Bloom filters of the ids in each row group of a shard, stored in its footer.

A query for a few trajectories or instances reads only the row groups that may contain them.
Parquet's own statistics and Bloom filters do not suffice: random ids span the whole range in every
row group, and no checksum covers either, so a flipped bit could hide rows. (PyArrow 26 writes
Parquet's Bloom filters, but has no function that reads them.) The filters here have digests, which
the footer's digest (`rollout_io.dataset.footer`) covers.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from schemas.metadata import DIGEST, ID_FILTERS
from schemas.ragged import BoolArray, IntArray, offsets_of

ID_COLUMNS = ("trajectory_id", "instance_id")

_FILTERS_OF = b"rollout_io_id_filters."  # prefix of keys that the footer's digest does not cover
_BITS_PER_ID = 12
_NUM_HASHES = 8  # with 12 bits per id, the false-positive rate is 1 in 300


@dataclass(slots=True)
class IdFilters:
    """Collects the ids of a shard that is being written, row group by row group."""

    _num_ids: dict[str, list[int]] = field(default_factory=lambda: {n: [] for n in ID_COLUMNS})
    _filters: dict[str, list[bytes]] = field(default_factory=lambda: {n: [] for n in ID_COLUMNS})

    def add(self, table: pa.Table) -> None:
        """Add the ids of the next row group."""
        for name in ID_COLUMNS:
            hashes = _hashes(table.column(name).unique().to_pylist())
            bits = np.zeros(_num_bytes(len(hashes)) * 8, np.bool_)
            if len(hashes):
                bits[_positions(hashes, len(bits))] = True
            self._num_ids[name].append(len(hashes))
            self._filters[name].append(np.packbits(bits).tobytes())

    def encode(self) -> dict[bytes, bytes]:
        """Return the filters as Parquet key-value pairs.

        The filters are large, so the footer's digest covers only their digests: a reader that does
        not use them does not have to check them.
        """
        joined = {n: base64.b64encode(b"".join(self._filters[n])) for n in ID_COLUMNS}
        facts = {n: {"num_ids": self._num_ids[n], "digest": _digest(joined[n])} for n in ID_COLUMNS}
        pairs = {_FILTERS_OF + name.encode(): value for name, value in joined.items()}
        return {ID_FILTERS: json.dumps(facts).encode(), **pairs}


def row_groups_with(
    predicate: pl.Expr, pairs: Mapping[bytes, bytes], num_row_groups: int
) -> IntArray:
    """Return the indices of the row groups that may contain rows that satisfy a predicate.

    Args:
        predicate: Condition on a row.
        pairs: Key-value pairs of the shard's footer, already checked against its digest.
        num_row_groups: Number of row groups of the shard.

    Raises:
        pa.ArrowInvalid: The filters are damaged.
    """
    may_match = np.ones(num_row_groups, np.bool_)
    if DIGEST in pairs and ID_FILTERS in pairs:
        for name in ID_COLUMNS:
            ids = required_ids(predicate, name)
            # With more ids, each row group probably contains one.
            if ids is not None and len(ids) <= num_row_groups:
                try:
                    may_match &= _may_have(pairs, name, ids)
                except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
                    raise pa.ArrowInvalid(f"the filters of {name} are damaged: {error}") from None
    return np.flatnonzero(may_match)


def required_ids(predicate: pl.Expr, name: str) -> set[str] | None:
    """Return the ids to which a predicate limits a column; None if it does not limit it.

    Example:
        >>> required_ids(
        ...     (pl.col("trajectory_id") == "a_0") & (pl.col("reward") > 0), "trajectory_id"
        ... )
        {'a_0'}
    """
    inputs = predicate.meta.pop()
    if len(inputs) != 2:
        return None
    right, left = inputs
    if predicate.meta.eq(left & right):
        limits = [ids for part in inputs if (ids := required_ids(part, name)) is not None]
        return set.intersection(*limits) if limits else None
    if predicate.meta.eq(left | right):
        either = [required_ids(part, name) for part in inputs]
        return None if None in either else set().union(*(ids for ids in either if ids))
    column = pl.col(name)
    if predicate.meta.eq(column == right):
        return _strings(right)
    if predicate.meta.eq(left == column):
        return _strings(left)
    if any(predicate.meta.eq(column.is_in(right, nulls_equal=n)) for n in (False, True)):
        return _strings(right)
    return None


def _strings(literal: pl.Expr) -> set[str] | None:
    """Return the strings of a literal, or of a literal list of strings."""
    if literal.meta.root_names():
        return None
    values = pl.select(literal).to_series()
    if isinstance(values.dtype, pl.List):
        values = values.explode()
    return None if values.dtype != pl.String or values.null_count() else set(values)


def _may_have(pairs: Mapping[bytes, bytes], name: str, ids: Iterable[str]) -> BoolArray:
    """Return, for each row group, whether its filter accepts one of the ids."""
    facts, stored = json.loads(pairs[ID_FILTERS])[name], pairs.get(_FILTERS_OF + name.encode(), b"")
    if facts["digest"] != _digest(stored):
        raise pa.ArrowInvalid(f"the filters of {name} do not match their digest")
    filters = np.frombuffer(base64.b64decode(stored), np.uint8)
    sizes = np.array([_num_bytes(num) for num in facts["num_ids"]], np.int64)
    accepts = np.zeros(len(sizes), np.bool_)
    filled = np.flatnonzero(sizes)
    starts, num_bits = offsets_of(sizes)[:-1][filled, None], 8 * sizes[filled, None]
    for one in _hashes(ids):
        at = _positions(one[None], num_bits)
        bits = filters[starts + at // 8] >> (7 - at % 8) & 1
        accepts[filled] |= bits.all(axis=1)
    return accepts


def _digest(stored: bytes) -> str:
    return hashlib.blake2b(stored, digest_size=16).hexdigest()


def _num_bytes(num_ids: int) -> int:
    return -(-num_ids * _BITS_PER_ID // 8)


def _hashes(ids: Iterable[str | None]) -> npt.NDArray[np.uint32]:
    """[N, 2] Return two hashes per id, the same in every version and process."""
    digests = (hashlib.blake2b(i.encode(), digest_size=8).digest() for i in ids if i is not None)
    return np.frombuffer(b"".join(digests), "<u4").reshape(-1, 2)


def _positions(hashes: npt.NDArray[np.uint32], num_bits: int | IntArray) -> IntArray:
    """[N or G, _NUM_HASHES] Return the positions of ids in filters of `num_bits` bits."""
    first, second = hashes.astype(np.int64).T[:, :, None]
    positions: IntArray = (first + second * np.arange(_NUM_HASHES)) % num_bits
    return positions
