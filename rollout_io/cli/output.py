"""Output of verbs: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from shutil import get_terminal_size
from typing import IO, TYPE_CHECKING, Any

import click

from rollout_io.terminal import Bar, console, is_quiet, printable, printable_styles
from schemas.errors import RolloutError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WIDTH = 100


def example(*commands: str) -> str:
    """Return the epilog of a verb's help: example commands."""
    return "\n  ".join(["\b\nExample:" if len(commands) == 1 else "\b\nExamples:", *commands])


def emit(text: str) -> None:
    """Print text to stdout, with control characters escaped."""
    click.echo(printable(text))


def emit_styled(text: str) -> None:
    """Print text with colours to stdout; its data was escaped before it was coloured."""
    click.echo(printable_styles(text))


def say(text: str) -> None:
    """Print text to stderr, with control characters escaped."""
    click.echo(printable(text), err=True)


def redraw(text: str) -> None:
    """Replace the last line of the terminal on stderr."""
    click.echo(f"\r\x1b[K{printable(text)}", err=True, nl=False)


def emit_json(value: Any) -> None:
    """Print one JSON document to stdout (NaN and infinity become null)."""
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def note(text: str) -> None:
    """Print a message to stderr, unless -q is given."""
    if not is_quiet():
        say(text)


def note_styled(text: str) -> None:
    """Print a message with colours to stderr, unless -q is given."""
    if not is_quiet():
        click.echo(printable_styles(text), err=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    say(f"warning: {text}")


def show_error(error: RolloutError) -> None:
    """Print an error and its hint to stderr."""
    say(f"Error: {error}")
    if error.hint:
        say(f"Hint: {error.hint}")


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        show = warn if record.levelno >= logging.WARNING else note
        show(record.getMessage())


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in ("schemas", "rollout_io", "pipelines", "trainer")]


def show_log(level: int) -> None:
    """Print log messages of our packages at `level` and above to stderr."""
    for logger in _loggers():
        if any(isinstance(handler, _ToStderr) for handler in logger.handlers):
            continue
        logger.addHandler(_ToStderr())
        logger.setLevel(level)


@contextmanager
def kept_log() -> Iterator[None]:
    """Restore the log levels and handlers of our packages on exit."""
    states = [(logger, logger.level, list(logger.handlers)) for logger in _loggers()]
    try:
        yield
    finally:
        for logger, level, handlers in states:
            logger.setLevel(level)
            logger.handlers[:] = handlers


@contextmanager
def shown_log() -> Iterator[None]:
    """Print log messages of our packages at level INFO and above to stderr."""
    with kept_log():
        show_log(logging.INFO)
        yield


def next_command(*words: str) -> None:
    """Suggest the next command on stderr, quoted for the shell."""
    note(f"next: {shlex.join(words)}")


@contextmanager
def going_on(how: Callable[[], str], waits_for: str | None = None) -> Iterator[None]:
    """Print how to resume the verb if an interrupt or SIGTERM stops it.

    Args:
        how: Returns a sentence that explains how to resume.
        waits_for: Work that is completed before the verb stops (see `announced_stop`), or None.
    """
    try:
        with announced_stop(waits_for) if waits_for else nullcontext():
            yield
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped: {how()}")
        raise


def section(title: str, body: RenderableType) -> list[RenderableType]:
    """Return a heading of a screen, and what is below it."""
    from rich.padding import Padding
    from rich.text import Text

    return [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def bare_table(*titles: str, left: Collection[str] = (), folds: Collection[str] = ()) -> Table:
    """Return a table without lines; columns are on the right and in one line, but for those named."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(
            title,
            justify="left" if title in left else "right",
            no_wrap=title not in folds,
            overflow="fold",
        )
    return table


def drawn(parts: Iterable[RenderableType]) -> str:
    """Draw parts as text for stdout, in 100 columns or as many as the terminal has."""
    color = wants_color(sys.stdout)
    screen = console(
        # Never narrower: rich would cut numbers off, while the terminal only wraps lines.
        width=max(_WIDTH, get_terminal_size().columns) if sys.stdout.isatty() else _WIDTH,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with screen.capture() as captured:
        for part in parts:
            screen.print(part)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n"))


def wants_color(stream: IO[str]) -> bool:
    """True for a terminal, unless `NO_COLOR` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


@contextmanager
def progress_bar(
    total: int, unit: str, label: str, counts: str | None = None
) -> Iterator[Callable[..., object]]:
    """Show a progress bar on stderr if it is a terminal.

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


GRACE_S = 0.3
"""Time before the message is printed; a verb that stops sooner prints only its own message."""
REPEATED_S = 1.0
"""Time after a signal in which further ones repeat it: a batch system signals every process, and a
launcher passes on to its processes what it receives itself."""
SHOW_CURSOR = b"\x1b[?25h\n"


_num_announced = 0


def answers_second_signal() -> bool:
    """True inside `announced_stop`, which ends the process at a second signal."""
    return _num_announced > 0


@contextmanager
def announced_stop(waits_for: str | None) -> Iterator[None]:
    """Announce that an interrupt or SIGTERM stops the verb; a second one ends the process at once.

    Signals within `REPEATED_S` of the first one repeat it.

    Python runs signal handlers only between bytecodes of the main thread, and a computation in C
    can take minutes. But Python immediately writes the signal's number to a pipe, which a thread here
    reads. Ending at once is as safe as SIGKILL. Outside the main thread, this does nothing.

    Args:
        waits_for: Work that is completed first, such as "the current micro-batch"; None: announce
            nothing, because another process of the run does.
    """
    global _num_announced
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()
    thread = threading.Thread(
        target=_answer, args=(reading, waits_for, over), daemon=True, name="stopping"
    )
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    _num_announced += 1
    try:
        yield
    finally:
        _num_announced -= 1
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writing)
        thread.join()
        os.close(reading)


def _answer(reading: int, waits_for: str | None, over: threading.Event) -> None:
    """Read signal numbers until the pipe is closed, and respond to each."""
    first_s: float | None = None
    while received := os.read(reading, 1):
        number = received[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        if first_s is not None:
            if time.monotonic() - first_s >= REPEATED_S:
                _end(number)
            continue
        first_s = time.monotonic()
        if waits_for and not over.wait(GRACE_S):
            text = f"stopping after {waits_for}; press Ctrl-C again to end at once"
            click.echo(printable(text), err=True)


def _end(number: int) -> None:
    """End the process without cleaning up; only restore the cursor that a progress bar hides."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)
    os._exit(128 + number)
