"""Python generators as sources of Polars queries.

Polars runs a source in threads of its own, and goes on for a moment after a query is left early
(`head`, an exception, an interrupt). Python must not be torn down meanwhile: the process would
abort. So at exit sources end at their next frame, and exit waits until none is at work.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import polars as pl

Source = Callable[
    [list[str] | None, pl.Expr | None, int | None, int | None], Iterator[pl.DataFrame]
]
LONGEST_WAIT_S, _SETTLES_S = 60.0, 0.02


class _Work:
    """How many sources are at work, and whether they should end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._ends = self._was_used = False

    @contextmanager
    def step(self) -> Iterator[bool]:
        """One step of a source; yields whether there is time for it."""
        with self._changed:
            goes_on = not self._ends
            self._num_running += 1
            self._was_used = True
        try:
            yield goes_on
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Let all sources end, and wait until they have."""
        with self._changed:
            self._ends = True
            self._changed.wait_for(lambda: not self._num_running, LONGEST_WAIT_S)
        if self._was_used:
            time.sleep(_SETTLES_S)


_work = _Work()
atexit.register(_work.end)


def lazy_frame(source: Source, schema: pl.Schema) -> pl.LazyFrame:
    """A LazyFrame of what a generator function yields.

    Args:
        source: Given the wanted columns, a predicate, a number of rows and a batch size, each None
            where there is none, as `polars.io.plugins.register_io_source` says.
        schema: Of all columns.
    """

    def guarded(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        frames = source(with_columns, predicate, n_rows, batch_size)
        while True:
            with _work.step() as goes_on:
                frame = next(frames, None) if goes_on else None
            if frame is None:
                return
            yield frame

    return pl.io.plugins.register_io_source(guarded, schema=schema)
