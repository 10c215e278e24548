"""Names and numbers in the fields of a record."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollout_io.formats.parsing.jsonl import decode_line

_LABEL = msgspec.json.Decoder(str)
_NUMBER = msgspec.json.Decoder(float | bool)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19  # of a 64-bit integer


def numbers(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """Return the fields that are numbers or booleans (as 0 and 1).

    Args:
        fields: Valid JSON by name.
        where: Location of the fields, for error messages.

    Raises:
        InputError: `record_type`: a number does not fit into a 64-bit float.
    """
    found: dict[str, float] = {}
    for name, raw in fields.items():
        text = bytes(raw)
        if not text.startswith(_NO_NUMBERS):
            found[name] = float(decode_line(_NUMBER, text, f"{where}, {name}"))
    return found


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """Return a name that is a string or an integer; None if it is empty or of another type.

    Args:
        raw: Valid JSON.
        where: Location of the field, for error messages.

    Raises:
        InputError: `json_line`: the string is not UTF-8.
    """
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_LABEL, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None
