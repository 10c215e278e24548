"""Names and numbers among the fields of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.logs.jsonl import decode_line
from rollout_io.logs.tokens import logprob_array

_LABEL = msgspec.json.Decoder(str)
_NUMBER = msgspec.json.Decoder(float | bool)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19


def numbers(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """The fields that are numbers or truth values (as 0 and 1).

    Args:
        fields: Valid JSON, by name.
        where: Their place.

    Raises:
        RolloutError: record_type: a number that a 64-bit float does not hold.
    """
    found: dict[str, float] = {}
    for name, raw in fields.items():
        text = bytes(raw)
        if not text.startswith(_NO_NUMBERS):
            found[name] = float(decode_line(_NUMBER, text, f"{where}, {name}"))
    return found


def logprobs(values: Sequence[float], num_tokens: int, where: str) -> npt.NDArray[np.float32]:
    """As `tokens.logprob_array`; a number beyond 32 bits is refused there as infinite is."""
    with np.errstate(over="ignore"):
        return logprob_array(values, num_tokens, where)


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """A name that is text or a whole number; None for null, for empty text and for all else.

    Args:
        raw: Valid JSON.
        where: Its place.

    Raises:
        RolloutError: json_line: text that is no UTF-8.
    """
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_LABEL, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None
