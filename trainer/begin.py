"""A run before its first update: where it is, what it will train on, and every check of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
from accelerate.utils import set_seed

import pipelines
import rollout_io
from rollout_io.storage import Location, occupied
from schemas.errors import RolloutError
from trainer.config import TrainConfig
from trainer.critic import CriticLearner
from trainer.data import index_rows
from trainer.forest import RowLimit
from trainer.launch import make_accelerator
from trainer.log import say
from trainer.plan import Plan, make_plan
from trainer.prepare import Models, check_dataset, load_models, make_learners
from trainer.processes import agreed
from trainer.resume import check_max_updates, find_checkpoint, lines_to_keep
from trainer.same_tokenizer import check_tokenizers
from trainer.state import Position, Progress, dataset_digest, load_progress, restore
from trainer.update import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run before its first update: everything is checked and loaded, nothing is written.

    Attributes:
        learner: Policy and optimizer, as they are at `progress`.
        critic: Critic and optimizer, if the run has one.
        rollouts: The dataset.
        plan: One pass over it.
        limit: The longest row that can be forwarded.
        digest: Of the dataset: see `trainer.state.dataset_digest`.
        progress: Where the run goes on.
        kept_metrics: The lines of `metrics.jsonl` up to there.
    """

    learner: Learner
    critic: CriticLearner | None
    rollouts: pl.LazyFrame
    plan: Plan
    limit: RowLimit
    digest: str
    progress: Progress
    kept_metrics: bytes


def begin(config: TrainConfig, *, resume: bool) -> Run:
    """Plan, check and load a run, or what is left of it; nothing is written.

    Raises:
        RolloutError: See `train`.
    """
    accelerator = make_accelerator(config)
    set_seed(config.seed)
    start = agreed(accelerator, lambda: _start(config, resume=resume))
    if accelerator.num_processes > 1:
        say(f"{accelerator.num_processes} processes")
    learner, critic = make_learners(accelerator, config, start.models, corrects=start.corrects)
    if start.checkpoint:
        restore(start.checkpoint / "state", learner, critic)
        say(f"resuming from {start.checkpoint}")
    return Run(
        learner=learner,
        critic=critic,
        rollouts=start.rollouts,
        plan=start.plan,
        limit=start.models.limit,
        digest=start.digest,
        progress=start.progress,
        kept_metrics=start.kept_metrics,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run as it is read from files."""

    checkpoint: Path | None
    rollouts: pl.LazyFrame
    plan: Plan
    digest: str
    progress: Progress
    kept_metrics: bytes
    models: Models
    corrects: bool


def _start(config: TrainConfig, *, resume: bool) -> Start:
    out = Path(config.out)
    if not resume:
        refuse_existing_run(out)
    checkpoint = find_checkpoint(config) if resume else None
    rollouts = rollout_io.scan(config.dataset)
    plan = make_plan(pipelines.trajectory_returns(rollouts, config.outcome).collect(), config)
    index = index_rows(rollouts)
    digest = dataset_digest(plan, index)
    progress = Progress(position=Position(kl_coef=config.kl_reward_coef))
    if checkpoint:
        progress = load_progress(checkpoint / "state", digest)
    check_max_updates(config, progress.global_step)
    kept = lines_to_keep(out / "metrics.jsonl", progress.num_mini_batches) if resume else b""
    for text in check_tokenizers(config, rollout_io.read_metadata(config.dataset)):
        say(text)
    models = load_models(config, checkpoint)
    checked = check_dataset(config, models, index, plan)
    for text in checked.remarks.values():
        say(text)
    return Start(
        checkpoint=checkpoint,
        rollouts=rollouts,
        plan=plan,
        digest=digest,
        progress=progress,
        kept_metrics=kept,
        models=models,
        corrects=checked.corrects,
    )


def refuse_existing_run(out: Path) -> None:
    """Refuse a directory that holds a run, or a dataset.

    Raises:
        RolloutError: existing_run, out_is_free.
    """
    if out.is_dir() and (shards := Location.of(out).shards()):
        raise occupied(str(out), len(shards))
    for name in ("config.json", "metrics.jsonl", "checkpoints"):
        if (out / name).exists():
            hint = "go on with it by --resume, choose another --out, or remove that run"
            raise RolloutError("existing_run", str(out), f"a {name}", "no run yet", hint)
