"""What a verb says, and where: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click


def example(command: str) -> str:
    """The epilog of a verb's help: one command that works."""
    return f"\b\nExample:\n  {command}"


def emit(text: str) -> None:
    """Data, to stdout."""
    click.echo(text)


def emit_json(value: Any) -> None:
    """Data for machines: one JSON document to stdout (NaN and infinity become null)."""
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def note(text: str) -> None:
    """A remark for people, to stderr."""
    click.echo(text, err=True)


def next_command(command: str) -> None:
    """What to do next, to stderr."""
    note(f"next: {command}")


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """Say how to go on after an interrupt or a polite kill, which end the verb all the same."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        note(f"stopped: {how}")
        raise


def wants_color(stream: IO[str]) -> bool:
    """Whether to colour: a terminal, and `NO_COLOR` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


@contextmanager
def progress_bar(
    total: int, unit: str, label: str, counts: str | None = None
) -> Iterator[Callable[..., object]]:
    """A bar on stderr, on a terminal only.

    Args:
        total: When the bar is full.
        unit: What is counted ("B" scales to kB, MB).
        label: What is being done.
        counts: What else is counted, shown beside the bar.

    Yields:
        A function to call with each increment, and with that of `counts`.
    """
    from tqdm import tqdm

    off = not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, unit_scale=True, desc=label, disable=off, leave=False) as bar:
        counted = 0

        def update(increment: int, also: int = 0) -> None:
            nonlocal counted
            if also:
                counted += also
                rate = counted / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(f"{counted} {counts}, {rate:,.0f} {counts}/s", refresh=False)
            bar.update(increment)

        yield update


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
