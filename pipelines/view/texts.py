"""Sanitize the texts in responses: replace lone surrogates, and limit the length."""

from __future__ import annotations

MAX_CHARS = 20_000
"""Maximum number of characters of a text in an answer."""


def shortened(text: str, max_chars: int = MAX_CHARS) -> str:
    """Cut a long text, and append its full length.

    Example:
        >>> shortened("abcdef", 3)
        'abc\u2026 [cut: 6 characters]'
    """
    if len(text) <= max_chars:
        return whole_characters(text)
    return f"{whole_characters(text[:max_chars])}\u2026 [cut: {len(text):,} characters]"


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
