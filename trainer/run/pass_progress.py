"""Show progress within updates.

An update forwards its tokens several times: the passes without gradient that a batch needs before
its first update, then the training passes. `Passes` counts the tokens of each pass, micro-batch by
micro-batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field

from rollout_io.terminal import Bar, Pace, Part, duration
from trainer.batches.forest import Forest
from trainer.run.messages import say

VALUES = "critic values"
OLD_LOGPROBS = "old log-probabilities"
REFERENCE = "reference log-probabilities"
SELECTION = "token selection"
TRAINING = "training"
CRITIC_TRAINING = "critic training"
COST = {TRAINING: 3.0, CRITIC_TRAINING: 3.0}
"""Time per token relative to a forward pass, assumed until it is measured: a backward pass costs
about two forward passes."""
SLOW_S = 1.0
"""Duration, in seconds, above which the end of a pass in the first update is logged."""

TICK_S = 1.0
"""Time between two checks for a due progress line, in seconds."""


@dataclass(slots=True)
class Speed:
    """Tokens that a kind of pass has forwarded so far, and the time taken."""

    num_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The speed with its unit, for display."""
        return f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s"


@dataclass(slots=True)
class PlannedUpdate:
    """Planned and forwarded tokens of one update.

    Attributes:
        passes: Number of tokens to forward, by pass, in order.
        epoch: "epoch 2 of 4" if the batch has several epochs, otherwise empty.
        done: Tokens forwarded so far, by pass.
    """

    passes: Mapping[str, int]
    epoch: str = ""
    done: dict[str, float] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Number of tokens forwarded so far, in all passes."""
        return round(sum(self.done.values()))

    @property
    def num_tokens(self) -> int:
        """Number of tokens to forward in all passes."""
        return sum(self.passes.values())

    @property
    def left_tokens(self) -> int:
        """Number of tokens not forwarded yet, in all passes."""
        return self.num_tokens - self.num_done

    def left(self) -> dict[str, float]:
        """Return the number of tokens not forwarded yet, by pass."""
        return {name: num - self.done.get(name, 0.0) for name, num in self.passes.items()}


class Passes:
    """Counts the tokens forwarded in each pass of an update, and shows the progress.

    On a terminal, a row below the run's bar shows the current update. Otherwise, a line is logged
    at most every 30 seconds (see `ticking`), and at the end of each slow pass of the first update.
    Counting runs no operation on a device and does not synchronise it. Without a bar, as in all
    processes except the main one, nothing is shown.

    Args:
        bar: The bar of the run.
        num_planned: Maximum number of updates.
        num_made: Number of updates before this process started.
        spans_run: Whether the run consists only of updates, so that its remaining time can be
            estimated.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        bar: Bar | None = None,
        *,
        num_planned: int = 0,
        num_made: int = 0,
        spans_run: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar, self._num_planned, self._num_made = bar, num_planned, num_made
        self._spans_run, self._clock = spans_run, clock
        self._pace = Pace(clock=clock)
        self._speeds: dict[str, Speed] = {}
        self._updates: list[PlannedUpdate] = []
        self._num_of_batch = 0
        self._batch_tokens: dict[str, int] = {}
        self._part = Part()
        self._running: str | None = None
        self._is_first = True
        self._began_s = self._counted_s = clock()
        self._lock = threading.RLock()  # `tick` runs in a thread

    def begin_batch(self, updates: Sequence[PlannedUpdate]) -> None:
        """Start a batch with its remaining updates."""
        with self._lock:
            self._updates = list(updates)
            self._began_s = self._clock()
        self._num_of_batch = len(updates)
        self._batch_tokens = {}
        for update in updates:
            for name, num in update.passes.items():
                self._batch_tokens[name] = self._batch_tokens.get(name, 0) + num

    def __call__(
        self, name: str, own: Sequence[tuple[int, Forest]]
    ) -> Iterator[tuple[int, Forest]]:
        """Yield the micro-batches of a pass, and count each after the caller has forwarded it.

        Args:
            name: Name of the pass; an unplanned pass is not counted.
            own: This process's micro-batches, from `own_forests`. The tokens of other processes
                are assumed to progress at the same rate.
        """
        is_planned = bool(self._updates) and name in self._updates[0].passes
        planned = self._updates[0].passes[name] if is_planned else 0
        share = planned / max(sum(forest.num_tokens for _, forest in own), 1)
        began = at = self._clock()
        if is_planned:
            self._begin_pass(name)
        for number, forest in own:
            yield number, forest
            if is_planned:
                now = self._clock()
                self._count(name, forest.num_tokens * share, now - at)
                at = now
        if is_planned:
            self._end_pass(name, self._clock() - began)

    def end_update(self, *, made: bool) -> None:
        """Finish an update; `made` is false for a mini-batch that was skipped."""
        with self._lock:
            self._running = None
            if self._updates:
                self._updates.pop(0)
            self._num_made += made
            self._began_s = self._clock()
        self._is_first = False
        self._part.close()
        self._part = Part()

    def tick(self) -> None:
        """Log a line if one is due, even during a long micro-batch; any thread may call this."""
        if self._bar is None or self._bar.is_shown:
            return
        with self._lock:
            name = self._running
            if name and self._updates[0].left_tokens and self._pace.is_due():
                say(f"update {self._number}: {self._line(name)}")

    def _begin_pass(self, name: str) -> None:
        with self._lock:
            self._running, self._counted_s = name, self._clock()
        if self._bar is None or not self._bar.is_shown:
            return
        update, label = self._updates[0], self._label(name)
        if update.done:
            self._part.update(0, label=label)
        else:
            self._part = self._bar.part(update.num_tokens, "tokens", label)

    def _count(self, name: str, num_tokens: float, seconds: float) -> None:
        update = self._updates[0]
        with self._lock:
            before, self._counted_s = update.num_done, self._clock()
            update.done[name] = update.done.get(name, 0.0) + num_tokens
            speed = self._speeds.setdefault(name, Speed())
            speed.num_tokens += num_tokens
            speed.seconds += seconds
        if self._bar and self._bar.is_shown:
            left_s = self._seconds(update.left())
            self._part.update(update.num_done - before, speed.text, left_s)
            self._bar.update(0, left_s=self._run_left_s())
        self.tick()

    def _label(self, name: str) -> str:
        epoch = self._updates[0].epoch
        return f"{name}, {epoch}" if epoch and name == TRAINING else name

    def _line(self, name: str) -> str:
        """Format the state of the current update.

        The time since the last finished micro-batch is subtracted from the estimate, which is
        omitted once it has passed.
        """
        now_s = self._clock()
        update, speed = self._updates[0], self._speeds.get(name)
        parts = [self._label(name), f"{update.num_done:,} of {update.num_tokens:,} tokens"]
        if speed:
            parts.append(speed.text)
        parts.append(f"{duration(now_s - self._began_s)} elapsed")
        waited_s = now_s - self._counted_s
        left_s = self._seconds(update.left()) - waited_s
        if self._speeds and left_s > 0:
            run_left_s = self._run_left_s()
            run = "" if run_left_s is None else f" ({duration(run_left_s - waited_s)} of the run)"
            parts.append(f"{duration(left_s)} left{run}")
        return ", ".join(parts)

    @property
    def _number(self) -> str:
        return f"{self._num_made + 1} of {self._num_planned}"

    def _end_pass(self, name: str, seconds: float) -> None:
        """Log the end of a slow pass of the first update, unless it is the update's last pass."""
        update = self._updates[0]
        is_last = name == list(update.passes)[-1]
        shows = self._bar is not None and not self._bar.is_shown
        if shows and self._is_first and not is_last and seconds >= SLOW_S:
            num = update.passes[name]
            rate = num / seconds
            text = f"{name}: {num:,} tokens in {duration(seconds)} ({rate:,.0f} tokens/s)"
            say(f"update {self._number}: {text}")

    def _seconds(self, num_tokens: Mapping[str, float]) -> float:
        """Estimate the duration of passes; unmeasured ones are assumed to have the mean speed."""
        work = sum(s.num_tokens * COST.get(name, 1.0) for name, s in self._speeds.items())
        usual = sum(s.seconds for s in self._speeds.values()) / max(work, 1e-9)
        total = 0.0
        for name, num in num_tokens.items():
            speed = self._speeds.get(name)
            measured = speed.seconds / speed.num_tokens if speed and speed.num_tokens else None
            total += num * (usual * COST.get(name, 1.0) if measured is None else measured)
        return total

    def _run_left_s(self) -> float | None:
        """Estimate the run's remaining time, assuming that later batches are like this one."""
        if not self._spans_run:
            return None
        num_after = max(self._num_planned - self._num_made - len(self._updates), 0)
        later = self._seconds(self._batch_tokens) * num_after / self._num_of_batch
        return sum(self._seconds(update.left()) for update in self._updates) + later


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
