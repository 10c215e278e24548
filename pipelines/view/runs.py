"""A training run that a viewer shows: its datasets, and what its updates recorded about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipelines.view import run_files
from pipelines.view.dataset import Dataset
from pipelines.view.names import absolute, short_name
from schemas.errors import InputError
from schemas.records import token_record_steps


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
