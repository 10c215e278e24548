"""Acknowledge Ctrl-C and SIGTERM at once, even if a long computation delays the stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from rollout_io.terminal import printable

GRACE_S = 0.3
"""Time before the message is printed; a verb that stops sooner prints only its own message."""
SHOW_CURSOR = b"\x1b[?25h\n"


@contextmanager
def announced_stop(waits_for: str) -> Iterator[None]:
    """Announce that an interrupt or SIGTERM stops the verb; a second one ends the process at once.

    Python runs signal handlers only between bytecodes of the main thread, and a computation in C
    can take minutes. But Python immediately writes the signal's number to a pipe, which a thread here
    reads. Ending at once is as safe as SIGKILL. Outside the main thread, this does nothing.

    Args:
        waits_for: Work that is completed first, such as "the current micro-batch".
    """
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
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writing)
        thread.join()
        os.close(reading)


def _answer(reading: int, waits_for: str, over: threading.Event) -> None:
    """Read signal numbers until the pipe is closed, and respond to each."""
    is_stopping = False
    while received := os.read(reading, 1):
        number = received[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        if is_stopping:
            _end(number)
        is_stopping = True
        if not over.wait(GRACE_S):
            text = f"stopping after {waits_for}; press Ctrl-C again to end at once"
            click.echo(printable(text), err=True)


def _end(number: int) -> None:
    """End the process without cleaning up; only restore the cursor that a progress bar hides."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)
    os._exit(128 + number)
