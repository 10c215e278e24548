"""The training loop: plan, load, old log-probabilities, updates, metrics, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import set_seed

import pipelines
import rollout_io
from schemas.errors import RolloutError
from schemas.ragged import IntArray
from trainer.batch_metrics import batch_metrics
from trainer.checkpoint import save_checkpoint
from trainer.checks import check_rows, corrects_for_sampler
from trainer.config import TrainConfig, save_config
from trainer.critic import CriticLearner, critic_values, make_critic_learner, update_critic
from trainer.data import Batch, groups_with_gradient, index_rows, load_batch
from trainer.estimate import estimate
from trainer.forest import Forest, RowLimit, chain_forests, chain_lengths
from trainer.kl_reward import charge_kl, next_coef
from trainer.log import RunLog, say
from trainer.plan import Plan, make_plan, num_groups_of_one, split
from trainer.policy import Policy, load_policy, row_limit
from trainer.update import Learner, policy_logprobs, update


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


def train(config: TrainConfig) -> TrainResult:
    """Train a policy on a rollout dataset.

    Every check comes before the first update and before anything is written, except that of a
    row's length where a merged dataset is trained step by step.

    Returns:
        The result; `OUT/` then holds `config.json`, `metrics.jsonl` (one line per mini-batch) and
        `checkpoints/global_step_N/`.

    Raises:
        RolloutError: Dataset, model or configuration cannot be trained as asked.
    """
    out = Path(config.out)
    _refuse_existing_run(out)
    set_seed(config.seed)
    rollouts = rollout_io.scan(config.dataset)
    plan = make_plan(pipelines.trajectory_returns(rollouts, config.outcome).collect(), config)
    learner, critic, limit = _prepare(config, rollouts, plan)
    model, source = learner.accelerator.unwrap_model(learner.policy).model, Path(config.model)
    value_model = learner.accelerator.unwrap_model(critic.critic) if critic else None
    out.mkdir(parents=True, exist_ok=True)
    save_config(config, out / "config.json")
    metrics: dict[str, Any] = {}
    trained: set[str] = set()
    global_step, num_skipped, every = 0, 0, config.save_every_updates
    with RunLog(learner, out, num_planned=_num_planned(plan, config)) as log:
        for moving, metrics in _updates(learner, critic, rollouts, plan, limit):
            stepped = not metrics["skipped"]
            global_step += stepped
            num_skipped += not stepped
            trained |= moving if stepped else set()
            metrics = {"global_step": global_step, "num_trained_groups": len(moving)} | metrics
            log.write(metrics)
            if every and stepped and global_step % every == 0:
                save_checkpoint(model, source, out, global_step, value_model)
            if global_step == config.max_updates:
                break
    return TrainResult(
        out=config.out,
        checkpoint=str(save_checkpoint(model, source, out, global_step, value_model)),
        num_updates=global_step,
        num_skipped_updates=num_skipped,
        num_groups=sum(map(len, plan.batches)),
        num_trained_groups=len(trained),
        num_groups_without_variance=plan.num_groups_without_variance,
        num_failed=int(plan.trajectories["failed"].sum()),
        metrics=metrics,
    )


def _refuse_existing_run(out: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "checkpoints"):
        if (out / name).exists():
            hint = "choose another --out, or remove that run"
            raise RolloutError("existing_run", str(out), f"a {name}", "no run yet", hint)


def _prepare(
    config: TrainConfig, rollouts: pl.LazyFrame, plan: Plan
) -> tuple[Learner, CriticLearner | None, RowLimit]:
    """Load the models, check every row against them, make the optimizers."""
    accelerator = _accelerator(config)
    policy = load_policy(
        config.model,
        logprob_chunk_tokens=config.logprob_chunk_tokens,
        entropy_gradient=config.entropy_loss_coef > 0,
    )
    reference = _reference(config, accelerator)
    models, critic = [p.model for p in (policy, reference) if p], None
    if config.advantage_estimator == "gae":
        critic = make_critic_learner(accelerator, config)
        models.append(accelerator.unwrap_model(critic.critic).model)
    limits = [row_limit(model.config, config.tokens_per_micro_batch) for model in models]
    limit = min(limits, key=lambda limit: limit.num_tokens)
    vocab_size = min(model.get_input_embeddings().weight.shape[0] for model in models)
    rows = check_rows(index_rows(rollouts), plan, config, vocab_size=vocab_size, limit=limit)
    logprobs_mode = rollout_io.read_metadata(config.dataset).logprobs_mode
    corrects = corrects_for_sampler(rows, config, logprobs_mode)
    if config.corrects_for_sampler and not corrects:
        say("note: no rollout_logprobs: importance correction (tis_ratio_type) is off")
    if config.advantage_estimator == "rloo" and (alone := num_groups_of_one(plan)):
        say(
            f"warning: {alone} groups of one: rloo has no others to compare with, they train nothing"
        )
    if config.gradient_checkpointing:
        policy.checkpoint_layers()
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    policy, optimizer = accelerator.prepare(policy, optimizer)
    learner = Learner(
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        config=config,
        corrects=corrects,
        reference=reference,
    )
    return learner, critic, limit


def _reference(config: TrainConfig, accelerator: Accelerator) -> Policy | None:
    """The frozen policy that the KL divergence is from, if one is asked for."""
    if not config.needs_reference:
        return None
    path = config.reference_model or config.model
    reference = load_policy(path, logprob_chunk_tokens=config.logprob_chunk_tokens)
    reference.requires_grad_(requires_grad=False)
    prepared: Policy = accelerator.prepare_model(reference, evaluation_mode=True)
    return prepared


def _accelerator(config: TrainConfig) -> Accelerator:
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in config.trackers:
        if tracker not in available:
            expected = f"one of those installed: {', '.join(available) or 'none'}"
            raise RolloutError("config_value", "trackers", f"`{tracker}`", expected)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=list(config.trackers) or None,
        project_dir=config.out,
    )
    if accelerator.num_processes > 1:
        got = f"{accelerator.num_processes} processes"
        raise RolloutError("processes", "launch", got, "one", "start without `accelerate launch`")
    return accelerator


def _updates(
    learner: Learner,
    critic: CriticLearner | None,
    rollouts: pl.LazyFrame,
    plan: Plan,
    limit: RowLimit,
) -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
    """Train mini-batch after mini-batch; of each the groups that move the policy, and metrics."""
    config = learner.config
    kl_coef = config.kl_reward_coef
    for groups in plan.batches * config.num_epochs:
        start = time.perf_counter()
        batch, mini_batches = _load(learner, rollouts, plan, limit, groups)
        forests = [forest for mini_batch in mini_batches for forest in mini_batch]
        values = critic_values(critic, batch, forests) if critic else None
        # With one update, the policy's own log-probabilities are the old ones: one pass saved.
        several = len(mini_batches) * config.epochs_per_batch > 1
        old_logprobs = ref_logprobs = None
        if (several and config.needs_old_logprobs) or config.kl_reward_coef:
            old_logprobs = policy_logprobs(learner, batch, forests)
        if learner.reference is not None:
            ref_logprobs = policy_logprobs(learner, batch, forests, learner.reference)
        kl_metrics: dict[str, float] = {}
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
        for number in list(range(len(mini_batches))) * config.epochs_per_batch:
            metrics = update(learner, batch, mini_batches[number], old_logprobs, ref_logprobs)
            if critic and values is not None and targets is not None:
                metrics |= update_critic(critic, mini_batches[number], values, targets)
            seconds = time.perf_counter() - start
            metrics |= (
                counts[number]
                | kl_metrics
                | {
                    "learning_rate": config.learning_rate,
                    "seconds": seconds,
                    "tokens_per_s": metrics["num_forwarded_tokens"] / seconds,
                }
            )
            yield moving.intersection(groups_of[number]), metrics
            start = time.perf_counter()


def _load(
    learner: Learner, rollouts: pl.LazyFrame, plan: Plan, limit: RowLimit, groups: Sequence[str]
) -> tuple[Batch, list[list[Forest]]]:
    """A batch and the micro-batches of each of its mini-batches."""
    batch = load_batch(rollouts, plan, groups, learner.config.sequence_layout)
    limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    budget = learner.config.tokens_per_micro_batch
    return batch, [
        chain_forests(batch.prompts, batch.responses, batch.trains, rows, budget)
        for rows in _rows_of_mini_batches(batch)
    ]


def _rows_of_mini_batches(batch: Batch) -> list[IntArray]:
    num = int(batch.mini_batch.max(initial=-1)) + 1
    return [np.flatnonzero(batch.mini_batch == number) for number in range(num)]


def _num_planned(plan: Plan, config: TrainConfig) -> int:
    per_epoch = sum(math.ceil(len(b) / config.groups_per_mini_batch) for b in plan.batches)
    planned = per_epoch * config.epochs_per_batch * config.num_epochs
    return min(planned, config.max_updates or planned)
