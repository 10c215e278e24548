"""Terminal output: progress bars and aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_is_quiet: ContextVar[bool] = ContextVar("_is_quiet", default=False)


def silence() -> None:
    """Hide notes and progress bars in the current context."""
    _is_quiet.set(True)


def is_quiet() -> bool:
    """True after `silence`."""
    return _is_quiet.get()


class Bar:
    """A progress bar on stderr, shown only on a terminal and not after `silence`.

    Text printed to `sys.stderr` while the bar is shown appears above it.

    Args:
        total: Value at which the bar is full.
        unit: Unit of `total`; "B" is shown as kB, MB and so on.
        label: Description of the work.
        done: Value to start from.
        shows: False hides the bar even on a terminal.
        stays: True leaves the bar on the screen after `close`.

    Attributes:
        is_shown: True if there is a bar.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        label: str = "",
        *,
        done: int = 0,
        shows: bool = True,
        stays: bool = False,
    ) -> None:
        self.is_shown = shows and not is_quiet() and sys.stderr.isatty()
        if not self.is_shown:
            return
        # Imported only for a terminal: importing rich takes 0.1 s.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        count: ProgressColumn = DownloadColumn() if unit == "B" else MofNCompleteColumn()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            count,
            TextColumn("" if unit == "B" else unit, markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
            transient=not stays,
        )
        self._task = self._progress.add_task(label, total=total, completed=done, text="")
        self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the bar was created; 0 if it is not shown."""
        return (self._progress.tasks[0].elapsed or 0.0) if self.is_shown else 0.0

    def update(self, increment: int = 1, text: str | None = None) -> None:
        """Move the bar.

        Args:
            increment: Amount added to the bar's value.
            text: Text shown after the bar from now on; None keeps the current text.
        """
        if not self.is_shown:
            return
        if text is None:
            self._progress.advance(self._task, increment)
        else:
            self._progress.update(self._task, advance=increment, text=text)

    def close(self) -> None:
        """Stop drawing."""
        if self.is_shown:
            self._progress.stop()


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first one left, all others right.

    Example:
        >>> columns([["layout", "tokens"], ["step", "8"]])
        ['layout  tokens', 'step         8']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))])
        for row in table
    ]
