"""Pack the answers of a report, without loss: JSON texts together, and tables by column.

A report stores blobs: raw deflate streams in base64, which browsers decompress. The first blob is a
JSON index, which maps the key of each answer to its position. JSON answers are concatenated in
blobs of about 100 KB. Tables with the same columns are concatenated in one Arrow stream, and an
answer is a range of its records, so that ids and numbers of all rows are compressed together; token
ids are indices into one vocabulary.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from schemas.numpy_arrays import filled, to_arrow, to_numpy

_LEVEL = _MEMORY_LEVEL = 9
_TEXT_BYTES = 100_000


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
        for name, tables in self._tables.items():
            blobs.append(_stream(pa.concat_tables(tables)))
            number[name] = len(blobs)
        tables_index = {
            key: {
                "parts": [(number[name], begin, end) for name, begin, end in ranges],
                "totals": self._totals.get(key, {}),
            }
            for key, ranges in self._ranges.items()
        }
        index: dict[str, Any] = {"texts": texts, "tables": tables_index}
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
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL)
    return base64.b64encode(compressor.compress(content) + compressor.flush()).decode()


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


def _stream(table: pa.Table) -> bytes:
    """Return an Arrow stream of one batch."""
    if {"id", "bytes"} <= set(table.column_names):
        table = with_vocabulary(table)
    columns = [_without_hidden(column.combine_chunks()) for column in table.columns]
    plain = pa.Table.from_arrays(columns, names=table.column_names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    return bytes(sink.getvalue())


def _without_hidden(column: pa.Array) -> pa.Array:
    """Overwrite the values hidden behind nulls with 0, so that they take no space."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not is_number or not column.null_count:
        return column
    return to_arrow(filled(column, 0), mask=~to_numpy(column.is_valid()))
