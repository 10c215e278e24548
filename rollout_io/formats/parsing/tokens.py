"""Logged token ids, log-probabilities and routing, checked and converted to arrays."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

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
