"""Show the log of a run on stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_io.cli.output import note


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def shown_log() -> Iterator[None]:
    """Print what the package `trainer` logs to stderr, above a progress bar."""
    logger, handler = logging.getLogger("trainer"), _ToStderr()
    if any(isinstance(known, _ToStderr) for known in logger.handlers):
        yield
        return
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
