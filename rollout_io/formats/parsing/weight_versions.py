"""Versions of the weights that sampled each token of a response.

SGLang reports spans of the generated tokens, `end` excluded:

    meta_info    {"weight_versions": [{"version": "3", "start": 0, "end": 7}, ...], ...}

miles keeps them per call, counted from the start of the prompt: `[{"spans": [...]}, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.formats.parsing.tokens import INT32_MAX, broken
from schemas.errors import InputError

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
