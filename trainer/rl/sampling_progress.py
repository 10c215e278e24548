"""Show how many trajectories have been sampled."""

from __future__ import annotations

import time
from typing import Self

from rollout_io.terminal import Bar, Pace, Part, duration
from trainer.run.messages import say


class SamplingProgress:
    """Shows a row below the run's bar on a terminal; else logs at most one line every 30 seconds.

    Args:
        bar: The bar of the run; None: nothing is shown.
        subject: Name of the set of trajectories, such as "iteration 1 of 10".
        total: Number of trajectories to sample.
    """

    def __init__(self, bar: Bar | None, subject: str, total: int) -> None:
        self._bar, self._subject, self._total = bar, subject, total
        self._part = bar.part(total, "trajectories", "sampling") if bar else Part()
        self._pace, self._done, self._began = Pace(), 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part.close()

    def show(self, done: int) -> None:
        """Update the progress: `done` trajectories have been sampled."""
        self._part.update(done - self._done)
        self._done = done
        if self._bar and not self._bar.is_shown and self._pace.is_due():
            took = duration(time.monotonic() - self._began)
            say(f"{self._subject}: sampled {done} of {self._total} trajectories in {took}")
