"""Train on a batch, from top to bottom: read, pack, forward, estimate, and step per mini-batch.

    steps          for each batch of the plan:
      read_share     read the rows of the batch; the next batch is read during this one
      ready_batch    exchange rows, pack them into micro-batches; old and reference
                     log-probabilities and values; KL in the reward; advantages (those of
                     groups, such as GRPO's, were estimated for the plan)
      -> Step        for each mini-batch, over the epochs of the batch
    make_update    for each Step:
      update         weights of the reduction; per micro-batch: forward, loss, backward; clip; step
      update_critic  the same for the critic
      -> metrics, and the records of its tokens

`trainer.run.loop` and `trainer.rl.updates` drive it; `rollouts replay` stops at a Step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
from torch import Tensor

from schemas.errors import RolloutError
from trainer.batches.data import Batch, groups_with_gradient, read_rows, to_batch, without_sets
from trainer.batches.forest import Forest, chain_lengths
from trainer.batches.packing import MiniBatch, cut_batch
from trainer.batches.plan import split
from trainer.batches.prefetch import one_ahead
from trainer.batches.stored_rows import Origins, StoredRows, digests_of, find_origins, stored_rows
from trainer.batches.transfer import Arriving, to_device
from trainer.distributed.balance import own_forests
from trainer.distributed.processes import agreed, exchange_rows, gather_parts, own_groups
from trainer.distributed.sharding import without_reduction
from trainer.models.critic import critic_values, update_critic
from trainer.models.optimizer import clip_and_step
from trainer.run.advice import differs_from_sampler, likely_cause
from trainer.run.batch_advantages import charge_kl, estimate, next_coef
from trainer.run.loss import Learner, loss_inputs, loss_of, policy_logprobs, with_teacher
from trainer.run.metrics import (
    batch_metrics,
    generated_per,
    generated_rows,
    sequence_metrics,
    update_metrics,
)
from trainer.run.open_run import TrainingRun
from trainer.run.pass_progress import (
    CRITIC_TRAINING,
    OLD_LOGPROBS,
    REFERENCE,
    SELECTION,
    TRAINING,
    UNWATCHED,
    VALUES,
    Passes,
    PlannedUpdate,
)
from trainer.run.state import Position
from trainer.run.token_records import TokenRecorder, recorder_of, token_records

Share = tuple[pl.DataFrame | None, dict[str, float], StoredRows | None]
"""What one process reads of a batch: the rows of its groups (None without groups) and, in the main
process, `sequence_metrics` of the batch and, if tokens are recorded, its rows in the dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyBatch:
    """A batch of T response tokens that is ready for its optimizer steps.

    Attributes:
        batch: The batch, with its advantages.
        groups: Groups of the batch, in order.
        mini_batches: Micro-batches of each optimizer step.
        known: Model outputs at the start of the batch; see `Position.known`.
        ref_logprobs: [T] reference log-probabilities for the loss; None if not needed.
        value_targets: [T] target values for the critic; None without a critic.
        kl_coef: KL coefficient of the next batch.
        metrics: Metrics of each mini-batch that are known before its update.
        generated: Metrics of the batch as generated, for its first update.
        raw_advantages: [T] advantages before `advantage.batch_normalize`.
        origins: Origins of the batch's tokens; None if no tokens are recorded.
    """

    batch: Batch
    groups: tuple[str, ...]
    mini_batches: list[MiniBatch]
    known: dict[str, Tensor]
    ref_logprobs: Tensor | None
    value_targets: Tensor | None
    kl_coef: float
    metrics: list[dict[str, Any]]
    generated: dict[str, float]
    raw_advantages: Tensor
    origins: Origins | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A mini-batch just before its optimizer step.

    Attributes:
        ready: Its batch.
        number: Index of the mini-batch in `ready.mini_batches`.
        num_left: Mini-batches of the batch that are not trained yet, including this one, over all
            epochs of the batch.
        before: Position of the run before the update (see `trainer.run.state`).
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


Made = tuple[Step, dict[str, Any], pa.Table | None, str | None]
"""An update that was made: its step, its metrics, its token records in the main process (None if
there are none), and the likely cause of a mismatch with the sampler (None if unknown)."""


def updates(
    run: TrainingRun,
    position: Position,
    *,
    explains: bool = True,
    passes: Passes = UNWATCHED,
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
            cause = likely_cause(run.learner, step.ready.batch, step.forests)
        seconds = time.perf_counter() - start
        metrics |= {
            "seconds": seconds,
            "tokens_per_s": metrics["num_forwarded_tokens"] / seconds,
        }
        passes.end_update(made=not metrics["skipped"])
        yield step, metrics, tokens, cause
        start = time.perf_counter()


def steps(run: TrainingRun, position: Position, passes: Passes = UNWATCHED) -> Iterator[Step]:
    """Yield the mini-batches from a position onwards, each just before its optimizer step.

    The caller must make each update before it asks for the next mini-batch, because the passes
    before a batch evaluate the current models.
    """
    sizes = run.config.batch
    batches = (run.plan.batches * sizes.num_epochs)[position.batch - run.first_batch :]
    shares = one_ahead(partial(read_share, run), batches)
    for groups in batches:
        share = agreed(run.learner.accelerator, lambda: next(shares))
        ready = ready_batch(run, groups, position, share, passes)
        moving = groups_with_gradient(ready.batch)
        groups_of = split(groups, sizes.groups_per_mini_batch)
        after = Position(batch=position.batch + 1, kl_coef=ready.kl_coef)
        order = list(range(len(ready.mini_batches))) * sizes.epochs_per_batch
        for done, number in enumerate(order[position.mini_batch :], position.mini_batch):
            here = dataclasses.replace(position, mini_batch=done, known=ready.known)
            between = dataclasses.replace(here, mini_batch=done + 1)
            yield Step(
                ready=ready,
                number=number,
                num_left=len(order) - done,
                before=here if done else position,
                after=after if done + 1 == len(order) else between,
                moving=moving.intersection(groups_of[number]),
                metrics=ready.metrics[number] | (ready.generated if done == 0 else {}),
            )
        position = after


def read_share(run: TrainingRun, groups: Sequence[str]) -> Share:
    """Read the part of a batch that is assigned to this process."""
    config, own = run.config, own_groups(run.learner.accelerator, groups)
    rows = read_rows(run.rollouts, run.plan, own, config.batch) if own else None
    if not run.learner.accelerator.is_main_process:
        return rows, {}, None
    found = generated_rows(run.rollouts, groups)
    generated = sequence_metrics(
        found,
        config.data.outcome or "last",
        generated_per(config.data.dataset),
        merges=config.batch.sequence_layout == "merge",
    )
    if config.run.record_tokens == "none":
        return rows, generated, None
    return rows, generated, stored_rows(found.hstack(digests_of(config.data.dataset, groups)))


def ready_batch(
    run: TrainingRun,
    groups: tuple[str, ...],
    position: Position,
    share: Share,
    passes: Passes = UNWATCHED,
) -> ReadyBatch:
    """Make a batch ready for its optimizer steps.

    Args:
        run: The run.
        groups: Groups of the batch.
        position: Position of the run; `position.known` has the model outputs if it is within the
            batch.
        share: From `read_share`.
        passes: Counts the forwarded micro-batches.
    """
    config, accelerator = run.config, run.learner.accelerator
    # Rows: every process reads some groups, and gets the rows of all.
    own, generated, stored = share
    rows = exchange_rows(accelerator, own)
    batch = to_batch(rows, config.batch.max_row_tokens, imitates=config.loss.is_supervised)
    if config.loss.policy_loss_type == "distill":
        batch = without_sets(batch)
    run.limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    generated["generate/batch_num_seq"] = len(batch.names)
    if config.batch.sequence_layout == "merge":
        generated["generate/num_seq_after_merge"] = len(batch.names)
    # Micro-batches.
    mini_batches = cut_batch(batch, config.batch, accelerator.num_processes)
    passes.begin_batch(_planned(run, mini_batches, position))
    # Old and reference log-probabilities, and values, under the models before the first update.
    known = position.known or _outputs(run, batch, mini_batches, passes)
    old_logprobs, ref_logprobs = known.get("old_logprobs"), known.get("ref_logprobs")
    # KL divergence in the reward; then it is not in the loss.
    kl_metrics, kl_coef = dict[str, float](), position.kl_coef
    if config.loss.kl_reward_coef and old_logprobs is not None and ref_logprobs is not None:
        batch, kl_metrics = charge_kl(
            batch,
            run.plan,
            groups,
            config,
            coef=kl_coef,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
        )
        kl_coef, ref_logprobs = next_coef(kl_coef, kl_metrics, batch, config.loss), None
    is_supervised = config.loss.is_supervised
    estimates = estimate(batch, config.advantage, known.get("values"), is_supervised=is_supervised)
    batch = dataclasses.replace(batch, advantages=estimates.advantages)
    counts = batch_metrics(run.plan, batch, groups, estimates)
    return ReadyBatch(
        batch=batch,
        groups=groups,
        mini_batches=mini_batches,
        known=known,
        ref_logprobs=ref_logprobs,
        value_targets=estimates.value_targets,
        kl_coef=kl_coef,
        metrics=[
            mini_batch.metrics | counted | kl_metrics
            for mini_batch, counted in zip(mini_batches, counts, strict=True)
        ],
        generated=generated,
        raw_advantages=estimates.raw,
        origins=find_origins(rows, stored) if stored else None,
    )


def make_update(
    run: TrainingRun, step: Step, global_step: int, passes: Passes = UNWATCHED
) -> tuple[dict[str, Any], pa.Table | None]:
    """Update the policy, and the critic if there is one, on a mini-batch.

    Args:
        run: The run that made the mini-batch ready.
        step: The mini-batch.
        global_step: Number of the update.
        passes: Counts the forwarded micro-batches.

    Returns:
        The metrics of the update, and its token records, if the main process has any.
    """
    ready, config, forests = step.ready, run.config.run, step.forests
    recorder = recorder_of(
        ready.batch, forests, config.record_tokens, seed=config.seed, global_step=global_step
    )
    old_logprobs, ref_logprobs = ready.known.get("old_logprobs"), ready.ref_logprobs
    metrics: dict[str, Any] = update(
        run.learner, ready.batch, forests, old_logprobs, ref_logprobs, recorder, passes
    )
    tokens = _records(run, ready, recorder)
    if run.critic and ready.value_targets is not None:
        values, watch = ready.known["values"], partial(passes, CRITIC_TRAINING)
        metrics |= update_critic(run.critic, forests, values, ready.value_targets, watch)
    rate = {"learning_rate": run.learner.optimizer.param_groups[0]["lr"]}
    return metrics | step.metrics | rate, None if metrics["skipped"] else tokens


def update(
    learner: Learner,
    batch: Batch,
    forests: Sequence[Forest],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None = None,
    recorder: TokenRecorder | None = None,
    passes: Passes = UNWATCHED,
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch and take an optimizer step.

    With the weight w from `loss.reduction`, the policy loss p, the correction c for sampler
    mismatch, the estimated divergence k and the entropy h of each target:

        loss = sum of w (c p + kl_loss_coef k - entropy_loss_coef h)

    No step is taken if there are no trained tokens or the gradient is not finite.

    Args:
        learner: Policy and optimizer.
        batch: The batch; the forests' targets index its tokens.
        forests: Micro-batches, which together contain every target of the mini-batch once; all
            targets of a row are in the same one. Each process forwards its share of them.
        old_logprobs: [T] nats under the policy at the start of the batch; None if the loss does not
            need them, or if this is the only update of its batch, because old and current
            log-probabilities are then equal.
        ref_logprobs: [T] nats under the learner's reference; None without one.
        recorder: Receives the values that enter the loss; None: they are not recorded.
        passes: Counts the forwarded micro-batches, and shows the progress.

    Returns:
        Metrics; `skipped` is 1 if no step was taken.

    Raises:
        InputError: A user's loss or reduction fails, or its result is invalid.
    """
    num_trained = sum(forest.num_targets for forest in forests)
    inputs = loss_inputs(learner, batch, forests, old_logprobs, ref_logprobs, passes)
    accelerator, parts = learner.accelerator, dict[int, Arriving]()
    own, failures = own_forests(accelerator, forests), list[RolloutError]()
    for done, (number, forest) in enumerate(passes(TRAINING, own), start=1):
        with without_reduction(learner.policy) if done < len(own) else nullcontext():
            slot = forest.target_slot
            temperature = to_device(batch.temperature[slot], accelerator.device)
            forest = with_teacher(forest, batch, learner.loss)
            outputs = learner.policy(forest.to(accelerator.device), temperature)
            loss, found = loss_of(learner, batch, slot, outputs, inputs, failures, recorder)
            # Data-parallel wrappers average gradients over processes; the weights are global.
            accelerator.backward(loss * accelerator.num_processes)
            parts[number] = Arriving(found)
    if learner.loss.has_own_loss:
        agreed(accelerator, partial(_raise_any, failures))
    grad_norm = 0.0
    if num_trained:
        parameters, max_norm = learner.policy.parameters(), learner.optimization.max_grad_norm
        grad_norm = clip_and_step(parameters, learner.optimizer, max_norm)
    arrived = {number: arriving.read() for number, arriving in parts.items()}
    return update_metrics(gather_parts(accelerator, arrived), learner.loss.policy_loss_type) | {
        "grad_norm": grad_norm,
        "num_trained_tokens": num_trained,
        "num_forwarded_tokens": sum(forest.num_tokens for forest in forests),
        "num_micro_batches": len(forests),
        "skipped": int(not num_trained or not math.isfinite(grad_norm)),
    }


def _raise_any(failures: Sequence[RolloutError]) -> None:
    if failures:
        raise failures[0]


def _needed(run: TrainingRun, num_mini_batches: int) -> list[str]:
    """List the forward passes that a batch needs before its first update."""
    learner, loss = run.learner, run.config.loss
    # With a single update, old log-probabilities are the policy's current ones, which saves a pass.
    several = num_mini_batches * run.config.batch.epochs_per_batch > 1
    needs_old = (several and loss.needs_old_logprobs) or loss.kl_reward_coef
    return [
        *([VALUES] if run.critic else []),
        *([OLD_LOGPROBS] if needs_old else []),
        *([REFERENCE] if learner.reference is not None else []),
    ]


def _outputs(
    run: TrainingRun, batch: Batch, mini_batches: Sequence[MiniBatch], passes: Passes
) -> dict[str, Tensor]:
    """Compute the model outputs that the updates of a batch need: see `Position.known`."""
    learner, known = run.learner, dict[str, Tensor]()
    forests = [forest for mini_batch in mini_batches for forest in mini_batch.forests]
    for name in _needed(run, len(mini_batches)):
        watch = partial(passes, name)
        if name == VALUES and run.critic:
            known["values"] = critic_values(run.critic, batch, forests, watch)
        elif name == OLD_LOGPROBS:
            known["old_logprobs"] = policy_logprobs(learner, batch, forests, watch=watch)
        else:
            model = learner.reference
            known["ref_logprobs"] = policy_logprobs(learner, batch, forests, model, watch)
    return known


def _planned(
    run: TrainingRun, mini_batches: Sequence[MiniBatch], position: Position
) -> list[PlannedUpdate]:
    """Count the tokens that each remaining update of a batch will forward, by pass."""
    num_epochs = run.config.batch.epochs_per_batch
    several = [SELECTION] if run.config.loss.selects_targets else []
    each = [*several, TRAINING, *([CRITIC_TRAINING] if run.critic else [])]
    planned = []
    for epoch in range(1, num_epochs + 1):
        for mini_batch in mini_batches:
            label = f"epoch {epoch} of {num_epochs}" if num_epochs > 1 else ""
            planned.append(PlannedUpdate(dict.fromkeys(each, mini_batch.num_tokens), label))
    left = planned[position.mini_batch :]
    if left and not position.known:
        total = sum(mini_batch.num_tokens for mini_batch in mini_batches)
        first = dict.fromkeys(_needed(run, len(mini_batches)), total)
        left[0].passes = first | dict(left[0].passes)
    return left


def _records(
    run: TrainingRun, ready: ReadyBatch, recorder: TokenRecorder | None
) -> pa.Table | None:
    """Gather the token records of an update in the main process; None if there are none."""
    if recorder is None:
        return None
    values = recorder.gathered(run.learner.accelerator)
    if ready.origins is None or not values:
        return None
    if "ref_logprobs" in ready.known:
        values["ref_logprobs"] = ready.known["ref_logprobs"][values["slots"]]
    return token_records(run.config.data.dataset, ready.origins, values)
