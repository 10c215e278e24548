"""Redaction of tables: texts, token ids, the columns by token, and references to files of `DS.blobs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.prefix_layout import find_parents, trajectory_starts
from rollout_io.formats.exporting import with_parts
from rollout_io.redaction.literals import Literals
from rollout_io.redaction.values import Replacer, has_text, replaced_sets
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.columns import COLUMNS, PICTURES, PICTURES_TYPE, Length
from schemas.errors import InputError
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import (
    BoolArray,
    IntArray,
    Ragged,
    list_lengths,
    offsets_of,
    ranges,
    relisted,
    zipped,
)

ROUTING = "rollout_expert_indices"
REDACTED = "redacted"

_CONTEXT_TOKENS = 8192
_KEPT = {"rewards", "policy_versions"}  # they tell nothing of a token, and sum up to other columns
_BY_TOKEN = {c.name: c.type for c in COLUMNS if c.length is Length.RESPONSE and c.type is not None}
_HANDLED = {"prompt_token_ids", "response_ids", "pictures", ROUTING, *_BY_TOKEN}


@dataclass(frozen=True)
class Redactor:
    """Replace known secrets in tables of complete trajectories.

    Attributes:
        literals: The secrets.
        vocabulary: Bytes of the tokens of the dataset's tokenizer.
        keep_pictures: Keep the references to pictures and documents, which are not scanned.
    """

    literals: Literals
    vocabulary: TokenBytes
    keep_pictures: bool = False

    @cached_property
    def fill(self) -> int:
        """The id that replaces the ids of secrets: the token "*", "x" or the first of one byte."""
        sizes = np.diff(self.vocabulary.offsets)
        single = np.flatnonzero(sizes == 1)
        if not len(single):
            finding = "the vocabulary has no token of one byte, which could replace a secret"
            raise InputError("tokenizer", self.vocabulary.name, finding)
        shown = self.vocabulary.values[self.vocabulary.offsets[single]].tobytes()
        at = next((shown.index(char) for char in (b"*", b"x") if char in shown), 0)
        return int(single[at])

    @cached_property
    def replacer(self) -> Replacer:
        """Replace secrets in texts, metadata and lists of ids."""
        return Replacer(self.literals, self._replaced_ids)

    def table(self, table: pa.Table) -> pa.Table:
        """Return a table without the secrets.

        Tokens that contain a byte of a secret are replaced by `fill`, so lengths do not change. In
        `response_ids` they are marked in `redacted`, have loss_mask false, log-probability 0.0 and
        empty sets, and all of their experts are 0..topk-1. A token that several steps share is
        replaced in all of them or in none, so a step still continues the same steps.

        Args:
            table: Complete trajectories, with `prompt_token_ids`.

        Raises:
            InputError: `tokenizer`: an id is not in the vocabulary.
        """
        prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
        responses = Ragged.from_arrow(table.column("response_ids"))
        whole = zipped(prompts, responses)
        self._refuse_unknown(whole.values)
        marks = self._marks(whole, trajectory_starts(table))
        ids = np.where(marks, np.int32(self.fill), whole.values)
        in_prompt = ranges(whole.offsets[:-1], prompts.lengths)
        in_response = whole.offsets[:-1] + prompts.lengths
        ids_by_name = {
            "prompt_token_ids": Ragged(ids[in_prompt], prompts.offsets, prompts.valid),
            "response_ids": Ragged(
                ids[ranges(in_response, responses.lengths)], responses.offsets, responses.valid
            ),
        }
        columns = {name: ragged.to_arrow(pa.int32()) for name, ragged in ids_by_name.items()}
        for name in _BY_TOKEN.keys() - _KEPT - {REDACTED}:
            if name in table.column_names:
                column = table.column(name)
                columns[name] = _without(column, marks[ranges(in_response, list_lengths(column))])
        # Marked is what was sampled: of a merged row, not the results of tools, as before merging.
        rows, starts, lengths = sampled_ranges(table)
        is_sampled = np.zeros(len(responses.values), np.bool_)
        is_sampled[ranges(responses.offsets[rows] + starts, lengths)] = True
        marks_of_responses = Ragged(
            marks[ranges(in_response, responses.lengths)] & is_sampled,
            responses.offsets,
            np.ones(table.num_rows, np.bool_),
        )
        columns[REDACTED] = _with_earlier(table, marks_of_responses).to_arrow(pa.bool_())
        if ROUTING in table.column_names:
            routes = table.column(ROUTING)
            at = ranges(whole.offsets[:-1], list_lengths(routes))
            columns[ROUTING] = _same_routes(routes, marks[at])
        for field in table.schema:
            if field.name not in _HANDLED and has_text(field.type):
                columns[field.name] = self.replacer.column(table.column(field.name), field.name)
        columns["trajectory_id"] = _trajectory_ids(table, columns["instance_id"])
        clean = _with_columns(table, columns)
        return clean if self.keep_pictures else without_pictures(clean)

    def _refuse_unknown(self, ids: np.ndarray) -> None:
        size = len(self.vocabulary.offsets) - 1
        if len(ids) and (top := int(ids.max())) >= size:
            finding = f"token id {top} is not in the vocabulary of {size} tokens"
            hint = "pass --tokenizer DIR with the tokenizer of the dataset's model"
            raise InputError("tokenizer", self.vocabulary.name, finding, "", hint)

    def _marks(self, whole: Ragged, starts: IntArray) -> BoolArray:
        """True for the tokens to replace, over all tokens of all rows."""
        no_tokens = Ragged(
            np.empty(0, np.int32), np.zeros(len(whole.valid) + 1, np.int64), whole.valid
        )
        parents, shared = find_parents(whole, no_tokens, starts)
        first_row = np.repeat(starts, np.diff(starts, append=len(whole.valid)))
        begin = np.maximum(shared - max(_CONTEXT_TOKENS, 2 * self.literals.longest), 0)
        rows = range(len(whole.valid))
        spans = self.spans_of_ids([whole.row(i)[begin[i] :] for i in rows])
        marks = np.zeros(len(whole.values), np.bool_)
        for i in rows:
            for start, end in spans[i]:
                first = int(whole.offsets[i] + begin[i])
                marks[first + start : first + end] = True
        # Steps that share a token share its mark, through the steps between them.
        pairs = [(i, int(first_row[i] + parents[i]), int(shared[i])) for i in rows if shared[i]]
        at = whole.offsets
        for row, origin, num in reversed(pairs):
            marks[at[origin] : at[origin] + num] |= marks[at[row] : at[row] + num]
        for row, origin, num in pairs:
            marks[at[row] : at[row] + num] |= marks[at[origin] : at[origin] + num]
        return marks

    def spans_of_ids(self, rows: list[np.ndarray]) -> list[list[tuple[int, int]]]:
        """Return the ranges of tokens that contain a byte of a secret, for each row of ids.

        Example:
            Tokens "key", "=abc", "defgh", "ij" and the secret "abcdefghi":

            >>> redactor.spans_of_ids([np.array([5, 6, 7, 8])])
            [[(1, 4)]]
        """
        texts = [self.vocabulary.join(ids.astype(np.int32, copy=False)) for ids in rows]
        spans_of_rows: list[list[tuple[int, int]]] = []
        for ids, spans in zip(rows, self.literals.spans(texts), strict=True):
            if not spans:
                spans_of_rows.append([])
                continue
            ends = np.cumsum(self.vocabulary.lengths(ids))
            bounds = np.array([span[:2] for span in spans])
            first = np.searchsorted(ends, bounds[:, 0], side="right")
            last = np.searchsorted(ends, bounds[:, 1], side="left") + 1
            spans_of_rows.append(list(zip(first.tolist(), last.tolist(), strict=True)))
        return spans_of_rows

    def _replaced_ids(self, ids: Ragged) -> Ragged:
        """Replace secrets between numbers that are no ids, such as -100 in labels."""
        size = len(self.vocabulary.offsets) - 1
        is_id = (ids.values >= 0) & (ids.values < size)
        if not is_id.any():
            return ids
        values = np.where(is_id, ids.values, self.fill)
        ids, original = Ragged(values, ids.offsets, ids.valid), ids
        rows = range(len(ids.valid))
        clean: Any = None
        for i, spans in zip(rows, self.spans_of_ids([ids.row(i) for i in rows]), strict=True):
            for start, end in spans:
                clean = values.copy() if clean is None else clean
                clean[ids.offsets[i] + start : ids.offsets[i] + end] = self.fill
        if clean is None:
            return original
        return Ragged(np.where(is_id, clean, original.values), ids.offsets, ids.valid)


def sampled_ranges(table: pa.Table) -> tuple[IntArray, IntArray, IntArray]:
    """Return the row, start and length of each sampled range of `response_ids`."""
    lengths = list_lengths(table.column("response_ids"))
    rows = np.arange(table.num_rows)
    if "segments" not in table.column_names:
        return rows, np.zeros_like(rows), lengths
    column = table.column("segments")
    flat, is_whole = pc.list_flatten(column), ~to_numpy(column.is_valid())
    starts, sizes = (to_numpy(pc.struct_field(flat, name)) for name in ("start", "length"))
    return (
        np.concatenate([rows[is_whole], np.repeat(rows, list_lengths(column))]),
        np.concatenate([np.zeros(is_whole.sum(), np.int64), starts]),
        np.concatenate([lengths[is_whole], sizes]),
    )


def _without(column: pa.ChunkedArray, marks: BoolArray) -> pa.Array:
    """Clear a column by token where a token is replaced: false, 0.0 or an empty set."""
    kind = column.type.value_type
    if pa.types.is_nested(kind):
        return replaced_sets(column, marks)
    lists = Ragged.from_arrow(column)
    zero = lists.values.dtype.type(0)
    return Ragged(np.where(marks, zero, lists.values), lists.offsets, lists.valid).to_arrow(kind)


def _with_earlier(table: pa.Table, marks: Ragged) -> Ragged:
    """Add the marks of an earlier redaction."""
    if REDACTED not in table.column_names:
        return marks
    earlier = Ragged.from_arrow(table.column(REDACTED))
    at = ranges(marks.offsets[:-1], earlier.lengths)
    values = marks.values.copy()
    values[at] |= earlier.values
    return Ragged(values, marks.offsets, marks.valid)


def _same_routes(routes: pa.ChunkedArray, marks: BoolArray) -> pa.Array:
    """Route replaced tokens to the experts 0..topk-1 in all layers."""
    layers, topk = routes.type.value_type.list_size, routes.type.value_type.value_type.list_size
    flat = pc.list_flatten(pc.list_flatten(pc.list_flatten(routes)))
    values = to_numpy(flat).reshape(-1, layers, topk).copy()
    values[marks] = np.arange(topk)
    array = pa.FixedSizeListArray.from_arrays(to_arrow(values.reshape(-1)), topk)
    array = pa.FixedSizeListArray.from_arrays(array, layers)
    offsets = to_arrow(offsets_of(list_lengths(routes)), pa.int32())
    mask = to_arrow(~to_numpy(routes.is_valid())) if routes.null_count else None
    return pa.ListArray.from_arrays(offsets, array, mask=mask).cast(routes.type)


def _trajectory_ids(table: pa.Table, instances: pa.Array) -> pa.Array:
    repetitions = pa.chunked_array([to_arrow(filled(table.column("repetition_id"), 0))])
    names = instances.cast(pa.string())
    return pc.binary_join_element_wise(names, repetitions.cast(pa.string()).combine_chunks(), "_")


def _with_columns(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, column in columns.items():
        if name in table.column_names:
            index = table.column_names.index(name)
            field = table.schema.field(name).with_type(column.type)
            table = table.set_column(index, field, pa.chunked_array([column]))
        else:
            index = table.column_names.index("loss_mask") + 1
            table = table.add_column(index, name, pa.chunked_array([column]))
    return pa.table(table.columns, pa.schema([field.remove_metadata() for field in table.schema]))


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
