"""Read the files of a training run: settings, metrics and token records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

import rollout_io
from rollout_io.dataset.opening import read_input, refuse_irregular
from rollout_io.dataset.trajectory_facts import with_stored_digest
from rollout_io.formats.parsing.records import natural_key
from schemas.errors import InputError, count
from schemas.records import TOKENS, token_record_path, token_record_schema, token_record_steps
from schemas.run_metrics import LOOP_METRICS, METRICS

KEYS = ("dataset", "instance_id", "trajectory_id", "step_index")
"""Columns that identify the row of a record."""
NUMBERS = {
    "advantages": "advantage",
    "weights": "weight",
    "old_logprobs": "old_logprob",
    "logprobs": "logprob",
    "ref_logprobs": "ref_logprob",
    "importance_weights": "importance_weight",
    "correction_weights": "correction_weight",
    "entropy": "entropy",
    "losses": "loss",
}
"""Columns with one number per response token; the values are the names used for one token."""
_ROW = ("trajectory_id", "step_index")
_EVALUATION = "evaluation/"
ITERATIONS = "rollouts"
"""Directory of the datasets in a run of `rl`."""
FLAGS = ("clipped", "rejected")
"""Columns with one flag per response token."""


def is_run(path: Path) -> bool:
    """True if a directory is a run of `rollouts train` or `rollouts rl`."""
    return (path / "metrics.jsonl").is_file() or (path / TOKENS).is_dir()


def read_config(run: Path) -> Mapping[str, Any]:
    """Return the settings of a run; empty if they are missing or damaged."""
    file = run / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(read_input(file))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def dataset_paths(run: Path) -> list[str]:
    """Return the datasets that a run trained on, oldest first: one for each iteration of `rl`."""
    iterations = run / ITERATIONS
    if iterations.is_dir():
        folders = [path for path in iterations.iterdir() if path.is_dir()]
        return [str(path) for path in sorted(folders, key=lambda path: natural_key(path.name))]
    trained = _setting(run, "data", "dataset")
    return [trained] if trained else []


def samples(run: Path) -> bool | None:
    """True for a run of `rl`, which samples its data; False for a run of `train`; None if unknown."""
    if (run / ITERATIONS).is_dir():
        return True
    return False if dataset_paths(run) else None


def model_of(run: Path) -> str | None:
    """Return the model that a run started from, as configured; None if unknown."""
    return _setting(run, "model", "path")


def _setting(run: Path, section: str, key: str) -> str | None:
    """Return the text of a key of the run's configuration; None if it is missing or damaged."""
    values = read_config(run).get(section)
    text = values.get(key) if isinstance(values, dict) else None
    return text if isinstance(text, str) and text else None


def read_metrics(run: Path) -> dict[str, Any]:
    """Return the metrics of a run as columns, one value per step.

    `rl` writes one line for an update, and another with the same step for the evaluation after it;
    their metrics are joined. If a step has several lines of the same kind, the last one is used.

    Returns:
        `global_step`: the steps, sorted; `updates`: the steps of updates, sorted; `metrics`: by
        name, a number or None for each step; `about`: unit and meaning of each known metric.

    Raises:
        InputError: `metrics_file`: a line is not a JSON object with an integer `global_step`.
    """
    updates: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[int, Mapping[str, Any]] = {}
    for record in metric_lines(run):
        if not record.get("skipped"):
            is_evaluation = any(name.startswith(_EVALUATION) for name in record)
            (evaluations if is_evaluation else updates)[record["global_step"]] = record
    steps = sorted({*updates, *evaluations})
    # The update comes first: its `iteration` is the iteration whose data it trained on.
    lines = {step: {**evaluations.get(step, {}), **updates.get(step, {})} for step in steps}
    names = dict.fromkeys(name for step in steps for name in lines[step])
    metrics = {name: [_number(lines[step].get(name)) for step in steps] for name in names}
    shown = {
        name: values
        for name, values in metrics.items()
        if name != "global_step" and any(value is not None for value in values)
    }
    described = {**METRICS, **LOOP_METRICS}
    about = {name: described[name]._asdict() for name in shown if name in described}
    return {"global_step": steps, "updates": sorted(updates), "metrics": shown, "about": about}


def metric_lines(run: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a run's metrics, except one that the run is still writing.

    Raises:
        InputError: `metrics_file`: a line is not a JSON object with an integer `global_step`.
    """
    return lines_of(run / "metrics.jsonl")


def lines_of(file: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a file of metrics; see `metric_lines`, also for the errors."""
    lines = enumerate(_whole_lines(file), 1)
    return [_record(line, f"{file}:{number}") for number, line in lines]


def recorded_rows(run: Path, update: int | None = None) -> pl.DataFrame:
    """Read which rows a run recorded, and their digests, from one update or from all.

    Damaged files of records are skipped; `read_tokens` reports them when their update is opened.

    Returns:
        `dataset`, `trajectory_id`, `step_index` and `row_digest`, without repeats.
    """
    names = ["dataset", *_ROW, "row_digest"]
    schema = token_record_schema()
    tables = [pl.DataFrame(pa.schema([schema.field(name) for name in names]).empty_table())]
    for step in token_record_steps(run):
        if update in (None, step):
            # Records may be damaged, or of an earlier version, without digests.
            with suppress(InputError):
                tables.append(read_tokens(run, step, names))
    return pl.concat(tables).unique(maintain_order=True)


def changed_rows(recorded: pl.DataFrame, dataset: str) -> str:
    """Compare a dataset with the rows of `recorded_rows`, by their ids and digests.

    Ids alone are not enough, because a dataset may have been converted again under the same path.

    Returns:
        A clause such as "2 of 9 recorded rows differ, the first in trajectory a_0, step 1"; "" if
        no row differs or none was recorded.

    Raises:
        InputError: `readable_file`: the dataset is damaged.
    """
    if recorded.is_empty():
        return ""
    stored = stored_digests(dataset, recorded["trajectory_id"].unique())
    changed = recorded.join(stored, on=[*_ROW, "row_digest"], how="anti")
    if changed.is_empty():
        return ""
    name, step = changed.select(_ROW).row(0)
    differ = f"{len(changed):,} of {count(len(recorded), 'recorded row')} differ"
    return f"{differ}, the first in trajectory {name}, step {step}"


def stored_digests(dataset: str, trajectory_ids: pl.Series) -> pl.DataFrame:
    """For each row of the trajectories, return its digest and its number of response tokens.

    Returns:
        `trajectory_id`, `step_index`, `row_digest` (int64) and `num_tokens_of_row`.

    Raises:
        InputError: `readable_file`: the dataset is damaged.
    """
    try:
        rows = rollout_io.scan(dataset).filter(
            pl.col("trajectory_id").is_in(trajectory_ids.implode())
        )
        length = pl.col("response_ids").list.len().cast(pl.Int32)
        return (
            with_stored_digest(rows).select(*_ROW, "row_digest", num_tokens_of_row=length).collect()
        )
    except (pl.exceptions.PolarsError, OSError) as error:
        finding = f"its rows cannot be read: {' '.join(str(error).split())}"
        raise InputError("readable_file", dataset, finding) from None


def iterations_of(run: Path) -> dict[int, str]:
    """Return the dataset path of each update of a run of `rl`, according to the run's metrics."""
    metrics = read_metrics(run)
    iterations = metrics["metrics"].get("iteration", [])
    pairs = zip(metrics["global_step"], iterations, strict=False)
    return {
        step: f"{run.as_posix()}/{ITERATIONS}/iteration_{int(iteration):05d}"
        for step, iteration in pairs
        if iteration is not None
    }


def read_tokens(run: Path, update: int, columns: list[str] | None = None) -> pl.DataFrame:
    """Read the token records of an update, one per row of a dataset.

    Raises:
        InputError: `input_file`: the update was not recorded; `readable_file`: its file is damaged.
    """
    records = scan_token_records(run, update)
    file = token_record_path(run, update)
    refuse_irregular(file)
    try:
        return records.select(columns or pl.all()).collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        finding = f"the file is damaged or not Parquet: {' '.join(str(error).split())}"
        raise InputError("readable_file", str(file), finding) from None


class RecordedTasks:
    """Tasks that each update of a run recorded, read from two columns of its token records.

    The tasks of an update are cached until its file changes.

    Args:
        run: Directory of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[int, tuple[tuple[int, int], frozenset[tuple[str, str]]]] = {}

    def of(self, update: int) -> frozenset[tuple[str, str]]:
        """Return the (dataset, instance_id) pairs of an update's records.

        Raises:
            InputError: See `read_tokens`.
        """
        file = token_record_path(self._run, update)
        status = file.stat() if file.is_file() else None
        stamp = (0, 0) if status is None else (status.st_mtime_ns, status.st_size)
        cached = self._known.get(update)
        if cached is None or cached[0] != stamp:
            pairs = read_tokens(self._run, update, ["dataset", "instance_id"]).unique().rows()
            cached = self._known[update] = stamp, frozenset(pairs)
        return cached[1]


def _whole_lines(file: Path) -> list[bytes]:
    """Return the complete lines of a file; an unterminated last line may still be incomplete."""
    return read_input(file).split(b"\n")[:-1] if file.is_file() else []


def _record(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("global_step")) is not int:
        expected = "a JSON object with an integer global_step"
        raise InputError("metrics_file", where, repr(line[:60].decode(errors="replace")), expected)
    return record


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def scan_token_records(run: str | os.PathLike[str], global_step: int | None = None) -> pl.LazyFrame:
    """Scan a training run's token records: the contribution of each trained token to an update.

    Args:
        run: Directory of the run.
        global_step: Number of the update; None: all updates, in order.

    Returns:
        `global_step` (int32), then `schemas.TOKEN_RECORD_COLUMNS`; one record per update and row of
        the dataset. Join it to the dataset on `trajectory_id` and `step_index`.

    Raises:
        InputError: `input_file`: the run has no records of the update, or no records at all.

    Example:
        >>> scan_token_records("run", 3).select("trajectory_id", "logprobs").collect()
    """
    folder = Path(run)
    steps = token_record_steps(folder)
    if global_step is not None:
        steps = [step for step in steps if step == global_step]
    if not steps:
        what = "any update" if global_step is None else f"update {global_step}"
        hint = "train with record_tokens=sampled or all"
        finding = f"the run has no token records of {what}"
        raise InputError("input_file", str(folder), finding, hint=hint)
    frames = (
        pl.scan_parquet(token_record_path(folder, step)).select(
            pl.lit(step, pl.Int32).alias("global_step"), pl.all()
        )
        for step in steps
    )
    return pl.concat(frames)
