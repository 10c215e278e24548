"""Output of verbs: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from rollout_io.terminal import Bar


def example(command: str) -> str:
    """Return the epilog of a verb's help, which shows an example command."""
    return f"\b\nExample:\n  {command}"


def emit(text: str) -> None:
    """Print data to stdout."""
    click.echo(text)


def emit_json(value: Any) -> None:
    """Print one JSON document to stdout (NaN and infinity become null)."""
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def note(text: str) -> None:
    """Print a message to stderr."""
    click.echo(text, err=True)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        note(f"{mark}{record.getMessage()}")


@contextmanager
def shown_log() -> Iterator[None]:
    """Print the log messages of the packages to stderr, at level INFO and above."""
    loggers = [logging.getLogger(name) for name in ("pipelines", "trainer")]
    if any(isinstance(known, _ToStderr) for known in loggers[0].handlers):
        yield
        return
    handler, levels = _ToStderr(), [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)


def next_command(command: str) -> None:
    """Suggest the next command on stderr."""
    note(f"next: {command}")


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """Print how to resume if an interrupt or SIGTERM ends the verb."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        note(f"stopped: {how}")
        raise


def wants_color(stream: IO[str]) -> bool:
    """True for a terminal, unless `NO_COLOR` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


@contextmanager
def progress_bar(
    total: int, unit: str, label: str, counts: str | None = None
) -> Iterator[Callable[..., object]]:
    """Show a progress bar on stderr, if that is a terminal.

    Args:
        total: Value at which the bar is full.
        unit: Unit of `total` ("B" scales to kB, MB).
        label: Description of the work.
        counts: Unit of a second counter, shown next to the bar.

    Yields:
        A function that takes the increment of the bar, and optionally of the second counter.
    """
    with Bar(total, unit.strip(), label) as bar:
        counted = 0

        def update(increment: int, also: int = 0) -> None:
            nonlocal counted
            counted += also
            rate = counted / max(bar.elapsed_s, 1e-3)
            text = f"{counted} {counts}, {rate:,.0f} {counts}/s" if counted else None
            bar.update(increment, text)

        yield update


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
