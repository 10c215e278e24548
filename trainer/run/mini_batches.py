"""Train batch by batch: load a batch, evaluate the models on it, and update per mini-batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
from torch import Tensor

from trainer.batches.data import Batch, groups_with_gradient, read_rows, to_batch
from trainer.batches.forest import Forest, chain_lengths
from trainer.batches.origins import Origins, StoredRows, find_origins, stored_rows
from trainer.batches.packing import MiniBatch, cut_batch
from trainer.batches.plan import split
from trainer.batches.prefetch import one_ahead
from trainer.distributed.processes import agreed, exchange_rows, own_groups
from trainer.models.critic import critic_values, update_critic
from trainer.run.advice import differs_from_sampler
from trainer.run.batch_advantages import estimate
from trainer.run.batch_metrics import (
    batch_metrics,
    generated_per,
    generated_rows,
    sequence_metrics,
)
from trainer.run.kl_reward import charge_kl, next_coef
from trainer.run.mismatch_causes import likely_cause
from trainer.run.open_run import TrainingRun
from trainer.run.passes import (
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
from trainer.run.update import policy_logprobs, update


class Share(NamedTuple):
    """The part of a batch that one process reads.

    Attributes:
        rows: Rows of the process's groups; None if it has no groups.
        generated: In the main process, `sequence_metrics` of the batch.
        stored: In the main process, the batch's rows in the dataset; None if no tokens are recorded.
    """

    rows: pl.DataFrame | None
    generated: dict[str, float]
    stored: StoredRows | None


class LoadedBatch(NamedTuple):
    """A batch with its mini-batches, generation metrics and the origins of its tokens."""

    batch: Batch
    mini_batches: list[MiniBatch]
    generated: dict[str, float]
    origins: Origins | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatchUpdate:
    """Result of one mini-batch's update.

    Attributes:
        moving: Groups of the mini-batch that have a gradient.
        position: Position of the run after the update.
        metrics: Metrics of the update.
        cause: Likely cause of a mismatch with the sampler's log-probabilities; None if unknown.
        tokens: Token records of the update, in the main process, if the run records any.
    """

    moving: frozenset[str]
    position: Position
    metrics: dict[str, Any]
    cause: str | None = None
    tokens: pa.Table | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A batch of T response tokens that is ready for its optimizer steps.

    Attributes:
        batch: The batch, with its advantages.
        mini_batches: Micro-batches of each optimizer step.
        known: Model outputs at the start of the batch; see `Position.known`.
        ref_logprobs: [T] reference log-probabilities for the loss; None if not needed.
        value_targets: [T] target values for the critic; None without a critic.
        kl_coef: KL coefficient of the next batch.
        metrics: Metrics of each mini-batch that are known before its update.
        raw_advantages: [T] advantages before `advantage.batch_normalize`.
        origins: Origins of the batch's tokens; None if no tokens are recorded.
    """

    batch: Batch
    mini_batches: list[MiniBatch]
    known: dict[str, Tensor]
    ref_logprobs: Tensor | None
    value_targets: Tensor | None
    kl_coef: float
    metrics: list[dict[str, Any]]
    raw_advantages: Tensor
    origins: Origins | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedUpdate:
    """A mini-batch just before its optimizer step.

    Attributes:
        prepared: Its batch.
        groups: Groups of the batch, in order.
        number: Index of the mini-batch in `prepared.mini_batches`.
        num_left: Mini-batches of the batch that are not trained yet, including this one, over all
            epochs of the batch.
        before: Position of the run before the update (see `trainer.run.state`).
        after: Position of the run after the update.
        moving: Groups of the mini-batch that have a gradient.
        metrics: Metrics that are known before the update.
    """

    prepared: PreparedBatch
    groups: tuple[str, ...]
    number: int
    num_left: int
    before: Position
    after: Position
    moving: frozenset[str]
    metrics: dict[str, Any]

    @property
    def forests(self) -> list[Forest]:
        """Micro-batches of the update."""
        return self.prepared.mini_batches[self.number].forests


def mini_batch_updates(
    run: TrainingRun,
    position: Position,
    *,
    explains: bool = True,
    passes: Passes = UNWATCHED,
) -> Iterator[MiniBatchUpdate]:
    """Train on the mini-batches from a position onwards, and yield their results.

    With `explains`, the first mismatch with the sampler's log-probabilities is analysed to find its
    cause. `passes` counts the forwarded micro-batches.
    """
    global_step, cause = run.progress.global_step, None
    start = time.perf_counter()
    for step in prepared_updates(run, position, passes):
        made = make_update(run, step, global_step + 1, passes)
        metrics = made.metrics
        global_step += not metrics["skipped"]
        if explains and cause is None and differs_from_sampler(metrics):
            cause = likely_cause(run.learner, step.prepared.batch, step.forests)
        seconds = time.perf_counter() - start
        metrics |= {
            "seconds": seconds,
            "tokens_per_s": metrics["num_forwarded_tokens"] / seconds,
        }
        passes.end_update(made=not metrics["skipped"])
        yield dataclasses.replace(made, cause=cause)
        start = time.perf_counter()


def prepared_updates(
    run: TrainingRun, position: Position, passes: Passes = UNWATCHED
) -> Iterator[PreparedUpdate]:
    """Yield the mini-batches from a position onwards, each just before its optimizer step.

    The caller must make each update before it asks for the next mini-batch, because the passes
    before a batch evaluate the current models.
    """
    sizes = run.config.batch
    batches = (run.plan.batches * sizes.num_epochs)[position.batch - run.first_batch :]
    shares = one_ahead(partial(_read_share, run), batches)
    for groups in batches:
        loaded = _load(run, shares)
        passes.begin_batch(_planned(run, loaded.mini_batches, position))
        prepared = prepare_batch(run, groups, position, loaded, passes)
        moving = groups_with_gradient(prepared.batch)
        groups_of = split(groups, sizes.groups_per_mini_batch)
        after = Position(batch=position.batch + 1, kl_coef=prepared.kl_coef)
        order = list(range(len(prepared.mini_batches))) * sizes.epochs_per_batch
        for done, number in enumerate(order[position.mini_batch :], position.mini_batch):
            here = dataclasses.replace(position, mini_batch=done, known=prepared.known)
            between = dataclasses.replace(here, mini_batch=done + 1)
            yield PreparedUpdate(
                prepared=prepared,
                groups=groups,
                number=number,
                num_left=len(order) - done,
                before=here if done else position,
                after=after if done + 1 == len(order) else between,
                moving=moving.intersection(groups_of[number]),
                metrics=prepared.metrics[number] | (loaded.generated if done == 0 else {}),
            )
        position = after


def make_update(
    run: TrainingRun, step: PreparedUpdate, global_step: int, passes: Passes = UNWATCHED
) -> MiniBatchUpdate:
    """Update the policy, and the critic if there is one, on a mini-batch.

    Args:
        run: The run that prepared the mini-batch.
        step: The mini-batch.
        global_step: Number of the update.
        passes: Counts the forwarded micro-batches.
    """
    prepared, config, forests = step.prepared, run.config, step.forests
    recorder = recorder_of(
        prepared.batch,
        forests,
        config.run.record_tokens,
        seed=config.run.seed,
        global_step=global_step,
    )
    metrics: dict[str, Any] = update(
        run.learner,
        prepared.batch,
        forests,
        prepared.known.get("old_logprobs"),
        prepared.ref_logprobs,
        recorder,
        passes,
    )
    tokens = _records(run, prepared, recorder)
    if run.critic and prepared.value_targets is not None:
        values = prepared.known["values"]
        watch = partial(passes, CRITIC_TRAINING)
        metrics |= update_critic(run.critic, forests, values, prepared.value_targets, watch)
    rate = {"learning_rate": run.learner.optimizer.param_groups[0]["lr"]}
    return MiniBatchUpdate(
        moving=step.moving,
        position=step.after,
        metrics=metrics | step.metrics | rate,
        tokens=None if metrics["skipped"] else tokens,
    )


def prepare_batch(
    run: TrainingRun,
    groups: Sequence[str],
    position: Position,
    loaded: LoadedBatch,
    passes: Passes = UNWATCHED,
) -> PreparedBatch:
    """Compute model outputs, subtract the KL divergence from rewards, and estimate advantages."""
    config, (batch, mini_batches) = run.config, loaded[:2]
    known = position.known or _known(run, batch, mini_batches, passes)
    old_logprobs, ref_logprobs = known.get("old_logprobs"), known.get("ref_logprobs")
    kl_metrics: dict[str, float] = {}
    kl_coef = position.kl_coef
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
    estimates = estimate(
        batch,
        config.advantage,
        known.get("values"),
        is_supervised=config.loss.is_supervised,
    )
    batch = dataclasses.replace(batch, advantages=estimates.advantages)
    counts = batch_metrics(run.plan, batch, groups, estimates)
    return PreparedBatch(
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
        raw_advantages=estimates.raw,
        origins=loaded.origins,
    )


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


def _known(
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
    run: TrainingRun, prepared: PreparedBatch, recorder: TokenRecorder | None
) -> pa.Table | None:
    """Gather the token records of an update in the main process; None if there are none."""
    if recorder is None:
        return None
    values = recorder.gathered(run.learner.accelerator)
    if prepared.origins is None or not values:
        return None
    if "ref_logprobs" in prepared.known:
        values["ref_logprobs"] = prepared.known["ref_logprobs"][values["slots"]]
    return token_records(run.config.data.dataset, prepared.origins, values)


def _read_share(run: TrainingRun, groups: Sequence[str]) -> Share:
    """Read the part of a batch that is assigned to this process."""
    accelerator, batch = run.learner.accelerator, run.config.batch
    own = own_groups(accelerator, groups)
    rows = read_rows(run.rollouts, run.plan, own, batch) if own else None
    if not accelerator.is_main_process:
        return Share(rows, {}, None)
    found = generated_rows(run.rollouts, groups)
    merges, records = batch.sequence_layout == "merge", run.config.run.record_tokens != "none"
    return Share(
        rows=rows,
        generated=sequence_metrics(
            found,
            run.config.data.outcome or "last",
            generated_per(run.config.data.dataset),
            merges=merges,
        ),
        stored=stored_rows(found) if records else None,
    )


def load_groups(run: TrainingRun, groups: Sequence[str]) -> LoadedBatch:
    """Load a batch of the given groups."""
    return _load(run, iter([_read_share(run, groups)]))


def _load(run: TrainingRun, shares: Iterator[Share]) -> LoadedBatch:
    """Load the next batch, from the parts that all processes read."""
    accelerator, config = run.learner.accelerator, run.config.batch
    own, generated, stored = agreed(accelerator, lambda: next(shares))
    rows = exchange_rows(accelerator, own)
    batch = to_batch(rows, config.max_row_tokens)
    run.limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    generated["generate/batch_num_seq"] = len(batch.names)
    if config.sequence_layout == "merge":
        generated["generate/num_seq_after_merge"] = len(batch.names)
    return LoadedBatch(
        batch=batch,
        mini_batches=cut_batch(batch, config, accelerator.num_processes),
        generated=generated,
        origins=find_origins(rows, stored) if stored else None,
    )
