"""The training half of the loop: updates, checkpoints, and weights for the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from pipelines.generation.environments import ENVIRONMENT
from rollout_io.dataset.filesystems import whole
from rollout_io.terminal import duration
from schemas.errors import ConfigError, InputError
from trainer.batches.forest import RowLimit
from trainer.config.train_config import TrainConfig
from trainer.distributed.accelerator import is_sharded, make_accelerator, whole_weights
from trainer.distributed.meeting import on_this_machine
from trainer.distributed.processes import agreed
from trainer.models.lora import checkpoint_weights, save_adapter
from trainer.models.policy import Policy
from trainer.rl.config import RlConfig
from trainer.run.checkpoint import remove_directory, write_model
from trainer.run.memory import available_bytes, estimate_memory, seconds_per_token
from trainer.run.messages import UNWATCHED, Remark, show
from trainer.run.open_run import open_models, open_run
from trainer.run.run import Run
from trainer.run.run_log import RunLog, samples_of
from trainer.training import save, write_in_main
from trainer.update import set_rates, updates

DIGEST = "rollouts rl"
"""Replaces the digest of the dataset, which would change as the run's dataset grows."""


class Learning:
    """Policy, optimizer and other training state across iterations; its methods are blocking.

    Every process of a run has this object, and all call its methods together, except methods that
    only return numbers or notes.

    Args:
        training: Configuration of the updates; `dataset` is not used.
        checkpoint: Checkpoint to resume from; None: start from the configured models.
        num_iterations: Number of iterations of the run.
        accelerator: Connects the processes of the run; None: `make_accelerator` makes it.

    Raises:
        RolloutError: A model cannot be trained as configured, or the checkpoint is unreadable.
    """

    def __init__(
        self,
        training: TrainConfig,
        checkpoint: Path | None,
        *,
        num_iterations: int,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.training, self.num_iterations = training, num_iterations
        accelerator = accelerator or make_accelerator(training)
        set_seed(training.run.seed)
        self.opened = open_models(training, checkpoint, accelerator, digest=DIGEST)
        self.progress = self.opened.progress
        self._saved_step = self.progress.global_step
        self._said: set[str] = set()

    @property
    def accelerator(self) -> Accelerator:
        """The Accelerator of the run."""
        return self.opened.accelerator

    @property
    def iteration(self) -> int:
        """Number of completed iterations, which is the version of the policy's weights."""
        return self.progress.position.batches_done

    @property
    def policy(self) -> Policy:
        """The policy in memory, without wrappers."""
        return self.opened.whole_policy

    @property
    def num_planned(self) -> int:
        """Maximum number of updates of the run."""
        sizes = self.training.batch
        steps = math.ceil(sizes.groups_per_batch / sizes.groups_per_mini_batch)
        steps *= sizes.epochs_per_batch
        return self.num_iterations * steps

    def notes_of_size(self, config: RlConfig) -> Iterator[str]:
        """Yield notes about rows that would take too much memory or time."""
        # Without wrappers, which would exchange values in each forward pass.
        return notes_of_size(config, dataclasses.replace(self.opened, policy=self.policy))

    def open_log(self) -> RunLog:
        """Return a context manager that opens the run's log."""
        return RunLog(
            self.accelerator,
            self.training,
            num_planned=self.num_planned,
            num_made=self.progress.global_step,
            num_iterations=self.num_iterations,
            iteration=self.iteration,
        )

    def update(
        self, dataset: Path, numbers: dict[str, Any], log: RunLog | None
    ) -> list[dict[str, Any]]:
        """Train on an iteration as `rollouts train` would on the same part of the dataset.

        Returns the metrics of its mini-batches; the first of them includes `numbers`. The main
        process writes them to `log`, which is None in the other processes.

        Raises:
            RolloutError: Rows cannot be used as configured, or every trajectory failed.
        """
        with on_this_machine(self.accelerator, dataset) as here:
            assert here is not None
            return self._update(self.run_on(here), numbers, log)

    def _update(
        self, run: Run, numbers: dict[str, Any], log: RunLog | None
    ) -> list[dict[str, Any]]:
        iteration, lines = self.iteration, list[dict[str, Any]]()
        set_rates(run, self.progress.global_step)
        passes, tell = (log.passes, log.warn_once) if log else (UNWATCHED, lambda *_: None)
        for update in updates(run, self.progress, passes=passes, tell=tell):
            self.progress, metrics = update.progress, update.metrics
            if any(name.startswith(ENVIRONMENT) for name in numbers):  # metrics of the environments
                metrics = {n: v for n, v in metrics.items() if not n.startswith(ENVIRONMENT)}
            metrics = {"iteration": iteration} | metrics | numbers
            if log:
                log.write(
                    metrics, update.tokens, samples_of(run, update.batch.groups, update.number)
                )
            lines.append(metrics)
            numbers = {}
        return lines

    @property
    def has_unsaved_iterations(self) -> bool:
        """True between two iterations if the latest checkpoint lacks updates."""
        is_between = self.progress.position.mini_batches_done == 0
        return is_between and self.progress.global_step > self._saved_step

    def save(self, log: RunLog | None) -> Path:
        """Save a checkpoint between two iterations."""
        path = save(self.opened, self.progress, log)
        self._saved_step = self.progress.global_step
        return path

    @property
    def has_adapter(self) -> bool:
        """True if the policy trains LoRA adapters."""
        return self.training.model.lora_rank is not None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights, named as in `weights/`; sharded ones are gathered one by one."""
        return checkpoint_weights(self.policy.model)

    def write_weights(self, keep: int, *, as_adapter: bool = False) -> Path:
        """Write the policy to `weights/version_N/`; delete all versions but the `keep` newest.

        With `as_adapter`, only the adapters are written, instead of a model with merged adapters.
        """
        accelerator, out = self.accelerator, Path(self.training.run.out)
        path = out / "weights" / f"version_{self.iteration}"
        weights = whole_weights(self.policy.model, keep=accelerator.is_main_process)

        def write() -> None:
            self._write_version(path, weights, keep, as_adapter=as_adapter)

        if accelerator.num_processes == 1:
            write()
        else:
            write_in_main(accelerator, out, write)
        return path

    def _write_version(
        self, path: Path, weights: dict[str, Tensor] | None, keep: int, *, as_adapter: bool
    ) -> None:
        folder = path.parent
        if path.exists():
            remove_directory(path)
        model = self.policy.model
        with whole(path) as partial:
            if as_adapter:
                save_adapter(model, partial, weights or model.state_dict())
            else:
                write_model(partial, model, self.opened.source, weights)
        newest = [f"version_{self.iteration - back}" for back in range(keep)]
        for other in folder.glob("version_*"):
            if other.name.removeprefix("version_").isdecimal() and other.name not in newest:
                remove_directory(other)

    def run_on(self, dataset: Path) -> Run:
        """Plan and check the current iteration as a separate run; all processes call it together.

        Raises:
            RolloutError: See `update`.
        """
        data = dataclasses.replace(self.training.data, dataset=str(dataset))
        run = open_run(
            dataclasses.replace(self.training, data=data),
            resume=None,
            opened=dataclasses.replace(self.opened, progress=self.progress),
            num_planned=self.num_planned,
            first_batch=self.iteration,
            tell=self._tell_once,
        )
        agreed(self.accelerator, lambda: _check_some_worked(run, dataset))
        return run

    def _tell_once(self, subject: str, remark: Remark) -> None:
        if subject not in self._said:
            self._said.add(subject)
            show(remark)


def check_lengths(config: RlConfig, limit: RowLimit, context_tokens: int | None) -> None:
    """Check that sampled rows will fit the trainer's model and the engine's context.

    Runs before sampling; an unknown context (None) is not checked.

    Raises:
        ConfigError: `row_too_long`: the longest possible row does not fit.
    """
    generation, cuts = config.generation, config.training.batch.max_row_tokens is not None
    hint = "pass --set generate.max_input_tokens=N, or truncate rows: --set batch.max_row_tokens=N"
    if generation.max_input_tokens is None:
        if context_tokens is not None and context_tokens > limit.num_tokens and not cuts:
            finding = f"rows of up to {context_tokens} tokens (the engine's context)"
            expected = f"at most {limit.num_tokens} ({limit.reason})"
            raise ConfigError("row_too_long", "[generate]", finding, expected, hint)
        return
    parts = generation.max_input_tokens, generation.max_response_tokens
    rooms = [] if cuts else [(limit.num_tokens, limit.reason)]
    rooms += [] if context_tokens is None else [(context_tokens, "the engine's context")]
    for room, reason in rooms:
        if sum(parts) > room:
            where = "[generate] max_input_tokens and max_response_tokens"
            finding = f"{parts[0]} + {parts[1]} tokens"
            raise ConfigError(
                "row_too_long", where, finding, f"at most {room} in total ({reason})", hint
            )


def _check_some_worked(run: Run, dataset: Path) -> None:
    """Reject an iteration in which every trajectory failed; the next iteration would fail too."""
    trajectories = run.plan.trajectories
    if not trajectories["failed"].all():
        return
    errors = run.rollouts.select(pl.col("error").drop_nulls().first()).collect()
    finding = f"every trajectory failed ({len(trajectories)}); first error: {errors.item()}"
    hint = f"fix the cause, remove {dataset}, and continue with --resume"
    raise InputError("iteration_failed", str(dataset), finding, hint=hint)


GIB = 1 << 30
TRAINING_COST = 3.0
"""Time per token relative to a forward pass: a backward pass costs about two forward passes."""
SLOW_UPDATE_S = 120.0
"""Minimum duration of an update, in seconds, for which a note is shown."""


def longest_row(config: RlConfig, limit: RowLimit) -> tuple[int, str]:
    """Return the largest number of tokens that a row may have, and what limits it."""
    generation, training = config.generation, config.training
    limits = [(limit.num_tokens, limit.reason)]
    if training.batch.max_row_tokens is not None:
        limits.append((training.batch.max_row_tokens, "batch.max_row_tokens"))
    if generation.max_input_tokens is not None:
        num_tokens = generation.max_input_tokens + generation.max_response_tokens
        limits.append((num_tokens, "generate.max_input_tokens + generate.max_response_tokens"))
    return min(limits, key=lambda one: one[0])


def notes_of_size(config: RlConfig, run: Run) -> Iterator[str]:
    """Yield notes about the memory and time of an update whose rows have the maximum length.

    On a CPU, both are measured on short chains. On a GPU, where the first forward pass may compile
    for minutes, nothing is measured: the note only warns about rows longer than a micro-batch.
    """
    training, (most, reason) = config.training, longest_row(config, run.row_limit)
    budget, device = training.batch.tokens_per_micro_batch, run.accelerator.device
    if device.type != "cpu":
        if most > budget:
            yield (
                f"note: rows may have up to {most} tokens ({reason}); rows longer than"
                f" batch.tokens_per_micro_batch ({budget}) are forwarded in separate micro-batches,"
                " which need more memory"
            )
        return
    if is_sharded(run.policy):
        return  # autograd's memory cannot be measured
    num_rows = training.batch.groups_per_mini_batch * config.generation.group_size
    largest = min(max(most, budget), num_rows * most)
    needed = estimate_memory(run, largest).still_needed
    free = available_bytes(device)
    num_processes = run.accelerator.num_processes
    seconds = num_rows * most * TRAINING_COST * seconds_per_token(run) / num_processes
    reasons = []
    if free is not None and needed > free:
        reasons.append(
            f"a micro-batch of {largest:,} tokens needs about {needed / GIB:,.1f} GiB of memory, but"
            f" {free / GIB:,.1f} GiB are free"
        )
    if seconds > SLOW_UPDATE_S:
        rows = f"{num_rows:,} rows of that length"
        reasons.append(f"an update on {rows} takes at least {duration(seconds)} on this CPU")
    if not reasons:
        return
    keys = []
    if largest > most:
        keys.append("batch.tokens_per_micro_batch for smaller micro-batches")
    if config.generation.max_input_tokens is None:
        keys.append("generate.max_input_tokens to end longer trajectories")
    keys.append("batch.max_row_tokens to truncate rows")
    yield (
        f"note: rows may have up to {most:,} tokens ({reason}); {', and '.join(reasons)}."
        f" If your rows get that long, set {', or '.join(keys)}"
    )
