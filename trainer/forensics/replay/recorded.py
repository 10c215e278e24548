"""Read the records of a run of `rollouts train` or `rollouts rl`, to replay its updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.view.run_files import changed_rows, metric_lines, recorded_rows
from rollout_io.configuration import build, checked_values, flat, with_options
from schemas.errors import ConfigError, InputError
from trainer.config.sections import BatchConfig
from trainer.config.train_config import TrainConfig
from trainer.rl.config import TABLES
from trainer.run.checkpoint import checkpoints
from trainer.run.resume import saved_config
from trainer.run.start_records import CHANGING, FILE, start_of
from trainer.run.state import load_progress

PLACES = ("data.dataset", "model.path", "loss.reference_model", "model.critic_model")
"""Keys whose values are paths, which may have moved since the run."""
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
        values = checked_values(BatchConfig, changed, (), str(self.path / FILE), table="batch.")
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
        finding = f"no update {update}"
        where, expected = (
            str(self.path / "metrics.jsonl"),
            f"an update from 1 to {max(index_of, default=0)}",
        )
        if not index_of:
            text = f"{where}: the run has not made an update yet."
            raise InputError("replay_update", where, finding, message=text)
        raise InputError("replay_update", where, finding, expected)

    def dataset_of(self, iteration: int) -> Path:
        """Return the dataset of an iteration of `rollouts rl`, counted from 0."""
        return self.path / "rollouts" / f"iteration_{iteration:05d}"

    def checkpoint_before(self, update: int, *, between_batches: bool = False) -> Path | None:
        """Return the newest checkpoint before an update that has a state; None: the start model.

        With `between_batches`, checkpoints within a batch are ignored.
        """
        for step, path in reversed(checkpoints(self.path).items()):
            state = path / "state"
            if step >= update or not state.is_dir():
                continue
            if not between_batches or not load_progress(state).position.mini_batch:
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
            hint = f"restore {path} from a copy, or move it out of the run: replay then"
            if step < update:
                earlier = [p for s, p in checkpoints(run.path).items() if s < step]
                start = next((p for p in reversed(earlier) if (p / "state").is_dir()), None)
                hint += f" starts from {start or 'the start model'}"
            else:
                hint += " does not compare with it"
            raise error.at(error.where, hint) from error
        raise


def read_recorded(path: Path, places: Mapping[str, str] | None = None) -> RecordedRun:
    """Read the configuration and metrics of a run.

    Args:
        path: Directory of the run.
        places: New paths of data and models that have been moved, by key of the configuration (see
            `PLACES`).

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
    if lacking := [key for key in PLACES[:2] if not flat(values).get(key)]:
        raise InputError("resume_config", str(file), f"lacks {' and '.join(lacking)}")
    config = build(TrainConfig, values)
    _check_places(config, str(file), is_loop=num_iterations is not None)
    lines = tuple(line for line in metric_lines(path) if _EVALUATED not in line)
    return RecordedRun(path=path, config=config, num_iterations=num_iterations, lines=lines)


def refuse_changed(run: RecordedRun, dataset: str, update: int) -> None:
    """Refuse a dataset whose rows differ from the rows that an update recorded.

    Raises:
        InputError: `resume_dataset`: a row has changed or is missing.
    """
    if changed := changed_rows(recorded_rows(run.path, update), dataset):
        finding = f"the dataset has changed since the run trained on it: {changed}"
        raise InputError("resume_dataset", dataset, finding, hint=ORIGINAL)


ORIGINAL = "replay with the original dataset: --set data.dataset=PATH"


def _check_places(config: TrainConfig, file: str, *, is_loop: bool) -> None:
    """Check that local paths exist; relative ones refer to the directory the run was started in."""
    for key in PLACES[is_loop:]:
        section, _, name = key.partition(".")
        path = getattr(getattr(config, section), name)
        is_local = path is not None and "://" not in path and not set(path) & set("*?[")
        if is_local and not Path(path).exists():
            finding = f"the run's {key}, {path}, does not exist"
            hint = (
                f"pass --set {key}=PATH if it has moved, or run the command in the directory in"
                " which the run was started"
            )
            raise ConfigError("replay_place", file, finding, hint=hint)
