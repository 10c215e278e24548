"""The trainer's half of the loop: batches that come one by one, checkpoints, weights for the engine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import polars as pl
from accelerate.utils import set_seed

import pipelines
import rollout_io
from schemas.errors import RolloutError
from trainer.batches import mini_batch_updates
from trainer.begin import Run
from trainer.checkpoint import remove_directory, whole_or_not, write_model
from trainer.data import index_rows
from trainer.launch import make_accelerator
from trainer.log import RunLog, say
from trainer.loop import counted, save, set_rates
from trainer.plan import Plan, make_plan
from trainer.prepare import Models, check_dataset, load_models, make_learners
from trainer.rl.config import RlConfig
from trainer.state import Position, Progress, load_progress, restore

DIGEST = "rollouts rl"
"""In place of a dataset's: a run's own grows."""
KEPT_WEIGHTS = 2


class Learning:
    """Policy, optimizer and what else trains, from one iteration to the next. Its methods block.

    Args:
        config: The run's configuration.
        checkpoint: What to go on from; None: the start.

    Raises:
        RolloutError: A model cannot be trained as asked; the checkpoint cannot be read.
    """

    def __init__(self, config: RlConfig, checkpoint: Path | None) -> None:
        self.config, self.training = config, config.training
        accelerator = make_accelerator(self.training)
        set_seed(self.training.seed)
        self.progress = Progress(position=Position(kl_coef=self.training.kl_reward_coef))
        if checkpoint:
            self.progress = load_progress(checkpoint / "state", DIGEST)
        self.models: Models = load_models(self.training, checkpoint)
        self._learner, self._critic = make_learners(
            accelerator, self.training, self.models, corrects=self.training.corrects_for_sampler
        )
        if checkpoint:
            restore(checkpoint / "state", self._learner, self._critic)
            say(f"resuming from {checkpoint}")
        self._said: set[str] = set()
        self._explained = False

    @property
    def iteration(self) -> int:
        """Iterations trained: the version of the policy's weights."""
        return self.progress.position.batch

    @property
    def num_planned(self) -> int:
        """Most updates of the run."""
        t = self.training
        steps = math.ceil(t.groups_per_batch / t.groups_per_mini_batch) * t.epochs_per_batch
        return self.config.num_iterations * steps

    def open_log(self) -> RunLog:
        """The log of the run, to be entered."""
        made = {"num_planned": self.num_planned, "num_made": self.progress.global_step}
        return RunLog(self._learner, Path(self.config.out), shows=False, **made)

    def update(self, dataset: Path, figures: dict[str, Any], log: RunLog) -> list[dict[str, Any]]:
        """Train an iteration: what `rollouts train` does with that part of the run's dataset.

        Args:
            dataset: Its groups.
            figures: What is known of them, for the first line of its metrics.
            log: Where these go.

        Returns:
            The metrics of its mini-batches.

        Raises:
            RolloutError: Rows that cannot be trained as asked; every trajectory failed.
        """
        run, iteration = self._run(dataset), self.iteration
        set_rates(run, self.progress.global_step, self.num_planned)
        lines = []
        position = dataclasses.replace(self.progress.position, batch=0)
        for made in mini_batch_updates(run, position, explains=not self._explained):
            self._explained |= made.cause is not None
            after = dataclasses.replace(made.position, batch=iteration + made.position.batch)
            there = dataclasses.replace(made, position=after)
            self.progress, metrics = counted(run, self.progress, there, self.num_planned)
            metrics = {"iteration": iteration} | metrics | figures
            log.write(metrics, made.cause)
            lines.append(metrics)
            figures = {}
        return lines

    def save(self, log: RunLog | None) -> Path:
        """Save a checkpoint between two iterations."""
        return save(self._learner, self._critic, self.progress, DIGEST, log)

    def write_weights(self) -> Path:
        """Write the policy as `weights/version_N/`, a model directory; the newest two stay."""
        folder = Path(self.config.out) / "weights"
        path = folder / f"version_{self.iteration}"
        if path.exists():
            remove_directory(path)
        model = self._learner.accelerator.unwrap_model(self._learner.policy).model
        with whole_or_not(path) as partial:
            write_model(partial, model, Path(self.training.model))
        kept = [f"version_{self.iteration - back}" for back in range(KEPT_WEIGHTS)]
        for other in folder.glob("version_*"):
            if other.name not in kept:
                remove_directory(other)
        return path

    def _run(self, dataset: Path) -> Run:
        """An iteration as a run of its own, planned and checked."""
        config = dataclasses.replace(self.training, dataset=str(dataset))
        rollouts = rollout_io.scan(dataset)
        plan = make_plan(pipelines.trajectory_returns(rollouts, config.outcome).collect(), config)
        _check_some_worked(plan, rollouts, dataset)
        index = index_rows(rollouts)
        checked = check_dataset(config, self.models, index, plan, must_learn=False)
        for name, text in checked.remarks.items():
            if name not in self._said:
                self._said.add(name)
                say(text)
        return Run(
            learner=dataclasses.replace(self._learner, corrects=checked.corrects),
            critic=self._critic,
            rollouts=rollouts,
            plan=plan,
            limit=self.models.limit,
            digest=DIGEST,
            progress=self.progress,
            kept_metrics=b"",
        )


def _check_some_worked(plan: Plan, rollouts: pl.LazyFrame, dataset: Path) -> None:
    """Refuse an iteration of which every trajectory failed: so would the next one."""
    if not plan.trajectories["failed"].all():
        return
    errors = rollouts.select(pl.col("error").drop_nulls().first()).collect()
    got = f"{len(plan.trajectories)} failed trajectories, the first by {errors.item()}"
    hint = f"mend the cause, remove {dataset}, and go on with --resume"
    raise RolloutError("iteration_failed", str(dataset), got, "one that did not fail", hint)
