"""Replacement of secrets in the values of columns of any type, and in metadata.

The words of the APIs are left where the APIs expect them. A password may be `assistant`, and an expression
may match `tool_calls`. Such a word is replaced in texts and arguments, but not as a role, a type or the name
of a field: readers would understand the record no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.redaction.literals import Literals, readable
from schemas.metadata import DatasetMetadata
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of

_LISTS = re.compile(rb"\s*\[[\[\]\d\s,]+\]\s*")
_VALUE, _END = re.compile(rb'(\\+")\s*:\s*\Z'), re.compile(rb"\s*[,}]")
_NUMBER, _NEAR = re.compile(rb"[-+.\deE]+"), 64
ReplaceIds = Callable[[Ragged], Ragged]


@dataclass(frozen=True, slots=True)
class Replacer:
    """Replace secrets by `[REDACTED_n]`, where n is the number of the secret.

    The same secret gets the same replacement in every column.

    Attributes:
        literals: The secrets.
        ids: Function that replaces secrets in lists of token ids.
    """

    literals: Literals
    ids: ReplaceIds

    def texts(self, texts: Sequence[bytes]) -> list[bytes]:
        """Return the texts without secrets. JSON remains JSON."""
        spans_of = self.literals.spans(texts)
        return [
            self._text(text, spans) if spans else self._listed(text)
            for text, spans in zip(texts, spans_of, strict=True)
        ]

    def _listed(self, text: bytes) -> bytes:
        """Replace secrets in a prompt that is a JSON list of token ids, or of such lists."""
        if not _LISTS.fullmatch(text):
            return text
        try:
            ids = pa.array([_parsed(text)])
        except (pa.ArrowException, OverflowError):  # no ids
            return text
        clean = self.column(ids)
        return text if clean.equals(ids) else json.dumps(clean[0].as_py()).encode()

    def _text(self, text: bytes, spans: Spans) -> bytes:
        is_json = text[:1] in {b"{", b"["} and _parsed(text) is not None
        clean = _replaced(text, outside(text, spans) if is_json else spans)
        if not is_json or _parsed(clean) is not None:
            return clean
        # The secret contains syntax of JSON: replace it in each string instead.
        return json.dumps(self.value(_parsed(text))).encode()

    def value(self, value: Any) -> Any:
        """Return a JSON value without secrets in its strings and keys.

        Words of the protocol stay (`rollout_io.redaction.values`).
        """
        if isinstance(value, str):
            clean = self.texts([value.encode("utf-8", "surrogatepass")])[0]
            return clean.decode("utf-8", "surrogatepass")
        if isinstance(value, dict):
            return {
                key if key in WORDS else self.value(key): (
                    inner if is_protocol(key, inner) else self.value(inner)
                )
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def metadata(self, metadata: DatasetMetadata) -> DatasetMetadata:
        """Return metadata without secrets: names of models, paths, parameters of earlier verbs."""
        return replace(
            metadata,
            tokenizer=self.value(metadata.tokenizer),
            models=tuple(self.value(metadata.models)),
            made_by=tuple(
                {name: v if name == "verb" else self.value(v) for name, v in step.items()}
                for step in metadata.made_by
            ),
        )

    def column(self, column: pa.Array | pa.ChunkedArray, name: str = "") -> pa.Array:
        """Return a column without secrets: strings, bytes and lists of ids at any depth.

        Args:
            column: The column.
            name: Its name; in `ENUMERATIONS`, the words of the protocol stay.
        """
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        kind = array.type
        if not has_text(kind):
            return array
        if isinstance(array, pa.ExtensionArray):
            return pa.ExtensionArray.from_storage(kind, self.column(array.storage, name))
        if pa.types.is_dictionary(kind):
            # Values that no row has any more are not scanned, and not kept.
            used = pc.unique(array.indices.drop_null()).sort()
            at = pc.index_in(array.indices, used, skip_nulls=True).cast(kind.index_type)
            clean = self.column(array.dictionary.take(used), name)
            return pa.DictionaryArray.from_arrays(at, clean, ordered=kind.ordered)
        if pa.types.is_struct(kind):
            fields = [self.column(array.field(i), field.name) for i, field in enumerate(kind)]
            return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
        if pa.types.is_map(kind):
            return self._map(array)
        if pa.types.is_nested(kind):
            return self._list(array)
        values = [None if v is None else _bytes(v) for v in array.to_pylist()]
        if pa.types.is_fixed_size_binary(kind):
            spans = self.literals.spans([v or b"" for v in values])
            stars = [v and _starred(v, hits) for v, hits in zip(values, spans, strict=True)]
            return pa.array(stars, kind)
        texts = {v for v in values if v is not None and not is_protocol(name, readable(v))}
        clean = dict(zip(texts, self.texts(list(texts)), strict=True))
        out = [value if value is None else clean.get(value, value) for value in values]
        return pa.array(out, pa.large_binary()).cast(kind)

    def _map(self, array: pa.Array) -> pa.Array:
        places = to_numpy(array.offsets)
        begin, num = int(places[0]), int(places[-1] - places[0])
        keys, items = (self.column(part.slice(begin, num)) for part in (array.keys, array.items))
        offsets = to_arrow(places - begin, pa.int32())
        mask = array.is_null() if array.null_count else None
        return pa.MapArray.from_arrays(offsets, keys, items, array.type, mask=mask)

    def _list(self, array: pa.Array) -> pa.Array:
        kind = array.type
        is_fixed = pa.types.is_fixed_size_list(kind)
        lists = array.cast(pa.list_(kind.value_field)) if is_fixed else array
        flat = pc.list_flatten(lists)
        if pa.types.is_integer(kind.value_type):
            clean = self._ids(flat, list_lengths(lists))
        else:
            clean = self.column(flat)
        offsets = to_arrow(offsets_of(list_lengths(lists)))
        mask = lists.is_null() if lists.null_count else None
        return pa.LargeListArray.from_arrays(offsets, clean, mask=mask).cast(kind)

    def _ids(self, flat: pa.Array, lengths: IntArray) -> pa.Array:
        """Replace secrets in flat lists of integers; nulls are no ids, and stay."""
        numbers = pc.fill_null(flat.cast(pa.int64(), safe=False), -1)
        ragged = Ragged(to_numpy(numbers), offsets_of(lengths), np.ones(len(lengths), np.bool_))
        clean = self.ids(ragged).values
        return pc.if_else(
            to_arrow(clean != ragged.values), to_arrow(clean).cast(flat.type, safe=False), flat
        )


def _starred(value: bytes, spans: Spans) -> bytes:
    stars = bytearray(value)
    for start, end, _ in spans:
        stars[start:end] = b"*" * (end - start)
    return bytes(stars)


def _replaced(text: bytes, spans: Spans) -> bytes:
    parts, at = list[bytes](), 0
    for start, end, number in spans:
        quote = _quote(text, start, end)
        parts += (text[at:start], quote, b"[REDACTED_%d]" % number, quote)
        at = end
    return b"".join((*parts, text[at:]))


def _quote(text: bytes, start: int, end: int) -> bytes:
    """Return the quote that a replaced number needs in JSON that is escaped in a text, or none."""
    name = _VALUE.search(text[max(0, start - _NEAR) : start])
    is_number = name and _NUMBER.fullmatch(text[start:end]) and _END.match(text, end)
    return name[1] if name and is_number else b""


def has_text(kind: pa.DataType) -> bool:
    """True if values of a type may contain text or lists of token ids."""
    if isinstance(kind, pa.ExtensionType):
        return has_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return has_text(kind.value_type)
    if pa.types.is_map(kind):
        return has_text(kind.key_type) or has_text(kind.item_type)
    if pa.types.is_struct(kind):
        return any(has_text(field.type) for field in kind)
    if pa.types.is_nested(kind):
        return pa.types.is_integer(kind.value_type) or has_text(kind.value_type)
    kinds = (
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
        pa.types.is_fixed_size_binary,
    )
    return any(is_kind(kind) for is_kind in kinds)


def texts_in(column: pa.Array | pa.ChunkedArray) -> Sequence[bytes | None]:
    """Return the text of each row of a column, or of all its strings if it is nested."""
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        return [None if v is None else _shown(v) for v in column.to_pylist()]
    return [None if value is None else _bytes(value) for value in column.to_pylist()]


def _shown(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def replaced_sets(column: pa.ChunkedArray, marks: Any) -> pa.Array:
    """Empty the sets of a list of lists where `marks`, over its flat lists, is true."""
    lists = pc.list_flatten(column)
    lists = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    lengths = list_lengths(lists)
    values = pc.list_flatten(lists).filter(to_arrow(~marks.repeat(lengths)))
    inner = to_arrow(offsets_of((~marks) * lengths), pa.int32())
    kind = column.type.value_type
    sets = pa.ListArray.from_arrays(inner, values, type=pa.list_(values.type)).cast(kind)
    outer = to_arrow(offsets_of(list_lengths(column)), pa.int32())
    mask = to_arrow(~to_numpy(column.is_valid())) if column.null_count else None
    return pa.ListArray.from_arrays(outer, sets, mask=mask).cast(column.type)


_FIELDS = "role type object finish_reason stop_reason tool_choice status sent token_source"
ENUMERATIONS = frozenset(_FIELDS.split())
"""Fields, also columns, whose value is one of few words."""

_SAID = """
assistant developer function system tool user
abort content_filter error function_call length max_tokens stop tool_calls
auto required none chat.completion chat.completion.chunk text_completion list model
array boolean integer json_object json_schema null number object string
text refusal reasoning reasoning_text summary_text thinking redacted_thinking tool_use
tool_result image image_url input_audio input_image input_text output_text audio_url video_url
document file message function_call_output custom_tool_call custom_tool_call_output
engine retokenized tokens completed incomplete in_progress failed

name type id index role content messages prompt model models tools tool_choice tool_call_id
arguments call_id input instructions output object created created_at choices delta
finish_reason stop_reason logprobs top_logprobs prompt_logprobs usage prompt_tokens
completion_tokens total_tokens prompt_tokens_details completion_tokens_details cached_tokens
reasoning_tokens token_ids prompt_token_ids response_token_ids return_token_ids token logprob
token_logprobs text_offset bytes service_tier system_fingerprint
max_completion_tokens max_output_tokens temperature top_p top_k min_p min_tokens seed
presence_penalty frequency_penalty repetition_penalty logit_bias stream stream_options
include_usage include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
stop_token_ids ignore_eos add_generation_prompt continue_final_message chat_template
chat_template_kwargs enable_thinking parallel_tool_calls response_format reasoning_effort
reasoning_content metadata modalities prediction store verbosity echo suffix best_of
description parameters properties additionalProperties enum items strict schema default
detail url data format source cache_control encrypted_content thoughts signature

session sessions request response time agent policy_version redacted sampling_support
routed_experts meta_info weight_versions version start end sent reward metrics
unrecorded lost unrecorded_calls exact_prefix_fallbacks encrypted_thoughts
rule where got expected hint record
"""
WORDS = frozenset(_SAID.split())
"""Values of enumerations, and names of fields."""

_WORDS = b"|".join(re.escape(word).encode() for word in sorted(WORDS))
_NAMES = b"|".join(name.encode() for name in sorted(ENUMERATIONS))
_PLACES = re.compile(
    rb'(?<!\\)"(?:(?:%b)"\s*:\s*"(?:%b)"|(?:%b)"(?=\s*:))' % (_NAMES, _WORDS, _WORDS)
)
Spans = Sequence[tuple[int, int, int]]


def is_protocol(name: str, value: object) -> bool:
    """True if a field has a value that redaction leaves alone."""
    return name in ENUMERATIONS and value in WORDS


def outside(text: bytes, spans: Spans) -> Spans:
    """Return the parts of ranges of a JSON text in which it has no word of the protocol.

    Quotes within texts are escaped, so JSON in JSON is a text like any other.

    Example:
        >>> outside(b'{"role": "user", "a": "user"}', [(10, 14, 0), (23, 27, 0)])
        [(23, 27, 0)]
    """
    outside_spans = list[tuple[int, int, int]]()
    places = [match.span() for match in _PLACES.finditer(text)]
    at = 0
    for start, end, number in spans:
        while at < len(places) and places[at][1] <= start:
            at += 1
        for begin, finish in places[at:]:
            if begin >= end:
                break
            if start < begin:
                outside_spans.append((start, begin, number))
            start = max(start, finish)
        if start < end:
            outside_spans.append((start, end, number))
    return outside_spans
