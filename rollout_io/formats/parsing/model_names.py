"""Names of the models that sampled the responses of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from rollout_io.formats.base import About

MODELS = "models"

_KEY = b'"model"'
_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')
_TEXT = msgspec.json.Decoder(str)


class ModelNames:
    """Collector of the first `model` value of each record.

    Example:
        >>> names = ModelNames()
        >>> names.see(b'{"request": {"model": "smollm2"}}')
        >>> [found.value for found in names.about()]
        [['smollm2']]
    """

    def __init__(self) -> None:
        self._found: set[bytes] = set()
        self._last = b"\n"

    def see(self, record: bytes) -> None:
        """Search a record for a model name, without parsing it, for speed."""
        at = record.find(_KEY)
        if record.startswith(self._last, at):  # the same as in the previous record
            return
        while at >= 0:
            value = _VALUE.match(record, at + len(_KEY))
            if value is not None:
                self._found.add(value[1])
                self._last = record[at : value.end()]
                return
            at = record.find(_KEY, at + len(_KEY))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        found = set()
        for text in self._found:
            try:
                found.add(_TEXT.decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the record itself is rejected elsewhere
        return sorted(name for name in found if name)

    def about(self) -> Iterator[About]:
        """Yield the names as a fact about the log, for `Adapter.find`."""
        names = self.names()
        if names:
            yield About(MODELS, names)
