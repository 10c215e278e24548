"""Train on a batch, from top to bottom.

    steps        read the rows of each batch (the next is read meanwhile)
    ready_batch  pack micro-batches; old and reference log-probabilities, values; advantages
    update       per micro-batch: forward, objective, backward; then clip and step

`trainer.run.loop` and `trainer.rl.updates` drive `updates`; `rollouts replay` stops at a Step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
import torch
from torch import Tensor

from schemas.errors import RolloutError
from trainer.batches.data import Batch, groups_with_gradient, read_rows, to_batch, without_sets
from trainer.batches.forest import Forest, chain_lengths
from trainer.batches.packing import MiniBatch, cut_batch
from trainer.batches.plan import split
from trainer.batches.prefetch import one_ahead
from trainer.batches.stored_rows import Origins, StoredRows, digests_of, find_origins, stored_rows
from trainer.batches.transfer import Arriving, columns_to_device, to_device
from trainer.distributed.balance import Watch, own_forests
from trainer.distributed.processes import agreed, exchange_rows, gather_parts, own_groups
from trainer.distributed.sharding import without_reduction
from trainer.models.critic import clipped_value_loss
from trainer.models.optimizer import clip_and_step
from trainer.run.advice import differs_from_sampler, likely_cause
from trainer.run.batch_advantages import charge_kl, estimate, next_coef
from trainer.run.loss import (
    critic_values,
    objective,
    policy_logprobs,
    targets_of,
    with_teacher,
    with_weights,
)
from trainer.run.metrics import (
    batch_metrics,
    generated_per,
    generated_rows,
    sequence_metrics,
    update_metrics,
)
from trainer.run.pass_progress import (
    CRITIC_TRAINING,
    OLD_LOGPROBS,
    REFERENCE,
    TRAINING,
    UNWATCHED,
    VALUES,
    Passes,
)
from trainer.run.run import Run
from trainer.run.state import Position
from trainer.run.token_records import TokenRecorder, recorder_of, token_records

Share = tuple[pl.DataFrame | None, dict[str, float], StoredRows | None]
"""What one process reads of a batch: the rows of its groups (None without groups) and, in the main
process, `sequence_metrics` of the batch and, if tokens are recorded, its rows in the dataset."""
Made = tuple["Step", dict[str, Any], pa.Table | None, str | None]
"""An update that was made: its step, its metrics, its token records in the main process (None if
there are none), and the likely cause of a mismatch with the sampler (None if unknown)."""
AT_START = ("old_logprobs", "ref_logprobs", "values")
"""Columns of a batch with model outputs at its start, which a checkpoint within the batch keeps."""
RECORDED_ONLY = ("losses", "correction_weights")
"""Columns of the objective that are not metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyBatch:
    """A batch that is ready for its optimizer steps.

    Attributes:
        batch: The batch, with advantages and the outputs of the models at its start.
        groups: Groups of the batch, in order.
        mini_batches: Micro-batches of each optimizer step.
        kl_coef: KL coefficient of the next batch.
        metrics: Metrics of each mini-batch that are known before its update.
        generated: Metrics of the batch as generated, for its first update.
        origins: Origins of the batch's tokens; None if no tokens are recorded.
    """

    batch: Batch
    groups: tuple[str, ...]
    mini_batches: list[MiniBatch]
    kl_coef: float
    metrics: list[dict[str, Any]]
    generated: dict[str, float]
    origins: Origins | None

    @property
    def known(self) -> dict[str, Tensor]:
        """Model outputs at the start of the batch, for `Position.known`."""
        columns = {name: getattr(self.batch, name) for name in AT_START}
        return {name: values for name, values in columns.items() if values is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A mini-batch just before its optimizer step.

    Attributes:
        ready: The batch.
        number: Number of the mini-batch within the batch.
        num_left: Steps of the batch that remain, including this one.
        before: Position of the run before the update.
        after: Position of the run after the update.
        moving: Groups of the mini-batch that have a gradient.
        metrics: Metrics that are known before the update.
    """

    ready: ReadyBatch
    number: int
    num_left: int
    before: Position
    after: Position
    moving: frozenset[str]
    metrics: dict[str, Any]

    @property
    def forests(self) -> list[Forest]:
        """Micro-batches of the update."""
        return self.ready.mini_batches[self.number].forests


def updates(
    run: Run, position: Position, *, explains: bool = True, passes: Passes = UNWATCHED
) -> Iterator[Made]:
    """Train on the mini-batches from a position onwards, and yield what was made of each.

    With `explains`, the first mismatch with the sampler's log-probabilities is analysed to find its
    cause. `passes` counts the forwarded micro-batches.
    """
    global_step, cause = run.progress.global_step, None
    start = time.perf_counter()
    for step in steps(run, position, passes):
        metrics, tokens = make_update(run, step, global_step + 1, passes)
        global_step += not metrics["skipped"]
        if explains and cause is None and differs_from_sampler(metrics):
            cause = likely_cause(run, step.ready.batch, step.forests)
        seconds = time.perf_counter() - start
        metrics |= {"seconds": seconds, "tokens_per_s": metrics["num_forwarded_tokens"] / seconds}
        passes.end_update(made=not metrics["skipped"])
        yield step, metrics, tokens, cause
        start = time.perf_counter()


def steps(run: Run, position: Position, passes: Passes = UNWATCHED) -> Iterator[Step]:
    """Yield the mini-batches from a position onwards, each just before its optimizer step.

    The caller must make each update before it asks for the next mini-batch, because `ready_batch`
    evaluates the current models.
    """
    sizes = run.config.batch
    batches = (run.plan.batches * sizes.num_epochs)[position.batch - run.first_batch :]
    shares = one_ahead(partial(read_share, run), batches)
    for groups in batches:
        share = agreed(run.accelerator, lambda: next(shares))
        ready = ready_batch(run, groups, position, share, passes)
        moving = groups_with_gradient(ready.batch)
        groups_of = split(groups, sizes.groups_per_mini_batch)
        after = Position(batch=position.batch + 1, kl_coef=ready.kl_coef)
        order = list(range(len(ready.mini_batches))) * sizes.epochs_per_batch
        for done, number in enumerate(order[position.mini_batch :], position.mini_batch):
            here = replace(position, mini_batch=done, known=ready.known)
            is_last = done + 1 == len(order)
            yield Step(
                ready=ready,
                number=number,
                num_left=len(order) - done,
                before=here if done else position,
                after=after if is_last else replace(here, mini_batch=done + 1),
                moving=moving.intersection(groups_of[number]),
                metrics=ready.metrics[number] | (ready.generated if done == 0 else {}),
            )
        position = after


def read_share(run: Run, groups: Sequence[str]) -> Share:
    """Read the part of a batch that is assigned to this process."""
    accelerator, config = run.accelerator, run.config
    own = own_groups(accelerator, groups)
    rows = read_rows(run.rollouts, run.plan, own, config.batch) if own else None
    if not accelerator.is_main_process:
        return rows, {}, None
    stored = generated_rows(run.rollouts, groups)
    generated = sequence_metrics(
        stored,
        config.data.outcome or "last",
        generated_per(config.data.dataset),
        merges=config.batch.sequence_layout == "merge",
    )
    if config.run.record_tokens == "none":
        return rows, generated, None
    return rows, generated, stored_rows(stored.hstack(digests_of(config.data.dataset, groups)))


def ready_batch(
    run: Run,
    groups: tuple[str, ...],
    position: Position,
    share: Share,
    passes: Passes = UNWATCHED,
) -> ReadyBatch:
    """Pack a batch, and compute all that its updates need of it.

    `share` is from `read_share`. Within a batch, `position.known` has the model outputs.
    """
    config, accelerator = run.config, run.accelerator
    own, generated, stored = share
    rows = exchange_rows(accelerator, own)  # every process reads some groups, and needs all
    batch = to_batch(rows, config.batch.max_row_tokens, imitates=config.loss.is_supervised)
    if config.loss.policy_loss_type == "distill":
        batch = without_sets(batch)
    run.limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    generated["generate/batch_num_seq"] = len(batch.names)
    if config.batch.sequence_layout == "merge":
        generated["generate/num_seq_after_merge"] = len(batch.names)

    mini_batches = cut_batch(batch, config.batch, accelerator.num_processes)
    forests = [forest for mini_batch in mini_batches for forest in mini_batch.forests]
    wanted = _needed(run, len(mini_batches))
    outputs: dict[str, Any] = dict(position.known)
    if not outputs:  # under the models before the first update
        if VALUES in wanted:
            outputs["values"] = critic_values(run, batch, forests, partial(passes, VALUES))
        if OLD_LOGPROBS in wanted:
            watch = partial(passes, OLD_LOGPROBS)
            outputs["old_logprobs"] = policy_logprobs(run, batch, forests, watch=watch)
        if REFERENCE in wanted:
            model, watch = run.reference, partial(passes, REFERENCE)
            outputs["ref_logprobs"] = policy_logprobs(run, batch, forests, model, watch)
    batch = replace(batch, **outputs)

    batch, kl_metrics = charge_kl(batch, run.plan, groups, config, position.kl_coef)
    batch = estimate(batch, config.advantage, is_supervised=config.loss.is_supervised)
    counts = batch_metrics(run.plan, batch, groups)
    packing = [mini_batch.metrics for mini_batch in mini_batches]
    return ReadyBatch(
        batch=batch,
        groups=groups,
        mini_batches=mini_batches,
        kl_coef=next_coef(position.kl_coef, kl_metrics, batch, config.loss),
        metrics=[own | counted | kl_metrics for own, counted in zip(packing, counts, strict=True)],
        generated=generated,
        origins=find_origins(rows, stored) if stored else None,
    )


def make_update(
    run: Run, step: Step, global_step: int, passes: Passes = UNWATCHED
) -> tuple[dict[str, Any], pa.Table | None]:
    """Update the policy, and the critic if there is one, on a mini-batch.

    Returns:
        The metrics of the update, and its token records, if the main process has any.
    """
    ready, batch, forests, config = step.ready, step.ready.batch, step.forests, run.config
    how, seed = config.run.record_tokens, config.run.seed
    recorder = recorder_of(batch, forests, how, seed=seed, global_step=global_step)
    metrics: dict[str, Any] = update(run, batch, forests, recorder, passes)
    tokens = None
    if recorder:
        values = recorder.gathered(run.accelerator)
        if values and batch.ref_logprobs is not None:
            values["ref_logprobs"] = batch.ref_logprobs[values["slots"]]
        if values and ready.origins and not metrics["skipped"]:
            tokens = token_records(config.data.dataset, ready.origins, values)
    if run.critic:
        metrics |= update_critic(run, batch, forests, partial(passes, CRITIC_TRAINING))
    rate = {"learning_rate": run.optimizer.param_groups[0]["lr"]}
    return metrics | step.metrics | rate, tokens


def update(
    run: Run,
    batch: Batch,
    forests: Sequence[Forest],
    recorder: TokenRecorder | None = None,
    passes: Passes = UNWATCHED,
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch and take an optimizer step.

    No step is taken if there are no trained tokens or the gradient is not finite.

    Args:
        run: The run.
        batch: The batch; the forests' targets index its tokens. `old_logprobs` may be None if the
            loss does not need them, or if this is the only update of its batch, because old and
            current log-probabilities are then equal.
        forests: Micro-batches, which together contain every target of the mini-batch once; all
            targets of a row are in the same one. Each process forwards its share of them.
        recorder: Receives the values that enter the loss; None: they are not recorded.
        passes: Counts the forwarded micro-batches, and shows the progress.

    Returns:
        Metrics; `skipped` is 1 if no step was taken.

    Raises:
        InputError: A user's loss or reduction fails, or its result is invalid.
    """
    accelerator, policy, config = run.accelerator, run.policy, run.config.loss
    num_trained = sum(forest.num_targets for forest in forests)
    batch = with_weights(run, batch, forests, passes)
    parts, failures = dict[int, Arriving](), list[RolloutError]()
    own = own_forests(accelerator, forests)
    for done, (number, forest) in enumerate(passes(TRAINING, own), start=1):
        slot = forest.target_slot
        temperature = to_device(batch.temperature[slot], accelerator.device)
        with without_reduction(policy) if done < len(own) else nullcontext():
            forest = with_teacher(forest, batch, config).to(accelerator.device)
            outputs = policy(forest, temperature)
            targets = targets_of(batch, slot, outputs)
            try:
                loss, columns = objective(targets, config, corrects=run.corrects)
            except RolloutError as error:  # of a user's loss
                if accelerator.num_processes == 1:
                    raise
                failures.append(error)  # the other processes wait for our gradient
                loss, columns = 0 * targets.logprobs.sum(), {}
            # Data-parallel wrappers average gradients over processes; the weights are global.
            accelerator.backward(loss * accelerator.num_processes)
        if recorder and columns:
            recorder.add(slot, targets, columns, batch, config)
        metrics = {n: v.double() for n, v in columns.items() if n not in RECORDED_ONLY}
        parts[number] = Arriving(metrics)
    if config.has_own_loss:
        agreed(accelerator, partial(_raise_any, failures))
    grad_norm = 0.0
    if num_trained:
        max_norm = run.config.optimizer.max_grad_norm
        grad_norm = clip_and_step(policy.parameters(), run.optimizer, max_norm)
    arrived = {number: arriving.read() for number, arriving in parts.items()}
    return update_metrics(gather_parts(accelerator, arrived), config.policy_loss_type) | {
        "grad_norm": grad_norm,
        "num_trained_tokens": num_trained,
        "num_forwarded_tokens": sum(forest.num_tokens for forest in forests),
        "num_micro_batches": len(forests),
        "skipped": int(not num_trained or not math.isfinite(grad_norm)),
    }


def update_critic(
    run: Run, batch: Batch, forests: Sequence[Forest], watch: Watch = iter
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch's value loss and take a step of the critic.

    The loss is the mean over the mini-batch's targets of the batch's `value_targets`, independent of
    micro-batches. No step is taken if there are no targets or the gradient is not finite.

    Returns:
        Loss, mean value, clipped fraction and gradient norm, by metric name.
    """
    critic, optimizer, accelerator = run.critic, run.critic_optimizer, run.accelerator
    old_values, targets = batch.values, batch.value_targets
    assert critic is not None
    assert optimizer is not None
    assert old_values is not None
    assert targets is not None
    num_trained = sum(forest.num_targets for forest in forests)
    clip, device = run.config.loss.value_clip, accelerator.device
    sums, own = torch.zeros(3, device=device), own_forests(accelerator, forests)
    for done, (_, forest) in enumerate(watch(own), start=1):
        slot = forest.target_slot
        with without_reduction(critic) if done < len(own) else nullcontext():
            values = critic(forest.to(device))
            columns = {"old": old_values[slot], "target": targets[slot]}
            columns = columns_to_device(columns, device)
            old, target = columns["old"], columns["target"]
            losses = clipped_value_loss(values, old, target, clip=clip)
            accelerator.backward(losses.sum() / num_trained * accelerator.num_processes)
        with torch.no_grad():
            clipped = losses > clipped_value_loss(values, old, target, clip=None)
            sums += torch.stack([losses.sum(), values.sum(), clipped.float().sum()])
    sums = accelerator.reduce(sums, reduction="sum")
    loss, value, clipped_fraction = (sums / max(num_trained, 1)).tolist()
    grad_norm = 0.0
    if num_trained:
        max_norm = run.config.optimizer.max_grad_norm
        grad_norm = clip_and_step(critic.parameters(), optimizer, max_norm)
    return {
        "critic/critic_loss": loss,
        "critic/values_mean": value,
        "critic/values_clipfrac": clipped_fraction,
        "critic/grad_norm": grad_norm,
    }


def _raise_any(failures: Sequence[RolloutError]) -> None:
    if failures:
        raise failures[0]


def _needed(run: Run, num_mini_batches: int) -> list[str]:
    """List the forward passes that a batch needs before its first update."""
    loss = run.config.loss
    # With a single update, old log-probabilities are the policy's current ones, which saves a pass.
    several = num_mini_batches * run.config.batch.epochs_per_batch > 1
    needs_old = (several and loss.needs_old_logprobs) or loss.kl_reward_coef
    return [
        *([VALUES] if run.critic else []),
        *([OLD_LOGPROBS] if needs_old else []),
        *([REFERENCE] if run.reference is not None else []),
    ]
