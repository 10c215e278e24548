"""Sanitize text from user code so that it can be stored in a dataset."""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""Escape lone surrogates, which UTF-8 cannot encode.

    Example:
        >>> encodable("caf\u00e9 \ud83d")
        'caf\xe9 \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode()
