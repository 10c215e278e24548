"""Pack the answers of a report, without loss: JSON texts together, and tables by column.

A report stores blobs: raw deflate streams in base64, which browsers decompress. The first blob is a
JSON index, which maps the key of each answer to its position. JSON answers are concatenated in
blobs of about 100 KB. Tables with the same columns are concatenated in one Arrow stream, and an
answer is a range of its records, so that ids and numbers of all rows are compressed together; token
ids are indices into one vocabulary. Numeric columns are transposed by byte (first bytes of all
numbers, then second bytes, ...), because signs and exponents repeat, but the last bytes of
log-probabilities do not. A column that other columns predict (old and new log-probabilities,
importance weights) is stored as the difference between the bit patterns of values and predictions.
Predictions use only operations that round identically on every machine.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.numpy_arrays import filled, to_arrow, to_numpy

_LEVEL = _MEMORY_LEVEL = 9
_TEXT_BYTES = 100_000
_TRIED_BYTES = 1 << 16
_WIDTHS = (2, 4, 8)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Guess:
    """Prediction of a column from other columns, a and b.

    Attributes:
        kind: "same": a; "ratio": exp(a - b); "product": -(a * b).
        of: Byte offsets of a and b in the stream.
    """

    kind: str
    of: tuple[int, ...]

    def values(self, stream: Bytes, num: int, width: int) -> npt.NDArray[Any]:
        """Return the bit patterns of the predictions ([num] unsigned integers of `width` bytes)."""
        kind = np.dtype(f"<u{width}")
        found = [stream[at : at + num * width].view(kind) for at in self.of]
        if self.kind == "same":
            return found[0]
        with np.errstate(all="ignore"):
            a, b = (values.view("<f4").astype(np.float64) for values in found)
            guessed = (_ratio(a, b) if self.kind == "ratio" else -(a * b)).astype("<f4")
        # The bit pattern of NaN differs between machines.
        return np.where(np.isfinite(guessed), guessed, np.float32(0)).view(kind)


def _ratio(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Compute exp(a - b) with sums and products, because `exp` rounds differently per library."""
    small = (a - b).astype("<f4").astype(np.float64) / 1024
    power = np.ones_like(small)
    for divisor in range(8, 0, -1):
        power = 1 + small * power / divisor
    for _ in range(10):
        power = power * power
    return power


_FOLLOWS = {
    "importance_weight": ("ratio", "logprob", "old_logprob"),
    "loss": ("product", "importance_weight", "advantage"),
}
"""Columns of an update that other columns usually predict exactly: kind and columns of a `Guess`."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """A numeric column of an Arrow stream, transposed by byte.

    Attributes:
        at: Position of the first byte in the stream.
        num: Number of values.
        width: Bytes per value.
        guess: Prediction whose bit patterns were subtracted; None: no prediction.
    """

    at: int
    num: int
    width: int
    guess: Guess | None

    def bytes_of(self, stream: Bytes) -> Bytes:
        """Subtract the prediction from the values, and return the result transposed by byte."""
        values = stream[self.at : self.at + self.num * self.width].view(f"<u{self.width}")
        if self.guess is not None:
            values = values - self.guess.values(stream, self.num, self.width)
        by_byte = values.view(np.uint8).reshape(self.num, self.width).T
        return np.ascontiguousarray(by_byte).reshape(-1)

    def middle(self) -> Transposed:
        """Return the middle part of the column, from which its compressed size is estimated."""
        num = min(self.num, _TRIED_BYTES // self.width)
        skipped = (self.num - num) // 2 * self.width
        guess = self.guess
        if guess is not None:
            guess = Guess(guess.kind, tuple(at + skipped for at in guess.of))
        return Transposed(self.at + skipped, num, self.width, guess)


@dataclass(slots=True)
class Packing:
    """Collects the answers of a report."""

    _texts: list[tuple[str, bytes]] = field(default_factory=list)
    _tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _places: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _ranges: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    _totals: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_text(self, key: str, content: bytes) -> None:
        """Add a JSON answer."""
        self._texts.append((key, content))

    def add_table(self, key: str, parts: dict[tuple[str, str], pa.Table]) -> None:
        """Add an Arrow answer.

        Args:
            key: Key of the answer.
            parts: Tables that together have the columns of the answer, by (name of the stored
                table, name of the part). All parts of a stored table have the same columns. A part
                that several answers share is stored once.
        """
        ranges = []
        for (name, part), table in parts.items():
            if (name, part) not in self._places:
                begin = self._sizes.get(name, 0)
                self._places[name, part] = begin, begin + table.num_rows
                self._tables.setdefault(name, []).append(table.replace_schema_metadata(None))
                self._sizes[name] = begin + table.num_rows
            ranges.append((name, *self._places[name, part]))
            for total, value in (table.schema.metadata or {}).items():
                self._totals.setdefault(key, {})[total.decode()] = value.decode()
        self._ranges[key] = ranges

    def blobs(self) -> list[str]:
        """Return the blobs to store in the report: the index, then texts, then tables."""
        blobs: list[bytes] = []
        texts: dict[str, tuple[int, int, int]] = {}
        for part in self._text_parts():
            begin = 0
            for key, content in part:
                texts[key] = (len(blobs) + 1, begin, begin + len(content))
                begin += len(content)
            blobs.append(b"".join(content for _, content in part))
        number: dict[str, int] = {}
        transposed: dict[int, list[Transposed]] = {}
        for name, tables in self._tables.items():
            content, found = _packed(pa.concat_tables(tables))
            blobs.append(content)
            number[name] = len(blobs)
            transposed[len(blobs)] = found
        tables_index = {
            key: {
                "parts": [(number[name], begin, end) for name, begin, end in ranges],
                "totals": self._totals.get(key, {}),
            }
            for key, ranges in self._ranges.items()
        }
        index: dict[str, Any] = {"texts": texts, "tables": tables_index, "transposed": transposed}
        return [_stored(content) for content in (msgspec.json.encode(index), *blobs)]

    def _text_parts(self) -> Iterator[list[tuple[str, bytes]]]:
        part: list[tuple[str, bytes]] = []
        for key, content in self._texts:
            part.append((key, content))
            if sum(len(one) for _, one in part) >= _TEXT_BYTES:
                yield part
                part = []
        if part:
            yield part


def _stored(content: bytes) -> str:
    return base64.b64encode(_deflated(content, _LEVEL)).decode()


def _deflated(content: bytes, level: int) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL)
    return compressor.compress(content) + compressor.flush()


def with_vocabulary(table: pa.Table) -> pa.Table:
    """Dictionary-encode the ids and bytes of tokens; frequent tokens have low indices."""
    ids = to_numpy(table.column("id").combine_chunks())
    used, first, index, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    kind = np.uint16 if len(order) <= 1 << 16 else np.int32
    indices = to_arrow(rank[index].astype(kind))
    spelled = table.column("bytes").take(pa.array(first[order])).combine_chunks()
    for name, values in (("id", to_arrow(used[order])), ("bytes", spelled)):
        column = pa.DictionaryArray.from_arrays(indices, values)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _packed(table: pa.Table) -> tuple[bytes, list[Transposed]]:
    """Return an Arrow stream of one batch, and the numeric columns transposed in it."""
    if {"id", "bytes"} <= set(table.column_names):
        table = with_vocabulary(table)
    columns = [_without_hidden(column.combine_chunks()) for column in table.columns]
    plain = pa.Table.from_arrays(columns, names=table.column_names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    content = sink.getvalue()
    stream = np.frombuffer(content, np.uint8)
    chosen: dict[str, Transposed] = {}
    for name, at, num, width in _numbers(content):
        alike = {n: t.at for n, t in chosen.items() if (t.num, t.width) == (num, width)}
        guesses = [None, *(Guess("same", (other,)) for other in alike.values())]
        kind, *of = _FOLLOWS.get(name, ("",))
        if of and set(of) <= alike.keys():
            guesses.append(Guess(kind, tuple(alike[one] for one in of)))
        tried = [Transposed(at, num, width, guess) for guess in guesses]
        chosen[name] = min(tried, key=lambda one: _size(one, stream))
    packed = stream.copy()
    for one in chosen.values():
        packed[one.at : one.at + one.num * one.width] = one.bytes_of(stream)
    return packed.tobytes(), list(chosen.values())


def _size(one: Transposed, stream: Bytes) -> int:
    return len(_deflated(one.middle().bytes_of(stream).tobytes(), 1))


def _without_hidden(column: pa.Array) -> pa.Array:
    """Overwrite the values hidden behind nulls with 0, so that they take no space."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not is_number or not column.null_count:
        return column
    return to_arrow(filled(column, 0), mask=~to_numpy(column.is_valid()))


def _numbers(content: pa.Buffer) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, byte offset, number of values, bytes per value) of each numeric column."""
    table = pa.ipc.open_stream(content).read_all()
    for name, column in zip(table.column_names, table.columns, strict=True):
        for chunk in column.chunks:
            kind = chunk.type.index_type if pa.types.is_dictionary(chunk.type) else chunk.type
            is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            if is_number and kind.bit_width // 8 in _WIDTHS and len(chunk):
                at = chunk.buffers()[1].address - content.address
                yield name, at, len(chunk), kind.bit_width // 8
