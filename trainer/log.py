"""What a run says while it goes on: to files, to trackers, to people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from trainer.advice import warnings_about
from trainer.metrics import LOOP_METRICS, METRICS
from trainer.processes import is_main
from trainer.update import Learner


def say(text: str) -> None:
    """A line for people, to stderr; above the progress bar if there is one. Said by one process."""
    if is_main():
        tqdm.write(text, file=sys.stderr)


class RunLog:
    """Metrics of each mini-batch: `metrics.jsonl`, trackers, and stderr.

    Of several processes, the main one has it. On a terminal stderr shows a progress bar, elsewhere
    a line per mini-batch.

    Args:
        learner: Whose accelerator has the trackers.
        out: Directory of the run.
        num_planned: Most updates the run can make.
        num_made: Updates it has made before.
        shows: Whether people see every mini-batch.
    """

    def __init__(
        self,
        learner: Learner,
        out: Path,
        *,
        num_planned: int,
        num_made: int = 0,
        shows: bool = True,
    ) -> None:
        self.accelerator, self.config = learner.accelerator, learner.config
        settings = {k: str(v) for k, v in dataclasses.asdict(self.config).items()}
        self.accelerator.init_trackers("rollouts", config=settings)
        self.file = (out / "metrics.jsonl").open("a", encoding="utf-8")
        self.num_planned = num_planned
        self.shows = shows
        self.bar = tqdm(
            total=num_planned,
            initial=num_made,
            unit="update",
            disable=not (shows and sys.stderr.isatty()),
        )
        self.warned: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.file.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def write(self, metrics: dict[str, Any], cause: str | None = None) -> None:
        """The metrics of a mini-batch."""
        assert metrics.keys() <= METRICS.keys() | LOOP_METRICS.keys()
        self.write_line(metrics)
        if self.shows:
            self._show(metrics)
        for name, text in warnings_about(metrics, self.config, cause).items():
            if name not in self.warned:
                self.warned.add(name)
                say(f"warning: update {metrics['global_step']}: {text}")

    def write_line(self, metrics: dict[str, Any]) -> None:
        """JSON has no NaN: a number that is not finite is null there."""
        finite = {k: None if _is_not_finite(v) else v for k, v in metrics.items()}
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()
        known = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        self.accelerator.log(known, step=metrics["global_step"])

    def sync(self) -> None:
        """Have the lines reach the disk: a checkpoint counts on those before it."""
        os.fsync(self.file.fileno())

    def _show(self, metrics: dict[str, Any]) -> None:
        if self.bar.disable:
            say(progress_line(metrics, self.num_planned))
        else:
            self.bar.set_postfix_str(numbers_of(metrics), refresh=False)
            self.bar.update(1 - metrics["skipped"])


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def progress_line(metrics: dict[str, Any], num_planned: int) -> str:
    """One mini-batch in a line.

    Example:
        >>> metrics = {"global_step": 2, "loss": -0.0123, "tokens_per_s": 850.4, "seconds": 3.21}
        >>> progress_line(metrics | {"return_mean": 0.5, "skipped": 0}, 6)
        'update 2 of 6: loss -0.0123, reward 0.5, 850 tokens/s, 3.2 s'
    """
    if metrics["skipped"]:
        why = "the gradient is not finite" if metrics["num_trained_tokens"] else "no token trains"
        return f"mini-batch skipped: {why}"
    numbers = numbers_of(metrics)
    return (
        f"update {metrics['global_step']} of {num_planned}: {numbers}, {metrics['seconds']:.1f} s"
    )


def numbers_of(metrics: dict[str, Any]) -> str:
    """What people watch."""
    reward = metrics["return_mean"]
    shown = "" if reward is None else f"reward {reward:.3g}, "
    return f"loss {metrics['loss']:.4g}, {shown}{metrics['tokens_per_s']:.0f} tokens/s"
