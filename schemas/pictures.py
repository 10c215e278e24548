"""Identity of tokens where a row has pictures: equal ids need not be what the model saw.

The placeholder ids of two pictures are the same, so a comparison of token ids would join rows that
show different pictures.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import PICTURES, PICTURES_TYPE
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import IntArray, Ragged, list_lengths, ranges, relisted
from schemas.types import cast_column

_BITS = np.uint64(2**63 - 1)


def identity_ids(tokens: Ragged, begins: IntArray, pictures: pa.ChunkedArray | None) -> Ragged:
    """Replace the ids at pictures so that equal ids mean that the model saw the same.

    An id at a picture becomes a negative number: a hash of the picture's digest, the length of its
    span, the offset in the span, and the token id. Entries of `pictures` without a digest or a span
    change nothing: their tokens are compared as they are.

    Args:
        tokens: [N] rows of int32 ids, each a part of the prompt + response of its row.
        begins: [N] index of each part's first token in its row's prompt + response.
        pictures: [N] column `pictures`, valid (`picture_spans`); None: there are none.

    Returns:
        [N] rows of int64 ids; `tokens` itself if no entry has a digest and a span.

    Example:
        Two prompts of the tokens [5, 9, 9, 6] with different pictures at [1, 3):

        >>> ids = identity_ids(prompts, np.zeros(2, np.int64), pictures)
        >>> ids.row(0)[[0, 3]].tolist(), (ids.row(0) == ids.row(1)).tolist()
        ([5, 6], [True, False, False, True])
    """
    if pictures is None or len((spans := Spans(pictures)).row) == 0:
        return tokens
    first = spans.start - begins[spans.row]
    begin = np.clip(first, 0, tokens.lengths[spans.row])
    end = np.clip(first + spans.length, begin, tokens.lengths[spans.row])
    at = ranges(tokens.offsets[spans.row] + begin, end - begin)
    of = np.repeat(np.arange(len(spans.row)), end - begin)
    offset = at - (tokens.offsets[spans.row] + first)[of]
    place = (spans.length[of] << 32 | offset).astype(np.uint64)
    ids = tokens.values.astype(np.int64)
    hashed = _mixed(_mixed(_keys(spans.sha256)[of] ^ place) ^ ids[at].astype(np.uint64))
    ids[at] = -1 - (hashed & _BITS).astype(np.int64)
    return Ragged(ids, tokens.offsets, tokens.valid)


def identities_of(
    prompts: Ragged, responses: Ragged, pictures: pa.ChunkedArray | None
) -> tuple[Ragged, Ragged]:
    """Return prompts and responses as `identity_ids`."""
    begins = np.zeros(len(prompts.lengths), np.int64)
    return (
        identity_ids(prompts, begins, pictures),
        identity_ids(responses, prompts.lengths, pictures),
    )


def identities(table: pa.Table) -> tuple[Ragged, Ragged]:
    """Return prompts and responses of a table in the `full` layout as `identity_ids`."""
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    return identities_of(prompts, responses, pictures_of(table))


def pictures_of(table: pa.Table) -> pa.ChunkedArray | None:
    """Return the column `pictures` of a table; None if there is none, or it is null in all rows."""
    column = table.column(PICTURES) if PICTURES in table.column_names else None
    return None if column is None or column.null_count == len(column) else column


class Spans:
    """The entries of a column `pictures` that have a digest, a start and a length, [S].

    Attributes:
        row: [S] row of the entry.
        sha256: [S] strings, references to the pictures.
        start: [S] index of the first token in the row's prompt + response.
        length: [S] number of tokens.
    """

    __slots__ = ("length", "row", "sha256", "start")

    def __init__(self, pictures: pa.ChunkedArray | pa.Array) -> None:
        column = cast_column(pictures, PICTURES_TYPE)
        row = to_arrow(np.repeat(np.arange(len(column)), list_lengths(column)))
        fields = pc.list_flatten(column).flatten()
        entries = pa.table([row, *fields], ["row", "sha256", "start", "length"]).drop_null()
        self.sha256 = entries.column("sha256").combine_chunks()
        self.row, self.start, self.length = (
            to_numpy(entries.column(name)).astype(np.int64) for name in ("row", "start", "length")
        )


def images_renamed(table: pa.Table) -> pa.Table:
    """Upgrade schema version 1: `images` (blob, position) becomes `pictures`, in segments too."""
    for index, field in enumerate(table.schema):
        if field.name in {"images", "segments"}:
            name = PICTURES if field.name == "images" else field.name
            column = _images_renamed(name, table.column(index).combine_chunks())
            table = table.set_column(index, field.with_name(name).with_type(column.type), column)
    return table


def _images_renamed(name: str, column: pa.Array) -> pa.Array:
    values = pc.list_flatten(column)
    fields = dict(zip((f.name for f in values.type), values.flatten(), strict=True))
    if name == PICTURES:
        unknown = pa.nulls(len(values), pa.int32())
        start = fields.get("position", unknown)  # a file's references are read alone
        values = pa.StructArray.from_arrays(
            [fields["blob"], start, unknown], fields=list(PICTURES_TYPE.value_type)
        )
    elif "images" in fields:
        names = [PICTURES if one == "images" else one for one in fields]
        fields["images"] = _images_renamed(PICTURES, fields["images"])
        values = pa.StructArray.from_arrays(list(fields.values()), names)
    return relisted(column, values)


def _keys(sha256: pa.Array) -> npt.NDArray[np.uint64]:
    """[S] Return 64 bits that identify each reference, also one that `picture_reference` refuses."""
    codes = sha256.dictionary_encode()
    digests = [hashlib.sha256(name.encode()).digest() for name in codes.dictionary.to_pylist()]
    keys = [int.from_bytes(digest[:8], "little") for digest in digests]
    return np.take(np.array(keys, np.uint64), to_numpy(codes.indices))


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits one to one (the finalizer of SplitMix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
