"""Change an update before it is replayed: change settings, or leave out some of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from torch import nn

from rollout_io.configuration import build, checked_values
from schemas.errors import ConfigError, InputError, count
from schemas.ragged import BoolArray
from trainer.batch import Batch, cut_batch, groups_with_gradient
from trainer.batches.chains import Origins
from trainer.config.sections import AdvantageConfig, LossConfig, OptimizerConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.accelerator import wrap_frozen
from trainer.forensics.reconstruct import PLACES
from trainer.models.lora import WithoutAdapter
from trainer.run.metrics import batch_metrics
from trainer.run.open_run import load_reference, open_run
from trainer.run.run import Run
from trainer.update import Step, read_groups, ready_batch, set_rates

MAY_CHANGE = (
    {f"loss.{key}" for key in LossConfig.__dataclass_fields__}
    | {f"advantage.{key}" for key in AdvantageConfig.__dataclass_fields__}
    | {f"optimizer.{key}" for key in OptimizerConfig.__dataclass_fields__}
    | {"data.outcome", "data.failed", "data.partial_groups", "batch.tokens_per_micro_batch"}
) - {*PLACES, "optimizer.algorithm"}
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
        if key in PLACES and value:
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


def prepared(run: Run, step: Step, settings: Sequence[str]) -> tuple[Run, Batch]:
    """Return a run with different settings (`key=value`), and the batch of a step made ready with them.

    Advantages, old and reference log-probabilities, and values are computed again: the run must be at
    the start of the batch.
    """
    changed = changed_run(run, changed_config(run.config, settings))
    position, coef = step.before, changed.config.loss.kl_reward_coef
    if coef != run.config.loss.kl_reward_coef:
        position = dataclasses.replace(position, kl_coef=coef)
    groups = step.batch.groups
    return changed, ready_batch(changed, groups, position, *read_groups(changed, groups))


def with_batch(run: Run, step: Step, batch: Batch) -> Step:
    """Return a mini-batch with the rows of a `prepared` batch."""
    before, after = (one.mini_batches[step.number].metrics for one in (step.batch, batch))
    others = {name: value for name, value in step.metrics.items() if name not in before}
    groups = groups_with_gradient(run.accelerator, batch) & _groups_of(run, step)
    return dataclasses.replace(step, batch=batch, trained_groups=groups, metrics=after | others)


def apply_settings(run: Run, global_step: int) -> None:
    """Apply the configuration of a changed run to its optimizers and its policy."""
    set_rates(run, global_step)
    settings = run.config.optimizer
    for _, optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group |= {"betas": settings.betas, "weight_decay": settings.weight_decay}
    run.whole_policy.entropy_gradient = run.config.loss.entropy_loss_coef > 0


def changed_run(run: Run, config: TrainConfig) -> Run:
    """Return a copy of a run with different settings and the same models and optimizers.

    Raises:
        ConfigError: `replay_change`: the settings need a critic that the run does not have.
        RolloutError: The dataset cannot be used with these settings.
    """
    if config.advantage.needs_critic and run.critic is None:
        finding = f"{config.advantage.estimator} needs a critic, which the run has not trained"
        hint = "choose an estimator without a critic"
        raise ConfigError("replay_change", "--set advantage.estimator", finding, hint=hint)
    return open_run(
        config,
        resume=None,
        opened=dataclasses.replace(run, reference=_reference(run, config)),
        num_planned=run.num_planned,
        first_batch=run.first_batch,
        tell=lambda _subject, _remark: None,
    )


def _reference(run: Run, config: TrainConfig) -> nn.Module | None:
    """Return the reference that the settings need, loaded if the run has none."""
    if not config.loss.needs_reference or run.reference is not None:
        return run.reference if config.loss.needs_reference else None
    loaded = load_reference(config)
    return wrap_frozen(run.accelerator, loaded) if loaded else WithoutAdapter(run.policy)


def without_rows(run: Run, step: Step, without: Sequence[str]) -> Step:
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
    batch = step.batch
    assert batch.origins is not None
    slots = np.arange(len(batch.trains))
    row = batch.responses.row_of(slots)

    def has(tokens: BoolArray) -> BoolArray:
        return np.bincount(row[tokens], minlength=len(batch.names)) > 0

    trained = batch.trains & (batch.mini_batch == step.number)[row]
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
        mini_batch=np.where(gone & (batch.mini_batch == step.number), nowhere, batch.mini_batch),
    )
    mini_batches = tuple(cut_batch(batch, run.config.batch))
    counted = _metrics_without(run, step, batch)
    metrics = step.metrics | mini_batches[step.number].metrics | counted
    batch = dataclasses.replace(batch, mini_batches=mini_batches)
    trained_groups = groups_with_gradient(run.accelerator, batch) & _groups_of(run, step)
    return dataclasses.replace(step, batch=batch, metrics=metrics, trained_groups=trained_groups)


def _groups_of(run: Run, step: Step) -> frozenset[str]:
    """Return the groups of a mini-batch."""
    size = run.config.batch.groups_per_mini_batch
    return frozenset(step.batch.groups[step.number * size : (step.number + 1) * size])


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


def _metrics_without(run: Run, step: Step, batch: Batch) -> dict[str, Any]:
    """Recompute the mini-batch's counts and means without trajectories that have no rows left."""
    before, after = (one.trajectory[one.mini_batch == step.number] for one in (step.batch, batch))
    groups, every = step.batch.groups, run.plan.trajectories
    ids = every.filter(pl.col("instance_id").is_in(list(groups)))["trajectory_id"].sort()
    lost = ids[np.setdiff1d(before, after)]  # as `Batch.trajectory` numbers them
    others = every.filter(~pl.col("trajectory_id").is_in(lost.implode()))
    plan = dataclasses.replace(run.plan, trajectories=others)
    return batch_metrics(run.accelerator, plan, batch, groups)[step.number]
