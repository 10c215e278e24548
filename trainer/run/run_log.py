"""Log a run to files, trackers and the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from accelerate import Accelerator

from rollout_io.configuration import flat
from rollout_io.terminal import Bar
from trainer.config.sections import SAMPLE_TRACKERS
from trainer.config.train_config import TrainConfig
from trainer.run.messages import say, warn
from trainer.run.pass_progress import Passes, ticking
from trainer.run.samples import Sample, log_samples
from trainer.run.token_records import write_token_records
from trainer.run.warnings import warnings_about

ZERO_LOSS = 1e-6
"""Absolute value below which a loss is treated as 0."""


class RunLog:
    """Logs the metrics of each mini-batch to `metrics.jsonl`, trackers and `logging`.

    Only the main process has a log. A progress bar is shown if stderr is a terminal; otherwise, one
    line per mini-batch is logged. `passes` shows the progress within an update.

    Args:
        accelerator: Provides the trackers.
        config: Provides the directory and the settings that warnings depend on.
        num_planned: Maximum number of updates.
        num_made: Number of updates before this process started.
        num_iterations: Number of iterations of `rollouts rl`, which logs a line per iteration
            instead of one per mini-batch, and moves the bar with `next_iteration`; None for other
            runs.
        iteration: Number of iterations completed before this process started.

    Attributes:
        passes: Counts the tokens of each pass of an update, and shows the progress.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainConfig,
        *,
        num_planned: int,
        num_made: int = 0,
        num_iterations: int | None = None,
        iteration: int = 0,
    ) -> None:
        self.accelerator, self.config = accelerator, config
        settings = {k: str(v) for k, v in flat(dataclasses.asdict(config)).items()}
        accelerator.init_trackers("rollouts", config=settings)
        self.file = (Path(config.run.out) / "metrics.jsonl").open("a", encoding="utf-8")
        self.num_planned = num_planned
        self.is_loop = num_iterations is not None
        if num_iterations is None:
            self.bar = Bar(num_planned, "updates", done=num_made, stays=True)
        else:
            self.bar = Bar(num_iterations, "iterations", done=iteration, stays=True)
        self.passes = Passes(self.bar, num_planned=num_planned, num_made=num_made)
        self.warned: set[str] = set()
        self.held = ExitStack()

    def __enter__(self) -> Self:
        if not self.bar.is_shown:
            self.held.enter_context(ticking(self.passes))
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
        self.bar.close()
        self.file.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def write(
        self,
        metrics: dict[str, Any],
        tokens: pa.Table | None = None,
        samples: Sequence[Sample] = (),
    ) -> None:
        """Log the metrics and samples of a mini-batch, and write its token records, if any."""
        if tokens is not None:
            write_token_records(Path(self.config.run.out), metrics["global_step"], tokens)
        self.write_line(metrics)
        for tracker in self.accelerator.trackers if samples else ():
            if tracker.name in SAMPLE_TRACKERS:
                log_samples(tracker, samples, metrics["global_step"])
        if self.bar.is_shown:
            increment = 0 if self.is_loop else 1 - metrics["skipped"]
            self.bar.update(increment, numbers_of(metrics))
        elif not self.is_loop:
            say(progress_line(metrics, self.num_planned))
        if "zero_loss" not in self.warned and _is_zero_loss(metrics):
            self.warned.add("zero_loss")
            say(
                "note: loss 0 is normal here: at probability ratio 1 the loss is minus the mean"
                " advantage, which is 0, but its gradient is not 0 (grad_norm)"
            )
        for subject, text in warnings_about(metrics, self.config).items():
            self.warn_once(subject, f"update {metrics['global_step']}: {text}")

    def warn_once(self, subject: str, text: str) -> None:
        """Log a warning unless the run has warned about its subject before."""
        if subject not in self.warned:
            self.warned.add(subject)
            warn(text)

    def next_iteration(self) -> None:
        """Advance the progress bar of `rollouts rl` by one iteration."""
        self.bar.update(1)

    def write_line(self, metrics: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        self.file.write(line_of(metrics) + "\n")
        self.file.flush()
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        self.accelerator.log(numbers, step=metrics["global_step"])

    def sync(self) -> None:
        """Sync the file to disk, because a checkpoint relies on the lines written before it."""
        os.fsync(self.file.fileno())


def line_of(metrics: Mapping[str, Any]) -> str:
    """Format metrics as JSON; NaN and infinity become null, because JSON supports neither.

    Example:
        >>> line_of({"global_step": 2, "grad_norm": float("inf")})
        '{"global_step": 2, "grad_norm": null}'
    """
    finite = dict(metrics)
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite)


def _is_zero_loss(metrics: dict[str, Any]) -> bool:
    """True if an update has a gradient although its loss is 0."""
    return bool(abs(metrics["loss"]) < ZERO_LOSS < metrics.get("grad_norm", 0.0))


def progress_line(metrics: dict[str, Any], num_planned: int) -> str:
    """Format a mini-batch as one line.

    Example:
        >>> metrics = {"global_step": 2, "loss": -0.0123, "tokens_per_s": 850.4, "seconds": 3.21}
        >>> progress_line(metrics | {"return_mean": 0.5, "skipped": 0}, 6)
        'update 2 of 6: loss -0.0123, return_mean 0.5, 850 tokens/s, 3.2 s'
    """
    if metrics["skipped"]:
        has_tokens = metrics["num_trained_tokens"]
        why = "the gradient is not finite" if has_tokens else "no tokens to train on"
        return f"mini-batch skipped: {why}"
    number = f"update {metrics['global_step']} of {num_planned}"
    return f"{number}: {numbers_of(metrics)}, {metrics['seconds']:.1f} s"


def numbers_of(metrics: dict[str, Any]) -> str:
    """Format the most important metrics."""
    return_mean = metrics["return_mean"]
    shown = "" if return_mean is None else f"return_mean {return_mean:.3g}, "
    return f"loss {metrics['loss']:.4g}, {shown}{metrics['tokens_per_s']:.0f} tokens/s"
