"""Restore a run to the state just before one of its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import InputError, count
from trainer.forensics.replay.recorded import (
    ORIGINAL,
    RecordedRun,
    naming_damaged,
    read_recorded,
    refuse_changed,
)
from trainer.rl.learning import Learning
from trainer.run.checkpoint import checkpoints
from trainer.run.open_run import open_run
from trainer.run.pass_progress import UNWATCHED, Passes
from trainer.run.run import Run
from trainer.run.start_records import set_threads, start_of
from trainer.run.state import Progress, load_progress
from trainer.update import Step, make_update, set_rates, steps

Follow = Callable[[Progress | None], Run]
"""Function that returns the run at a given progress; None: at the progress where it was loaded."""


class Forwarded(NamedTuple):
    """A replayed mini-batch before the update: the line that the run wrote, and its metrics now."""

    recorded: Mapping[str, Any]
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconstruction:
    """A run restored to the state just before one of its optimizer steps.

    `run` and `run.critic` hold models and optimizers as they were just before the step, with the
    learning rates of the update set; `run.config` records the tokens of all rows. `make_update` takes
    the step.
    """

    recorded: RecordedRun  # the run, as its directory describes it
    update: int  # its `global_step`, counted from 1
    line: Mapping[str, Any]  # the update's line of `metrics.jsonl`
    checkpoint: Path | None  # from which the run was loaded; None: its start model
    forwarded: tuple[Forwarded, ...]  # mini-batches between the checkpoint and the update
    run: Run
    progress: Progress  # before the update; `progress.global_step` is `update` - 1
    step: Step  # the mini-batch


def reconstruct(
    run: str | Path,
    update: int,
    *,
    places: Mapping[str, str] | None = None,
    at_batch: Callable[[Run, Step], None] | None = None,
    passes: Passes = UNWATCHED,
) -> Reconstruction:
    """Restore a run to the state just before one of its optimizer steps.

    Loads the newest checkpoint before the update that has a state, or the start model, and replays
    the updates in between with the code that trained the run. On a CPU, with the same number of
    threads, the state equals the state in the run bit for bit. This process is set to use as many
    threads as the run. The run's directory is only read, so the run may still be training.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`.
        update: Number of the update: its `global_step`, counted from 1.
        places: New paths of data and models that have been moved, by key of the configuration:
            `dataset`, `model`, `reference_model`, `critic_model`.
        at_batch: Called with the first mini-batch of the update's batch, before any update of the
            batch is made; checkpoints within a batch are then not used.
        passes: Counts the forwarded micro-batches, and shows progress.

    Raises:
        InputError: `replay_run`, `replay_update`: there is no such run or update;
            `resume_dataset`: the dataset has changed since; `replay_skipped`: a mini-batch is
            skipped now but was not skipped by the run, or the reverse.
        RolloutError: See `trainer.training.train`.

    Example:
        >>> before = reconstruct("run", 12)  # doctest: +SKIP
        >>> metrics = make_update(
        ...     before.run, before.step, before.progress
        ... ).metrics  # doctest: +SKIP
    """
    recorded = read_recorded(Path(run), places).at(update)
    target = recorded.index_of(update)
    with naming_damaged(recorded, update):
        checkpoint = recorded.checkpoint_before(update, between_batches=at_batch is not None)
        follow = _opened_loop(recorded, checkpoint) if recorded.num_iterations else None
        follow = follow or _opened_run(recorded, checkpoint)
        done = load_progress(checkpoint / "state").global_step if checkpoint else 0
    forwarded: list[Forwarded] = []
    set_threads(start_of(recorded.path, done + 1))
    progress: Progress | None = None
    while True:
        part = follow(progress)
        progress, begun = part.progress, None
        set_rates(part, progress.global_step)
        for step in steps(part, progress.position, passes):
            num_before = target - progress.num_mini_batches
            # The batch of the update begins: its advantages follow from the policy as it is now.
            if at_batch and begun is not step.batch and num_before < step.num_left:
                at_batch(part, step)
            begun = step.batch
            if not num_before:
                refuse_changed(recorded, part.config.data.dataset, update)
                return Reconstruction(
                    recorded=recorded,
                    update=update,
                    line=recorded.lines[target],
                    checkpoint=checkpoint,
                    forwarded=tuple(forwarded),
                    run=part,
                    progress=progress,
                    step=step,
                )
            line = recorded.lines[progress.num_mini_batches]
            if recorded.num_iterations and not line.get("skipped"):
                refuse_changed(recorded, part.config.data.dataset, line["global_step"])
            made = make_update(part, step, progress, passes)
            progress, metrics = made.progress, made.metrics
            passes.end_update(stepped=not metrics["skipped"])
            set_threads(start_of(recorded.path, progress.global_step + 1))
            forwarded.append(Forwarded(line, iteration_of(recorded, part) | metrics))
            _check_skipped(recorded, line, metrics)
        if not recorded.num_iterations:
            finding = f"the run has {count(progress.num_mini_batches, 'mini-batch', 'es')}"
            expected = f"at least {target + 1}, as in metrics.jsonl"
            raise InputError(
                "resume_dataset", part.config.data.dataset, finding, expected, ORIGINAL
            )


def iteration_of(recorded: RecordedRun, run: Run) -> dict[str, int]:
    """Return the metric that `rollouts rl` adds to those of an update."""
    return {"iteration": run.first_batch} if recorded.num_iterations else {}


def _opened_run(recorded: RecordedRun, checkpoint: Path | None) -> Follow:
    """Load a run of `rollouts train`, whose plan spans all its updates."""
    try:
        run = open_run(recorded.config, resume=None, checkpoint=checkpoint)
        for other in () if checkpoint else checkpoints(recorded.path).values():
            if (other / "state").is_dir():  # check that the dataset is the run's
                load_progress(other / "state", run.digest)
                break
    except InputError as error:
        if error.rule != "resume_dataset":
            raise
        raise error.at(recorded.config.data.dataset, ORIGINAL) from None
    return lambda _: run


def _opened_loop(recorded: RecordedRun, checkpoint: Path | None) -> Follow:
    """Load a run of `rollouts rl`, which has a plan for each iteration."""
    assert recorded.num_iterations is not None
    learning = Learning(recorded.config, checkpoint, num_iterations=recorded.num_iterations)

    def follow(progress: Progress | None) -> Run:
        if progress is not None:
            learning.progress = progress
        return learning.run_on(recorded.dataset_of(learning.iteration))

    return follow


def _check_skipped(
    recorded: RecordedRun, line: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Check that a replayed mini-batch is skipped if and only if the run skipped it."""
    then, now = bool(line.get("skipped")), bool(metrics["skipped"])
    if then == now:
        return
    which = f"the mini-batch after update {line['global_step'] - (not then)}"
    finding = f"the run skipped {which}" if then else f"the run did not skip {which}"
    finding += ", but now it is not skipped" if then else ", but now it is skipped"
    hint = "replay on the machine of the run, with the same versions of its packages"
    raise InputError("replay_skipped", str(recorded.path), finding, hint=hint)
