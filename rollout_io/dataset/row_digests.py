"""Digests of rows, which change with any value, its place and its row's other values."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import list_lengths, offsets_of

Digests = npt.NDArray[np.uint64]
_ZERO = np.uint64(0)
_PIECE_BYTES = 1 << 19
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


STORED = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards")
"""Columns of `stored_digests`: what a run or an audit reads of a row, as it is stored."""


def row_digest(columns: Iterable[str]) -> pl.Expr:
    """Build an expression that hashes the given columns of each row, int64.

    Digests are the same on all machines and versions. Columns without a value do not change them.
    """
    return pl.struct(sorted(columns)).map_batches(
        lambda rows: pl.Series(_in_pieces(rows.to_arrow()).view(np.int64)),
        return_dtype=pl.Int64,
        is_elementwise=True,
    )


def _in_pieces(rows: pa.StructArray) -> Digests:
    """Hash a few rows at a time: an intermediate array has eight bytes a token, and there are ten."""
    size = max(1, len(rows) * _PIECE_BYTES // max(rows.nbytes, 1))
    pieces = [_digests(rows.slice(begin, size)) for begin in range(0, len(rows), size)]
    return np.concatenate([np.empty(0, np.uint64), *pieces])


def with_stored_digest(frame: pl.LazyFrame) -> pl.LazyFrame:
    """Add a column `row_digest`: the digest of the columns `STORED`."""
    present = frame.collect_schema()
    return frame.with_columns(row_digest=row_digest(name for name in STORED if name in present))


def _digests(array: pa.Array) -> Digests:
    kind = array.type
    if pa.types.is_struct(kind):
        digests = np.zeros(len(array), np.uint64)
        for number, field in enumerate(kind):
            name = np.array([zlib.crc32(field.name.encode())], np.uint64)
            values = array.field(number)
            digests += np.where(to_numpy(values.is_valid()), _mixed(_digests(values), name), _ZERO)
    elif pa.types.is_nested(kind):
        lengths = list_lengths(array)
        offsets = offsets_of(lengths)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = _mixed(_digests(pc.list_flatten(array)), place.astype(np.uint64))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values)])
        digests = _mixed(total[offsets[1:]] - total[offsets[:-1]], lengths.astype(np.uint64))
    elif pa.types.is_floating(kind):
        digests = filled(array, 0).astype(np.float64).view(np.uint64)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        digests = filled(array, 0).astype(np.int64).view(np.uint64)
    else:
        is_binary = pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind)
        texts = array.cast(pa.binary() if is_binary else pa.large_string()).dictionary_encode()
        values = texts.dictionary.cast(pa.large_binary()).to_pylist()
        hashes = [hashlib.sha256(value).digest()[:8] for value in values]
        digests = np.frombuffer(b"\0" * 8 + b"".join(hashes), "<u8")[filled(texts.indices, -1) + 1]
    digests[~to_numpy(array.is_valid())] = _FACTORS[1]
    return digests


def _mixed(values: Digests, with_: Digests) -> Digests:
    bits = values + (with_ + np.uint64(1)) * _FACTORS[0]
    bits = (bits ^ (bits >> np.uint64(30))) * _FACTORS[1]
    mixed: Digests = bits ^ (bits >> np.uint64(27))
    return mixed
