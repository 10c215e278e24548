"""Stop a run between two updates, on SIGINT (Ctrl-C) or SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import Accelerator

from rollout_io.cli.output import REPEATED_S, answers_second_signal
from trainer.distributed.processes import gather_bytes


class Stop:
    """Remembers a request to stop, so that the loop can save a checkpoint first.

    Signals within `REPEATED_S` of the first one repeat it; a later one raises KeyboardInterrupt,
    unless the command line already ends the process at it. Ignored signals stay ignored, as in
    background jobs of a shell.

    Args:
        on_request: Called at the first signal.
    """

    def __init__(self, on_request: Callable[[], object] = lambda: None) -> None:
        self._on_request = on_request
        self._number = 0
        self._first_s = 0.0
        self._agreed = 0

    @contextmanager
    def requested_by_signals(self) -> Iterator[None]:
        """Handle the signals inside the `with` block; outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [
            n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN
        ]
        before = [signal.signal(number, self._request) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _request(self, number: int, _: object) -> None:
        if not self._number:
            self._number, self._first_s = number, time.monotonic()
            self._on_request()
        # The command line knows when a signal arrived; this handler may run seconds later.
        elif not answers_second_signal() and time.monotonic() - self._first_s >= REPEATED_S:
            raise KeyboardInterrupt

    def is_requested(self, accelerator: Accelerator) -> bool:
        """True if any process got a signal; all processes must call this together."""
        # A signal may arrive during the exchange: it counts the next time.
        self._agreed = max(b"".join(gather_bytes(accelerator, bytes([self._number]))))
        return self._agreed != 0

    def end(self) -> None:
        """End the run as the signal that the processes agreed on would have, if there was one.

        Raises:
            KeyboardInterrupt: The signal was SIGINT.
            SystemExit: The signal was SIGTERM.
        """
        if self._agreed == signal.SIGINT:
            raise KeyboardInterrupt
        if self._agreed:
            raise SystemExit(128 + self._agreed)
