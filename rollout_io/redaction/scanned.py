"""Memory of what was scanned, by content: a text that continues another is scanned from there."""

from __future__ import annotations

from hashlib import blake2b
from itertools import accumulate, takewhile
from threading import Lock

BLOCK_BYTES = 2048
CONTEXT_BYTES = 8192
"""Bytes before new text that are scanned again: a secret may begin in them."""
_AHEAD_BYTES = 1024  # what follows a secret may decide whether it is one
MOST_BLOCKS = 1 << 15
"""Blocks that are remembered: those of 64 MiB of text."""


class Scanned:
    """Remembers the beginnings of texts as hashes of their blocks; the oldest ones are forgotten.

    Example:
        >>> scanned, text = Scanned(), bytes(20_000)
        >>> fresh, num_known = scanned.fresh(text)
        >>> scanned.add(text)
        >>> len(fresh), num_known, [len(scanned.fresh(text + b"more")[0])]
        (20000, 0, [8740])
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, None] = {}
        self._lock = Lock()

    def fresh(self, text: bytes) -> tuple[bytes, int]:
        """Return what a text has after its longest known beginning, and its context.

        The result begins with up to 8 KiB of that beginning. The second value is the number of its
        bytes up to which no secret is new.
        """
        num = sum(1 for _ in takewhile(self._blocks.__contains__, _beginnings(text)))
        begin = max(0, num * BLOCK_BYTES - CONTEXT_BYTES)
        return text[begin:], max(0, num * BLOCK_BYTES - begin - _AHEAD_BYTES)

    def add(self, text: bytes) -> None:
        """Remember that a text was scanned."""
        with self._lock:
            for beginning in _beginnings(text):
                self._blocks.pop(beginning, None)
                self._blocks[beginning] = None
            while len(self._blocks) > MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]


def _beginnings(text: bytes) -> list[bytes]:
    """Hash the text up to the end of each whole block."""
    starts = range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES)
    blocks = (text[start : start + BLOCK_BYTES] for start in starts)
    return list(
        accumulate(blocks, lambda last, block: blake2b(last + block).digest(), initial=b"")
    )[1:]
