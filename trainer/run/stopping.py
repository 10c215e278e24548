"""Stop a run between two updates, on SIGINT (Ctrl-C) or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator

from trainer.distributed.processes import gather_bytes


class Stop:
    """Remembers a request to stop, so that the loop can save a checkpoint first.

    A second request raises KeyboardInterrupt at once. Ignored signals stay ignored, as in
    background jobs of a shell.
    """

    def __init__(self) -> None:
        self._number = 0

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
        if self._number:
            raise KeyboardInterrupt
        self._number = number

    def is_requested(self, accelerator: Accelerator) -> bool:
        """True if any process got a signal; all processes must call this together."""
        self._number = max(b"".join(gather_bytes(accelerator, bytes([self._number]))))
        return self._number != 0

    def end(self) -> None:
        """End the run as the signal would have, if there was one.

        Raises:
            KeyboardInterrupt: The signal was SIGINT.
            SystemExit: The signal was SIGTERM.
        """
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number:
            raise SystemExit(128 + self._number)
