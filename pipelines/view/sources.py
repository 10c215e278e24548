"""Datasets and training runs that a viewer shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import polars as pl

from pipelines.view import run_files
from pipelines.view.annotations import (
    SHARE,
    RowTable,
    Shares,
    kind_of_table,
    read_row_tables,
)
from pipelines.view.dataset import Dataset
from pipelines.view.log_dataset import LogDataset
from pipelines.view.paths import absolute, distinct_names, kind_of_path, short_name
from pipelines.view.runs import Run
from pipelines.view.tokenizers import Tokenizers
from rollout_io.conversion.opened_logs import AUTO
from rollout_io.dataset.reader import read_metadata
from rollout_io.retokenize.local import about_other_tokenizer, is_other_tokenizer
from schemas.errors import InputError, RolloutError, count
from schemas.records import AUDIT, BLAME, token_record_steps

FIRST_S = 2.0
"""Maximum time to wait for the first trajectory of logs before the page is served."""


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
    tokenizer: str | None = None
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        tokenizer: str | None = None,
        log_format: str = AUTO,
        *,
        is_live: bool = False,
    ) -> Sources:
        """Open datasets, runs and logs; check and index the datasets among `paths` immediately.

        Args:
            paths: Datasets, run directories, logs or directories of them, and tables with verdicts on the datasets' rows or with
                the rows' shares of an update.
            tokenizer: Directory of the tokenizer; None: the tokenizer named in each dataset, or the
                tokenizer of its run's model.
            log_format: Format of the logs; `auto` detects it.
            is_live: If true, logs are read in the background; if false, before this returns.

        Raises:
            RolloutError: A path is not a dataset, a run or such a table, or its data is invalid.
        """
        sources = cls(tokenizer=tokenizer)
        if tokenizer is not None:
            sources.tokenizers.token_bytes(tokenizer)
        numbers, tables = [], []
        for path in dict.fromkeys(paths):
            kind = kind_of_path(path, log_format)
            if kind == "run":
                sources._add_run(path)
            elif kind == "table":
                tables.append(path)
            elif kind == "log":
                sources._add_logs(path, log_format, is_live=is_live)
            else:
                numbers.append(sources._add_dataset(path, path))
        if tables and not sources.datasets and not sources.runs:
            finding = "a table of verdicts or row shares can be shown only with its dataset or run"
            hint = f"pass the dataset too: rollouts view DATASET {tables[0]}"
            raise InputError("view_table", tables[0], finding, hint=hint)
        sources._name()
        sources._add_tables(tables, numbers)
        for number in numbers:
            _ = sources.datasets[number].index
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
        return self.datasets[number].now()

    def run(self, number: str) -> Run:
        """Return a run by its id.

        Raises:
            InputError: `no_such_path`: the id is unknown.
        """
        if number not in self.runs:
            raise InputError("no_such_path", number, "the viewer has no run with this id")
        return self.runs[number]

    def changes(self) -> str:
        """Take in what logs and runs have gained; return a text that differs if there is any.

        A dataset that a run is still writing is opened when it is complete.
        """
        with self.lock:
            num_datasets = len(self.datasets)
            for number, dataset in list(self.datasets.items()):
                if isinstance(dataset, LogDataset):
                    self.datasets[number] = dataset.newest()
            for number, run in list(self.runs.items()):
                self.runs[number], _ = self._with_datasets(run)
            if len(self.datasets) > num_datasets:
                self._name()
            logs = [one.version for one in self.datasets.values() if isinstance(one, LogDataset)]
            return repr((logs, [run.stamp for run in self.runs.values()]))

    def describe(self) -> dict[str, Any]:
        """Return the response of `/api/sources`."""
        stamp, datasets = self.changes(), []
        warnings = [*self.warnings, *self.without_tokenizer()]
        for number, dataset in list(self.datasets.items()):
            try:
                other = self.compared(number)
                datasets.append(
                    {"id": number, **dataset.now().describe(), "shares_tasks_with": other}
                )
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
        return {
            "datasets": datasets,
            "runs": runs,
            "shares": shares,
            "warnings": warnings,
            "stamp": stamp,
        }

    def compared(self, number: str) -> str | None:
        """Return the id of the newest other dataset with a task of this one; None without one.

        Datasets are as old as the order in which they are opened: as they are passed, and those of
        a run by iteration.
        """
        if len(self.datasets) < 2:
            return None
        tasks = self.datasets[number].tasks
        for other, dataset in reversed([*self.datasets.items()]):
            if other != number and tasks.is_in(dataset.tasks.implode()).any():
                return other
        return None

    def compared_pair(self) -> tuple[str, str] | None:
        """Return the ids of the newest two datasets that share tasks, older first."""
        for number in reversed([*self.datasets]):
            if (other := self.compared(number)) is not None:
                return other, number
        return None

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

    def _name(self) -> None:
        """Give datasets and runs distinct names."""
        names = distinct_names([one.path for one in self.datasets.values()])
        for one, name in zip(self.datasets.values(), names, strict=True):
            one.name = name
        names = distinct_names([str(one.path) for one in self.runs.values()])
        self.runs = {
            number: replace(run, name=name)
            for (number, run), name in zip(self.runs.items(), names, strict=True)
        }

    def _add_tables(self, tables: Sequence[str], datasets: Sequence[str]) -> None:
        """Add the given tables of verdicts and row shares, and all tables in run directories."""
        in_runs = set()
        for number, run in self.runs.items():
            for folder in (AUDIT, BLAME):
                for file in sorted((run.path / folder).glob("*.parquet")):
                    in_runs.add(absolute(str(file)))
                    try:
                        self._add_table(str(file), datasets, number)
                    except InputError as error:
                        self.warnings.append(f"{error.sentence} It is not shown.")
        for path in tables:
            if absolute(path) not in in_runs:
                self._add_table(path, datasets, None)

    def _add_table(self, path: str, datasets: Sequence[str], run: str | None) -> None:
        kind = kind_of_table(path)
        if kind is None:
            raise InputError("readable_file", path, "the file is damaged or not Parquet")
        for table in read_row_tables(path, kind):
            numbers = {
                named: self._dataset_of(table, named, datasets)
                for named in table.rows["dataset"].unique(maintain_order=True).to_list()
            }
            dataset = pl.col("dataset").replace_strict(numbers, return_dtype=pl.String)
            rows = table.rows.with_columns(dataset)
            shown = {number: rows.filter(dataset=number) for number in numbers.values() if number}
            if kind == "verdicts":
                for number, part in shown.items():
                    before = self.datasets[number].verdicts
                    both = part if before is None else pl.concat([before, part])
                    self.datasets[number].verdicts = both
            else:
                self._add_shares(table, rows, shown, run or self._run_of(table))

    def _add_shares(
        self, table: RowTable, rows: pl.DataFrame, shown: dict[str, pl.DataFrame], run: str | None
    ) -> None:
        assert table.update is not None
        name = column = f"{SHARE}{table.update}"
        taken = {one.column for one in self.shares.values()}
        again = 1
        while column in taken:
            again += 1
            column = f"{name}_{again}"
        self.shares[f"s{len(self.shares)}"] = Shares(
            name=table.name, path=table.path, run=run, update=table.update, column=column, rows=rows
        )
        for number, part in shown.items():
            self.datasets[number].shares[column] = part

    def _run_of(self, table: RowTable) -> str | None:
        """Return the id of the run recorded in a table of row shares; None if it is not open."""
        assert table.run is not None
        for number, run in self.runs.items():
            if absolute(str(run.path)) == absolute(table.run):
                return number
        named = [
            n for n, run in self.runs.items() if short_name(str(run.path)) == short_name(table.run)
        ]
        if len(named) == 1 and not Path(table.run).exists():  # it was moved
            return named[0]
        if self.runs:
            self.warnings.append(
                f"{table.name}: its row shares belong to the run {table.run}, which is not open."
            )
        return None

    def _dataset_of(self, table: RowTable, named: str, datasets: Sequence[str]) -> str | None:
        """Find the open dataset that has all rows of a table; None if none or several have them."""
        exact = [n for n, one in self.datasets.items() if absolute(one.path) == absolute(named)]
        tried = exact or [
            number for run in self.runs.values() if (number := run.dataset_of(named)) is not None
        ]
        if not tried and table.rows["dataset"].n_unique() == 1 and not Path(named).exists():
            tried = list(datasets)  # the dataset was moved
        differences = {number: self._difference(table, named, number) for number in tried}
        same = [number for number, difference in differences.items() if not difference]
        if len(same) == 1:
            return same[0]
        start = f"{table.name}: its {count(len(table.of_dataset(named)), 'row')} about {named}"
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

    def _difference(self, table: RowTable, named: str, number: str) -> str:
        try:
            return table.difference(named, self.datasets[number].path)
        except InputError as error:
            return error.sentence.removesuffix(".")

    def _add_dataset(self, name: str, path: str) -> str:
        for number, dataset in self.datasets.items():
            if absolute(dataset.path) == absolute(path):
                return number
        number = f"d{len(self.datasets)}"
        self.datasets[number] = Dataset(
            number, short_name(name), path, self.tokenizer, self.tokenizers
        )
        return number

    def _add_logs(self, path: str, log_format: str, *, is_live: bool) -> None:
        number = f"d{len(self.datasets)}"
        name = short_name(absolute(path))
        logs = LogDataset(number, name, path, self.tokenizer, self.tokenizers, log_format)
        if is_live:
            logs.start(FIRST_S)
        else:
            logs.read()
        self.datasets[number] = logs

    def _add_run(self, path: str) -> None:
        run = Run(
            name=short_name(path),
            path=Path(path),
            datasets=(),
            recorded={},
            opened=frozenset(),
            tasks=run_files.RecordedTasks(Path(path)),
        )
        run, damaged = self._with_datasets(run)
        self.runs[f"r{len(self.runs)}"] = run
        self.warnings += [
            f"A dataset of the run {path} is unreadable: {error.sentence}" for error in damaged
        ]

    def _with_datasets(self, run: Run) -> tuple[Run, list[RolloutError]]:
        """Open the datasets of a run that it did not have before; also return those that are damaged."""
        path, damaged = run.path, list[RolloutError]()
        paths = [one for one in run_files.dataset_paths(path) if absolute(one) not in run.opened]
        if not paths:
            return run, []
        recorded, opened = dict(run.recorded), set(run.opened)
        rows = run_files.recorded_rows(path)
        for path_of_dataset in paths:
            number = self._add_dataset(path_of_dataset, path_of_dataset)
            try:
                _ = self.datasets[number].reader
                # By name: the run, with its datasets, may have been moved.
                named = pl.col("dataset").str.split("/").list.last() == Path(path_of_dataset).name
                changed = run_files.changed_rows(rows.filter(named), path_of_dataset)
            except RolloutError as error:
                del self.datasets[number]
                damaged.append(error)
                continue
            opened.add(absolute(path_of_dataset))
            dataset = self.datasets[number]
            dataset.model = dataset.model or run_files.model_of(path)
            if changed:
                self.warnings.append(
                    f"{dataset.name} has changed since {path} trained on it: {changed}. Its tokens"
                    " are shown without the values that the run recorded."
                )
            else:
                recorded[absolute(path_of_dataset)] = number
        datasets = tuple(recorded.values())
        run = replace(run, datasets=datasets, recorded=recorded, opened=frozenset(opened))
        return run, damaged

    def without_tokenizer(self) -> list[str]:
        """Say for which datasets there is no tokenizer."""
        hint = "Pass --tokenizer DIR to decode them."
        reasons: dict[str, list[str]] = {}
        for dataset in list(self.datasets.values()):
            if dataset.why_no_tokenizer:
                reasons.setdefault(dataset.why_no_tokenizer, []).append(dataset.name)
        return [
            f"{names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more'}: tokens are"
            f" shown as ids because {reason}. {hint}"
            for reason, names in reasons.items()
        ]

    def _warn_of_others(self, tokenizer: str) -> None:
        for dataset in (one for one in self.datasets.values() if not one.is_log):
            metadata = read_metadata(dataset.path)
            if is_other_tokenizer(tokenizer, metadata):
                text = about_other_tokenizer(tokenizer, metadata)
                self.warnings.append(f"{dataset.name}: {text}.")
