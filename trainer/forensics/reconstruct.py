"""Restore a run to the state just before one of its optimizer steps, from the run's records."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.view.run_files import changed_rows, metric_lines, recorded_rows
from rollout_io.configuration import build, checked_values, flat, with_options
from rollout_io.terminal import Bar
from schemas.errors import ConfigError, InputError, count
from trainer.batch import Batch
from trainer.config.sections import BatchConfig
from trainer.config.train_config import PATHS, TrainConfig
from trainer.rl.config import TABLES
from trainer.rl.learning import Learning
from trainer.run.checkpoint import checkpoints
from trainer.run.messages import UNWATCHED, Passes, ticking
from trainer.run.open_run import open_run
from trainer.run.resume import load_progress, saved_config
from trainer.run.run import Progress, Run
from trainer.run.run_log import CHANGING, STARTS, set_threads, start_of
from trainer.update import Update, make_update, pending_updates, set_rates

_EVALUATED = "evaluation/return_mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """Configuration and metrics of a run, read from its directory."""

    path: Path
    # Of its updates: `run.out` is `path`, all tokens are recorded, and there are no trackers.
    config: TrainConfig
    num_iterations: int | None  # of `rollouts rl`; None for a run of `rollouts train`
    lines: tuple[Mapping[str, Any], ...]  # of `metrics.jsonl`, without evaluations

    def at(self, update: int) -> RecordedRun:
        """Return the run with the settings that were in effect when it made an update.

        `--resume` may change some settings; they are recorded at each start of the run.
        """
        start = start_of(self.path, update)
        changed = {key: start[key] for key in CHANGING if key in start}
        values = checked_values(BatchConfig, changed, (), str(self.path / STARTS), table="batch.")
        batch = dataclasses.replace(self.config.batch, **values)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, batch=batch))

    def index_of(self, update: int) -> int:
        """Return the index in `lines` of an optimizer step, by its `global_step`.

        Raises:
            InputError: `replay_update`: the run has not made the update.
        """
        index_of = {
            line["global_step"]: index
            for index, line in enumerate(self.lines)
            if not line.get("skipped")
        }
        if update in index_of:
            return index_of[update]
        where, finding = str(self.path / "metrics.jsonl"), f"no update {update}"
        expected = f"an update from 1 to {max(index_of, default=0)}"
        none = None if index_of else f"{where}: the run has not made an update yet."
        raise InputError("replay_update", where, finding, expected, message=none)

    def checkpoint_before(self, update: int, *, between_batches: bool = False) -> Path | None:
        """Return the newest checkpoint before an update that has a state; None: the start model.

        With `between_batches`, checkpoints within a batch are ignored.
        """
        for step, path in reversed(checkpoints(self.path).items()):
            state = path / "state"
            if step >= update or not state.is_dir():
                continue
            if not between_batches or not load_progress(state).position.mini_batches_done:
                return path
        return None


@contextmanager
def naming_damaged(run: RecordedRun, update: int) -> Iterator[None]:
    """Add a hint to errors about a damaged checkpoint: how to replay without the checkpoint."""
    try:
        yield
    except InputError as error:
        for step, path in checkpoints(run.path).items():
            if not Path(error.where).is_relative_to(path):
                continue
            then = f"starts from {run.checkpoint_before(step) or 'the start model'}"
            then = then if step < update else "does not compare with it"
            hint = f"restore {path} from a copy, or move it out of the run: replay then {then}"
            raise error.at(error.where, hint) from error
        raise


def read_recorded(path: Path, places: Mapping[str, str] | None = None) -> RecordedRun:
    """Read the configuration and metrics of a run.

    Args:
        path: Directory of the run.
        places: New paths of data and models that have been moved, by key of the configuration (see
            `PATHS`).

    Raises:
        InputError: `replay_run`: the directory is no run; `resume_config`, `metrics_file`: a file
            of the run is damaged.
        ConfigError: `config_key`, `config_value`: the saved configuration is not valid.
    """
    file, saved = path / "config.json", saved_config(path)
    if saved is None:
        finding = "the directory has no config.json, so it is not a run"
        hint = "name the directory that `rollouts train` or `rollouts rl` wrote (--out)"
        raise InputError("replay_run", str(path), finding, hint=hint)
    loop = saved.get("loop")
    num_iterations = loop.get("num_iterations") if isinstance(loop, dict) else None
    places = dict(places or {})
    if num_iterations is not None:
        places["data.dataset"] = str(path / "rollouts" / "*")
    changed: dict[str, Any] = {"run.out": str(path), "run.record_tokens": "all", **places}
    changed |= {"run.trackers": [], "run.log_samples": 0}
    sections = {key: saved[key] for key in saved if key not in ("loop", *TABLES)}
    values = checked_values(TrainConfig, with_options(sections, changed), (), str(file))
    paths = flat(values)
    if lacking := [key for key in PATHS[:2] if not paths.get(key)]:
        raise InputError("resume_config", str(file), f"lacks {' and '.join(lacking)}")
    config = build(TrainConfig, values)
    for key in PATHS if num_iterations is None else PATHS[1:]:
        place = paths.get(key) or ""
        is_local = "://" not in place and not set(place) & set("*?[")
        if is_local and not Path(place).exists():
            finding = f"the run's {key}, {place}, does not exist"
            hint = f"pass --set {key}=PATH if it has moved, or run the command in the directory in which the run was started"
            raise ConfigError("replay_place", str(file), finding, hint=hint)
    lines = tuple(line for line in metric_lines(path) if _EVALUATED not in line)
    return RecordedRun(path=path, config=config, num_iterations=num_iterations, lines=lines)


@contextmanager
def forwarding(verb: str, doing: str, update: int) -> Iterator[Passes]:
    """Show the progress of a verb that makes the updates of a run again, up to one of them.

    Raises:
        ConfigError: `launch`: the verb was started with torchrun, in several processes.
    """
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        text = f"WORLD_SIZE is {num_processes}, but `rollouts {verb}` uses one process"
        hint = "launch it without torchrun"
        raise ConfigError("launch", "WORLD_SIZE", num_processes, "1", hint, message=text)
    with Bar(update, "updates", f"{doing} update {update}") as bar:
        passes = Passes(bar, num_planned=update, moves=True)
        with ticking(passes):
            yield passes


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
    pending: Update  # the update, before it is made
    prepared: tuple[Run, Batch] | None  # what `at_batch` returned


def reconstruct(
    run: str | Path,
    update: int,
    *,
    places: Mapping[str, str] | None = None,
    at_batch: Callable[[Run, Update], tuple[Run, Batch]] | None = None,
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
        >>> made = make_update(before.run, before.pending, before.progress)  # doctest: +SKIP
    """
    recorded = read_recorded(Path(run), places).at(update)
    target, loop = recorded.index_of(update), recorded.num_iterations
    with naming_damaged(recorded, update):
        checkpoint = recorded.checkpoint_before(update, between_batches=at_batch is not None)
        num_made = load_progress(checkpoint / "state").global_step if checkpoint else 0
        learning = Learning(recorded.config, checkpoint, num_iterations=loop) if loop else None
        part = learning.opened if learning else _opened_run(recorded, checkpoint)
    progress, forwarded = part.progress, list[Forwarded]()
    prepared: tuple[Run, Batch] | None = None
    passes.end_update(stepped=num_made)
    set_threads(start_of(recorded.path, num_made + 1))
    while True:
        if learning:  # which has a plan for each iteration
            learning.progress = progress
            part = learning.run_on(
                recorded.path / "rollouts" / f"iteration_{learning.iteration:05d}"
            )
        dataset, begun = part.config.data.dataset, None
        set_rates(part, progress.global_step)
        for pending in pending_updates(part, progress.position, passes):
            num_before = target - progress.num_mini_batches
            # The batch of the update begins: its advantages follow from the policy as it is now.
            if at_batch and begun is not pending.batch and num_before < pending.num_left:
                prepared = at_batch(part, pending)
            begun, line = pending.batch, recorded.lines[progress.num_mini_batches]
            if not num_before or (learning and not line.get("skipped")):
                rows = recorded_rows(recorded.path, line["global_step"])
                if changed := changed_rows(rows, dataset):
                    finding = f"the dataset has changed since the run trained on it: {changed}"
                    raise InputError("resume_dataset", dataset, finding, hint=ORIGINAL)
            if not num_before:
                return Reconstruction(
                    recorded=recorded,
                    update=update,
                    line=line,
                    checkpoint=checkpoint,
                    forwarded=tuple(forwarded),
                    run=part,
                    progress=progress,
                    pending=pending,
                    prepared=prepared,
                )
            made_update = make_update(part, pending, progress, passes)
            progress, metrics = made_update.progress, made_update.metrics
            passes.end_update(stepped=not metrics["skipped"])
            set_threads(start_of(recorded.path, progress.global_step + 1))
            forwarded.append(Forwarded(line, iteration_of(recorded, part) | metrics))
            _check_skipped(recorded, line, metrics)
        if not learning:
            finding = f"the run has {count(progress.num_mini_batches, 'mini-batch', 'es')}"
            expected = f"at least {target + 1}, as in metrics.jsonl"
            raise InputError("resume_dataset", dataset, finding, expected, ORIGINAL)


def iteration_of(recorded: RecordedRun, run: Run) -> dict[str, int]:
    """Return the metric that `rollouts rl` adds to those of an update."""
    return {"iteration": run.first_batch} if recorded.num_iterations else {}


ORIGINAL = "replay with the original dataset: --set data.dataset=PATH"


def _opened_run(recorded: RecordedRun, checkpoint: Path | None) -> Run:
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
    return run


def _check_skipped(
    recorded: RecordedRun, line: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Check that a replayed mini-batch is skipped if and only if the run skipped it."""
    then = bool(line.get("skipped"))
    if then == bool(metrics["skipped"]):
        return
    which = f"the mini-batch after update {line['global_step'] - (not then)}"
    ran, now = ("skipped", "is not skipped") if then else ("did not skip", "is skipped")
    finding = f"the run {ran} {which}, but now it {now}"
    hint = "replay on the machine of the run, with the same versions of its packages"
    raise InputError("replay_skipped", str(recorded.path), finding, hint=hint)
