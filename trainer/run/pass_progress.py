"""Show progress within updates: which pass over their tokens runs, and how far it is.

An update forwards its tokens several times: the passes without gradient that a batch needs before
its first update, then the training passes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import NamedTuple

from rollout_io.terminal import Bar, Pace, duration
from trainer.batches.forest import Forest
from trainer.run.messages import say

VALUES = "critic values"
OLD_LOGPROBS = "old log-probabilities"
REFERENCE = "reference log-probabilities"
SELECTION = "token selection"
TRAINING = "training"
CRITIC_TRAINING = "critic training"
TICK_S = 1.0
"""Time between two checks for a due progress line, in seconds."""


class _Position(NamedTuple):
    """Where a pass is: the micro-batch that runs, and the tokens of those before it."""

    name: str
    micro_batch: int
    num_micro_batches: int
    micro_batch_tokens: int
    done_tokens: int
    num_tokens: int
    began_s: float


class Passes:
    """Counts the micro-batches of each pass of an update, and shows the progress.

    On a terminal, a row below the run's bar shows the pass that runs. Otherwise, a line is logged at
    most every 30 seconds, during a long micro-batch too (see `ticking`). Only this process's
    micro-batches are counted. Counting does not synchronise a device. Without a bar, as in all
    processes except the main one, nothing is shown.

    Args:
        bar: The bar of the run.
        num_planned: Maximum number of updates.
        num_made: Number of updates before this process started.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        bar: Bar | None = None,
        *,
        num_planned: int = 0,
        num_made: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar, self._num_planned, self._num_made = bar, num_planned, num_made
        self._clock, self._pace = clock, Pace(clock=clock)
        # `tick` reads it in another thread: it is replaced, never changed.
        self._position: _Position | None = None

    def __call__(
        self, name: str, own: Sequence[tuple[int, Forest]]
    ) -> Iterator[tuple[int, Forest]]:
        """Yield the micro-batches of a pass, each with its number, and count them.

        `own` are this process's micro-batches, from `own_forests`.
        """
        num_tokens, done_tokens = sum(forest.num_tokens for _, forest in own), 0
        began_s, bar = self._clock(), self._bar or Bar(0, "", shows=False)
        with bar.part(num_tokens, "tokens", name) as row:
            for index, (number, forest) in enumerate(own, start=1):
                sizes = len(own), forest.num_tokens, done_tokens, num_tokens
                self._position = _Position(name, index, *sizes, began_s)
                self.tick()
                yield number, forest
                done_tokens += forest.num_tokens
                row.update(forest.num_tokens)
        self._position = None

    def end_update(self, *, made: bool) -> None:
        """Finish an update; `made` is false for a mini-batch that was skipped."""
        self._num_made += made

    def tick(self) -> None:
        """Log a line if one is due; any thread may call this."""
        at = self._position
        if at is None or self._bar is None or self._bar.is_shown or not self._pace.is_due():
            return
        tokens = f"{at.done_tokens:,} of {at.num_tokens:,} tokens done"
        if at.num_micro_batches == 1:  # nothing is done before the end of the pass
            tokens = f"{at.num_tokens:,} tokens"
        say(
            f"update {self._num_made + 1} of {self._num_planned}: {at.name}, micro-batch"
            f" {at.micro_batch} of {at.num_micro_batches}, {tokens},"
            f" {duration(self._clock() - at.began_s)} elapsed"
        )


@contextmanager
def ticking(passes: Passes) -> Iterator[None]:
    """Call `Passes.tick` regularly from a thread: on a CPU, one micro-batch can take minutes."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_S):
            passes.tick()

    in_context = copy_context().run  # so that -q applies in the thread as well
    thread = threading.Thread(target=in_context, args=(tick,), daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


UNWATCHED = Passes()
"""A `Passes` that shows no progress."""
