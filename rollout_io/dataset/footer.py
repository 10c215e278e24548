"""Footer metadata of a shard: its place in the dataset, and a digest of the footer.

Parquet has checksums for pages but none for the footer. A flipped bit there can change a column's
type or the dataset's metadata without an error. If a shard is missing, or replaced by another
dataset's shard of the same name, each file is still valid by itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import InputError
from schemas.metadata import DIGEST, PLACE, is_ours
from schemas.numpy_arrays import empty_table
from schemas.ragged import list_lengths


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
