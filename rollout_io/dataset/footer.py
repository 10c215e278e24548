"""Footer metadata of a shard: its place in the dataset, filters of its ids, and a digest of the footer.

Parquet has checksums for pages but none for the footer. A flipped bit there can change a column's
type or the dataset's metadata without an error. If a shard is missing, or replaced by another
dataset's shard of the same name, each file is still valid by itself.

With the Bloom filters of the ids in each row group (`IdFilters`), a query for a few trajectories or
instances reads only the row groups that may contain them. Parquet's own statistics and Bloom filters do not
suffice: random ids span the whole range in every row group, and no checksum covers either, so a flipped bit
could hide rows. (PyArrow 26 writes Parquet's Bloom filters, but has no function that reads them.) The
filters here have digests, which the footer's digest covers.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import InputError
from schemas.metadata import DIGEST, ID_FILTERS, PLACE, is_ours
from schemas.numpy_arrays import empty_table
from schemas.ragged import BoolArray, IntArray, list_lengths, offsets_of

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One writer's part of a dataset.

    Attributes:
        writing: Digest that identifies the write; the same for all parts of a dataset.
        index: Index of the part, from 0.
        num_parts: Number of parts of the write.
    """

    writing: str
    index: int = 0
    num_parts: int = 1

    @classmethod
    def of(cls, facts: Any, index: int = 0, num_parts: int = 1) -> Part:
        """Return a part whose `writing` is the digest of JSON-serialisable `facts`."""
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
        return cls(writing=digest, index=index, num_parts=num_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A shard's position in its dataset.

    Attributes:
        writing: See `Part`.
        part: See `Part.index`.
        num_parts: See `Part`.
        index: Index of the shard in its part, from 0.
        is_last: True for the part's last shard.
        before: Digest of the ids and lengths of the part's rows before this shard.
        after: Digest of the same values, including this shard's rows.
    """

    writing: str
    part: int
    num_parts: int
    index: int
    is_last: bool
    before: str
    after: str

    def encode(self) -> dict[bytes, bytes]:
        """Return the place as a Parquet key-value pair."""
        return {PLACE: json.dumps(asdict(self)).encode()}

    @classmethod
    def decode(cls, pairs: Mapping[bytes, bytes]) -> Place | None:
        """Parse the output of `encode`; None if the shard was appended, and so has no recorded place.

        Raises:
            InputError: `file_metadata`: the value is not a place.
        """
        if PLACE not in pairs:
            return None
        try:
            return msgspec.json.decode(pairs[PLACE], type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            hint = "write the file again from its source: its metadata is damaged"
            raise InputError("file_metadata", "metadata 'place'", str(error), "", hint) from None

    def precedes(self, other: Place) -> bool:
        """True if `other` is the next shard of the dataset."""
        if self.writing != other.writing or self.num_parts != other.num_parts:
            return False
        if self.is_last:
            return (other.part, other.index) == (self.part + 1, 0)
        return (other.part, other.index, other.before) == (self.part, self.index + 1, self.after)


@dataclass(slots=True)
class Places:
    """Assigns each shard of a part its position in the dataset, in order.

    Attributes:
        part: The part being written.
    """

    part: Part
    _index: int = 0
    _before: str = ""
    _rows: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    @classmethod
    def of_whole(cls, metadata: Mapping[bytes, bytes], table: pa.Table) -> Places:
        """Return places for a dataset with one writer; metadata and first rows identify it."""
        facts = {key.decode(): value.decode() for key, value in metadata.items()}
        first = cls(Part(writing=""))
        first.add(table)
        return cls(Part.of([facts, first.next(is_last=True).after]))

    def add(self, table: pa.Table) -> None:
        """Add the rows of a table, in either layout, to the next shard."""
        self._rows.update("\n".join(table.column("trajectory_id").to_pylist()).encode())
        for name in ("response_ids", "prompt_token_ids", "prompt_suffix_ids"):
            if name in table.column_names:
                self._rows.update(list_lengths(table.column(name)).tobytes())

    def next(self, *, is_last: bool) -> Place:
        """Return the position of the next shard; call `add` with all of its rows first."""
        place = Place(
            writing=self.part.writing,
            part=self.part.index,
            num_parts=self.part.num_parts,
            index=self._index,
            is_last=is_last,
            before=self._before,
            after=self._rows.hexdigest(),
        )
        self._index, self._before = self._index + 1, place.after
        return place


def refuse_incomplete(where: str, places: Sequence[Place | None], names: Sequence[str]) -> None:
    """Raise an error if a shard of a dataset is missing from a directory, or in the wrong order.

    A directory may contain several complete datasets. Shards that were appended one by one have no
    place and are not checked.

    Args:
        where: The directory.
        places: Place of each shard, in the order of the file names; None for appended shards.
        names: File names of the shards.

    Raises:
        InputError: `shards_complete`: a shard is missing, or from a different dataset.
    """
    writings: dict[str, list[tuple[Place, str]]] = {}
    for place, name in zip(places, names, strict=True):
        if place is not None:
            writings.setdefault(place.writing, []).append((place, name))
    for places_of in writings.values():
        _refuse_gaps(where, places_of)


def _refuse_gaps(where: str, places: Sequence[tuple[Place, str]]) -> None:
    (first, name), (last, last_name) = places[0], places[-1]
    if (first.part, first.index) != (0, 0):
        raise _incomplete(where, f"the first shard, {name}, is number {_number(first)}; expected 0")
    for (before, name_before), (place, name) in pairwise(places):
        if not before.precedes(place):
            finding = f"{name} does not follow {name_before}"
            why = "a shard is missing, was renamed, or belongs to a different dataset"
            raise _incomplete(where, f"{finding}: {why}")
    if not last.is_last or last.part != last.num_parts - 1:
        raise _incomplete(where, f"the shards after {last_name} are missing")


def _number(place: Place) -> str:
    return f"{place.index}" if place.num_parts == 1 else f"{place.index} of part {place.part}"


def _incomplete(where: str, got: str) -> InputError:
    hint = "restore the missing shard from a copy, or write the dataset again from its source"
    return InputError("shards_complete", where, got, "", hint)


def seal(
    schema: pa.Schema, pairs: Mapping[bytes, bytes], num_rows: Iterable[int]
) -> dict[bytes, bytes]:
    """Return the digest of a footer that is about to be written, as a key-value pair.

    Args:
        schema: The schema that is passed to the Parquet writer.
        pairs: All key-value pairs that this library writes.
        num_rows: Number of rows of each row group.
    """
    return {DIGEST: _digest(_as_read(schema), pairs, num_rows)}


def verify(file: pq.ParquetFile, source: Any) -> None:
    """Check a footer against its digest, if it has one (other programs write none).

    Args:
        file: The Parquet file.
        source: The open file, searched for a digest that a flipped bit hides from Parquet's parser.

    Raises:
        pa.ArrowInvalid: The footer is damaged.
    """
    pairs: Mapping[bytes, bytes] = file.metadata.metadata or {}
    if DIGEST not in pairs:
        if DIGEST in _footer_bytes(source):
            raise pa.ArrowInvalid("the digest of the footer cannot be read")
        return
    groups = range(file.metadata.num_row_groups)
    num_rows = [file.metadata.row_group(index).num_rows for index in groups]
    if pairs.get(DIGEST) != _digest(file.schema_arrow, pairs, num_rows):
        raise pa.ArrowInvalid("the footer does not match its digest")


def _footer_bytes(source: Any) -> bytes:
    source.seek(-8, os.SEEK_END)
    num_bytes = int.from_bytes(source.read(4), "little")
    source.seek(-8 - num_bytes, os.SEEK_END)
    content: bytes = source.read(num_bytes)
    return content


def _digest(schema: pa.Schema, pairs: Mapping[bytes, bytes], num_rows: Iterable[int]) -> bytes:
    fields = [[f.name, f.nullable, _type_text(f.type)] for f in schema]
    ours = sorted(
        (k.decode(), v.decode()) for k, v in pairs.items() if k != DIGEST and is_ours([k])
    )
    content = json.dumps([fields, ours, list(num_rows)]).encode()
    return json.dumps(hashlib.blake2b(content, digest_size=16).hexdigest()).encode()


def _type_text(kind: pa.DataType) -> Any:
    """Return a type as text, without the names that Parquet gives to list elements."""
    if pa.types.is_struct(kind):
        return ["struct", *([f.name, f.nullable, _type_text(f.type)] for f in kind)]
    if pa.types.is_nested(kind):
        children = [kind.field(i) for i in range(kind.num_fields)]
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        return [
            str(kind).partition("<")[0],
            size,
            *([f.nullable, _type_text(f.type)] for f in children),
        ]
    return str(kind)


def _as_read(schema: pa.Schema) -> pa.Schema:
    """Return the schema that a reader of the file will see: Parquet coerces some types."""
    file = io.BytesIO()
    pq.write_table(empty_table(schema), file)
    return pq.ParquetFile(file).schema_arrow


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
        facts = {n: {"num_ids": self._num_ids[n], "digest": _hash(joined[n])} for n in ID_COLUMNS}
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
    import polars as pl

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
    import polars as pl

    if literal.meta.root_names():
        return None
    values = pl.select(literal).to_series()
    if isinstance(values.dtype, pl.List):
        values = values.explode()
    return None if values.dtype != pl.String or values.null_count() else set(values)


def _may_have(pairs: Mapping[bytes, bytes], name: str, ids: Iterable[str]) -> BoolArray:
    """Return, for each row group, whether its filter accepts one of the ids."""
    facts, stored = json.loads(pairs[ID_FILTERS])[name], pairs.get(_FILTERS_OF + name.encode(), b"")
    if facts["digest"] != _hash(stored):
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


def _hash(stored: bytes) -> str:
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
