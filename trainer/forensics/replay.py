"""Replay an update of a run, unchanged or with changes, and compare it with the records."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollout_io.dataset.filesystems import whole, writable
from rollout_io.dataset.locking import destination
from rollout_io.terminal import Bar
from schemas.errors import ConfigError, InputError, count
from schemas.records import token_record_path
from trainer.forensics.reconstruct import (
    Reconstruction,
    iteration_of,
    naming_damaged,
    read_recorded,
    reconstruct,
)
from trainer.forensics.replay_changes import (
    apply_settings,
    changed_config,
    prepared,
    split_settings,
    with_batch,
    without_rows,
)
from trainer.forensics.replay_comparison import (
    Comparison,
    Difference,
    as_recorded,
    compared_metrics,
)
from trainer.run.checkpoint import checkpoint_path, write_model
from trainer.run.messages import Passes, ticking
from trainer.run.resume import load_progress
from trainer.run.run import Run
from trainer.run.run_log import CHANGING, MACHINE, start_of, starts_of, this_machine
from trainer.update import Step, make_update


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
    refuse_several_processes("replay")
    path = Path(run)
    if out is not None:
        _refuse_taken(Path(out), path)
    places, settings = split_settings(settings)
    recorded = read_recorded(path, places)
    recorded.index_of(update)
    changed_config(recorded.config, settings)
    at_batch = partial(prepared, settings=settings) if settings else None
    with naming_damaged(recorded, update):
        start = recorded.checkpoint_before(update, between_batches=bool(settings))
        num_made = load_progress(start / "state").global_step if start else 0
    with Bar(update, "updates", f"replaying update {update}", done=num_made) as bar:
        passes = Forwarding(bar, num_planned=update, num_made=num_made)
        with ticking(passes):
            before = reconstruct(path, update, places=places, at_batch=at_batch, passes=passes)
            is_changed = bool(settings or without)
            first = _paused(before.run) if is_changed else before.run
            # clip_cov draws the same numbers in both updates.
            with torch.random.fork_rng(enabled=is_changed):
                result = make_update(first, before.step, before.progress, passes)
            passes.end_update(stepped=not result.metrics["skipped"])
            run_after, changed = before.run, None
            if is_changed:
                step = before.step
                if before.prepared is not None:
                    changed_run, batch = before.prepared
                    run_after = dataclasses.replace(changed_run, progress=run_after.progress)
                    step = with_batch(before.run, step, batch)
                step = without_rows(run_after, step, without) if without else step
                apply_settings(run_after, before.progress.global_step)
                changed = as_recorded(make_update(run_after, step, before.progress, passes).metrics)
    with naming_damaged(recorded, update):
        compared, differences = _compared(before, result, is_changed=is_changed)
    if out is not None:
        _write(Path(out), run_after)
    iteration = iteration_of(before.recorded, before.run)
    names = compared_metrics(before.line, is_loop=bool(iteration))
    return Replay(
        run=str(path),
        update=update,
        iteration=iteration.get("iteration"),
        checkpoint=None if before.checkpoint is None else str(before.checkpoint),
        num_forwarded=len(before.forwarded),
        num_threads=torch.get_num_threads(),
        compared=tuple(compared),
        not_compared=tuple(name for name in before.line if name not in names),
        differences=tuple(differences),
        recorded=before.line,
        replayed=as_recorded(iteration | result.metrics),
        changed=changed,
        changes=(*settings, *(f"without {row}" for row in without)),
        notes=tuple(_notes(before)),
        out=None if out is None else str(out),
    )


class Forwarding(Passes):
    """`Passes` that also advance the progress bar after each replayed update."""

    def __init__(self, bar: Bar, *, num_planned: int, num_made: int = 0) -> None:
        super().__init__(bar, num_planned=num_planned, num_made=num_made)
        self._main = bar

    def end_update(self, *, stepped: bool) -> None:
        """See `Passes.end_update`."""
        super().end_update(stepped=stepped)
        self._main.update(int(stepped))


def _paused(run: Run) -> Run:
    """Return a copy of the run whose optimizers clear the gradient but never step."""

    def paused(optimizer: torch.optim.Optimizer) -> Any:
        names = ("zero_grad", "param_groups")
        settings = {name: getattr(optimizer, name) for name in names}
        return SimpleNamespace(**settings, step=lambda: None)

    critic = run.critic_optimizer
    return dataclasses.replace(
        run, optimizer=paused(run.optimizer), critic_optimizer=critic and paused(critic)
    )


def _compared(
    before: Reconstruction, result: Step, *, is_changed: bool
) -> tuple[list[str], list[Difference]]:
    """Compare a replayed update with the run's records: what is compared, and what differs.

    The weights and the state after the update are compared too, unless changes are made to it.
    """
    recorded, update, run = before.recorded, before.update, before.run
    is_loop, comparison = recorded.num_iterations is not None, Comparison(run, update)
    for one in before.forwarded:
        comparison.metrics(one.recorded, one.metrics, is_loop=is_loop)
    replayed = iteration_of(recorded, run) | result.metrics
    comparison.metrics(before.line, replayed, is_loop=is_loop)
    compared = [count(len(compared_metrics(before.line, is_loop=is_loop)), "metric")]
    if before.forwarded:
        on_the_way = count(len(before.forwarded), "update")
        compared.append(f"the metrics of {on_the_way} before it")
    if token_record_path(recorded.path, update).is_file():
        comparison.tokens(recorded.path, result.tokens)
        compared.append("the recorded tokens")
    folder = checkpoint_path(recorded.path, update)
    if folder.is_dir() and not is_changed:
        comparison.weights(folder)
        compared.append(f"the weights of {folder}")
        if run.critic is not None:
            comparison.critic(folder / "critic")
            compared.append("its critic")
        if (folder / "state").is_dir():
            comparison.state(folder / "state", result.progress)
            compared.append("its optimizers and position")
    version = recorded.path / "weights" / f"version_{run.first_batch + 1}"
    if is_loop and before.step.num_left == 1 and version.is_dir() and not is_changed:
        comparison.weights(version)
        compared.append(f"the weights of {version}")
    return compared, comparison.differences


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
