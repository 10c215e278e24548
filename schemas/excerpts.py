"""Excerpts of contents in error messages: what must not be told is replaced before they are cut.

Half a secret is recognised by no scanner, and tells most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CLEAN: ContextVar[Callable[[str], str] | None] = ContextVar("clean", default=None)


@contextmanager
def cleaning(clean: Callable[[str], str] | None) -> Iterator[None]:
    """Clean the contents that errors quote in a block, and in the tasks that begin in it.

    Args:
        clean: Returns a text without its secrets; None: contents are quoted as they are.
    """
    token = _CLEAN.set(clean)
    try:
        yield
    finally:
        _CLEAN.reset(token)


def cleaned(text: str) -> str:
    """Return a text as errors may quote it, to be cut afterwards."""
    clean = _CLEAN.get()
    return text if clean is None else clean(text)


def fragment(text: str) -> str:
    """Quote a part of a content that was cut before; it is left out in a block of `cleaning`."""
    return repr(text if _CLEAN.get() is None else "...")


def quoted(text: str) -> str:
    """Quote the begin and the end of a long text.

    Example:
        >>> quoted("a" * 70)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaa'"
    """
    text = cleaned(text)
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
