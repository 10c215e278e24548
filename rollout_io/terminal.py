"""Terminal output: progress bars, rate-limited progress lines and aligned columns."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

SECONDS_A_LINE = 30.0
"""Time between progress lines when stderr is not a terminal and no bar is shown."""
_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")
_is_quiet: ContextVar[bool] = ContextVar("_is_quiet", default=False)


def silence() -> None:
    """Hide notes and progress bars in the current context."""
    _is_quiet.set(True)


def is_quiet() -> bool:
    """True if `silence` was called in the current context."""
    return _is_quiet.get()


def printable(text: str) -> str:
    r"""Escape control characters and bidirectional marks, so that data cannot control a terminal.

    Newlines and tabs are kept.

    Example:
        >>> printable("a\x1b[2J\u202eb")
        'a\\x1b[2J\\u202eb'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def printable_styles(text: str) -> str:
    """Escape like `printable`, but keep colours and bold: the sequences ESC [ ... m.

    Only for text whose data was escaped before it was styled.
    """
    parts = _STYLE.split(text)  # odd parts are styles
    return "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))


def console(**options: Any) -> Console:
    """Create a rich console that escapes all text like `printable`.

    Args:
        options: Arguments of `rich.console.Console`.
    """
    # Imported only when needed: importing rich takes 0.1 s.
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *arguments: Any, **settings: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*arguments, **settings):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole(**options)


class Bar:
    """A progress bar on stderr, shown only on a terminal and not after `silence`.

    Text printed to `sys.stderr` while the bar is shown appears above it.

    Args:
        total: Value at which the bar is full.
        unit: Unit of `total`; "B" is shown as kB, MB and so on.
        label: Description of the work.
        done: Initial value.
        shows: False hides the bar even on a terminal.
        stays: True leaves the bar on the screen after `close`.

    Attributes:
        is_shown: True if the bar is shown.
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
            TextColumn("{task.fields[unit]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console(stderr=True),
            transient=not stays,
        )
        shown = "" if unit == "B" else unit
        self._task = self._progress.add_task(
            label, total=total, completed=done, unit=shown, text=""
        )
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
        """Advance the bar.

        Args:
            increment: Amount added to the bar's value.
            text: Text shown after the bar from now on; None keeps the current text.
        """
        if self.is_shown:
            _move(self._progress, self._task, increment, text)

    def part(self, total: int, unit: str, label: str) -> Part:
        """Add a row below the bar, for a part of its work; it disappears once it is closed.

        Example:
            >>> with Bar(3, "updates") as bar, bar.part(8192, "tokens", "training") as part:
            ...     part.update(4096)
        """
        if not self.is_shown:
            return Part()
        row = self._progress.add_task(label, total=total, unit=unit, text="")
        return Part(self._progress, row)

    def close(self) -> None:
        """Stop drawing the bar."""
        if self.is_shown:
            self._progress.stop()


class Part:
    """A row below a `Bar`; without arguments, it is not shown."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, increment: int = 1, text: str | None = None) -> None:
        """Advance the row like `Bar.update`."""
        if self._progress and self._task is not None:
            _move(self._progress, self._task, increment, text)

    def close(self) -> None:
        """Remove the row."""
        if self._progress and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def _move(progress: Progress, task: TaskID, increment: int, text: str | None) -> None:
    fields = {} if text is None else {"text": text}
    progress.update(task, advance=increment, **fields)  # type: ignore[arg-type]


class Pace:
    """Limits progress lines to one per `seconds`; the first one is due after `seconds`.

    Args:
        seconds: Time between two lines.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, seconds: float = SECONDS_A_LINE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._clock = seconds, clock
        self._said = clock()

    def is_due(self) -> bool:
        """True if a line is due now; if so, the next one is due `seconds` later."""
        now = self._clock()
        if now - self._said < self._seconds:
            return False
        self._said = now
        return True


def duration(seconds: float) -> str:
    """Format a duration in words.

    Example:
        >>> duration(0.84), duration(75), duration(3600 * 5 + 60 * 7)
        ('0.8 s', '1 min 15 s', '5 h 7 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, all others to the right.

    Example:
        >>> columns([["layout", "tokens"], ["step", "8"]])
        ['layout  tokens', 'step         8']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))])
        for row in table
    ]


def readable(value: Any) -> str:
    """Format a number for a table; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return printable(value) if isinstance(value, str) else "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else four_digits(value)


def four_digits(value: float, sign: str = "") -> str:
    """Format a number with four digits, or with all before the point; `sign` "+" shows a plus.

    Example:
        >>> four_digits(0.12345), four_digits(14141.5), four_digits(2.5, "+")
        ('0.1235', '14,142', '+2.5')
    """
    return f"{value:{sign},.0f}" if 1000 <= abs(value) < 1e15 else f"{value:{sign},.4g}"


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
