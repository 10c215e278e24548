"""Batch after batch: load it, ask the models what its updates need, update by its mini-batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import torch
from torch import Tensor

from trainer.advice import differs_from_sampler
from trainer.batch_metrics import batch_metrics
from trainer.begin import Run
from trainer.causes import likely_cause
from trainer.critic import critic_values, update_critic
from trainer.data import Batch, groups_with_gradient, read_rows, to_batch
from trainer.estimate import estimate
from trainer.forest import chain_lengths
from trainer.kl_reward import charge_kl, next_coef
from trainer.packing import MiniBatch, cut_batch
from trainer.plan import split
from trainer.prefetch import one_ahead
from trainer.processes import agreed, exchange_rows, own_groups
from trainer.state import Position
from trainer.update import policy_logprobs, update


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One mini-batch's update.

    Attributes:
        moving: Groups of the mini-batch that give it a gradient.
        position: Where the run is after it.
        metrics: What it did.
        cause: Why the log-probabilities are not the sampler's, once they are far apart.
    """

    moving: frozenset[str]
    position: Position
    metrics: dict[str, Any]
    cause: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A batch of T response tokens that only its updates are missing of.

    Attributes:
        batch: With its advantages.
        mini_batches: What each of its optimizer steps forwards.
        known: What the models said at its start; see `Position`.
        ref_logprobs: [T] what the loss keeps the policy close to; None where it does not.
        value_targets: [T] what the critic should say; None without one.
        kl_coef: `kl_coef` of the batch after this one.
        metrics: Of each mini-batch, what is known before its update.
    """

    batch: Batch
    mini_batches: list[MiniBatch]
    known: dict[str, Tensor]
    ref_logprobs: Tensor | None
    value_targets: Tensor | None
    kl_coef: float
    metrics: list[dict[str, Any]]


def mini_batch_updates(run: Run, position: Position, *, explains: bool = True) -> Iterator[Made]:
    """Train mini-batch after mini-batch from a position on.

    Args:
        run: The run.
        position: What is done of it.
        explains: Ask once, where log-probabilities are far from the sampler's, for the cause.
    """
    config = run.learner.config
    batches = (run.plan.batches * config.num_epochs)[position.batch :]
    start, cause = time.perf_counter(), None
    tables = one_ahead(partial(_read_share, run), batches)
    for groups in batches:
        batch, mini_batches = _load(run, tables)
        ready = _ready(run, groups, position, batch, mini_batches)
        moving = groups_with_gradient(ready.batch)
        groups_of = split(groups, config.groups_per_mini_batch)
        after = Position(batch=position.batch + 1, kl_coef=ready.kl_coef)
        order = list(range(len(mini_batches))) * config.epochs_per_batch
        for done, number in enumerate(order[position.mini_batch :], position.mini_batch + 1):
            metrics = _update(run, ready, number)
            if explains and cause is None and differs_from_sampler(metrics):
                cause = likely_cause(run.learner, ready.batch, ready.mini_batches[number].forests)
            seconds = time.perf_counter() - start
            speed = {
                "seconds": seconds,
                "tokens_per_s": metrics["num_forwarded_tokens"] / seconds,
            }
            between = dataclasses.replace(position, mini_batch=done, known=ready.known)
            yield Made(
                moving=moving.intersection(groups_of[number]),
                position=after if done == len(order) else between,
                metrics=metrics | speed,
                cause=cause,
            )
            start = time.perf_counter()
        position = after


def _ready(
    run: Run,
    groups: Sequence[str],
    position: Position,
    batch: Batch,
    mini_batches: list[MiniBatch],
) -> Ready:
    """Ask the models, charge the divergence to the rewards, estimate the advantages."""
    config = run.learner.config
    known = position.known or _known(run, batch, mini_batches)
    old_logprobs, ref_logprobs = known.get("old_logprobs"), known.get("ref_logprobs")
    kl_metrics: dict[str, float] = {}
    kl_coef = position.kl_coef
    if config.kl_reward_coef and old_logprobs is not None and ref_logprobs is not None:
        logprobs = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        batch, kl_metrics = charge_kl(batch, run.plan, groups, config, coef=kl_coef, **logprobs)
        kl_coef, ref_logprobs = next_coef(kl_coef, kl_metrics, batch, config), None
    estimates = estimate(batch, config, known.get("values"))
    supervised = config.policy_loss_type == "cross_entropy"
    advantages = torch.ones(len(batch.trains)) if supervised else estimates.advantages
    batch = dataclasses.replace(batch, advantages=advantages)
    counts = batch_metrics(run.plan, batch, groups, estimates)
    return Ready(
        batch=batch,
        mini_batches=mini_batches,
        known=known,
        ref_logprobs=ref_logprobs,
        value_targets=estimates.value_targets,
        kl_coef=kl_coef,
        metrics=[
            mini_batch.metrics | counted | kl_metrics
            for mini_batch, counted in zip(mini_batches, counts, strict=True)
        ],
    )


def _update(run: Run, ready: Ready, number: int) -> dict[str, Any]:
    """Update policy and critic by a mini-batch."""
    forests, old_logprobs = ready.mini_batches[number].forests, ready.known.get("old_logprobs")
    metrics = update(run.learner, ready.batch, forests, old_logprobs, ready.ref_logprobs)
    if run.critic and ready.value_targets is not None:
        metrics |= update_critic(run.critic, forests, ready.known["values"], ready.value_targets)
    rate = {"learning_rate": run.learner.optimizer.param_groups[0]["lr"]}
    return metrics | ready.metrics[number] | rate


def _known(run: Run, batch: Batch, mini_batches: Sequence[MiniBatch]) -> dict[str, Tensor]:
    """What the models say at a batch's start that its updates need: see `Position`."""
    learner, config, known = run.learner, run.learner.config, {}
    forests = [forest for mini_batch in mini_batches for forest in mini_batch.forests]
    if run.critic:
        known["values"] = critic_values(run.critic, batch, forests)
    # With one update, the policy's own log-probabilities are the old ones: one pass saved.
    several = len(mini_batches) * config.epochs_per_batch > 1
    if (several and config.needs_old_logprobs) or config.kl_reward_coef:
        known["old_logprobs"] = policy_logprobs(learner, batch, forests)
    if learner.reference is not None:
        known["ref_logprobs"] = policy_logprobs(learner, batch, forests, learner.reference)
    return known


def _read_share(run: Run, groups: Sequence[str]) -> pl.DataFrame | None:
    """The rows of this process's share of a batch's groups; None where that is no group."""
    own = own_groups(run.learner.accelerator, groups)
    layout = run.learner.config.sequence_layout
    return read_rows(run.rollouts, run.plan, own, layout) if own else None


def _load(run: Run, tables: Iterator[pl.DataFrame | None]) -> tuple[Batch, list[MiniBatch]]:
    """The next batch and its mini-batches."""
    accelerator = run.learner.accelerator
    batch = to_batch(exchange_rows(accelerator, agreed(accelerator, lambda: next(tables))))
    run.limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    return batch, cut_batch(batch, run.learner.config, accelerator.num_processes)
