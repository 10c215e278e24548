"""Replay an update of a run, unchanged or with changes, and compare it with the records."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch

from rollout_io.dataset.atomic_files import whole, writable
from rollout_io.dataset.locking import destination
from rollout_io.terminal import Bar
from schemas.errors import ConfigError, InputError, count
from schemas.token_records import token_record_path
from trainer.forensics.replay.changes import (
    ChangedBatch,
    Changes,
    apply_settings,
    changed_config,
    describe,
    split_settings,
    without_rows,
)
from trainer.forensics.replay.compare import (
    Difference,
    as_recorded,
    compared_metrics,
    metric_differences,
    state_differences,
    token_differences,
    weight_differences,
)
from trainer.forensics.replay.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay.recorded import naming_damaged, read_recorded
from trainer.run.checkpoint import checkpoint_path, write_model
from trainer.run.loop import count_update
from trainer.run.pass_progress import Passes, ticking
from trainer.run.run import Run
from trainer.run.start_records import CHANGING, MACHINE, start_of, starts_of, this_machine
from trainer.run.state import Progress, load_progress
from trainer.run.update import Step, make_update


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Result of replaying an update.

    Attributes:
        run: Directory of the run.
        update: Number of the update.
        iteration: Iteration of `rollouts rl`, counted from 0; None for `rollouts train`.
        checkpoint: Checkpoint from which the replay started; None: the start model.
        num_forwarded: Mini-batches replayed between the checkpoint and the update.
        num_threads: Number of threads used.
        compared: Descriptions of the data that were compared.
        not_compared: Metrics that were not compared: times, and metrics of sampling.
        differences: Values that differ from the recorded ones, in the order of the updates.
        recorded: The metrics that the run recorded.
        replayed: The metrics of the replayed update.
        changed: The metrics of the update with changes; None without changes.
        changes: Descriptions of the changes.
        notes: Reasons why the replay may differ from the run.
        out: Directory of the resulting model; None if it was not written.
    """

    run: str
    update: int
    iteration: int | None
    checkpoint: str | None
    num_forwarded: int
    num_threads: int
    compared: tuple[str, ...]
    not_compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]
    changed: Mapping[str, Any] | None
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    out: str | None

    @property
    def is_identical(self) -> bool:
        """True if all compared values are equal bit for bit."""
        return not self.differences


def replay(
    run: str | Path,
    update: int,
    changes: Changes | None = None,
    *,
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
        changes: Changes to the update; None: no changes.
        out: New directory for the resulting model; None: it is not written.

    Raises:
        RolloutError: See `reconstruct`, `changed_config` and `without_rows`; or `out_is_free`: the
            output directory exists or is inside the run.

    Example:
        >>> replay("run", 12).is_identical  # doctest: +SKIP
        True
        >>> replay("run", 12, Changes(rows=["g3_1"])).changed["grad_norm"]  # doctest: +SKIP
    """
    refuse_several_processes("replay")
    path, changes = Path(run), changes or Changes()
    if out is not None:
        _refuse_taken(Path(out), path)
    places, settings = split_settings(changes.settings)
    recorded = read_recorded(path, places)
    recorded.index_of(update)
    changed_config(recorded.config, settings)
    batch = None
    with naming_damaged(recorded, update):
        start = recorded.checkpoint_before(update, between_batches=bool(settings))
        num_made = load_progress(start / "state").global_step if start else 0
    with Bar(update, "updates", f"replaying update {update}", done=num_made) as bar:
        passes = Forwarding(bar, num_planned=update, num_made=num_made)
        if settings:
            batch = ChangedBatch(settings=settings)
        with ticking(passes):
            found = reconstruct(
                path,
                update,
                places=places,
                at_batch=batch.prepare if batch else None,
                passes=passes,
            )
            if settings or changes.leaves_out:
                after, step = _changed(found, batch, changes)
                with torch.random.fork_rng():  # clip_cov draws the same numbers in both
                    made = _made(_paused(found.run), found, passes)
                changed = _made_changed(after, step, found, passes)
            else:
                made, changed, after = _made(found.run, found, passes), None, found.run
    with naming_damaged(recorded, update):
        result = _compared(found, made, is_changed=changed is not None)
    if out is not None:
        _write(Path(out), after)
    return dataclasses.replace(
        result,
        changed=changed,
        changes=tuple(describe(dataclasses.replace(changes, settings=settings))),
        out=None if out is None else str(out),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Result of an update: its metrics, including counts, token records, and progress after it."""

    metrics: dict[str, Any]
    tokens: pa.Table | None
    progress: Progress


def _made(run: Run, found: Reconstruction, passes: Passes) -> _Made:
    metrics, tokens = make_update(run, found.step, found.update, passes)
    passes.end_update(made=not metrics["skipped"])
    progress, metrics = count_update(run, found.progress, found.step, metrics)
    return _Made(metrics=metrics, tokens=tokens, progress=progress)


def _changed(
    found: Reconstruction, batch: ChangedBatch | None, changes: Changes
) -> tuple[Run, Step]:
    """Apply the changes to a run and its mini-batch, without taking the step."""
    run, step = batch.of(found.run, found.step) if batch else (found.run, found.step)
    return run, without_rows(run, step, changes) if changes.leaves_out else step


def _made_changed(run: Run, step: Step, found: Reconstruction, passes: Passes) -> dict[str, Any]:
    """Make the update with the changes, and return its metrics."""
    apply_settings(run, found.progress.global_step)
    metrics, _ = make_update(run, step, found.update, passes)
    _, metrics = count_update(run, found.progress, step, metrics)
    return as_recorded(metrics)


class Forwarding(Passes):
    """`Passes` that also advance the progress bar after each replayed update."""

    def __init__(self, bar: Bar, *, num_planned: int, num_made: int = 0) -> None:
        super().__init__(bar, num_planned=num_planned, num_made=num_made)
        self._main = bar

    def end_update(self, *, made: bool) -> None:
        """See `Passes.end_update`."""
        super().end_update(made=made)
        self._main.update(int(made))


class _Paused:
    """An optimizer that clears the gradient but never steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self._optimizer.param_groups

    def step(self) -> None:
        """Leave the weights unchanged."""

    def zero_grad(self) -> None:
        """Clear the gradient."""
        self._optimizer.zero_grad()


def _paused(run: Run) -> Run:
    """Return a copy of the run whose optimizers leave models and optimizer states unchanged."""

    def still(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return cast("torch.optim.Optimizer", _Paused(optimizer))

    of_critic = run.critic_optimizer
    return dataclasses.replace(
        run,
        optimizer=still(run.optimizer),
        critic_optimizer=of_critic and still(of_critic),
    )


def _compared(found: Reconstruction, made: _Made, *, is_changed: bool) -> Replay:
    """Compare a replayed update with the run's records.

    The weights and the state after the update are compared too, unless changes will be made.
    """
    recorded, update, run = found.recorded, found.update, found.run
    is_loop = recorded.num_iterations is not None
    differences: list[Difference] = []
    for one in found.forwarded:
        step = one.metrics["global_step"]
        differences += metric_differences(one.recorded, one.metrics, step, is_loop=is_loop)
    own = {"iteration": run.first_batch} if is_loop else {}
    replayed = own | made.metrics
    differences += metric_differences(found.line, replayed, update, is_loop=is_loop)
    names = compared_metrics(found.line, is_loop=is_loop)
    compared = [count(len(names), "metric")]
    if found.forwarded:
        on_the_way = count(len(found.forwarded), "update")
        compared.append(f"the metrics of {on_the_way} before it")
    if token_record_path(recorded.path, update).is_file():
        differences += token_differences(recorded.path, update, made.tokens)
        compared.append("the recorded tokens")
    if not is_changed:
        for what, more in _saved_differences(found, made):
            compared.append(what)
            differences += more
    return Replay(
        run=str(recorded.path),
        update=update,
        iteration=own.get("iteration"),
        checkpoint=None if found.checkpoint is None else str(found.checkpoint),
        num_forwarded=len(found.forwarded),
        num_threads=torch.get_num_threads(),
        compared=tuple(compared),
        not_compared=tuple(name for name in found.line if name not in names),
        differences=tuple(differences),
        recorded=found.line,
        replayed=as_recorded(replayed),
        changed=None,
        changes=(),
        notes=tuple(_notes(found)),
        out=None,
    )


def _saved_differences(
    found: Reconstruction, made: _Made
) -> Iterator[tuple[str, list[Difference]]]:
    """Compare models and state with the files that the run saved after the update.

    Yields a description of each part that was compared, and its differences.
    """
    run, update = found.run, found.update
    folder = checkpoint_path(found.recorded.path, update)
    if folder.is_dir():
        yield f"the weights of {folder}", weight_differences(folder, run, update)
        if run.critic is not None:
            critic = folder / "critic"
            yield "its critic", weight_differences(critic, run, update, "critic")
        if (folder / "state").is_dir():
            more = state_differences(folder / "state", run, made.progress, update)
            yield "its optimizers and position", more
    version = found.recorded.path / "weights" / f"version_{run.first_batch + 1}"
    is_last = found.recorded.num_iterations is not None and found.step.num_left == 1
    if is_last and version.is_dir():
        yield f"the weights of {version}", weight_differences(version, run, update)


def _notes(found: Reconstruction) -> Iterator[str]:
    """Yield reasons why the replayed update may differ from the run's."""
    out, update = found.recorded.path, found.update
    start, here = start_of(out, update), this_machine(found.run.accelerator)
    if not start:
        yield (
            "the run did not record its number of threads; if it was not"
            f" {here['num_threads']}, set OMP_NUM_THREADS"
        )
    different = [key for key in MACHINE if key in start and start[key] != here[key]]
    for key in different:
        yield f"{key} is {here[key]}, but was {start[key]} in the run"
    if here["device"].partition(" ")[0] != "CPU":
        yield f"results on {here['device']} are not reproducible bit for bit"
    first = found.progress.global_step - len(found.forwarded) + 1
    used = [start_of(out, step) for step in range(max(first, 1), update + 1)]
    for key in CHANGING if starts_of(out) else ():
        values = {one.get(key) for one in used}
        if len(values) > 1:
            yield f"{key} was changed by --resume between updates {first} and {update}"


def refuse_several_processes(verb: str) -> None:
    """Refuse to make an update in several processes.

    Raises:
        ConfigError: `launch`: the verb was started with torchrun.
    """
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        text = f"WORLD_SIZE is {num_processes}, but `rollouts {verb}` uses one process"
        hint = "launch it without torchrun"
        raise ConfigError("launch", "WORLD_SIZE", num_processes, "1", hint, message=text)


def _refuse_taken(out: Path, run: Path) -> None:
    """Refuse an output directory that exists or is inside the run."""
    if out.exists() or out.is_symlink():
        got, hint = "the output path already exists", "choose a different --out, or remove it"
        raise InputError("out_is_free", str(out), got, hint=hint)
    if out.resolve().is_relative_to(run.resolve()):
        got, hint = "the output path is inside the run", "choose a directory outside the run"
        raise InputError("out_is_free", str(out), got, hint=hint)


def _write(out: Path, run: Run) -> None:
    """Write the policy, and the critic in `critic/`, in the layout of a checkpoint."""
    unwrap = run.accelerator.unwrap_model
    with destination(out), writable(str(out)), whole(out) as partial:
        write_model(partial, unwrap(run.policy).model, run.source)
        if run.critic is not None:
            unwrap(run.critic.critic).save(partial / "critic")
