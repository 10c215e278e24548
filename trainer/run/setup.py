"""Set up a run: plan, check and load everything before the first update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from accelerate.utils import set_seed

import rollout_io
from rollout_io.dataset.storage import Location, occupied
from schemas.errors import InputError, count
from trainer.batches.data import index_rows
from trainer.batches.forest import RowLimit
from trainer.batches.plan import Plan, dataset_returns, num_planned_updates
from trainer.config.resolved import resolved
from trainer.config.train_config import TrainConfig, uses
from trainer.distributed.launch import make_accelerator
from trainer.distributed.processes import agreed
from trainer.models.critic import CriticLearner
from trainer.run.checkpoint import Checkpoints
from trainer.run.dataset_checks import plan_of
from trainer.run.load_models import Models, check_dataset, load_models, make_learners
from trainer.run.remarks import Remark, say, say_attention, show
from trainer.run.resume import check_max_updates, find_checkpoint, lines_to_keep, say_if_new
from trainer.run.same_tokenizer import check_tokenizers
from trainer.run.sampling_checks import scan_rows
from trainer.run.state import Position, Progress, dataset_digest, load_progress, restore
from trainer.run.update import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A run before its first update: everything is checked and loaded; nothing has been written.

    Attributes:
        config: Configuration of the run, resolved.
        learner: Policy and optimizer, in their state at `progress`.
        critic: Critic and optimizer, if the run has one.
        rollouts: The dataset.
        plan: Plan of one pass over the dataset.
        num_planned: Maximum number of updates of the run.
        num_greedy_rows: Rows masked because they were sampled at temperature 0.
        limit: Maximum row length.
        checkpoints: Location and settings of its checkpoints.
        progress: Progress from which the run starts or resumes.
        kept_metrics: Lines of `metrics.jsonl` up to `progress`.
        checkpoint: Checkpoint to resume from; None: the run starts from the configured models.
        first_batch: Number of batches completed before the plan's first batch; 0 except in
            `rollouts rl`, where each iteration has a separate plan.
    """

    config: TrainConfig
    learner: Learner
    critic: CriticLearner | None
    rollouts: pl.LazyFrame
    plan: Plan
    num_planned: int
    num_greedy_rows: int
    limit: RowLimit
    checkpoints: Checkpoints
    progress: Progress
    kept_metrics: bytes
    checkpoint: Path | None = None
    first_batch: int = 0


def set_up(config: TrainConfig, *, resume: bool) -> TrainingRun:
    """Plan, check and load a new or resumed run, without writing anything.

    Raises:
        RolloutError: See `train`.
    """
    out = Path(config.run.out)

    def latest(config: TrainConfig) -> Path | None:
        checkpoint = find_checkpoint(config) if resume else None
        if resume:
            say_if_new(out)
        return checkpoint

    def load() -> LoadedRun:
        if not resume:
            refuse_existing_run(out)
        return _load(config, latest, keeps_lines=resume)

    run = _set_up(config, load)
    if run.checkpoint:
        say(f"resuming from {run.checkpoint}")
    _note_few_updates(run.config, run.plan, run.num_planned)
    return run


def set_up_at(config: TrainConfig, checkpoint: Path | None) -> TrainingRun:
    """Plan, check and load a run as it was at a checkpoint, or before its first update if None.

    The run may be complete or still training: nothing is written or locked.

    Raises:
        RolloutError: See `train`.
    """
    return _set_up(config, lambda: _load(config, lambda _: checkpoint, keeps_lines=False))


def _set_up(config: TrainConfig, load: Callable[[], LoadedRun]) -> TrainingRun:
    accelerator = make_accelerator(config)
    say_attention(accelerator)
    set_seed(config.run.seed)
    loaded = agreed(accelerator, load)
    if accelerator.num_processes > 1:
        say(f"training with {accelerator.num_processes} processes")
    learner, critic = make_learners(
        accelerator, loaded.config, loaded.models, corrects=loaded.corrects
    )
    if loaded.checkpoint:
        restore(loaded.checkpoint / "state", learner, critic)
    return TrainingRun(
        config=loaded.config,
        learner=learner,
        critic=critic,
        rollouts=loaded.rollouts,
        plan=loaded.plan,
        num_planned=num_planned_updates(loaded.plan, loaded.config.batch),
        num_greedy_rows=loaded.num_greedy_rows,
        limit=loaded.models.limit,
        checkpoints=Checkpoints(
            out=Path(config.run.out),
            source=Path(config.model.path).absolute(),
            keep=config.run.keep_checkpoints,
            digest=loaded.digest,
        ),
        progress=loaded.progress,
        kept_metrics=loaded.kept_metrics,
        checkpoint=loaded.checkpoint,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRun:
    """A run loaded from files, before optimizers are made and models are placed on devices."""

    config: TrainConfig
    checkpoint: Path | None
    rollouts: pl.LazyFrame
    plan: Plan
    num_greedy_rows: int
    digest: str
    progress: Progress
    kept_metrics: bytes
    models: Models
    corrects: bool


def _load(
    config: TrainConfig, find: Callable[[TrainConfig], Path | None], *, keeps_lines: bool
) -> LoadedRun:
    rollout_io.require_valid(config.data.dataset)
    config = resolved(config)
    checkpoint, metrics = find(config), Path(config.run.out) / "metrics.jsonl"
    rollouts = scan_rows(config.data.dataset, config)
    plan = plan_of(dataset_returns(rollouts, config.data.outcome), config)
    index = index_rows(rollouts)
    digest = dataset_digest(plan, index)
    progress = Progress(position=Position(kl_coef=config.loss.kl_reward_coef))
    if checkpoint:
        progress = load_progress(checkpoint / "state", digest)
    check_max_updates(config.batch.max_updates, progress.global_step)
    kept = lines_to_keep(metrics, progress.num_mini_batches) if keeps_lines else b""
    compared = check_tokenizers(config, rollout_io.read_metadata(config.data.dataset))
    models = load_models(config, checkpoint)
    checked = check_dataset(config, models, index, plan)
    own = [Remark(f"note: {key}: {use}") for key, use in uses(config).items() if use.place]
    for remark in (*own, *compared, *checked.remarks.values()):
        show(remark)
    return LoadedRun(
        config=config,
        checkpoint=checkpoint,
        rollouts=rollouts,
        plan=plan,
        num_greedy_rows=checked.num_greedy_rows,
        digest=digest,
        progress=progress,
        kept_metrics=kept,
        models=models,
        corrects=checked.corrects,
    )


def _note_few_updates(config: TrainConfig, plan: Plan, num_planned: int) -> None:
    """Log a note if the dataset yields fewer updates than `max_updates`."""
    if config.batch.max_updates is None or num_planned >= config.batch.max_updates:
        return
    groups, size = count(sum(map(len, plan.batches)), "group"), config.batch.groups_per_mini_batch
    passes = f" in {count(config.batch.num_epochs, 'pass', 'es')} over the dataset"
    made = count(num_planned, "update")
    say(
        f"note: {groups}, {size} per update, give {made}{passes}, fewer than max_updates"
        f" ({config.batch.max_updates}): pass --set batch.num_epochs=N for more passes"
    )


def refuse_existing_run(out: Path) -> None:
    """Reject a directory that contains a run or a dataset.

    Raises:
        InputError: `existing_run`: the directory contains a run; `out_is_free`: it contains a
            dataset.
    """
    if out.is_dir() and (shards := Location.of(out).datasets()):
        raise occupied(str(out), len(shards))
    for name in ("config.json", "metrics.jsonl", "checkpoints"):
        if (out / name).exists():
            got = f"the directory already contains a run ({name})"
            hint = "pass --resume to continue it, choose a different --out, or remove the run"
            raise InputError("existing_run", str(out), got, hint=hint)
