"""Python generators as sources of Polars queries.

Polars runs a source in its own threads, and continues for a moment after a query is abandoned
(`head`, an exception, an interrupt). If Python shuts down during that time, the process aborts. At
exit, sources therefore stop at their next frame, and the process waits for them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import polars as pl
import pyarrow as pa

from rollout_io.plugins import plugins

Rows = pl.LazyFrame | pl.DataFrame | pa.Table
"""Rows of a rollout table, where a dataset's path may be given too."""

Pieces = Callable[[list[str], pl.Expr | None], Iterator[pl.DataFrame]]
_LOG = logging.getLogger(__name__)
LONGEST_WAIT_S = 60.0
_SETTLES_S = 0.02  # lets Polars' threads finish with the last frame


class _Work:
    """Count the running sources, and stop them at exit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._ends = self._was_used = False

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Count a source as running during one step; yield False if the source must stop."""
        with self._changed:
            continues = not self._ends
            self._num_running += 1
            self._was_used = True
        try:
            yield continues
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Stop all sources and wait for them."""
        with self._changed:
            self._ends = True
            self._changed.wait_for(lambda: not self._num_running, LONGEST_WAIT_S)
        if self._was_used:
            time.sleep(_SETTLES_S)


_work = _Work()
atexit.register(_work.end)


@cache
def _register_namespaces() -> None:
    """Import the entry points `rollout_io.namespaces`, which add methods to the frames of Polars."""
    for plugin in plugins("rollout_io.namespaces"):
        try:
            plugin.load()
        except Exception as error:
            _LOG.warning("namespace %s is not available: %s", plugin.name, error)


def lazy_frame(pieces: Pieces, schema: pl.Schema) -> pl.LazyFrame:
    """Return a LazyFrame over the frames that a generator function yields.

    Args:
        pieces: Generator function, called with the columns that a query uses and its predicate (or
            None). It may skip frames in which no row satisfies the predicate, and yield additional
            columns.
        schema: Schema of all columns.
    """
    _register_namespaces()

    def source(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        del batch_size
        wanted = schema.names() if with_columns is None else with_columns
        used = [] if predicate is None else predicate.meta.root_names()
        names = list(dict.fromkeys([*wanted, *used]))
        frames = pieces(names, predicate if n_rows is None else None)
        while n_rows != 0:
            with _work.step() as continues:
                frame = next(frames, None) if continues else None
                if frame is None:
                    return
                if n_rows is not None:  # the first rows are taken before the predicate is applied
                    frame, n_rows = frame.head(n_rows), max(0, n_rows - len(frame))
                wanted_rows = (frame if predicate is None else frame.filter(predicate))[wanted]
            yield wanted_rows

    return pl.io.plugins.register_io_source(source, schema=schema)
