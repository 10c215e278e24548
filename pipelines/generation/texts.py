"""Texts of other people's code, as a dataset can hold them."""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""The text; a lone surrogate in it, which UTF-8 has no bytes for, is written as an escape.

    Example:
        >>> encodable("caf\u00e9 \ud83d")
        'caf\xe9 \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode()
