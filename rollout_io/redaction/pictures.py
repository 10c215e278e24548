"""Redaction of pictures: a dataset without its references to files of `DS.blobs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.formats.exporting import with_parts
from schemas.columns import PICTURES, PICTURES_TYPE
from schemas.ragged import relisted

REDACTED_PART = {"type": "redacted"}
"""The `source` of a part whose file was dropped."""


def without_pictures(table: pa.Table) -> pa.Table:
    """Return a table that refers to no file of a store, in its rows and in the steps of merged rows.

    `pictures` keep their spans, with a null `sha256`. Parts of messages keep their type, with
    `REDACTED_PART` in place of the reference.
    """
    for index, field in enumerate(table.schema):
        if field.name in _REPLACED:
            column = table.column(index)
            whole = (
                pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
            )
            values = _REPLACED[field.name](whole)
            table = table.set_column(index, field.with_type(values.type), values)
    return table


def _entries(column: pa.Array) -> pa.Array:
    entries = pc.list_flatten(column)
    start, length = (pc.struct_field(entries, name) for name in ("start", "length"))
    digests = pa.nulls(len(entries), pa.string())
    fields = list(PICTURES_TYPE.value_type)
    return relisted(column, pa.StructArray.from_arrays([digests, start, length], fields=fields))


def _texts(column: pa.Array) -> pa.Array:
    return pa.array([_text(text) for text in column.to_pylist()], column.type)


def _text(text: str | None) -> str | None:
    if text is None or '"blob"' not in text:
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(with_parts(messages, _part), ensure_ascii=False)


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in part.items() if k != "blob"} | {"source": REDACTED_PART}


def _segments(column: pa.Array) -> pa.Array:
    steps = pc.list_flatten(column)
    values = [
        _REPLACED[field.name](pc.struct_field(steps, field.name))
        if field.name in {PICTURES, "messages"}
        else pc.struct_field(steps, field.name)
        for field in steps.type
    ]
    names = [field.name for field in steps.type]
    return relisted(column, pa.StructArray.from_arrays(values, names))


_REPLACED = {PICTURES: _entries, "messages": _texts, "segments": _segments}
