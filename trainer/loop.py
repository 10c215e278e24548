"""A training run: updates, their metrics, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.batches import Made, mini_batch_updates
from trainer.begin import Run, begin
from trainer.checkpoint import checkpoint_path, discard_after, save_checkpoint
from trainer.config import TrainConfig, save_config
from trainer.critic import CriticLearner
from trainer.log import RunLog
from trainer.optimizer import set_learning_rates
from trainer.plan import num_planned_updates
from trainer.processes import on_main
from trainer.resume import alone_in, cut, stops_when_full
from trainer.sharding import whole_weights
from trainer.state import Progress, optimizer_tensors, save_state
from trainer.update import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run came to.

    Attributes:
        out: Directory of the run.
        checkpoint: Model directory of the final policy.
        num_updates: Optimizer steps made.
        num_skipped_updates: Mini-batches without a step: nothing trained, or the gradient was not
            finite.
        num_groups: Groups in the plan.
        num_trained_groups: Those that gave an optimizer step a gradient that is not zero.
        num_groups_without_variance: Groups of two or more whose returns are all equal, in the plan
            unless `drop_zero_variance_groups` left them out of it.
        num_failed: Failed trajectories in the plan.
        metrics: The last update's metrics.
    """

    out: str
    checkpoint: str
    num_updates: int
    num_skipped_updates: int
    num_groups: int
    num_trained_groups: int
    num_groups_without_variance: int
    num_failed: int
    metrics: dict[str, Any]


def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a policy on a rollout dataset.

    Every check comes before the first update and before anything is written.

    Args:
        config: The run's configuration.
        resume: Go on from the latest checkpoint in `OUT/`, or from the start where there is none
            yet. On a CPU, with as many threads, the metrics but for the times are bit for bit those
            of a run that nobody stopped.

    Returns:
        The result; `OUT/` then holds `config.json`, `metrics.jsonl` (one line per mini-batch) and
        `checkpoints/global_step_N/`.

    Raises:
        RolloutError: Dataset, model or configuration cannot be trained as asked; the run to resume
            had another dataset or configuration, or goes on; the disk is full.
    """
    run = begin(config, resume=resume)
    plan = run.plan
    with ExitStack() as held, stops_when_full(Path(config.out)):
        _write(run.learner, lambda: _open(config, run, held))
        progress, metrics = _make_updates(run)
        saved = save(run.learner, run.critic, progress, run.digest)
    return TrainResult(
        out=config.out,
        checkpoint=str(saved),
        num_updates=progress.global_step,
        num_skipped_updates=progress.num_skipped,
        num_groups=sum(map(len, plan.batches)),
        num_trained_groups=len(progress.trained),
        num_groups_without_variance=plan.num_groups_without_variance,
        num_failed=int(plan.trajectories["failed"].sum()),
        metrics=metrics or json.loads((run.kept_metrics.splitlines() or [b"{}"])[-1]),
    )


def _open(config: TrainConfig, run: Run, held: ExitStack) -> None:
    """Have the run's directory for oneself, and leave in it what the run goes on from."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(alone_in(out))
    cut(out / "metrics.jsonl", len(run.kept_metrics))
    discard_after(out, run.progress.global_step)
    save_config(config, out / "config.json")


def _write(learner: Learner, work: Callable[[], object] | None) -> None:
    """Have the main process write; if it has no room, all stop. Others may have no `work`."""

    def write() -> None:
        with stops_when_full(Path(learner.config.out)):
            if work:
                work()

    on_main(learner.accelerator, write)


def _make_updates(run: Run) -> tuple[Progress, dict[str, Any]]:
    """Make the updates that are left; the progress then, and the last one's metrics."""
    learner, config, progress = run.learner, run.learner.config, run.progress
    metrics: dict[str, Any] = {}
    every, num_planned = config.save_every_updates, num_planned_updates(run.plan, config)
    with _open_log(run, num_planned) as log:
        if progress.global_step == config.max_updates:
            return progress, metrics
        set_rates(run, progress.global_step, num_planned)
        for made in mini_batch_updates(run, progress.position):
            progress, metrics = counted(run, progress, made, num_planned)
            step = progress.global_step
            _write(learner, partial(log.write, metrics, made.cause) if log else None)
            if every and not metrics["skipped"] and step % every == 0:
                save(learner, run.critic, progress, run.digest, log)
            if step == config.max_updates:
                break
        if log:
            log.sync()
    return progress, metrics


def counted(
    run: Run, progress: Progress, made: Made, num_planned: int
) -> tuple[Progress, dict[str, Any]]:
    """Count a mini-batch and set the learning rates of the next; the progress, and its metrics."""
    progress = progress.after(made.position, made.moving, stepped=not made.metrics["skipped"])
    set_rates(run, progress.global_step, num_planned)
    counts = {"global_step": progress.global_step, "num_trained_groups": len(made.moving)}
    return progress, counts | made.metrics


def _open_log(run: Run, num_planned: int) -> AbstractContextManager[RunLog | None]:
    """The log of the main process; others have none."""
    if not run.learner.accelerator.is_main_process:
        return nullcontext()
    out, num_made = Path(run.learner.config.out), run.progress.global_step
    return RunLog(run.learner, out, num_planned=num_planned, num_made=num_made)


def set_rates(run: Run, global_step: int, num_planned: int) -> None:
    """Give the optimizers the learning rates of the update after `global_step` others."""
    set_learning_rates(
        run.learner.config,
        run.learner.optimizer,
        run.critic.optimizer if run.critic else None,
        num_planned=num_planned,
        global_step=global_step,
    )


def save(
    learner: Learner,
    critic: CriticLearner | None,
    progress: Progress,
    digest: str,
    log: RunLog | None = None,
) -> Path:
    """Save a checkpoint, which counts on the lines of `log` before it."""
    unwrap, config = learner.accelerator.unwrap_model, learner.config
    keep, out = learner.accelerator.is_main_process, Path(config.out)
    policy, critic_model = unwrap(learner.policy), unwrap(critic.critic) if critic else None
    weights = whole_weights(policy.model, keep=keep)
    critic_weights = whole_weights(critic_model, keep=keep) if critic_model else None
    optimizers = optimizer_tensors(learner, critic)

    def write() -> None:
        if log:
            log.sync()
        save_checkpoint(
            policy.model,
            Path(config.model),
            out,
            progress.global_step,
            critic_model,
            save_state=lambda path: save_state(path, optimizers, digest, progress),
            keep=config.keep_checkpoints,
            weights=weights,
            critic_weights=critic_weights,
        )

    _write(learner, write)
    return checkpoint_path(out, progress.global_step)
