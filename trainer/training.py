"""A training run: updates, metrics, checkpoints, and a stop between two updates on a signal."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rollout_io.cli.output import REPEATED_S, answers_second_signal
from trainer.config.train_config import TrainConfig, save_config
from trainer.distributed.accelerator import whole_weights
from trainer.distributed.liveness import watched
from trainer.distributed.processes import agreed, gather_bytes, handling, lost_processes
from trainer.run.checkpoint import checkpoint_path, discard_after, save_checkpoint
from trainer.run.directory import alone_in, publish, published, stays_in_place, stops_when_full
from trainer.run.messages import UNWATCHED
from trainer.run.open_run import open_run
from trainer.run.resume import (
    SETTINGS,
    fixed_settings,
    optimizer_tensors,
    save_state,
    with_whole_outputs,
)
from trainer.run.run import Progress, Run
from trainer.run.run_log import RunLog, record_start, samples_of
from trainer.run.token_records import discard_token_records, say_size
from trainer.update import set_rates, updates


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of a run.

    Attributes:
        out: Directory of the run.
        checkpoint: Model directory of the final policy.
        num_updates: Optimizer steps taken.
        num_skipped_updates: Mini-batches without a step, because they had no trained tokens or the
            gradient was not finite.
        num_groups: Groups in the plan.
        num_trained_groups: Groups that contributed a nonzero gradient to a step.
        num_groups_without_variance: Groups of two or more trajectories whose returns are all equal;
            in the plan unless `drop_zero_variance_groups` removed them.
        num_failed: Failed trajectories in the plan.
        num_greedy_rows: Rows masked because they were sampled at temperature 0.
        metrics: Metrics of the last update.
    """

    out: str
    checkpoint: str
    num_updates: int
    num_skipped_updates: int
    num_groups: int
    num_trained_groups: int
    num_groups_without_variance: int
    num_failed: int
    num_greedy_rows: int
    metrics: dict[str, Any]


@stays_in_place
@watched()
@lost_processes()
def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a policy on a rollout dataset.

    All checks precede the first update and any output. SIGINT and SIGTERM stop the run after its
    current update, with a checkpoint.

    Args:
        config: Configuration of the run.
        resume: Resume from the latest checkpoint in `OUT/`, or start if there is none. On a CPU
            with the same number of threads, all metrics except times equal the metrics of an
            uninterrupted run bit for bit.

    Returns:
        The result; `OUT/` then contains `config.json`, `metrics.jsonl` (one line per mini-batch),
        `checkpoints/global_step_N/`, and `tokens/` (see `record_tokens`).

    Raises:
        RolloutError: The dataset, the model or the configuration cannot be used for training; the
            run to resume had a different dataset or configuration, or is still running; or the disk
            is full.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM stopped the run.
    """
    run = open_run(config, resume=resume)
    plan, config = run.plan, run.config
    write = partial(write_in_main, run.accelerator, run.out)
    progress, metrics = run.progress, dict[str, Any]()
    save_every, stop = config.run.save_every_updates, Stop()
    with ExitStack() as held, stops_when_full(Path(config.run.out)):
        write(lambda: _lock_and_roll_back(run, held))
        with stop.requested_by_signals(), _open_log(run) as log:
            set_rates(run, progress.global_step)
            is_over = progress.global_step == config.batch.max_updates
            passes, tell = (log.passes, log.warn_once) if log else (UNWATCHED, lambda *_: None)
            for update in () if is_over else updates(run, progress, passes=passes, tell=tell):
                progress, metrics = update.progress, update.metrics
                samples = samples_of(run, update.batch.groups, update.number) if log else []
                write(partial(log.write, metrics, update.tokens, samples) if log else None)
                if save_every and not metrics["skipped"] and progress.global_step % save_every == 0:
                    save(run, progress, log)
                is_over = progress.global_step == config.batch.max_updates
                if stop.is_requested(run.accelerator) or is_over:
                    break
            if log:
                log.sync()
                say_size(run.out)
            saved = save(run, progress)
    stop.raise_if_stopped()
    return TrainResult(
        out=config.run.out,
        checkpoint=str(saved),
        num_updates=progress.global_step,
        num_skipped_updates=progress.num_skipped,
        num_groups=sum(map(len, plan.batches)),
        num_trained_groups=len(progress.trained_groups),
        num_groups_without_variance=plan.num_groups_without_variance,
        num_failed=int(plan.trajectories["failed"].sum()),
        num_greedy_rows=run.num_greedy_rows,
        metrics=metrics or json.loads((run.kept_metrics.splitlines() or [b"{}"])[-1]),
    )


def _lock_and_roll_back(run: Run, held: ExitStack) -> None:
    """Lock the run's directory, and delete output of updates after the checkpoint to resume from.

    Also write the configuration and record the start.
    """
    out = run.out
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(alone_in(out))
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        os.truncate(metrics, len(run.kept_metrics))
    discard_after(out, run.progress.global_step)
    discard_token_records(out, run.progress.global_step)
    section = dataclasses.replace(run.config.run, out=published(out) or run.config.run.out)
    save_config(dataclasses.replace(run.config, run=section), out / "config.json")
    record_start(out, run.accelerator, run.config, run.progress.global_step)


def write_in_main(accelerator: Accelerator, out: Path, work: Callable[[], object] | None) -> None:
    """Run `work` in the main process while the others wait; an error, such as a full disk, stops all."""

    def write() -> None:
        with stops_when_full(out):
            if work and accelerator.is_main_process:
                work()

    agreed(accelerator, write)


def _open_log(run: Run) -> AbstractContextManager[RunLog | None]:
    """Open the log in the main process; other processes get None."""
    accelerator = run.accelerator
    if not accelerator.is_main_process:
        return nullcontext()
    num_made, num_planned = run.progress.global_step, run.num_planned
    return RunLog(accelerator, run.config, num_planned=num_planned, num_made=num_made)


def save(run: Run, progress: Progress, log: RunLog | None = None) -> Path:
    """Save a checkpoint, after syncing the lines of `log` that it relies on."""
    holds_whole = run.accelerator.is_main_process  # the others only help to gather
    model = run.whole_policy.model
    critic = run.accelerator.unwrap_model(run.critic) if run.critic is not None else None
    weights = whole_weights(model, keep=holds_whole)
    critic_weights = whole_weights(critic, keep=holds_whole) if critic else None
    optimizers = optimizer_tensors(run.optimizers, keep=holds_whole)
    progress = with_whole_outputs(run.accelerator, progress)

    def write_state(path: Path) -> None:
        save_state(path, optimizers, run.digest, progress)
        settings = json.dumps(fixed_settings(run.config), indent=2)
        (path / SETTINGS).write_text(settings + "\n", encoding="utf-8")

    def write() -> None:
        if log:
            log.sync()
        save_checkpoint(
            model,
            run.source,
            run.out,
            progress.global_step,
            critic,
            save_state=write_state,
            keep=run.config.run.keep_checkpoints,
            weights=weights,
            critic_weights=critic_weights,
        )
        publish(run.out, run.config.run.keep_checkpoints)

    write_in_main(run.accelerator, run.out, write)
    return checkpoint_path(run.out, progress.global_step)


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
        numbers = [
            n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN
        ]
        with handling(self._request, numbers):
            yield

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

    def raise_if_stopped(self) -> None:
        """End the run as the signal that the processes agreed on would have, if there was one.

        Raises:
            KeyboardInterrupt: The signal was SIGINT.
            SystemExit: The signal was SIGTERM.
        """
        if self._agreed == signal.SIGINT:
            raise KeyboardInterrupt
        if self._agreed:
            raise SystemExit(128 + self._agreed)
