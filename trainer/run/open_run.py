"""Open a run: plan, check and load everything before the first update."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from accelerate import Accelerator
from accelerate.utils import set_seed

import rollout_io
from rollout_io.dataset.storage import Location, occupied
from schemas.errors import InputError, count
from trainer.batches.data import index_rows
from trainer.batches.forest import RowLimit
from trainer.batches.plan import Plan, dataset_returns, num_planned_updates
from trainer.config.train_config import TrainConfig, resolved, uses
from trainer.distributed.launch import make_accelerator
from trainer.distributed.processes import agreed
from trainer.models.critic import CriticLearner
from trainer.run.checkpoint import check_files
from trainer.run.dataset_checks import plan_of
from trainer.run.load_models import Models, check_dataset, load_models, make_learners
from trainer.run.loss import Learner
from trainer.run.messages import Remark, say, say_attention, say_learning_rate, show
from trainer.run.resume import check_max_updates, find_checkpoint, lines_to_keep, say_if_new
from trainer.run.same_tokenizer import check_tokenizers
from trainer.run.sampling_checks import scan_rows
from trainer.run.state import Position, Progress, dataset_digest, load_progress, restore


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModels:
    """The models and optimizers of a run, in their state at `progress`, without a dataset.

    Attributes:
        config: Configuration of the run.
        models: The models as loaded; `learner` and `critic` hold them, prepared for training.
        learner: Policy and optimizer.
        critic: Critic and optimizer, if the run has one.
        source: Absolute path of the model directory from which the run started.
        checkpoint: Checkpoint to resume from; None: the run starts from the configured models.
        progress: Progress from which the run starts or resumes.
        digest: Identifies the data of the run in its checkpoints.
    """

    config: TrainConfig
    models: Models
    learner: Learner
    critic: CriticLearner | None
    source: Path
    checkpoint: Path | None
    progress: Progress
    digest: str

    @property
    def limit(self) -> RowLimit:
        """Maximum row length."""
        return self.models.limit

    @property
    def out(self) -> Path:
        """Directory of the run."""
        return Path(self.config.run.out)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun(OpenModels):
    """A run before its first update: everything is checked and loaded; nothing has been written.

    Attributes:
        rollouts: The dataset.
        plan: Plan of one pass over the dataset.
        num_planned: Maximum number of updates of the run.
        num_greedy_rows: Rows masked because they were sampled at temperature 0.
        kept_metrics: Lines of `metrics.jsonl` up to `progress`.
        first_batch: Number of batches completed before the plan's first batch; 0 except in
            `rollouts rl`, where each iteration has a separate plan.
    """

    rollouts: pl.LazyFrame
    plan: Plan
    num_planned: int
    num_greedy_rows: int
    kept_metrics: bytes = b""
    first_batch: int = 0


def open_run(
    config: TrainConfig,
    *,
    resume: bool | None = False,
    checkpoint: Path | None = None,
    opened: OpenModels | None = None,
    num_planned: int | None = None,
    first_batch: int = 0,
    tell: Callable[[str, Remark], None] = lambda _, remark: show(remark),
) -> TrainingRun:
    """Plan, check and load a run, without writing anything.

    `rollouts train` opens a new run, or resumes one; `rollouts rl` opens each iteration as a run of
    the same models; `rollouts replay` and `rollouts blame` open a run as it was at a checkpoint.

    Args:
        config: Configuration of the run.
        resume: True: start from the latest checkpoint in `config.run.out`, if there is one. False:
            there must be no run. None: start from `checkpoint`; the directory is only read.
        checkpoint: Checkpoint to start from if `resume` is None; None: the configured models.
        opened: Models that are in memory already, with which the run is opened; a dataset from
            which they learn nothing is then accepted. None: load them.
        num_planned: Maximum number of updates; None: as many as the plan has.
        first_batch: See `TrainingRun`.
        tell: Called with each remark about the dataset, and with its subject.

    Raises:
        RolloutError: See `trainer.run.loop.train`.
    """
    accelerator = opened.learner.accelerator if opened else _started(config)
    # Each of these stages fails in all processes if it fails in one.
    config, start = agreed(accelerator, lambda: _find(config, checkpoint, resume=resume))
    if resume is not None:
        say_learning_rate(config)
    if not opened:
        say_attention(accelerator)
    rollouts, plan, index = agreed(accelerator, lambda: _plan(config))
    digest = opened.digest if opened else dataset_digest(plan, index)
    if opened:
        models, progress, kept = opened.models, opened.progress, b""
    else:
        keeps = bool(resume)
        progress, kept = agreed(accelerator, lambda: _progress(config, start, digest, keeps=keeps))
        models = agreed(accelerator, lambda: _load(config, start))
    must_learn = opened is None
    checked = agreed(
        accelerator, lambda: check_dataset(config, models, index, plan, must_learn=must_learn)
    )
    for subject, remark in checked.remarks.items():
        tell(subject, remark)
    if opened:
        learner, critic = _with_sections(opened, config, corrects=checked.corrects)
    else:
        learner, critic = _prepared(accelerator, config, models, start, corrects=checked.corrects)
    run = TrainingRun(
        config=config,
        models=models,
        learner=learner,
        critic=critic,
        source=opened.source if opened else Path(config.model.path).absolute(),
        checkpoint=opened.checkpoint if opened else start,
        progress=progress,
        digest=digest,
        rollouts=rollouts,
        plan=plan,
        num_planned=num_planned or num_planned_updates(plan, config.batch),
        num_greedy_rows=checked.num_greedy_rows,
        kept_metrics=kept,
        first_batch=first_batch,
    )
    if resume is not None:
        if start:
            say(f"resuming from {start}")
        _note_few_updates(run)
    return run


def open_models(
    config: TrainConfig, checkpoint: Path | None, *, digest: str, accelerator: Accelerator | None
) -> OpenModels:
    """Load the models of a run, whose datasets do not exist yet.

    Args:
        config: Configuration of the run; `data` is not used.
        checkpoint: Checkpoint to resume from; None: the configured models.
        digest: Replaces the digest of the dataset, which would change as the dataset grows.
        accelerator: Connects the processes of the run; None: it is made.

    Raises:
        RolloutError: A model cannot be trained as configured, or the checkpoint is unreadable.
    """
    accelerator = accelerator or make_accelerator(config)
    set_seed(config.run.seed)
    progress, _ = agreed(accelerator, lambda: _progress(config, checkpoint, digest, keeps=False))
    models = agreed(accelerator, lambda: load_models(config, checkpoint))
    corrects = config.loss.corrects_for_sampler
    learner, critic = _prepared(accelerator, config, models, checkpoint, corrects=corrects)
    return OpenModels(
        config=config,
        models=models,
        learner=learner,
        critic=critic,
        source=Path(config.model.path).absolute(),
        checkpoint=checkpoint,
        progress=progress,
        digest=digest,
    )


def _started(config: TrainConfig) -> Accelerator:
    accelerator = make_accelerator(config)
    set_seed(config.run.seed)
    return accelerator


def _find(
    config: TrainConfig, checkpoint: Path | None, *, resume: bool | None
) -> tuple[TrainConfig, Path | None]:
    """Check the dataset, and return the resolved configuration and the checkpoint to start from."""
    out = Path(config.run.out)
    if resume is False:
        refuse_existing_run(out)
    rollout_io.validate(config.data.dataset)
    config = resolved(config)
    if resume:
        checkpoint = find_checkpoint(config)
        say_if_new(out)
    return config, checkpoint


def _plan(config: TrainConfig) -> tuple[pl.LazyFrame, Plan, pl.DataFrame]:
    """Return the rows of the dataset, their plan, and their index (`index_rows`)."""
    rollouts = scan_rows(config)
    plan = plan_of(dataset_returns(rollouts, config), config)
    return rollouts, plan, index_rows(rollouts, imitates=config.loss.is_supervised)


def _progress(
    config: TrainConfig, start: Path | None, digest: str, *, keeps: bool
) -> tuple[Progress, bytes]:
    """Return the progress at the start, and the lines of metrics up to it, if they are kept."""
    progress = Progress(position=Position(kl_coef=config.loss.kl_reward_coef))
    if start:
        check_files(start)
        progress = load_progress(start / "state", digest)
    check_max_updates(config.batch.max_updates, progress.global_step)
    metrics = Path(config.run.out) / "metrics.jsonl"
    return progress, lines_to_keep(metrics, progress.num_mini_batches) if keeps else b""


def _load(config: TrainConfig, start: Path | None) -> Models:
    """Load the models, after comparing their tokenizers with the dataset's."""
    compared = check_tokenizers(config, rollout_io.read_metadata(config.data.dataset))
    models = load_models(config, start)
    own = [Remark(f"note: {key}: {use}") for key, use in uses(config).items() if use.place]
    for remark in (*own, *compared):
        show(remark)
    return models


def _prepared(
    accelerator: Accelerator,
    config: TrainConfig,
    models: Models,
    start: Path | None,
    *,
    corrects: bool,
) -> tuple[Learner, CriticLearner | None]:
    """Create the optimizers, place everything on its device, and restore the state at `start`."""
    if accelerator.num_processes > 1:
        say(f"training with {accelerator.num_processes} processes")
    learner, critic = make_learners(accelerator, config, models, corrects=corrects)
    if start:
        restore(start / "state", learner, critic)
    return learner, critic


def _with_sections(
    opened: OpenModels, config: TrainConfig, *, corrects: bool
) -> tuple[Learner, CriticLearner | None]:
    """Give the learners the sections of another configuration."""
    loss, optimization, critic = config.loss, config.optimizer, opened.critic
    learner = dataclasses.replace(
        opened.learner, loss=loss, corrects=corrects, optimization=optimization
    )
    return learner, critic and dataclasses.replace(critic, loss=loss, optimization=optimization)


def _note_few_updates(run: TrainingRun) -> None:
    """Log a note if the dataset yields fewer updates than `max_updates`."""
    config, plan, num_planned = run.config, run.plan, run.num_planned
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
            again = f"--resume {shlex.quote(str(out))}"
            hint = f"continue it with {again}, choose a different --out, or remove the run"
            raise InputError("existing_run", str(out), got, hint=hint)
