"""Replay an update of a run, unchanged or with changes, and compare it with the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import torch

from rollout_io.configuration import build, checked_values
from rollout_io.dataset.filesystems import whole, writable
from rollout_io.dataset.locking import destination
from schemas.errors import ConfigError, InputError, count
from schemas.ragged import BoolArray
from trainer.batch import Batch, cut_batch, groups_with_gradient
from trainer.batches.chains import Origins
from trainer.batches.plan import split
from trainer.config.sections import AdvantageConfig, LossConfig, OptimizerConfig
from trainer.config.train_config import PATHS, TrainConfig
from trainer.forensics.reconstruct import (
    Reconstruction,
    forwarding,
    naming_damaged,
    read_recorded,
    reconstruct,
)
from trainer.forensics.replay_comparison import Comparison, Difference, as_recorded
from trainer.run.checkpoint import write_model
from trainer.run.metrics import batch_metrics
from trainer.run.open_run import frozen_reference, load_reference, open_run
from trainer.run.run import Run
from trainer.run.run_log import CHANGING, MACHINE, start_of, starts_of, this_machine
from trainer.update import Update, make_update, read_groups, ready_batch, set_rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Result of replaying an update."""

    run: str  # its directory
    update: int
    iteration: int | None  # of `rollouts rl`, counted from 0; None for `rollouts train`
    checkpoint: str | None  # from which the replay started; None: the start model
    num_forwarded: int  # mini-batches replayed between the checkpoint and the update
    num_threads: int
    compared: tuple[str, ...]  # descriptions of the data that were compared
    not_compared: tuple[str, ...]  # metrics: times, and metrics of sampling
    differences: tuple[Difference, ...]  # in the order of the updates
    recorded: Mapping[str, Any]  # metrics of the run
    replayed: Mapping[str, Any]  # metrics of the replayed update
    changed: Mapping[str, Any] | None  # metrics of the update with changes; None without changes
    changes: tuple[str, ...]  # their descriptions
    notes: tuple[str, ...]  # why the replay may differ from the run
    out: str | None  # directory of the resulting model; None if it was not written

    @property
    def is_identical(self) -> bool:
        """True if all compared values are equal bit for bit."""
        return not self.differences


def replay(
    run: str | Path,
    update: int,
    *,
    settings: Sequence[str] = (),
    without: Sequence[str] = (),
    out: str | Path | None = None,
) -> Replay:
    """Replay an update of a run, and compare it with the records of the run.

    The run's directory is only read. The comparison covers the metrics of the update and of the
    updates replayed before it, the update's recorded tokens, and the weights and the state of a
    checkpoint that the run saved after the update. With changes, the update is computed twice from
    the same state: unchanged, to compare metrics and tokens, and with the changes.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`.
        update: Number of the update: its `global_step`, counted from 1.
        settings: Settings to change, `key=value`, or new paths of data and models that have moved.
        without: Trajectories or rows to leave out of the loss; see `without_rows`.
        out: New directory for the resulting model; None: it is not written.

    Raises:
        RolloutError: See `reconstruct`, `changed_config` and `without_rows`; or `out_is_free`: the
            output directory exists or is inside the run.

    Example:
        >>> replay("run", 12).is_identical  # doctest: +SKIP
        True
        >>> replay("run", 12, without=["g3_1"]).changed["grad_norm"]  # doctest: +SKIP
    """
    path = Path(run)
    if out is not None:
        _refuse_taken(Path(out), path)
    places, settings = split_settings(settings)
    changed_config(read_recorded(path, places).config, settings)
    at_batch = partial(prepared, settings=settings) if settings else None
    with forwarding("replay", "replaying", update) as passes:
        before = reconstruct(path, update, places=places, at_batch=at_batch, passes=passes)
        is_changed = bool(settings or without)
        first = _paused(before.run) if is_changed else before.run
        # clip_cov draws the same numbers in both updates.
        with torch.random.fork_rng(enabled=is_changed):
            result = make_update(first, before.pending, before.progress, passes)
        passes.end_update(stepped=not result.metrics["skipped"])
        run_after, pending, changed = before.run, before.pending, None
        if is_changed:
            if before.prepared is not None:
                changed_run, batch = before.prepared
                run_after = dataclasses.replace(changed_run, progress=run_after.progress)
                pending = with_batch(before.run, pending, batch)
            pending = without_rows(run_after, pending, without) if without else pending
            apply_settings(run_after, before.progress.global_step)
            changed = as_recorded(make_update(run_after, pending, before.progress, passes).metrics)
    comparison = Comparison(before)
    with naming_damaged(before.recorded, update):
        comparison.compare(result, is_changed=is_changed)
    if out is not None:
        _write(Path(out), run_after)
    return Replay(
        run=str(path),
        update=update,
        iteration=comparison.replayed.get("iteration"),
        checkpoint=None if before.checkpoint is None else str(before.checkpoint),
        num_forwarded=len(before.forwarded),
        num_threads=torch.get_num_threads(),
        compared=tuple(comparison.compared),
        not_compared=tuple(n for n in before.line if n not in comparison.names(before.line)),
        differences=tuple(comparison.differences),
        recorded=before.line,
        replayed=comparison.replayed,
        changed=changed,
        changes=(*settings, *(f"without {row}" for row in without)),
        notes=tuple(_notes(before)),
        out=None if out is None else str(out),
    )


def _paused(run: Run) -> Run:
    """Return a copy of the run whose optimizers clear the gradient but never step."""

    def paused(optimizer: torch.optim.Optimizer) -> Any:
        clear, groups = optimizer.zero_grad, optimizer.param_groups
        return SimpleNamespace(zero_grad=clear, param_groups=groups, step=lambda: None)

    critic = run.critic_optimizer
    return dataclasses.replace(
        run, optimizer=paused(run.optimizer), critic_optimizer=critic and paused(critic)
    )


def _notes(before: Reconstruction) -> Iterator[str]:
    """Yield reasons why the replayed update may differ from the run's."""
    out, update = before.recorded.path, before.update
    start, here = start_of(out, update), this_machine(before.run.accelerator)
    if not start:
        unless = f"if it was not {here['num_threads']}, set OMP_NUM_THREADS"
        yield f"the run did not record its number of threads; {unless}"
    for key in [key for key in MACHINE if key in start and start[key] != here[key]]:
        yield f"{key} is {here[key]}, but was {start[key]} in the run"
    if here["device"].partition(" ")[0] != "CPU":
        yield f"results on {here['device']} are not reproducible bit for bit"
    first = before.progress.global_step - len(before.forwarded) + 1
    starts = [start_of(out, step) for step in range(max(first, 1), update + 1)]
    for key in CHANGING if starts_of(out) else ():
        if len({one.get(key) for one in starts}) > 1:
            yield f"{key} was changed by --resume between updates {first} and {update}"


def _refuse_taken(out: Path, run: Path) -> None:
    """Refuse an output directory that exists or is inside the run."""
    finding, hint = "the output path already exists", "choose a different --out, or remove it"
    if is_inside := out.resolve().is_relative_to(run.resolve()):
        finding, hint = "the output path is inside the run", "choose a directory outside the run"
    if is_inside or out.exists() or out.is_symlink():
        raise InputError("out_is_free", str(out), finding, hint=hint)


def _write(out: Path, run: Run) -> None:
    """Write the policy, and the critic in `critic/`, in the layout of a checkpoint."""
    unwrap = run.accelerator.unwrap_model
    with destination(out), writable(str(out)), whole(out) as partial:
        write_model(partial, unwrap(run.policy).model, run.source)
        if run.critic is not None:
            unwrap(run.critic).save(partial / "critic")


MAY_CHANGE = (
    {f"loss.{key}" for key in LossConfig.__dataclass_fields__}
    | {f"advantage.{key}" for key in AdvantageConfig.__dataclass_fields__}
    | {f"optimizer.{key}" for key in OptimizerConfig.__dataclass_fields__}
    | {"data.outcome", "data.failed", "data.partial_groups", "batch.tokens_per_micro_batch"}
) - {*PATHS, "optimizer.algorithm"}
"""Keys that may change for a single update: they affect neither the models nor the rows of the
update's batch."""


def split_settings(settings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split `key=value` strings into new paths of the dataset and models, and changed settings.

    Example:
        >>> split_settings(["model.path=other/", "optimizer.learning_rate=1e-5"])
        ({'model.path': 'other/'}, ['optimizer.learning_rate=1e-5'])
    """
    places, changes = dict[str, str](), []
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if key in PATHS and value:
            places[key] = value
        else:
            changes.append(setting.strip())
    return places, changes


def changed_config(config: TrainConfig, settings: Sequence[str]) -> TrainConfig:
    """Apply `key=value` strings to the configuration of a run.

    Raises:
        ConfigError: `replay_change`: a key affects more than one update; `config_key`,
            `config_value`: see `load_config`.
    """
    values = checked_values(TrainConfig, dataclasses.asdict(config), settings, "config.json")
    for setting in settings:
        key = ".".join(setting.partition("=")[0].strip().split(".")[:2])
        if key not in MAY_CHANGE:
            finding = f"`{key}`, which cannot change for a single update"
            expected = "a key of the loss, the advantages or the optimizer"
            hint = "start a run with it: rollouts train DS --model DIR --out RUN"
            raise ConfigError("replay_change", f"--set {setting}", finding, expected, hint)
    return build(TrainConfig, values)


def prepared(run: Run, update: Update, settings: Sequence[str]) -> tuple[Run, Batch]:
    """Return a run with different settings (`key=value`), and the batch of a step made ready with them.

    The models and optimizers stay the same. Advantages, old and reference log-probabilities, and values
    are computed again: the run must be at the start of the batch.

    Raises:
        ConfigError: `replay_change`: the settings need a critic that the run does not have.
        RolloutError: The dataset cannot be used with these settings.
    """
    config = changed_config(run.config, settings)
    if config.advantage.needs_critic and run.critic is None:
        finding = f"{config.advantage.estimator} needs a critic, which the run has not trained"
        hint = "choose an estimator without a critic"
        raise ConfigError("replay_change", "--set advantage.estimator", finding, hint=hint)
    reference = run.reference if config.loss.needs_reference else None
    if reference is None:
        loaded = load_reference(config)
        reference = frozen_reference(run.accelerator, config, run.policy, loaded)
    changed = open_run(
        config,
        resume=None,
        opened=dataclasses.replace(run, reference=reference),
        num_planned=run.num_planned,
        first_batch=run.first_batch,
        tell=lambda _subject, _remark: None,
    )
    position, coef = update.before, config.loss.kl_reward_coef
    if coef != run.config.loss.kl_reward_coef:
        position = dataclasses.replace(position, kl_coef=coef)
    groups = update.batch.groups
    return changed, ready_batch(changed, groups, position, *read_groups(changed, groups))


def with_batch(run: Run, update: Update, batch: Batch) -> Update:
    """Return a mini-batch with the rows of a `prepared` batch."""
    before, after = (one.mini_batches[update.number].metrics for one in (update.batch, batch))
    others = {name: value for name, value in update.metrics.items() if name not in before}
    groups = _trained_groups(run, update, batch)
    return dataclasses.replace(update, batch=batch, trained_groups=groups, metrics=after | others)


def apply_settings(run: Run, global_step: int) -> None:
    """Apply the configuration of a changed run to its optimizers and its policy."""
    set_rates(run, global_step)
    settings = run.config.optimizer
    for _, optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group |= {"betas": settings.betas, "weight_decay": settings.weight_decay}
    run.whole_policy.entropy_gradient = run.config.loss.entropy_loss_coef > 0


def without_rows(run: Run, update: Update, without: Sequence[str]) -> Update:
    """Leave rows out of the loss of a mini-batch, as if it had been built without them.

    The denominators of `loss.reduction` count only the rows, trajectories and groups that remain,
    and the gradient is clipped again. Advantages, old and reference log-probabilities and values do
    not change: the row stays in the baseline of its group. In a merged row, the tokens of a step that
    is left out remain as the context of later steps; the row no longer counts once none of its
    targets remains.

    `without` are trajectories, or rows `TRAJECTORY:STEP` with the stored `step_index`.

    Raises:
        InputError: `replay_without`: a row is not in the mini-batch or does not train, or none
            remains.
    """
    batch = update.batch
    assert batch.origins is not None
    slots = np.arange(len(batch.trains))
    row = batch.responses.row_of(slots)

    def has(tokens: BoolArray) -> BoolArray:
        return np.bincount(row[tokens], minlength=len(batch.names)) > 0

    trained = batch.trains & (batch.mini_batch == update.number)[row]
    stored, _ = batch.origins.of(slots)
    used = np.zeros(len(batch.origins.rows), np.bool_)
    used[stored[trained]] = True
    chosen = _chosen(run, batch.origins, without, used)
    leaves = trained & chosen[stored]
    if not (trained & ~leaves).any():
        finding, hint = "no row of the update remains", "leave fewer rows out"
        raise InputError("replay_without", "--without", finding, hint=hint)
    # Rows whose targets are all left out, and rows without targets whose steps are all chosen.
    all_chosen = has(slots >= 0) & ~has(~chosen[stored])
    gone = ~has(trained & ~leaves) & (has(trained) | all_chosen)
    # The removed rows move to a mini-batch that is never trained, so no denominator counts them.
    nowhere = len(batch.mini_batches)
    batch = dataclasses.replace(
        batch,
        trains=batch.trains & ~leaves,
        mini_batch=np.where(gone & (batch.mini_batch == update.number), nowhere, batch.mini_batch),
    )
    mini_batches = tuple(cut_batch(batch, run.config.batch))
    counted = _metrics_without(run, update, batch)
    metrics = update.metrics | mini_batches[update.number].metrics | counted
    batch = dataclasses.replace(batch, mini_batches=mini_batches)
    groups = _trained_groups(run, update, batch)
    return dataclasses.replace(update, batch=batch, trained_groups=groups, metrics=metrics)


def _trained_groups(run: Run, update: Update, batch: Batch) -> frozenset[str]:
    """Return the groups of a mini-batch that have a gradient in a changed batch."""
    groups = split(update.batch.groups, run.config.batch.groups_per_mini_batch)[update.number]
    return groups_with_gradient(run.accelerator, batch).intersection(groups)


def _chosen(run: Run, origins: Origins, without: Sequence[str], used: BoolArray) -> BoolArray:
    """Return a mask of the stored rows to leave out ([D] bool).

    `used` marks the rows that the update trains on.
    """
    names, steps = origins.rows["trajectory_id"], origins.rows["step_index"]
    chosen = np.zeros(len(names), np.bool_)
    for selector in without:
        matches = (names == selector).to_numpy()
        name, colon, number = selector.rpartition(":")
        if not matches.any() and colon and number.isdecimal():
            matches = ((names == name) & (steps == int(number))).to_numpy()
        chosen |= matches
        if (matches & used).any():
            continue
        finding = "no such row in the update"
        if matches.any():
            finding = f"{count(int(matches.sum()), 'row')}, none of which the update trains on"
        examples = names.filter(used).unique(maintain_order=True).head(3).to_list()
        expected = f"rows that it trains on, such as the rows of {', '.join(examples)}"
        hint = f"list the rows of its dataset: rollouts inspect {run.config.data.dataset}"
        raise InputError("replay_without", f"--without {selector}", finding, expected, hint)
    return chosen


def _metrics_without(run: Run, update: Update, batch: Batch) -> dict[str, Any]:
    """Recompute the mini-batch's counts and means without trajectories that have no rows left."""
    before, after = (
        one.trajectory[one.mini_batch == update.number] for one in (update.batch, batch)
    )
    groups, every = update.batch.groups, run.plan.trajectories
    ids = every.filter(pl.col("instance_id").is_in(list(groups)))["trajectory_id"].sort()
    lost = ids[np.setdiff1d(before, after)]  # as `Batch.trajectory` numbers them
    others = every.filter(~pl.col("trajectory_id").is_in(lost.implode()))
    plan = dataclasses.replace(run.plan, trajectories=others)
    return batch_metrics(run.accelerator, plan, batch, groups)[update.number]
