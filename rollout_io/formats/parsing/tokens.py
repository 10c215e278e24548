"""Logged token ids, log-probabilities, routing and weight versions, checked and converted to arrays.

In logs that are not JSON, these are lists, NumPy arrays or tensors, checked by their kind (`Numbers`).

SGLang reports the versions of the weights as spans of the generated tokens, `end` excluded:

    meta_info    {"weight_versions": [{"version": "3", "start": 0, "end": 7}, ...], ...}

miles keeps them per call, counted from the start of the prompt: `[{"spans": [...]}, ...]`.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.formats.base import Ids
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.columns import LOGPROB_SENTINEL
from schemas.errors import InputError, InvariantError, count
from schemas.ragged import IntArray
from schemas.rules import RULES

INT32_MAX = 2**31 - 1

_END = b"%d" % (INT32_MAX + 1)
"""Separator between lists: the smallest number that cannot be an id."""

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_Expert = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
_INTEGERS_DECODER = msgspec.json.Decoder(list[int])
_ROUTES_DECODER = msgspec.json.Decoder(list[list[list[_Expert]]] | None)


def broken(rule: str, where: str, got: str, expected: str = "") -> InvariantError:
    """Return the error for a named invariant, with its hint."""
    return InvariantError(rule, where, got, expected, RULES[rule].hint)


def token_ids(ids: Sequence[int], what: str, where: str) -> npt.NDArray[np.int32]:
    """Return the ids of a prompt or response, [tokens] int32."""
    if not ids:
        raise broken(f"nonempty_{what}", where, f"the {what} has no tokens")
    return _in_range(ids, what, where)


def _in_range(ids: Sequence[int], what: str, where: str) -> npt.NDArray[np.int32]:
    if ids and not 0 <= min(ids) <= max(ids) <= INT32_MAX:
        bad = next(i for i in ids if not 0 <= i <= INT32_MAX)
        digits = str(bad) if abs(bad) < 1 << 70 else "with more than 20 digits"
        expected = f"ids in 0..{INT32_MAX}"
        raise broken("token_range", where, f"id {digits} in the {what}", expected)
    return np.array(ids, np.int32)


def parse_ids(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Parse many JSON lists of integers at once; return all numbers, and the length of each list.

    If a list extends the previous one, as the prompts of a growing chat do, only its new numbers
    are parsed, so each token of a chat is parsed once.

    Raises:
        ValueError: A text is not a list of integers, or has a number that does not fit in 32 bits; call
            `strict_ids` on each text to find it.

    Example:
        >>> ids, lengths = parse_ids([b"[1, 33]", b"[1, 33, 37]", b"[]"])
        >>> ids.tolist(), lengths.tolist()
        ([1, 33, 1, 33, 37], [2, 3, 0])
    """
    if not texts:
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    parts: list[bytes] = []
    extends: list[bool] = []
    before = b"[]"
    for text in texts:
        if text[:1] != b"[":
            raise ValueError("not a list")
        size = len(before)
        goes_on = text[size - 1 : size] == b"," and text.startswith(before[:-1])
        part = text[size if goes_on else 1 : -1]
        if part and not part.isspace():
            parts.append(part)
        parts.append(_END)
        extends.append(goes_on)
        before = text
    numbers = _parse_numbers(b",".join(parts))
    ends = np.flatnonzero(numbers == INT32_MAX + 1)
    if len(ends) != len(texts) or numbers.max() > INT32_MAX + 1 or numbers.min() < -INT32_MAX - 1:
        raise ValueError("a number does not fit in 32 bits")
    return _with_shared(numbers, ends, np.array(extends, np.bool_))


def _with_shared(
    numbers: npt.NDArray[np.int64], ends: IntArray, extends: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Rebuild the lists; where a list `extends` the previous one, `numbers` has only new numbers."""
    new = numbers[numbers <= INT32_MAX].astype(np.int32)
    stops = ends - np.arange(len(ends))
    starts = np.maximum.accumulate(np.where(extends, 0, np.append(0, stops[:-1])))
    if not extends.any():
        return new, stops - starts
    rows = [new[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.concatenate(rows), stops - starts


def _parse_numbers(text: bytes) -> npt.NDArray[np.int64]:
    with warnings.catch_warnings():  # NumPy only warns if it stops before the end of the text
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text, np.int64, sep=",")
        except DeprecationWarning as error:
            raise ValueError("not a list of whole numbers") from error


def num_ids(ids: Ids) -> int:
    """Return the number of ids."""
    if not isinstance(ids, bytes):
        return len(ids)
    commas = ids.count(b",")
    return commas + 1 if commas or ids[1:-1].strip() else 0


def strict_ids(text: bytes, what: str, where: str) -> npt.NDArray[np.int32]:
    """Parse a JSON list of token ids, [n] int32."""
    ids = decode_line(_INTEGERS_DECODER, text, f"{where}, {what} ids")
    return _in_range(ids, what, where)


def same_ids(ids: bytes, others: bytes, what: str, where: str) -> None:
    """Raise an error unless two JSON lists of ids are equal."""
    if ids == others:
        return
    first, second = strict_ids(ids, what, where), strict_ids(others, what, where)
    if not np.array_equal(first, second):
        finding = f"the two lists of {what} differ ({len(first)} and {count(len(second), 'id')})"
        hint = "keep the response exactly as the engine returned it"
        raise InputError("conflicting_ids", where, finding, hint=hint)


def usage_differs(what: str, num_tokens: int, counted: int, where: str) -> InputError:
    """Return the error for an engine's token count that differs from the number of ids."""
    finding = f"`usage` reports {count(counted, f'{what} token')}, but the call has {count(num_tokens, f'{what} id')}"
    hint = "record the call again: ids are missing or belong to a different call"
    return InputError("usage_counts", where, finding, hint=hint)


def logprob_array(values: Sequence[float], num_tokens: int, where: str) -> npt.NDArray[np.float32]:
    """Return log-probabilities of a response, [tokens] float32 nats; 0.0 is a valid value.

    Raises:
        InvariantError: `lengths_align`: the number of values is wrong; `logprobs_finite`,
            `logprobs_nonpositive`: a value is invalid.
    """
    if len(values) != num_tokens:
        expected = f"{num_tokens}, one per response token"
        raise broken("lengths_align", where, count(len(values), "logprob"), expected)
    with np.errstate(over="ignore"):  # an overflow to infinity is rejected below
        logprobs = np.array(values, np.float32)
    if len(logprobs) and not logprobs.min() > LOGPROB_SENTINEL:
        raise broken("logprobs_finite", where, f"logprob {min(values)}", "a value above -9999")
    if len(logprobs) and logprobs.max() > 0:
        raise broken(
            "logprobs_nonpositive", where, f"logprob {max(values)}", "a value of at most 0"
        )
    return logprobs


def route_array(raw: msgspec.Raw, num_tokens: int, place: str) -> npt.NDArray[np.int16] | None:
    """Return the routed experts of leading tokens, [tokens, layers, topk] int16; None for null.

    They are nested lists, or a NumPy file in base64 (vLLM), of at most `num_tokens` of prompt + response.

    Raises:
        InvariantError: `routing_shape`: the routing has the wrong type or shape, or more entries
            than `num_tokens`.
    """
    try:
        routes = _routes(raw)
    except ValueError as error:  # msgspec's errors are ValueErrors
        finding = (
            f"the routing is not a list [tokens][layers][topk] of experts in 0..32767 ({error})"
        )
        raise broken("routing_shape", place, finding) from None
    if routes is None:
        return None
    if routes.ndim != 3 or 0 in routes.shape or len(routes) > num_tokens:
        finding, expected = f"shape {routes.shape}", f"shape [1..{num_tokens} tokens][layers][topk]"
        raise broken("routing_shape", place, finding, expected)
    return routes


def _numpy_file(file: bytes) -> npt.NDArray[Any]:
    """Read the array of an .npy file, without trusting its header."""
    stream = io.BytesIO(file)
    try:
        version = np.lib.format.read_magic(stream)
        shape, is_fortran, dtype = _HEADERS[version](stream)
    except Exception as error:  # NumPy evaluates the header as Python literals
        raise ValueError("not a NumPy file") from error
    if dtype.hasobject or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("not an array of numbers")
    if math.prod(shape) * dtype.itemsize != len(file) - stream.tell():
        raise ValueError(f"{len(file)} bytes for an array of shape {shape}")
    flat = np.frombuffer(file, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _routes(raw: msgspec.Raw) -> npt.NDArray[np.int16] | None:
    if not bytes(raw).startswith(b'"'):
        nested = _ROUTES_DECODER.decode(raw)
        return None if nested is None else np.array(nested, np.int16)
    routes = _numpy_file(msgspec.json.decode(raw, type=bytes))
    if routes.dtype.kind not in "iu" or (
        routes.size and not 0 <= routes.min() <= routes.max() < 2**15
    ):
        raise ValueError("the array does not contain expert indices")
    return routes.astype(np.int16)


_SHAPES = ("a number", "a flat list of numbers", "numbers [tokens, k]", "[tokens, layers, topk]")


class BrokenArray(Exception):
    """An array breaks a rule; the reader of a format knows where it stands."""

    def __init__(self, rule: str, got: str, expected: str) -> None:
        self.broken_rule, self.got, self.expected = rule, got, expected


class Numbers(NamedTuple):
    """What an array may hold.

    Attributes:
        kinds: Kinds of numbers, as NumPy names them.
        bounds: Smallest and largest value; if there are any, numbers are whole.
        rules: Rule that another type or shape breaks, and rule that another value breaks.
    """

    kinds: str
    dtype: Any
    bounds: tuple[int, int] | None = None
    num_dimensions: int = 1
    rules: tuple[str, str] = ("record_type", "token_range")

    def read(self, value: Any) -> npt.NDArray[Any]:
        """Return a value as an array of `dtype`; routing (3 dimensions) is not empty.

        Raises:
            BrokenArray: The value is no such array.
        """
        array, finding = array_of(value), ""
        is_empty = array.size == 0
        is_other = array.dtype.kind not in self.kinds and not is_empty
        if (
            "b" not in self.kinds
            and isinstance(value, list | tuple)
            and bool in {*map(type, value)}
        ):
            finding = "booleans"
        elif array.ndim != self.num_dimensions or is_other or (is_empty and array.ndim == 3):
            finding = "null" if value is None else f"{array.dtype} of shape {array.shape}"
        if finding:
            raise BrokenArray(self.rules[0], finding, _SHAPES[self.num_dimensions])
        if self.bounds is not None and not is_empty:
            low, high = self.bounds
            is_within = low <= array.min() <= array.max() <= high
            if not is_within or not np.array_equal(array, np.round(array)):
                finding = f"numbers in {array.min()}..{array.max()}"
                raise BrokenArray(self.rules[1], finding, f"whole numbers in {low}..{high}")
        with np.errstate(over="ignore"):  # overflow gives infinity, which the invariants reject
            return array.astype(self.dtype)


IDS = Numbers("iu", np.int32, (0, INT32_MAX))
MASK = Numbers("biuf", np.bool_, (0, 1), rules=("record_type", "record_type"))
LOGPROBS = Numbers("fiu", np.float32)
ROUTES = Numbers("iu", np.int16, (0, 2**15 - 1), 3, ("routing_shape", "routing_shape"))
SUPPORT = Numbers("iu", np.int64, (-1, INT32_MAX), 2)


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a value as an array; it has no dimension if it is none, such as lists of other lengths."""
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (ValueError, TypeError, OverflowError, RuntimeError, RecursionError):
        return np.asarray(None)


_MOST_DIGITS = 10  # of a 32-bit integer


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    weight_versions: list[_Span] | None = None


class _Call(msgspec.Struct):
    spans: list[_Span]


_META = msgspec.json.Decoder(_Meta)


def versions_of_meta(
    meta_info: msgspec.Raw, num_tokens: int, where: str
) -> npt.NDArray[np.int32] | None:
    """Return the version of each token of a response, [num_tokens], from SGLang's `meta_info`.

    It is None if there are no spans, or if a version is not a number.
    """
    try:
        spans = _META.decode(meta_info).weight_versions if bytes(meta_info) != b"null" else None
    except msgspec.MsgspecError as error:
        raise InputError("record_type", f"{where}, meta_info", str(error)) from None
    return None if spans is None else _spread(spans, 0, num_tokens, where)


def versions_of_calls(
    calls: Sequence[Any] | None, start: int, num_tokens: int, where: str
) -> npt.NDArray[np.int32] | None:
    """Return the version of each response token from miles' calls; None if these are plain names.

    A token outside all spans has version 0.
    """
    if not calls or not all(isinstance(call, dict) for call in calls):
        return None
    try:
        converted = msgspec.convert(list(calls), list[_Call])
    except msgspec.ValidationError as error:
        raise InputError("record_type", f"{where}, weight_versions", str(error)) from None
    spans = [span for call in converted for span in call.spans]
    return _spread(spans, start, num_tokens, where, has_gaps=True)


def names_of(calls: Sequence[Any] | None) -> list[str]:
    """Return the versions in `weight_versions`, of plain names or of calls with spans."""
    named = [
        span.get("version") if isinstance(span, dict) else span
        for call in calls or ()
        for span in (call.get("spans") or () if isinstance(call, dict) else [call])
    ]
    return [str(name) for name in named]


def _spread(
    spans: Sequence[_Span], first: int, num_tokens: int, where: str, *, has_gaps: bool = False
) -> npt.NDArray[np.int32] | None:
    versions, end = np.zeros(num_tokens, np.int32), first
    for span in spans:
        if span.start < end or (span.start > end and not has_gaps) or span.end <= span.start:
            break
        name, end = str(span.version), span.end
        if not name.isdecimal() or int(name) > INT32_MAX:
            return None
        versions[span.start - first : span.end - first] = int(name)
    else:
        if end == first + num_tokens or (has_gaps and end <= first + num_tokens):
            return versions
    finding = ", ".join(f"{span.start} to {span.end}" for span in spans[:5])
    expected = f"spans in order that cover {first} to {first + num_tokens}"
    raise broken("lengths_align", f"{where}, weight_versions", finding, expected)


def oldest(versions: Sequence[str]) -> int | None:
    """Return the smallest version; None if there are none or if one of them is not a number."""
    is_known = versions and all(v.isdecimal() and len(v) <= _MOST_DIGITS for v in versions)
    version = min(map(int, versions)) if is_known else None
    return version if version is not None and version <= INT32_MAX else None
