"""Train on a batch, from top to bottom.

    updates            one update after another
      pending_updates  read the rows of each batch (the next is read meanwhile)
        ready_batch    pack micro-batches; old and reference log-probabilities, values; advantages
      make_update      per micro-batch: forward, objective, backward; then clip, step and record

`trainer.training` and `trainer.rl.learning` drive `updates`; `rollouts replay` stops at an Update.

target   a response token that trains, once for each row that sampled it
slots    indices of tokens in the batch's response tokens, one row after another
forest   a micro-batch: the packed tokens of some rows, which may share prefixes, and their targets
chain    the trained tokens of a trajectory in temporal order, for estimators that look ahead
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from schemas.errors import RolloutError
from trainer.algorithms.losses import clipped_value_loss
from trainer.batch import Batch, cut_batch, groups_with_gradient, read_rows, to_batch, without_sets
from trainer.batches.chains import digests_of, find_origins, place_steps
from trainer.batches.forest import Forest, Watch, chain_lengths, padded_forests
from trainer.batches.overlap import CopyToCpu, columns_to_device, one_ahead, to_device
from trainer.batches.plan import split
from trainer.distributed.accelerator import without_reduction
from trainer.distributed.balance import gather_places, share_rows, with_repeated_share
from trainer.distributed.processes import agreed, local_groups, over_processes, raise_in_all
from trainer.loss import (
    critic_values,
    objective,
    policy_logprobs,
    targets_of,
    with_target_weights,
    with_teacher,
)
from trainer.models.optimizer import clip_and_step, rate_factor, set_learning_rate
from trainer.run.batch_advantages import estimate_advantages, next_kl_coef, subtract_kl
from trainer.run.messages import (
    CRITIC_TRAINING,
    OLD_LOGPROBS,
    REFERENCE,
    TRAINING,
    UNWATCHED,
    VALUES,
    Passes,
)
from trainer.run.metrics import batch_metrics, generated_metrics, generated_rows, update_metrics
from trainer.run.run import START, Position, Progress, Run
from trainer.run.token_records import recorder_of, token_records
from trainer.run.warnings import MISMATCH, sampler_mismatch

RECORDED_ONLY = ("unweighted_loss", "correction_weights")
"""Columns of the objective that are not metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A mini-batch, just before its optimizer step or after it.

    Attributes:
        batch: The batch, with advantages and the outputs of the models at its start.
        number: Number of the mini-batch within the batch.
        num_left: Steps of the batch that remain, including this one.
        before: Position of the run before the update.
        after: Position of the run after the update.
        trained_groups: Groups of the mini-batch that have a gradient.
        metrics: Metrics; before the update, those that do not depend on it.
        progress: Progress of the run after the update.
        tokens: Token records of the update, in the main process; None: there are none.
    """

    batch: Batch
    number: int = 0
    num_left: int = 1
    before: Position = START.position
    after: Position = START.position
    trained_groups: frozenset[str] = frozenset()
    metrics: dict[str, Any] = field(default_factory=dict)
    progress: Progress = START
    tokens: pa.Table | None = None

    @property
    def forests(self) -> list[Forest]:
        """Micro-batches of the update."""
        return self.batch.mini_batches[self.number].forests


def updates(
    run: Run,
    progress: Progress,
    *,
    passes: Passes = UNWATCHED,
    tell: Callable[[str, str], None] = lambda *_: None,
) -> Iterator[Update]:
    """Train on the mini-batches that follow `progress`, and yield each after its update.

    `passes` counts the forwarded micro-batches. Before the first update of the run, `tell` is called
    with a subject and a warning if the log-probabilities differ from the sampler's.
    """
    start = time.perf_counter()
    for ready in pending_updates(run, progress.position, passes):
        if not progress.num_mini_batches and (
            text := sampler_mismatch(run, ready.batch, ready.forests)
        ):
            tell(MISMATCH, text)
        update = make_update(run, ready, progress, passes)
        progress, metrics = update.progress, update.metrics
        seconds = time.perf_counter() - start
        metrics |= {"seconds": seconds, "tokens_per_s": metrics["num_forwarded_tokens"] / seconds}
        passes.end_update(stepped=not metrics["skipped"])
        yield update
        start = time.perf_counter()


def pending_updates(run: Run, position: Position, passes: Passes = UNWATCHED) -> Iterator[Update]:
    """Yield the mini-batches from a position onwards, each just before its optimizer step.

    The caller must make each update before it asks for the next mini-batch, because `ready_batch`
    evaluates the current models.
    """
    sizes = run.config.batch
    batches = (run.plan.batches * sizes.num_epochs)[position.batches_done - run.first_batch :]
    reading = one_ahead(partial(read_groups, run), batches)
    for groups in batches:
        rows, stored = agreed(run.accelerator, lambda: next(reading))
        batch = ready_batch(run, groups, position, rows, stored, passes)
        trained_groups = groups_with_gradient(run.accelerator, batch)
        groups_of = split(groups, sizes.groups_per_mini_batch)
        after = Position(batches_done=position.batches_done + 1, kl_coef=batch.next_kl_coef)
        order = list(range(len(batch.mini_batches))) * sizes.epochs_per_batch
        is_alone = run.accelerator.num_processes == 1
        local_slots = None if is_alone else (batch.global_slots, int(batch.num_response.sum()))
        for done, number in enumerate(
            order[position.mini_batches_done :], position.mini_batches_done
        ):
            here = replace(
                position, mini_batches_done=done, outputs=batch.outputs, local_slots=local_slots
            )
            is_last = done + 1 == len(order)
            yield Update(
                batch=batch,
                number=number,
                num_left=len(order) - done,
                before=here if done else position,
                after=after if is_last else replace(here, mini_batches_done=done + 1),
                trained_groups=trained_groups.intersection(groups_of[number]),
                metrics=batch.mini_batches[number].metrics | (batch.generated if done == 0 else {}),
            )
        position = after


def read_groups(run: Run, groups: Sequence[str]) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Read the rows of a batch: this process's share of them, and in the main process all as stored.

    Each is None where there is nothing to read.
    """
    accelerator, config = run.accelerator, run.config
    share = local_groups(accelerator, groups)
    rows = read_rows(run.rollouts, run.plan, share, config.batch) if share else None
    if not accelerator.is_main_process:
        return rows, None
    stored = generated_rows(run.rollouts, groups)
    if config.run.record_tokens != "none":
        stored = stored.hstack(digests_of(config.data.dataset, groups))
    return rows, stored


def ready_batch(
    run: Run,
    groups: tuple[str, ...],
    position: Position,
    rows: pl.DataFrame | None,
    stored: pl.DataFrame | None,
    passes: Passes = UNWATCHED,
) -> Batch:
    """Make a batch of rows from `read_groups`, with all columns that do not depend on the mini-batch.

    Within a batch, `position.outputs` has the outputs of the models at its start.
    """
    config, accelerator = run.config, run.accelerator
    alone = rows if accelerator.num_processes == 1 else None  # no other process has any
    batch = to_batch(
        share_rows(accelerator, rows, run.plan, groups, config) if alone is None else alone,
        config.batch.max_row_tokens,
        imitates=config.loss.is_supervised,
        pictures=run.pictures,
    )
    if config.loss.policy_loss_type == "distill":
        batch = without_sets(batch)
    lengths = chain_lengths(batch.prompts, batch.responses, batch.trains)
    agreed(accelerator, lambda: run.row_limit.check(lengths, batch.names))
    places = None
    if config.run.record_tokens != "none":
        places = gather_places(accelerator, rows) if alone is None else place_steps(alone)
    if stored is not None:
        batch = replace(
            batch,
            generated=generated_metrics(stored, config, num_rows=len(batch.names)),
            origins=places if places is None else find_origins(places, batch.num_response, stored),
        )

    mini_batches = cut_batch(batch, config.batch)
    if alone is None:
        mini_batches = with_repeated_share(accelerator, mini_batches)
    forests = [forest for mini_batch in mini_batches for forest in mini_batch.forests]
    needed = _needed(run, len(mini_batches))
    outputs: dict[str, Any] = dict(position.outputs)
    if outputs and alone is None and position.local_slots is None:  # of a checkpoint
        outputs = {name: values[batch.global_slots] for name, values in outputs.items()}
    if not outputs:  # under the models before the first update
        if VALUES in needed:
            outputs["values"] = critic_values(run, batch, forests, partial(passes, VALUES))
        if OLD_LOGPROBS in needed:
            watch = partial(passes, OLD_LOGPROBS)
            outputs["old_logprobs"] = policy_logprobs(run, batch, forests, watch=watch)
        if REFERENCE in needed:
            model, watch = run.reference, partial(passes, REFERENCE)
            outputs["ref_logprobs"] = policy_logprobs(run, batch, forests, model, watch)
    batch = replace(batch, **outputs)

    batch, kl_metrics = subtract_kl(accelerator, batch, run.plan, groups, config, position.kl_coef)
    batch = estimate_advantages(
        accelerator, batch, config.advantage, is_supervised=config.loss.is_supervised
    )
    counts = batch_metrics(accelerator, run.plan, batch, groups)
    return replace(
        batch,
        groups=groups,
        mini_batches=tuple(
            replace(mini_batch, metrics=mini_batch.metrics | counted | kl_metrics)
            for mini_batch, counted in zip(mini_batches, counts, strict=True)
        ),
        next_kl_coef=next_kl_coef(position.kl_coef, kl_metrics, batch, config.loss),
    )


def make_update(run: Run, update: Update, progress: Progress, passes: Passes = UNWATCHED) -> Update:
    """Train the policy, and the critic if there is one, on a mini-batch.

    The policy takes no step if there are no trained tokens or its gradient is not finite; the critic
    decides for itself.

    Args:
        run: The run; afterwards its learning rates are those of the next update.
        update: The mini-batch. Its forests, of all processes together, contain every target once; all
            targets of a row are in the same one. `old_logprobs` of the
            batch may be None if the loss does not need them, or if this is the only update of the
            batch, because old and current log-probabilities are then equal.
        progress: Progress before the update.
        passes: Counts the forwarded micro-batches, and shows the progress.

    Returns:
        The update with all metrics (`skipped` is 1 if the policy took no step), the progress after
        it, and its token records.

    Raises:
        InputError: A user's loss or reduction fails, or its result is invalid.
    """
    accelerator, policy, loss_config = run.accelerator, run.policy, run.config.loss
    forests = update.forests
    counts = [(f.num_targets, f.num_tokens, 1) for f in forests]
    totals = over_processes(accelerator, np.sum(counts or [(0, 0, 0)], axis=0), "sum")
    num_trained, num_forwarded, num_micro_batches = map(int, totals)
    batch = with_target_weights(run, update.batch, forests, passes)
    records, seed = run.config.run.record_tokens, run.config.run.seed
    recorder = recorder_of(
        accelerator, batch, forests, records, seed=seed, global_step=progress.global_step + 1
    )
    parts, failures = list[CopyToCpu](), list[RolloutError]()
    share = padded_forests(accelerator, forests)
    for done, forest in enumerate(passes(TRAINING, share), start=1):
        slot = forest.target_slot
        temperature = to_device(batch.temperature[slot], accelerator.device)
        # Gradients are exchanged once, in the backward pass of the last micro-batch.
        with without_reduction(policy) if done < len(share) else nullcontext():
            forest = with_teacher(forest, batch, loss_config).to(accelerator.device)
            outputs = policy(forest, temperature)
            targets = targets_of(batch, slot, outputs)
            try:
                loss, columns = objective(targets, loss_config, corrects=run.corrects_for_sampler)
            except RolloutError as error:  # of a user's loss
                if accelerator.num_processes == 1:
                    raise
                failures.append(error)  # the other processes wait for our gradient
                loss, columns = 0 * targets.logprobs.sum(), {}
            # Data-parallel wrappers average gradients over processes; the weights are global.
            accelerator.backward(loss * accelerator.num_processes)
        if recorder and columns:
            recorder.add(slot, targets, columns, batch, loss_config)
        parts.append(
            CopyToCpu(
                {name: x.double() for name, x in columns.items() if name not in RECORDED_ONLY}
            )
        )
    if loss_config.has_own_loss:
        raise_in_all(accelerator, *failures)
    grad_norm = 0.0
    if num_trained:
        max_norm = run.config.optimizer.max_grad_norm
        grad_norm = clip_and_step(policy.parameters(), run.optimizer, max_norm)
    skipped = not num_trained or not math.isfinite(grad_norm)
    arrived = [part.read() for part in parts]
    loss_name = loss_config.policy_loss_type
    metrics: dict[str, Any] = update_metrics(accelerator, arrived, loss_name) | {
        "grad_norm": grad_norm,
        "num_trained_tokens": num_trained,
        "num_forwarded_tokens": num_forwarded,
        "num_micro_batches": num_micro_batches,
        "skipped": int(skipped),
    }
    values = recorder.gathered(accelerator, batch) if recorder else {}
    tokens = None
    if values and batch.origins and not skipped:
        tokens = token_records(run.config.data.dataset, batch.origins, values)
    if run.critic:
        metrics |= update_critic(run, batch, forests, partial(passes, CRITIC_TRAINING))
    metrics |= update.metrics | {"learning_rate": run.optimizer.param_groups[0]["lr"]}
    progress = progress.after(update.after, update.trained_groups, stepped=not skipped)
    set_rates(run, progress.global_step)
    counted = {
        "global_step": progress.global_step,
        "num_trained_groups": len(update.trained_groups),
    }
    return replace(update, metrics=counted | metrics, progress=progress, tokens=tokens)


def set_rates(run: Run, global_step: int) -> None:
    """Set the learning rates for the update that follows `global_step` updates."""
    config = run.config.optimizer
    factor = rate_factor(config, run.num_planned, global_step)
    set_learning_rate(run.optimizer, run.config.learning_rate * factor)
    if run.critic_optimizer:
        set_learning_rate(run.critic_optimizer, config.critic_learning_rate * factor)


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
    old_values, value_targets = batch.values, batch.value_targets
    assert critic is not None
    assert optimizer is not None
    assert old_values is not None
    assert value_targets is not None
    here = sum(forest.num_targets for forest in forests)
    num_trained = int(over_processes(accelerator, [here], "sum")[0])
    clip, device = run.config.loss.value_clip, accelerator.device
    sums, share = torch.zeros(3, device=device), padded_forests(accelerator, forests)
    for done, forest in enumerate(watch(share), start=1):
        slot = forest.target_slot
        with without_reduction(critic) if done < len(share) else nullcontext():
            values = critic(forest.to(device))
            columns = {"old": old_values[slot], "target": value_targets[slot]}
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
