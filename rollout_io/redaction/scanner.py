"""Scanners, which find secrets and personal data in text, and memory of what was scanned, by content.

A text that continues another is scanned from there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, takewhile
from threading import Lock
from typing import Any, NamedTuple

from rollout_io.redaction.credentials import credentials
from rollout_io.redaction.literals import readable
from schemas.errors import ConfigError, MissingExtra
from schemas.imports import requires_extra

PERSONAL = ("CreditCard", "Crypto", "Iban", "Phone", "UsSsn")
"""Presidio's recognizers that need neither a language model nor a network."""

_PERSONAL_SCORE = 0.4
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@(?:[\w-]{1,63}\.)+[A-Za-z]{2,24}\b")
_PHONE_MARKS = frozenset("+()- ")  # digits alone are mostly times and ids
_SPACED = bytes.maketrans(b"<>()[]{},|&", b" " * 11)
_ANY_TEXT = "this is any text"
_SENTENCE_END = re.compile(rb"[.:!?](?=\s|$)")


class Found(NamedTuple):
    """A secret: its kind, and the range of bytes that it has in the scanned text."""

    kind: str
    start: int
    end: int


class Rules(NamedTuple):
    """What is looked for.

    Attributes:
        patterns: (name, regular expression) pairs. The first group of an expression that is not
            empty is the secret, or the entire match if no group takes part in it.
        personal: If true, also look for personal data with Presidio (`PERSONAL`).
    """

    patterns: tuple[tuple[str, str], ...] = ()
    personal: bool = False

    @property
    def checksum(self) -> int:
        """Tell changed expressions apart; 16 bits are too few to guess a secret one."""
        return zlib.crc32(repr(self.patterns).encode()) & 0xFFFF

    @classmethod
    def of(cls, patterns: Mapping[str, str], *, personal: bool = False) -> Rules:
        """Check the expressions.

        Raises:
            ConfigError: `choices`: an expression is invalid, or matches the empty text.
            MissingExtra: `extra_installed`: a scanner is not installed.
        """
        for name, pattern in patterns.items():
            try:
                is_empty = re.compile(pattern).search("") is not None
            except re.error as error:
                raise ConfigError("choices", f"pattern {name}", f"{error}", "a regex") from None
            if is_empty:
                expected = "a regex that matches no empty text"
                raise ConfigError("choices", f"pattern {name}", repr(pattern), expected)
            if re.search(pattern, _ANY_TEXT):
                finding = f"{pattern!r} matches any text, such as {_ANY_TEXT!r}"
                hint = "the expression follows the first =: NAME=REGEX"
                raise ConfigError("choices", f"pattern {name}", finding, "a regex of secrets", hint)
        rules = cls(tuple(sorted(patterns.items())), personal)
        _require_scanners(rules)
        return rules


def scan(content: bytes, rules: Rules) -> Iterator[Found]:
    r"""Yield the secrets in a text, in UTF-8.

    Example:
        >>> list(scan(b"my pin is 4711", Rules.of({"pin": r"pin is (\d+)"})))
        [Found(kind='pin', start=10, end=14)]
    """
    if not content:
        return
    yield from _known_secrets(content)
    if not rules.patterns and not rules.personal:
        return
    text = readable(content)
    is_plain = len(text) == len(content)

    def found(kind: str, start: int, end: int) -> Found:
        if is_plain:
            return Found(kind, start, end)
        begin = len(text[:start].encode())
        return Found(kind, begin, begin + len(text[start:end].encode()))

    for name, pattern in rules.patterns:
        for match in re.finditer(pattern, text):
            groups = [i for i in range(1, match.re.groups + 1) if match.start(i) >= 0] or [0]
            start, end = match.span(next((i for i in groups if match[i]), groups[0]))
            if start < end:
                yield found(name, start, end)
    if rules.personal:
        for recognizer, entity in _recognizers():
            for result in recognizer.analyze(text, [entity], None):
                is_number = entity == "PHONE_NUMBER" and not (
                    _PHONE_MARKS & set(text[result.start : result.end])
                )
                if result.score >= _PERSONAL_SCORE and not is_number:
                    yield found(entity.lower(), result.start, result.end)
        for match in _EMAIL.finditer(text):
            yield found("email_address", *match.span())


def _known_secrets(content: bytes) -> Iterator[Found]:
    yield from _scanned(content)
    # Many rules expect a space or a quote after a secret, but a marker or a bracket may follow.
    parted = _SENTENCE_END.sub(b" ", content.translate(_SPACED))
    if parted != content:
        yield from _scanned(parted)
    for place in credentials(content):
        yield Found(*place)


def _scanned(content: bytes) -> Iterator[Found]:
    findings = _scanner().scan(content)
    # A part of a credential, such as a public key, counts only next to the rest of it.
    visible = {_provider(finding.rule_id) for finding in findings if finding.visible}
    for finding in findings:
        if finding.visible or _provider(finding.rule_id) in visible:
            place = finding.location
            kind = finding.rule_id.split(".", 1)[-1].rstrip("0123456789").rstrip(".")
            yield Found(kind, place["start_offset"], place["end_offset"])


def _provider(rule: str) -> str:
    return rule.split(".", 1)[-1].split("-", 1)[0]


def _require_scanners(rules: Rules) -> None:
    _scanner()
    if rules.personal:
        _recognizers()


@lru_cache(maxsize=1)
def _scanner() -> Any:
    """Compile the scanner's rules once per process (a second; the first time, ten)."""
    with requires_extra("redact", "redact"):
        from kingfisher_sdk import Scanner
    return Scanner()


@lru_cache(maxsize=1)
def _recognizers() -> tuple[tuple[Any, str], ...]:
    try:
        from presidio_analyzer import predefined_recognizers
    except ModuleNotFoundError:
        raise MissingExtra(
            "extra_installed",
            "--personal",
            "no package presidio_analyzer",
            "Presidio",
            "pip install presidio-analyzer",
            message="--personal needs the package presidio_analyzer, which is not installed",
        ) from None
    recognizers = [getattr(predefined_recognizers, f"{name}Recognizer")() for name in PERSONAL]
    return tuple(
        (recognizer, entity)
        for recognizer in recognizers
        for entity in recognizer.supported_entities
    )


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
