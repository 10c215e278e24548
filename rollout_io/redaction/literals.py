"""Literal search: every occurrence of known secrets in text, also where they are escaped."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import polars as pl

from schemas.ragged import IntArray

SHORTEST = 8
"""Bytes of the shortest secret that is searched for; shorter ones include what is around them."""

_SHORTEST_LINE = 16
_ESCAPE = re.compile(
    rb"\\+(?:u([0-9a-fA-F]{4})(?:\\+u([dD][c-fC-F][0-9a-fA-F]{2}))?|([bfnrt\"'/]))|\\(\\+)"
    rb"|%(?:25)*([0-9a-fA-F]{2})"
)
_CONTROL = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("rollout_io.redaction", _one_each)


def readable(content: bytes) -> str:
    """Decode UTF-8; each invalid byte becomes "?", so that the number of bytes does not change."""
    return content.decode("utf-8", "rollout_io.redaction")


@dataclass(frozen=True, slots=True)
class Unescaped:
    r"""A text in which each escape is replaced by the character that it stands for.

    Escapes of JSON are undone at any depth: JSON in JSON doubles backslashes, and a run of them
    counts as one. Escapes of URLs (`%2F`) are undone too, at any depth (`%252F`).

    Attributes:
        content: The bytes without escapes.
        ends: [E] end of the replacement of each escape in `content`.
        removed: [E + 1] number of bytes that the escapes before each of them had more.

    Example:
        >>> Unescaped.of(rb'{"a": "x\\ny"}').content
        b'{"a": "x\ny"}'
    """

    content: bytes
    ends: IntArray
    removed: IntArray

    @classmethod
    def of(cls, content: bytes) -> Unescaped:
        """Undo the escapes of a text."""
        parts: list[bytes] = []
        ends, removed = list[int](), [0]
        at = size = 0
        for match in _ESCAPE.finditer(content):
            begin, end = match.span()
            plain = _plain(match)
            parts += (content[at:begin], plain)
            size += begin - at + len(plain)
            ends.append(size)
            removed.append(end - size)
            at = end
        parts.append(content[at:])
        return cls(b"".join(parts), np.array(ends, np.int64), np.array(removed, np.int64))

    def original(self, offset: int) -> int:
        """Return the position in the original text of a position in `content`."""
        return offset + int(self.removed[np.searchsorted(self.ends, offset, side="right")])


def _plain(match: re.Match[bytes]) -> bytes:
    code, low, control, backslashes, percent = match.groups()
    if code is not None:
        pair = bytes.fromhex((code + (low or b"")).decode())
        return pair.decode("utf-16-be", "replace").encode()
    if control is not None:
        return _CONTROL.get(control, control)
    return b"\\" if backslashes is not None else bytes.fromhex(percent.decode())


@lru_cache(maxsize=8)  # a text is scanned, and then searched
def views(content: bytes) -> list[Unescaped]:
    """Return a text as it is and, if it has escapes, without them."""
    given = Unescaped(content, np.empty(0, np.int64), np.zeros(1, np.int64))
    if b"\\" not in content and b"%" not in content:
        return [given]
    plain = Unescaped.of(content)
    return [given, plain] if len(plain.ends) else [given]


def forms(content: bytes, start: int, end: int) -> Iterator[bytes]:
    """Yield the literals to search for after a secret was found in a text.

    A short secret includes the bytes around it, because its own bytes may occur anywhere. The
    lines of a long one are searched for too: tools print line numbers between them.
    """
    secret = content[start:end]
    if end - start < SHORTEST:
        left = max(0, start - (SHORTEST - (end - start) + 1) // 2)
        right = max(end, left + SHORTEST)
        # No byte of a character is left out.
        while left and content[left] & 0xC0 == 0x80:
            left -= 1
        while right < len(content) and content[right] & 0xC0 == 0x80:
            right += 1
        secret = content[left:right]
    yield secret
    yield Unescaped.of(secret).content
    lines = re.split(rb"[\r\n]+", Unescaped.of(secret).content)
    if len(lines) > 1:
        for line in lines:
            line = line.strip()
            if len(line) >= _SHORTEST_LINE and not line.startswith(b"-----"):
                yield line


@dataclass(frozen=True)
class Literals:
    """Known secrets, and the search for them.

    Attributes:
        secrets: The literals, in the order in which they were found.
    """

    secrets: tuple[bytes, ...]

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest literal."""
        return max(map(len, self.secrets), default=0)

    @cached_property
    def _num_head(self) -> int:
        return min((SHORTEST, *map(len, self.secrets)))

    @cached_property
    def _patterns(self) -> list[str]:
        return [readable(secret) for secret in self.secrets]

    @cached_property
    def _by_head(self) -> dict[bytes, list[tuple[int, bytes]]]:
        heads: dict[bytes, list[tuple[int, bytes]]] = {}
        for number, secret in enumerate(self.secrets):
            heads.setdefault(secret[: self._num_head], []).append((number, secret))
        return {head: sorted(found, key=lambda f: -len(f[1])) for head, found in heads.items()}

    def spans(self, texts: Sequence[bytes]) -> list[list[tuple[int, int, int]]]:
        """Find all secrets in texts.

        Args:
            texts: N texts in UTF-8; invalid bytes match only the same bytes.

        Returns:
            [N] lists of (start, end, number): disjoint ranges of bytes in order, and the number of
            the secret that begins each range. Ranges that overlap are joined.
        """
        if not self.secrets:
            return [[] for _ in texts]
        shown = [(i, view) for i, text in enumerate(texts) for view in views(text)]
        # Escaped texts are searched as they are and without escapes: a backslash may also be text.
        series = pl.Series([readable(view.content) for _, view in shown], dtype=pl.String)
        places = series.str.find_many(self._patterns, overlapping=True)
        found: list[list[tuple[int, int, int]]] = [[] for _ in texts]
        for (index, view), offsets in zip(shown, places, strict=True):
            for start in sorted({*(offsets if offsets is not None else ())}):
                head = view.content[start : start + self._num_head]
                for number, secret in self._by_head.get(head, []):
                    if view.content.startswith(secret, start):
                        bounds = view.original(start), view.original(start + len(secret))
                        found[index].append((*bounds, number))
                        break
        return [list(_joined(each)) for each in found]

    def halves(self, texts: Sequence[bytes], cuts: Sequence[int]) -> Iterator[bytes]:
        """Yield the parts of secrets that begin before a cut and end after it.

        Where an answer continues a prompt, the texts of both have only a part of a secret.

        Args:
            texts: N prompts, each with its answer.
            cuts: [N] number of bytes of each prompt.

        Example:
            >>> list(Literals((b"abcdefghijklmnop",)).halves([b"is abcdefghijklmnop"], [12]))
            [b'abcdefghi']
        """
        if not self.secrets:
            return
        near = 2 * self.longest  # escapes take more bytes
        begins = [max(0, cut - near) for cut in cuts]
        rows = list(zip(texts, begins, cuts, strict=True))
        found = self.spans([text[begin : cut + near] for text, begin, cut in rows])
        for (text, begin, cut), spans in zip(rows, found, strict=True):
            for start, end, _ in spans:
                if begin + start < cut < begin + end:
                    parts = text[begin + start : cut], text[cut : begin + end]
                    yield from (part for part in parts if len(part) >= SHORTEST)


def _joined(found: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    ordered = sorted(set(found), key=lambda each: (each[0], -each[1], each[2]))
    ends = accumulate((end for _, end, _ in ordered), max)
    begun: tuple[int, int, int] | None = None
    for (start, _, number), end in zip(ordered, ends, strict=True):
        if begun is not None and start < begun[1]:
            begun = (begun[0], end, begun[2])
            continue
        if begun is not None:
            yield begun
        begun = (start, end, number)
    if begun is not None:
        yield begun
