"""The training loop: plan, load, old log-probabilities, updates, metrics, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from schemas.ragged import IntArray
from trainer.batch_metrics import batch_metrics
from trainer.begin import Run, begin
from trainer.checkpoint import checkpoint_path, discard_after, save_checkpoint
from trainer.config import TrainConfig, save_config
from trainer.critic import CriticLearner, critic_values, update_critic
from trainer.data import Batch, groups_with_gradient, read_rows, to_batch
from trainer.estimate import estimate
from trainer.forest import Forest, RowLimit, chain_forests, chain_lengths
from trainer.kl_reward import charge_kl, next_coef
from trainer.log import RunLog
from trainer.optimizer import set_learning_rates
from trainer.plan import Plan, num_planned_updates, split
from trainer.prefetch import one_ahead
from trainer.processes import agreed, exchange_rows, on_main, own_groups
from trainer.resume import cut, stops_when_full
from trainer.sharding import whole_weights
from trainer.state import Position, Progress, optimizer_tensors, save_state
from trainer.update import Learner, policy_logprobs, update

KNOWN = ("old_logprobs", "ref_logprobs", "values")


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
            had another dataset or configuration; the disk is full.
    """
    run = begin(config, resume=resume)
    learner, critic, plan = run.learner, run.critic, run.plan
    with stops_when_full(Path(config.out)):
        _write(learner, lambda: _open(config, run))
        progress, metrics = _run(learner, critic, run.rollouts, plan, run.limit, run.progress)
        saved = _save(learner, critic, plan, progress)
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


def _open(config: TrainConfig, run: Run) -> None:
    """Leave in the run's directory what the run goes on from."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
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


def _run(
    learner: Learner,
    critic: CriticLearner | None,
    rollouts: pl.LazyFrame,
    plan: Plan,
    limit: RowLimit,
    progress: Progress,
) -> tuple[Progress, dict[str, Any]]:
    """Make the updates that are left; the progress then, and the last one's metrics."""
    config = learner.config
    metrics: dict[str, Any] = {}
    every, num_planned = config.save_every_updates, num_planned_updates(plan, config)
    num_made = progress.global_step
    out, is_main = Path(config.out), learner.accelerator.is_main_process
    planned = {"num_planned": num_planned, "num_made": num_made}
    with RunLog(learner, out, **planned) if is_main else nullcontext() as log:
        if num_made == config.max_updates:
            return progress, metrics
        set_rates = partial(
            set_learning_rates,
            config,
            learner.optimizer,
            critic.optimizer if critic else None,
            num_planned=num_planned,
        )
        set_rates(global_step=num_made)
        updates = _updates(learner, critic, rollouts, plan, limit, progress.position)
        for moving, position, metrics in updates:
            stepped = not metrics["skipped"]
            progress = progress.after(position, moving, stepped=stepped)
            step = progress.global_step
            set_rates(global_step=step)
            metrics = {"global_step": step, "num_trained_groups": len(moving)} | metrics
            _write(learner, partial(log.write, metrics) if log else None)
            if every and stepped and step % every == 0:
                _save(learner, critic, plan, progress, log)
            if step == config.max_updates:
                break
        if log:
            log.sync()
    return progress, metrics


def _save(
    learner: Learner,
    critic: CriticLearner | None,
    plan: Plan,
    progress: Progress,
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
            save_state=lambda path: save_state(path, optimizers, plan, progress),
            keep=config.keep_checkpoints,
            weights=weights,
            critic_weights=critic_weights,
        )

    _write(learner, write)
    return checkpoint_path(out, progress.global_step)


def _updates(
    learner: Learner,
    critic: CriticLearner | None,
    rollouts: pl.LazyFrame,
    plan: Plan,
    limit: RowLimit,
    position: Position,
) -> Iterator[tuple[frozenset[str], Position, dict[str, Any]]]:
    """Train mini-batch after mini-batch from a position on.

    Of each: the groups that move the policy, the position after it, and metrics.
    """
    config = learner.config
    batches = (plan.batches * config.num_epochs)[position.batch :]
    start = time.perf_counter()
    tables = one_ahead(partial(_read_share, learner, rollouts, plan), batches)
    for groups in batches:
        batch, mini_batches = _load(learner, limit, tables)
        known = position.known or _known(learner, critic, batch, mini_batches)
        old_logprobs, ref_logprobs, values = map(known.get, KNOWN)
        kl_metrics: dict[str, float] = {}
        kl_coef = position.kl_coef
        if config.kl_reward_coef and old_logprobs is not None and ref_logprobs is not None:
            logprobs = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
            batch, kl_metrics = charge_kl(batch, plan, groups, config, coef=kl_coef, **logprobs)
            kl_coef, ref_logprobs = next_coef(kl_coef, kl_metrics, batch, config), None
        estimates = estimate(batch, config, values)
        targets = estimates.value_targets
        supervised = config.policy_loss_type == "cross_entropy"
        advantages = torch.ones(len(batch.trains)) if supervised else estimates.advantages
        batch = dataclasses.replace(batch, advantages=advantages)
        counts = batch_metrics(plan, batch, groups, estimates)
        moving, groups_of = groups_with_gradient(batch), split(groups, config.groups_per_mini_batch)
        order = list(range(len(mini_batches))) * config.epochs_per_batch
        for done, number in enumerate(order[position.mini_batch :], position.mini_batch + 1):
            metrics = update(learner, batch, mini_batches[number], old_logprobs, ref_logprobs)
            if critic and values is not None and targets is not None:
                metrics |= update_critic(critic, mini_batches[number], values, targets)
            seconds = time.perf_counter() - start
            metrics |= (
                counts[number]
                | kl_metrics
                | {
                    "learning_rate": learner.optimizer.param_groups[0]["lr"],
                    "seconds": seconds,
                    "tokens_per_s": metrics["num_forwarded_tokens"] / seconds,
                }
            )
            between = dataclasses.replace(position, mini_batch=done, known=known)
            if done == len(order):
                between = Position(batch=position.batch + 1, kl_coef=kl_coef)
            yield moving.intersection(groups_of[number]), between, metrics
            start = time.perf_counter()
        position = Position(batch=position.batch + 1, kl_coef=kl_coef)


def _known(
    learner: Learner,
    critic: CriticLearner | None,
    batch: Batch,
    mini_batches: Sequence[Sequence[Forest]],
) -> dict[str, Tensor]:
    """What the models say at a batch's start that its updates need: see `Position`."""
    config, known = learner.config, {}
    forests = [forest for mini_batch in mini_batches for forest in mini_batch]
    if critic:
        known["values"] = critic_values(critic, batch, forests)
    # With one update, the policy's own log-probabilities are the old ones: one pass saved.
    several = len(mini_batches) * config.epochs_per_batch > 1
    if (several and config.needs_old_logprobs) or config.kl_reward_coef:
        known["old_logprobs"] = policy_logprobs(learner, batch, forests)
    if learner.reference is not None:
        known["ref_logprobs"] = policy_logprobs(learner, batch, forests, learner.reference)
    return known


def _read_share(
    learner: Learner, rollouts: pl.LazyFrame, plan: Plan, groups: Sequence[str]
) -> pl.DataFrame | None:
    """The rows of this process's share of a batch's groups; None where that is no group."""
    own = own_groups(learner.accelerator, groups)
    return read_rows(rollouts, plan, own, learner.config.sequence_layout) if own else None


def _load(
    learner: Learner, limit: RowLimit, tables: Iterator[pl.DataFrame | None]
) -> tuple[Batch, list[list[Forest]]]:
    """The next batch and the micro-batches of each of its mini-batches."""
    accelerator = learner.accelerator
    batch = to_batch(exchange_rows(accelerator, agreed(accelerator, lambda: next(tables))))
    limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    budget, num_ranks = learner.config.tokens_per_micro_batch, accelerator.num_processes
    return batch, [
        chain_forests(batch.prompts, batch.responses, batch.trains, rows, budget, num_ranks)
        for rows in _rows_of_mini_batches(batch)
    ]


def _rows_of_mini_batches(batch: Batch) -> list[IntArray]:
    num = int(batch.mini_batch.max(initial=-1)) + 1
    return [np.flatnonzero(batch.mini_batch == number) for number in range(num)]
