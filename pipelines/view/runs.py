"""A training run that a viewer shows: its datasets, its updates, and what they recorded about rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa
from starlette.responses import Response

from pipelines.view import run_files
from pipelines.view.dataset import Dataset
from pipelines.view.paths import absolute, short_name
from pipelines.view.responses import arrow_response
from pipelines.view.run_files import KEYS, read_tokens
from schemas.errors import InputError, RolloutError
from schemas.records import token_record_steps

if TYPE_CHECKING:
    from pipelines.view.sources import Sources

_PER_TARGET = ("loss_mask", "advantages", "weights", "logprobs", "importance_weights", "losses")
_FLAGS = ("clipped", "rejected")
MAX_TARGETS = 100_000


@dataclass(frozen=True, slots=True)
class Run:
    """A run that a viewer shows.

    Attributes:
        name: Short name for the page.
        path: Directory of the run.
        datasets: Ids of the datasets that the run trained on.
        recorded: Dataset ids by absolute path.
        opened: Absolute paths of the datasets that were opened; those that changed since the run
            trained on them are not in `recorded`.
        tasks: The tasks that each update recorded.
    """

    name: str
    path: Path
    datasets: tuple[str, ...]
    recorded: dict[str, str]
    opened: frozenset[str]
    tasks: run_files.RecordedTasks

    def dataset_of(self, path: str) -> str | None:
        """Return the id of the dataset that the run recorded under a path; None if unknown.

        Iterations of `rl` are found by name, so that a run can be moved or opened from any
        directory.
        """
        folder, _, name = path.rstrip("/").rpartition("/")
        number = self.recorded.get(absolute(path))
        if number is None and short_name(folder) == run_files.ITERATIONS:
            number = self.recorded.get(absolute(str(self.path / run_files.ITERATIONS / name)))
        return number

    def records(
        self, update: int, dataset: Dataset, columns: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Read an update's token records for the rows of one dataset.

        Iterations of `rl` reuse trajectory ids, so ids alone do not identify a row.

        Raises:
            InputError: See `run_files.read_tokens`.
        """
        names = None if columns is None else ["dataset", *columns]
        tokens = run_files.read_tokens(self.path, update, names)
        paths = tokens["dataset"].unique().to_list()
        of_dataset = [path for path in paths if self.dataset_of(path) == dataset.number]
        return tokens.filter(pl.col("dataset").is_in(of_dataset)).drop("dataset")

    def recorded_updates(
        self, dataset: Dataset, instance_id: str, row: tuple[str, int] | None = None
    ) -> dict[str, list[int]]:
        """List the updates that recorded a task of a dataset.

        Args:
            dataset: The dataset.
            instance_id: The task.
            row: trajectory_id and step_index of one of its rows; None: any row.

        Returns:
            `updates`, in order, and `unreadable`: the updates whose records cannot be read.
        """
        updates, unreadable = [], []
        for update in token_record_steps(self.path):
            try:
                paths = [path for path, task in self.tasks.of(update) if task == instance_id]
                if not any(self.dataset_of(path) == dataset.number for path in paths):
                    continue
                if row is not None:
                    keys = self.records(update, dataset, ["trajectory_id", "step_index"])
                    if row not in keys.rows():
                        continue
            except InputError:
                unreadable.append(update)
            else:
                updates.append(update)
        return {"updates": updates, "unreadable": unreadable}

    def trained_datasets(self) -> list[str | None]:
        """Return the dataset of each update with token records, according to the run's metrics."""
        steps = token_record_steps(self.path)
        if len(self.datasets) == 1:
            return [self.datasets[0] for _ in steps]
        iterations = run_files.iterations_of(self.path)
        return [self.dataset_of(iterations[step]) if step in iterations else None for step in steps]

    @property
    def stamp(self) -> tuple[int, ...]:
        """Numbers that change when the run writes metrics, token records or an iteration."""
        file = self.path / "metrics.jsonl"
        facts = file.stat() if file.is_file() else None
        return (
            *((facts.st_size, facts.st_mtime_ns) if facts else ()),
            len(token_record_steps(self.path)),
            len(self.opened),
        )


def update_rows(sources: Sources, run: Run, update: int) -> Response:
    """Return the rows of an update, sorted by their absolute share of the loss, largest first."""
    return arrow_response(_ranked(sources, run, update).drop("record"))


def update_targets(sources: Sources, run: Run, update: int, limit: int) -> Response:
    """Return up to `limit` trained tokens, evenly spaced over the rows from `update_rows`."""
    order = _ranked(sources, run, update)["record"]
    names = ["loss_mask", "logprobs", "importance_weights", "clipped", "rejected"]
    lists = read_tokens(run.path, update)[order]
    present = [name for name in names if name in lists.columns]
    flat = _flat(lists.select(present).with_row_index("row")).filter("loss_mask")
    limit = min(max(limit, 1), MAX_TARGETS)
    drawn = np.unique(np.linspace(0, max(len(flat) - 1, 0), min(limit, len(flat))).astype(np.int64))
    return arrow_response(
        flat[drawn].select(
            "row",
            "position",
            logprob=_column(flat, "logprobs", pl.Float32),
            importance_weight=_column(flat, "importance_weights", pl.Float32),
            clipped=_column(flat, "clipped", pl.Boolean),
            rejected=_column(flat, "rejected", pl.Boolean),
        ),
        total=len(flat),
    )


def _ranked(sources: Sources, run: Run, update: int) -> pl.DataFrame:
    records = read_tokens(run.path, update).with_row_index("record")
    present = [name for name in (*_PER_TARGET, *_FLAGS) if name in records.columns]
    flat = _flat(records.select("record", *present))
    flat = flat.with_columns(sampler=_sampler_logprobs(sources, run, records))
    flat = flat.filter("loss_mask")
    difference = (
        _column(flat, "logprobs", pl.Float32).cast(pl.Float64) - pl.col("sampler").cast(pl.Float64)
    ).abs()
    weighted = _column(flat, "weights", pl.Float32).cast(pl.Float64) * _column(
        flat, "losses", pl.Float32
    ).cast(pl.Float64)
    sums = flat.group_by("record").agg(
        num_targets=pl.len().cast(pl.Int32),
        loss_share=weighted.sum(),
        max_importance_weight=_column(flat, "importance_weights", pl.Float32).max(),
        max_abs_difference=difference.max(),
        mean_abs_difference=difference.mean(),
        num_clipped=_column(flat, "clipped", pl.Boolean).sum().cast(pl.Int32),
        num_rejected=_column(flat, "rejected", pl.Boolean).sum().cast(pl.Int32),
        advantage=_column(flat, "advantages", pl.Float32).cast(pl.Float64).mean(),
    )
    recorded = records.select("record", *KEYS)
    ids = {path: run.dataset_of(path) for path in recorded["dataset"].unique().to_list()}
    named = recorded.with_columns(
        pl.col("dataset").replace_strict(ids, default=None, return_dtype=pl.String)
    )
    rows = named.join(sums, on="record", how="inner", maintain_order="left")
    return rows.sort(
        pl.col("loss_share").abs(), descending=True, nulls_last=True, maintain_order=True
    )


def _flat(records: pl.DataFrame) -> pl.DataFrame:
    """Return one line per response token, with its position in the response."""
    key = records.columns[0]
    lists = [name for name in records.columns if name != key]
    sizes = records["loss_mask"].list.len()
    # A null list becomes one null per token.
    filled = [
        pl.when(pl.col(name).is_null())
        .then(pl.lit(None, pl.Float32).repeat_by(pl.col("loss_mask").list.len()).cast(kind))
        .otherwise(pl.col(name))
        .alias(name)
        for name, kind in records.select(lists).schema.items()
    ]
    filled_records = records.with_columns(filled).filter(sizes > 0)
    positions = pl.int_ranges(0, pl.col("loss_mask").list.len()).alias("position")
    flat = filled_records.with_columns(positions).explode(*lists, "position")
    return flat.with_columns(pl.col("position").cast(pl.Int32))


def _column(frame: pl.DataFrame, name: str, kind: pl.DataType | type[pl.DataType]) -> pl.Expr:
    return pl.col(name) if name in frame.columns else pl.lit(None, kind)


def _sampler_logprobs(sources: Sources, run: Run, records: pl.DataFrame) -> pl.Series:
    """Read the sampler's log-probability of each response token, in the order of the records."""
    sizes = records["loss_mask"].list.len().to_list()
    values_of: list[pa.Array] = [pa.nulls(size, pa.float32()) for size in sizes]
    for path, part in records.select("record", *KEYS).group_by("dataset"):
        number = run.dataset_of(str(path[0]))
        if number is None:
            continue
        dataset = sources.dataset(number)
        if not dataset.has("rollout_logprobs"):
            continue
        places = []
        for record, trajectory_id, step_index in part.select(
            "record", "trajectory_id", "step_index"
        ).rows():
            try:
                begin, end = dataset.index.bounds(dataset.index.number(trajectory_id))
            except RolloutError:
                continue  # the dataset has changed since the run
            if step_index < end - begin:
                places.append((begin + step_index, record))
        places.sort()
        rows = np.array([row for row, _ in places], np.int64)
        lists = dataset.reader.take(rows, ["rollout_logprobs"]).column(0)
        for (_, record), values in zip(places, lists, strict=True):
            if values.is_valid and len(values.values) == sizes[record]:
                values_of[record] = values.values
    flat = pa.concat_arrays(
        [part for part in values_of if len(part)] or [pa.nulls(0, pa.float32())]
    )
    series = pl.from_arrow(flat)
    assert isinstance(series, pl.Series)
    return series.alias("sampler")
