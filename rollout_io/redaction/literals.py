"""Search for known secrets in text: escaped, spaced, wrapped, encoded and in parts."""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from rollout_io.redaction.credentials import decoded, is_random
from schemas.ragged import IntArray

SHORTEST = 8
"""Bytes of the shortest secret that is searched for; shorter ones include what is around them."""

_SHORTEST_LINE = 16
_SHORTEST_COMPACT = 12  # shorter secrets are searched for as they are
_PART = 10  # bytes of the shortest part of a secret that is searched for
_PREFIX = re.compile(rb"(?:[A-Za-z]{1,12}\d{0,2}[-_.]){0,4}")  # not secret: names what issued it
_ESCAPE = re.compile(
    rb"\\+(?:u([0-9a-fA-F]{4})(?:\\+u([dD][c-fC-F][0-9a-fA-F]{2}))?|([bfnrt\"'/]))|\\(\\+)"
    rb"|(?:%(?:25)*|\\+x)([0-9a-fA-F]{2})|&(amp|quot|lt|gt|#39);"
)
_CONTROL = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_ENTITY = {b"amp": b"&", b"quot": b'"', b"lt": b"<", b"gt": b">", b"#39": b"'"}
_INVISIBLE = re.compile(rb"\xe2\x80[\x8b-\x8f]|\xe2\x81\xa0|\xef\xbb\xbf|\xc2[\xa0\xad]")
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
_ONE_KIND = re.compile(rb"[a-z]+|[A-Z]+|\d+")
_DEPTH = 8  # times that a text is unescaped


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("rollout_io.redaction", _one_each)


def readable(content: bytes) -> str:
    """Decode UTF-8; each invalid byte becomes "?", so that the number of bytes does not change."""
    return content.decode("utf-8", "rollout_io.redaction")


@dataclass(frozen=True, slots=True)
class View:
    r"""A text that is read in another way: without its escapes, or without blanks and in lower case.

    Attributes:
        content: The bytes of the view.
        ends: [E] end in `content` of what replaces each escape or blank.
        removed: [E + 1] number of bytes that the escapes before each of them had more.
        parent: The view that this one was made of; None: the text itself.
        is_compact: True if blanks are removed.

    Example:
        >>> View.of(rb'{"a": "x\\ny"}').unescaped().content
        b'{"a": "x\ny"}'
    """

    content: bytes
    ends: IntArray
    removed: IntArray
    parent: View | None = None
    is_compact: bool = False

    @classmethod
    def of(cls, content: bytes) -> View:
        """View a text as it is."""
        return cls(content, np.empty(0, np.int64), np.zeros(1, np.int64))

    def unescaped(self) -> View:
        """Undo escapes of JSON (at any depth), URLs and HTML; a run of backslashes counts as one."""
        parts: list[bytes] = []
        ends, removed = list[int](), [0]
        at = size = 0
        for match in _ESCAPE.finditer(self.content):
            begin, end = match.span()
            plain = _plain(match)
            parts += (self.content[at:begin], plain)
            size += begin - at + len(plain)
            ends.append(size)
            removed.append(end - size)
            at = end
        content = b"".join((*parts, self.content[at:]))
        return View(content, np.array(ends, np.int64), np.array(removed, np.int64), self)

    def compact(self) -> View:
        """Remove blanks and invisible characters, and change letters to lower case."""
        is_blank = _IS_SPACE[np.frombuffer(self.content, np.uint8)]
        for match in _INVISIBLE.finditer(self.content):
            is_blank[slice(*match.span())] = True
        edges = np.flatnonzero(np.diff(is_blank, prepend=False, append=False)).reshape(-1, 2)
        removed = np.concatenate([[0], np.cumsum(edges[:, 1] - edges[:, 0])])
        content = np.frombuffer(self.content, np.uint8)[~is_blank].tobytes().lower()
        return View(content, edges[:, 0] - removed[:-1], removed, self, is_compact=True)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the range in the original text of a range of `content` that is not empty."""
        start += int(self.removed[np.searchsorted(self.ends, start, side="right")])
        side: Literal["left", "right"] = "left" if self.is_compact else "right"
        end += int(self.removed[np.searchsorted(self.ends, end, side=side)])
        return (start, end) if self.parent is None else self.parent.span(start, end)


def _plain(match: re.Match[bytes]) -> bytes:
    code, low, control, backslashes, number, entity = match.groups()
    if code is not None:
        pair = bytes.fromhex((code + (low or b"")).decode())
        return pair.decode("utf-16-be", "replace").encode()
    if control is not None:
        return _CONTROL.get(control, control)
    if entity is not None:
        return _ENTITY[entity]
    return b"\\" if backslashes is not None else bytes.fromhex(number.decode())


@lru_cache(maxsize=8)  # a text is scanned, and then searched
def views(content: bytes) -> list[View]:
    """Return a text as it is and, if it has escapes, without them: escapes may give new escapes."""
    listed = [View.of(content)]
    while len(listed) <= _DEPTH and _ESCAPE.search(listed[-1].content):
        listed.append(listed[-1].unescaped())
    return listed


def widened(content: bytes, start: int, end: int) -> bytes:
    """Return a secret of a text; a short one includes the bytes around it.

    Its own bytes may occur anywhere.
    """
    if end - start >= SHORTEST:
        return content[start:end]
    left = max(0, start - (SHORTEST - (end - start) + 1) // 2)
    right = max(end, left + SHORTEST)
    # No byte of a character is left out.
    while left and content[left] & 0xC0 == 0x80:
        left -= 1
    while right < len(content) and content[right] & 0xC0 == 0x80:
        right += 1
    return content[left:right]


def forms(secret: bytes) -> Iterator[bytes]:
    """Yield what to search for: a secret, its encodings, its lines, and what it is base64 of."""
    plain = views(secret)[-1].content
    yield from (secret, plain, plain.replace(b" ", b"+"))
    for line in re.split(rb"[\r\n]+", plain):
        if len(line.strip()) >= _SHORTEST_LINE and not line.strip().startswith(b"-----"):
            yield line.strip()
    if len(plain) >= _SHORTEST_COMPACT:
        yield plain.hex().encode()
        for shift in range(3):  # other bytes may precede it
            encoded = base64.b64encode(b"\0" * shift + plain)
            inner = encoded[-(-shift * 4 // 3) : (len(plain) + shift) * 4 // 3]
            yield inner
            yield inner.translate(bytes.maketrans(b"+/", b"-_"))
    if len(of := decoded(plain)) >= SHORTEST:
        yield of
        yield of.partition(b":")[2] or of


def parts(secret: bytes) -> Iterator[bytes]:
    """Yield all parts of ten bytes of the random words of a secret."""
    for word in views(secret)[-1].content.split():
        if len(word) >= _SHORTEST_LINE and is_random(word):
            prefix = _PREFIX.match(word)
            begin = max(0, prefix.end() - _PART + 2) if prefix else 0
            windows = (word[at : at + _PART] for at in range(begin, len(word) - _PART + 1))
            yield from (part.lower() for part in windows if not _ONE_KIND.fullmatch(part))


class _Search:
    """Finds any of many byte strings in a text."""

    def __init__(self, numbers: Mapping[bytes, int]) -> None:
        self._num = min((SHORTEST, *map(len, numbers)))
        self._by_head: dict[bytes, list[tuple[bytes, int]]] = {}
        for text in sorted(numbers, key=len, reverse=True):
            self._by_head.setdefault(text[: self._num], []).append((text, numbers[text]))
        self._is_head = np.zeros(1 << 20, np.bool_)
        for head in self._by_head:
            self._is_head[self._slots(head)[0]] = True

    def _slots(self, content: bytes) -> IntArray:
        """Hash each range of as many bytes as a head has."""
        padded = content + b"\0" * 8
        eights = np.ndarray(max(0, len(content) - self._num + 1), "<u8", padded, strides=(1,))
        mask = np.uint64((1 << 8 * self._num) - 1)
        slots = ((eights & mask) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(44)
        return slots.astype(np.int64)

    def __call__(self, content: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, number) of the longest text that begins at each position."""
        if not self._by_head:
            return
        for start in np.flatnonzero(self._is_head[self._slots(content)]).tolist():
            for text, number in self._by_head.get(content[start : start + self._num], ()):
                if content.startswith(text, start):
                    yield start, start + len(text), number
                    break


@dataclass(frozen=True)
class Literals:
    """Known secrets, and the search for them.

    Attributes:
        secrets: The secrets, in the order in which they were found.
        first: Number of the first one: earlier redactions used the numbers before it.
    """

    secrets: tuple[bytes, ...]
    first: int = 0

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest text that is searched for."""
        return max(map(len, (*self._exact, *self._compact)), default=0)

    @cached_property
    def _numbers(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        exact, compact = dict[bytes, int](), dict[bytes, int]()
        for number, secret in enumerate(self.secrets, self.first):
            for form in forms(secret):
                short = View.of(form).compact().content
                if len(short) >= _SHORTEST_COMPACT:
                    compact.setdefault(short, number)
                elif len(form) >= min(SHORTEST, len(secret)):
                    exact.setdefault(form, number)
        for number, secret in enumerate(self.secrets, self.first):
            for part in parts(secret):
                compact.setdefault(part, number)
        return exact, compact

    @cached_property
    def _exact(self) -> dict[bytes, int]:
        return self._numbers[0]

    @cached_property
    def _compact(self) -> dict[bytes, int]:
        return self._numbers[1]

    @cached_property
    def _searches(self) -> tuple[_Search, _Search]:
        return _Search(self._exact), _Search(self._compact)

    def spans(self, texts: Sequence[bytes]) -> list[list[tuple[int, int, int]]]:
        """Find all secrets in texts.

        Secrets of 12 bytes or more are also found with blanks or invisible characters inside, in
        other cases of letters, and in parts of ten bytes or more if they are random.

        Args:
            texts: N texts in UTF-8; invalid bytes match only the same bytes.

        Returns:
            [N] lists of (start, end, number): disjoint ranges of bytes in order, and the number of
            the secret that begins each range. Ranges that overlap are joined.
        """
        if not self.secrets:
            return [[] for _ in texts]
        exact, compact = self._searches
        all_spans: list[list[tuple[int, int, int]]] = []
        for text in texts:
            hits = set[tuple[int, int, int]]()
            # Escaped texts are searched as they are and without escapes: a backslash may be text.
            for view in views(text):
                hits.update((*view.span(a, b), n) for a, b, n in exact(view.content))
                if self._compact:
                    short = view.compact()
                    hits.update((*short.span(a, b), n) for a, b, n in compact(short.content))
            all_spans.append(list(_joined(hits)))
        return all_spans

    def halves(self, texts: Sequence[bytes], cuts: Sequence[Sequence[int]]) -> Iterator[bytes]:
        """Yield the parts of secrets that begin before a cut and end after it.

        Where an answer continues a prompt, the texts of both have only a part of a secret.

        Args:
            texts: N texts that consist of several.
            cuts: [N] number of bytes before each of these.

        Example:
            >>> list(Literals((b"abcdefghijklmnop",)).halves([b"is abcdefghijklmnop"], [[12]]))
            [b'abcdefghi']
        """
        if not self.secrets:
            return
        near = 4 * self.longest  # escapes and blanks take more bytes
        rows = [
            (t, max(0, c - near), c) for t, places in zip(texts, cuts, strict=True) for c in places
        ]
        all_spans = self.spans([text[begin : cut + near] for text, begin, cut in rows])
        for (text, begin, cut), spans in zip(rows, all_spans, strict=True):
            for start, end, _ in spans:
                yield from cut_parts(text, begin + start, begin + end, [cut])


def cut_parts(text: bytes, start: int, end: int, cuts: Sequence[int]) -> Iterator[bytes]:
    """Yield the parts, long enough to be searched for, into which cuts divide a secret."""
    inner = [cut for cut in cuts if start < cut < end]
    for left, right in pairwise([start, *inner, end]) if inner else ():
        if right - left >= SHORTEST:
            yield text[left:right]


def _joined(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    ordered = sorted(set(spans), key=lambda span: (span[0], -span[1], span[2]))
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
