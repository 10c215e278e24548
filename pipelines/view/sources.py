"""Datasets and training runs that a viewer shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import polars as pl
import pyarrow as pa

from pipelines.view import run_files
from pipelines.view.findings import (
    FAULT_NATS,
    FAULTS,
    SHARE,
    Findings,
    faults_of,
    kind_of_table,
    read_findings,
    shares_of,
)
from pipelines.view.tokenizers import Found, Tokenizers
from pipelines.view.trajectory_index import COMPUTED, TrajectoryIndex, kind_of
from rollout_io.dataset.reader import RowReader, read_layout, read_metadata, scan
from rollout_io.retokenize import ChatTokenizer
from rollout_io.retokenize.local import about_other_tokenizer, is_other_tokenizer
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import ConfigError, InputError, RolloutError, count
from schemas.token_records import token_record_steps
from schemas.update_shares import BLAME
from schemas.verdicts import AUDIT


class Dataset:
    """A dataset that a viewer shows; it is checked and indexed on first use.

    Args:
        number: Id of the dataset in the viewer, such as "d0".
        name: Short name for the page.
        path: Path of the dataset.
        tokenizer: Directory of its tokenizer; None: the tokenizer named in the dataset, or the
            tokenizer of the model of a run that trained on it.
        tokenizers: Loads tokenizers.
    """

    def __init__(
        self, number: str, name: str, path: str, tokenizer: str | None, tokenizers: Tokenizers
    ) -> None:
        self.number, self.name, self.path = number, name, path
        self._given_tokenizer, self._tokenizers = tokenizer, tokenizers
        self.model: str | None = None
        """Model of a run that trained on the dataset."""
        self.verdicts: pl.DataFrame | None = None
        """Verdicts about the dataset's rows; None without an audit."""
        self.shares: dict[str, pl.DataFrame] = {}
        """The rows' shares of updates, by the name of their column in the table of trajectories."""
        self._lock = Lock()
        self._index: TrajectoryIndex | None = None

    @property
    def added(self) -> list[str]:
        """Columns that verdicts and row shares add to the table of trajectories."""
        return [*(() if self.verdicts is None else (FAULTS, FAULT_NATS)), *self.shares]

    @property
    def warnings(self) -> list[str]:
        """Warnings about columns that the page cannot show."""
        computed = {*COMPUTED, *self.added}
        hidden = [field.name for field in self.reader.schema if field.name in computed]
        end = "because the viewer computes a column of this name. Rename it in the dataset."
        return [f"{self.name}: the column {name} is not shown, {end}" for name in hidden]

    @property
    def index(self) -> TrajectoryIndex:
        """Index of the short columns; building it checks the dataset.

        Raises:
            RolloutError: The dataset is missing, or breaks a named invariant.
        """
        with self._lock:
            if self._index is None:
                index = TrajectoryIndex.read(self.path)
                if self.verdicts is not None:
                    index.add(faults_of(self.verdicts))
                for column, rows in self.shares.items():
                    index.add(shares_of(rows, column))
                self._index = index
            return self._index

    @cached_property
    def reader(self) -> RowReader:
        """Access to rows by position."""
        return RowReader(self.path)

    @property
    def tokenizer(self) -> str | None:
        """Directory of the tokenizer; None if it is unknown or missing."""
        return self._found.directory

    @property
    def why_no_tokenizer(self) -> str:
        """Reason why no tokenizer is available, as a clause; "" if one is."""
        return self._found.reason

    @cached_property
    def _found(self) -> Found:
        if self._given_tokenizer is not None:
            return Found(self._given_tokenizer)
        return self._tokenizers.find(read_metadata(self.path), self.model)

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Bytes of each token of the vocabulary; None without a tokenizer."""
        return None if self.tokenizer is None else self._tokenizers.token_bytes(self.tokenizer)

    @property
    def chat_tokenizer(self) -> ChatTokenizer | None:
        """Tokenizer that splits ids into messages; None if it is missing or cannot be loaded."""
        return None if self.tokenizer is None else self._tokenizers.chat(self.tokenizer)

    def has(self, name: str) -> bool:
        """True if the dataset has a column."""
        return name in self.reader.schema.names

    def present(self, *names: str) -> list[str]:
        """Return the columns among `names` that the dataset has."""
        return [name for name in names if self.has(name)]

    def trajectory(self, number: int, names: Sequence[str]) -> pa.Table:
        """Read columns of a trajectory's rows."""
        return self.reader.rows(*self.index.bounds(number), names)

    def row(self, trajectory_id: str, step_index: int, names: Sequence[str]) -> pa.Table:
        """Read columns of one row.

        Raises:
            ConfigError: `known_trajectory`: the dataset has no such trajectory or step.
        """
        number = self.index.number(trajectory_id)
        begin, end = self.index.bounds(number)
        if not 0 <= step_index < end - begin:
            got = f"{trajectory_id} has no step {step_index}"
            raise ConfigError("known_trajectory", self.path, got)
        if "prompt_token_ids" in names:  # a prompt is decoded from the rows before it
            return self.reader.rows(begin, begin + step_index + 1, names)[step_index:]
        return self.reader.rows(begin + step_index, begin + step_index + 1, names)

    def describe(self) -> dict[str, Any]:
        """Return the dataset's entry in the response of `/api/sources`."""
        if self._index is None:
            ids = scan(self.path).select("trajectory_id", "instance_id").unique().collect()
        else:
            ids = self._index.trajectories.select("trajectory_id", "instance_id")
        columns = [
            {"name": f.name, "kind": kind_of(f.type), "own": f.name not in COLUMN_BY_NAME}
            for f in self.reader.schema
        ]
        return {
            "name": self.name,
            "path": self.path,
            "num_rows": self.reader.num_rows,
            "num_trajectories": ids["trajectory_id"].n_unique(),
            "num_groups": ids["instance_id"].n_unique(),
            "columns": columns,
            "tokenizer": self.tokenizer,
            "layout": read_layout(self.path),
            "num_verdicts": 0 if self.verdicts is None else len(self.verdicts),
            "added": self.added,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """A run that a viewer shows.

    Attributes:
        name: Short name for the page.
        path: Directory of the run.
        datasets: Ids of the datasets that the run trained on.
        recorded: Dataset ids by absolute path.
        tasks: The tasks that each update recorded.
    """

    name: str
    path: Path
    datasets: tuple[str, ...]
    recorded: dict[str, str]
    tasks: run_files.RecordedTasks

    def dataset_of(self, path: str) -> str | None:
        """Return the id of the dataset that the run recorded under a path; None if unknown.

        Iterations of `rl` are found by name, so that a run can be moved or opened from any
        directory.
        """
        folder, _, name = path.rstrip("/").rpartition("/")
        found = self.recorded.get(_absolute(path))
        if found is None and _short_name(folder) == run_files.ITERATIONS:
            found = self.recorded.get(_absolute(str(self.path / run_files.ITERATIONS / name)))
        return found

    def records(
        self, update: int, dataset: Dataset, columns: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Read an update's token records for the rows of one dataset.

        Iterations of `rl` reuse trajectory ids, so ids alone do not identify a row.

        Raises:
            InputError: See `run_files.read_tokens`.
        """
        names = None if columns is None else ["dataset", *columns]
        found = run_files.read_tokens(self.path, update, names)
        paths = found["dataset"].unique().to_list()
        own = [path for path in paths if self.dataset_of(path) == dataset.number]
        return found.filter(pl.col("dataset").is_in(own)).drop("dataset")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """A table of row shares: the contributions of rows to an update.

    Attributes:
        name: Name of the file.
        path: The file.
        run: Id of the run; None if it is not open.
        update: The update.
        column: Name of the column of these shares in the table of trajectories.
        rows: The rows of the table; `dataset` is the id of the dataset, null if it is not shown.
    """

    name: str
    path: str
    run: str | None
    update: int
    column: str
    rows: pl.DataFrame


@dataclass(kw_only=True)
class Sources:
    """The datasets and runs of a viewer.

    Attributes:
        datasets: Datasets by id.
        runs: Runs by id.
        shares: Tables of row shares by id.
        warnings: Warnings that the page shows.
    """

    datasets: dict[str, Dataset] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    shares: dict[str, Shares] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    tokenizers: Tokenizers = field(default_factory=Tokenizers)

    @classmethod
    def open(cls, paths: Sequence[str], tokenizer: str | None = None) -> Sources:
        """Open datasets and runs; check and index the datasets among `paths` immediately.

        Args:
            paths: Datasets, run directories, and tables with verdicts on the datasets' rows or with
                the rows' shares of an update.
            tokenizer: Directory of the tokenizer; None: the tokenizer named in each dataset, or the
                tokenizer of its run's model.

        Raises:
            RolloutError: A path is not a dataset, a run or such a table, or its data is invalid.
        """
        sources = cls()
        if tokenizer is not None:
            sources.tokenizers.token_bytes(tokenizer)
        given, tables = [], []
        for path in dict.fromkeys(paths):
            if run_files.is_run(Path(path)):
                sources._add_run(path, tokenizer)
            elif kind_of_table(path) is not None:
                tables.append(path)
            else:
                given.append(sources._add_dataset(path, path, tokenizer))
        if tables and not sources.datasets and not sources.runs:
            got = "a table of verdicts or row shares can be shown only with its dataset or run"
            hint = f"pass the dataset too: rollouts view DATASET {tables[0]}"
            raise InputError("view_table", tables[0], got, hint=hint)
        sources._add_tables(tables, given)
        for number in given:
            _ = sources.datasets[number].index
        sources._warn_of_tokenizers()
        if tokenizer is not None:
            sources._warn_of_others(tokenizer)
        return sources

    def dataset(self, number: str) -> Dataset:
        """Return a dataset by its id.

        Raises:
            InputError: `no_such_path`: the id is unknown.
        """
        if number not in self.datasets:
            raise InputError("no_such_path", number, "the viewer has no dataset with this id")
        return self.datasets[number]

    def run(self, number: str) -> Run:
        """Return a run by its id.

        Raises:
            InputError: `no_such_path`: the id is unknown.
        """
        if number not in self.runs:
            raise InputError("no_such_path", number, "the viewer has no run with this id")
        return self.runs[number]

    def describe(self) -> dict[str, Any]:
        """Return the response of `/api/sources`."""
        datasets, warnings = [], list(self.warnings)
        for number, dataset in self.datasets.items():
            try:
                datasets.append({"id": number, **dataset.describe()})
                warnings += dataset.warnings
            except RolloutError as error:
                warnings.append(str(error))
        runs = [
            {
                "id": number,
                "name": run.name,
                "path": str(run.path),
                "datasets": list(run.datasets),
                "updates": run_files.read_metrics(run.path)["updates"],
                "token_updates": token_record_steps(run.path),
                "token_datasets": run.trained_datasets(),
                "samples": run_files.samples(run.path),
            }
            for number, run in self.runs.items()
        ]
        shares = [
            {
                "id": number,
                "name": one.name,
                "run": one.run,
                "update": one.update,
                "column": one.column,
                "num_rows": len(one.rows),
            }
            for number, one in self.shares.items()
        ]
        return {"datasets": datasets, "runs": runs, "shares": shares, "warnings": warnings}

    def share(self, number: str) -> Shares:
        """Return a table of row shares by its id.

        Raises:
            InputError: `no_such_path`: the id is unknown.
        """
        if number not in self.shares:
            raise InputError(
                "no_such_path", number, "the viewer has no table of row shares with this id"
            )
        return self.shares[number]

    def _add_tables(self, tables: Sequence[str], given: Sequence[str]) -> None:
        """Add the given tables of verdicts and row shares, and all tables in run directories."""
        known = set()
        for number, run in self.runs.items():
            for folder in (AUDIT, BLAME):
                for file in sorted((run.path / folder).glob("*.parquet")):
                    known.add(_absolute(str(file)))
                    try:
                        self._add_table(str(file), given, number)
                    except InputError as error:
                        self.warnings.append(f"{error.sentence} It is not shown.")
        for path in tables:
            if _absolute(path) not in known:
                self._add_table(path, given, None)

    def _add_table(self, path: str, given: Sequence[str], run: str | None) -> None:
        kind = kind_of_table(path)
        if kind is None:
            raise InputError("readable_file", path, "the file is damaged or not Parquet")
        for found in read_findings(path, kind):
            numbers = {
                named: self._dataset_of(found, named, given)
                for named in found.rows["dataset"].unique(maintain_order=True).to_list()
            }
            dataset = pl.col("dataset").replace_strict(numbers, return_dtype=pl.String)
            rows = found.rows.with_columns(dataset)
            shown = {number: rows.filter(dataset=number) for number in numbers.values() if number}
            if kind == "verdicts":
                for number, own in shown.items():
                    before = self.datasets[number].verdicts
                    both = own if before is None else pl.concat([before, own])
                    self.datasets[number].verdicts = both
            else:
                self._add_shares(found, rows, shown, run or self._run_of(found))

    def _add_shares(
        self, found: Findings, rows: pl.DataFrame, shown: dict[str, pl.DataFrame], run: str | None
    ) -> None:
        assert found.update is not None
        name = column = f"{SHARE}{found.update}"
        taken = {one.column for one in self.shares.values()}
        again = 1
        while column in taken:
            again += 1
            column = f"{name}_{again}"
        self.shares[f"s{len(self.shares)}"] = Shares(
            name=found.name, path=found.path, run=run, update=found.update, column=column, rows=rows
        )
        for number, own in shown.items():
            self.datasets[number].shares[column] = own

    def _run_of(self, found: Findings) -> str | None:
        """Return the id of the run recorded in a table of row shares; None if it is not open."""
        assert found.run is not None
        for number, run in self.runs.items():
            if _absolute(str(run.path)) == _absolute(found.run):
                return number
        named = [n for n, run in self.runs.items() if run.name == _short_name(found.run)]
        if len(named) == 1 and not Path(found.run).exists():  # it was moved
            return named[0]
        if self.runs:
            self.warnings.append(
                f"{found.name}: its row shares belong to the run {found.run}, which is not open."
            )
        return None

    def _dataset_of(self, found: Findings, named: str, given: Sequence[str]) -> str | None:
        """Find the open dataset that has all rows of a table; None if none or several have them."""
        exact = [n for n, one in self.datasets.items() if _absolute(one.path) == _absolute(named)]
        tried = exact or [
            number for run in self.runs.values() if (number := run.dataset_of(named)) is not None
        ]
        if not tried and found.rows["dataset"].n_unique() == 1 and not Path(named).exists():
            tried = list(given)  # the dataset was moved
        differences = {number: self._difference(found, named, number) for number in tried}
        same = [number for number, difference in differences.items() if not difference]
        if len(same) == 1:
            return same[0]
        start = f"{found.name}: its {count(len(found.of_dataset(named)), 'row')} about {named}"
        if not tried:
            reason = "that dataset is not open"
        elif same:
            reason = f"{count(len(same), 'open dataset')} have these rows"
        else:
            reason = "; ".join(
                f"{self.datasets[n].name} is another dataset, or was changed: {difference}"
                for n, difference in differences.items()
            )
        self.warnings.append(f"{start} are not shown because {reason}.")
        return None

    def _difference(self, found: Findings, named: str, number: str) -> str:
        try:
            return found.difference(named, self.datasets[number].path)
        except InputError as error:
            return error.sentence.removesuffix(".")

    def _add_dataset(self, name: str, path: str, tokenizer: str | None) -> str:
        for number, known in self.datasets.items():
            if _absolute(known.path) == _absolute(path):
                return number
        number = f"d{len(self.datasets)}"
        self.datasets[number] = Dataset(number, _short_name(name), path, tokenizer, self.tokenizers)
        return number

    def _add_run(self, path: str, tokenizer: str | None) -> None:
        recorded: dict[str, str] = {}
        for found in run_files.dataset_paths(Path(path)):
            dataset = self._add_dataset(found, found, tokenizer)
            try:
                _ = self.datasets[dataset].reader
                changed = run_files.changed_rows(Path(path), found)
            except RolloutError as error:
                del self.datasets[dataset]
                self.warnings.append(f"A dataset of the run {path} is unreadable: {error.sentence}")
                continue
            known = self.datasets[dataset]
            known.model = known.model or run_files.model_of(Path(path))
            if changed:
                self.warnings.append(
                    f"{known.name} has changed since {path} trained on it: {changed}. Its tokens"
                    " are shown without the values that the run recorded."
                )
            else:
                recorded[_absolute(found)] = dataset
        tasks = run_files.RecordedTasks(Path(path))
        run = Run(_short_name(path), Path(path), tuple(recorded.values()), recorded, tasks)
        self.runs[f"r{len(self.runs)}"] = run

    def _warn_of_tokenizers(self) -> None:
        hint = "Pass --tokenizer DIR to decode them."
        reasons: dict[str, list[str]] = {}
        for dataset in self.datasets.values():
            if dataset.why_no_tokenizer:
                reasons.setdefault(dataset.why_no_tokenizer, []).append(dataset.name)
        for reason, names in reasons.items():
            shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self.warnings.append(f"{shown}: tokens are shown as ids because {reason}. {hint}")

    def _warn_of_others(self, tokenizer: str) -> None:
        for dataset in self.datasets.values():
            metadata = read_metadata(dataset.path)
            if is_other_tokenizer(tokenizer, metadata):
                text = about_other_tokenizer(tokenizer, metadata)
                self.warnings.append(f"{dataset.name}: {text}.")


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100


def _short_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path
