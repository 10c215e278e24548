"""A dataset that a viewer shows: its index, rows, tokenizer and description, and a labelled copy."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import polars as pl
import pyarrow as pa

from pipelines.frames import set_column
from pipelines.view.annotations import (
    FAULT_NATS,
    FAULTS,
    FINDINGS_COLUMN,
    Findings,
    faults_of,
    shares_of,
)
from pipelines.view.index_columns import kind_of
from pipelines.view.tokenizers import Found, Tokenizers
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.dataset.blobs import MEDIA_TYPES, Blobs, stores_of
from rollout_io.dataset.reader import RowReader, read_layout, read_metadata, scan
from rollout_io.dataset.rewriting import rewrite
from rollout_io.dataset.sources import Sources
from rollout_io.dataset.trajectory_conditions import COMPUTED, task_of
from rollout_io.retokenize import ChatTokenizer
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.columns import COLUMN_BY_NAME, TASK
from schemas.errors import ConfigError, InputError
from schemas.types import PREFIX_TYPES, with_absent

if TYPE_CHECKING:
    from pipelines.view.log_index import LogRows

Label = str | float | None
_MOST_BYTES = 32 << 20


class TokensMissing(InputError):
    """A row has text, but no token ids."""


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

    is_log = False
    """True for logs (`LogDataset`), whose text stays text."""
    rows_at_once = 4096
    """Maximum number of rows that a search reads together."""

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
        """Columns that verdicts, findings and row shares add to the table of trajectories."""
        faults = () if self.verdicts is None else (FAULTS, FAULT_NATS)
        return [*faults, *([FINDINGS_COLUMN] if self.findings else []), *self.shares]

    @cached_property
    def findings(self) -> Findings:
        """Findings beside the dataset."""
        return Findings("" if self.is_log else self.path)

    @property
    def warnings(self) -> list[str]:
        """Warnings about columns and findings that the page cannot show."""
        computed = {*COMPUTED, *self.added}
        hidden = [field.name for field in self.reader.schema if field.name in computed]
        end = "because the viewer computes a column of this name. Rename it in the dataset."
        shown = [f"{self.name}: the column {name} is not shown, {end}" for name in hidden]
        return [*shown, *self.findings.warnings]

    @property
    def index(self) -> TrajectoryIndex:
        """Index of the short columns; building it checks the dataset.

        Raises:
            RolloutError: The dataset is missing, or breaks a named invariant.
        """
        with self._lock:
            if self._index is None:
                _ = self._shards
                index = TrajectoryIndex.read(self.path)
                if self.verdicts is not None:
                    index.add(faults_of(self.verdicts))
                if self.findings:
                    index.add(self.findings.by_trajectory)
                for column, rows in self.shares.items():
                    index.add(shares_of(rows, column))
                self._index = index
            return self._index

    def now(self) -> Self:
        """Return the dataset for one request: itself.

        Raises:
            InputError: `input_file`: a shard was replaced, rewritten or removed since it was opened.
        """
        self._shards.refuse_changed()
        return self

    @cached_property
    def _shards(self) -> Sources:
        return Sources(self.path, may_grow=True)

    @property
    def stored_path(self) -> str:
        """Path of the tables."""
        return self.path

    def may_hold(self, number: int, text: str) -> bool:  # noqa: ARG002
        """False if a trajectory is known not to contain a text."""
        return True

    @property
    def has_tokens(self) -> bool:
        """True if rows have token ids."""
        return True

    @property
    def reader(self) -> RowReader | LogRows:
        """Access to rows by position."""
        return self._reader

    @cached_property
    def _reader(self) -> RowReader:
        _ = self._shards  # before anything is read
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
            finding = f"{trajectory_id} has no step {step_index}"
            raise ConfigError("known_trajectory", self.path, finding)
        if "prompt_token_ids" in names:  # a prompt is decoded from the rows before it
            return self.reader.rows(begin, begin + step_index + 1, names)[step_index:]
        return self.reader.rows(begin + step_index, begin + step_index + 1, names)

    def picture(self, name: str) -> str | None:
        """Return a picture of the dataset's store as a data URL.

        None if it is no picture, missing, changed, or larger than 32 MiB.

        Args:
            name: Reference to the picture, as in the column `images`.
        """
        for store in self._stores:
            path = store.files.get(name)
            media_type = None if path is None else MEDIA_TYPES.get(Path(path).suffix)
            if path is None or media_type is None or not media_type.startswith("image/"):
                continue
            is_short = store.folder.fs.size(path) <= _MOST_BYTES
            content = store.read(name) if is_short else None
            if content is not None:
                return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
        return None

    @cached_property
    def _stores(self) -> list[Blobs]:
        return stores_of(self.path)

    @property
    def tasks(self) -> pl.Series:
        """The distinct tasks."""
        return self._ids[TASK].unique()

    @cached_property
    def _ids(self) -> pl.DataFrame:
        """The distinct ids of trajectories, with their groups and tasks."""
        names = ("trajectory_id", "instance_id", TASK)
        if self._index is not None:
            return self._index.trajectories.select(names)
        return (
            with_absent(scan(self.path), [TASK])
            .with_columns(task_of.alias(TASK))
            .select(names)
            .unique()
            .collect()
        )

    def describe(self) -> dict[str, Any]:
        """Return the dataset's entry in the response of `/api/sources`."""
        ids = self._ids
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
            "num_findings": len(self.findings),
            "added": self.added,
        }


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Adds the column of labels to a table when called."""

    column: str
    values: Mapping[str, Label]
    kind: pa.DataType

    def __call__(self, table: pa.Table) -> pa.Table:
        ids = table.column("trajectory_id").to_pylist()
        values = pa.array([self.values.get(name) for name in ids], self.kind)
        return set_column(table, self.column, values)


def write_labels(
    dataset: Dataset, column: str, values: Mapping[str, Any], out: str
) -> dict[str, Any]:
    """Write a copy of a dataset with a column of labels; unlabelled trajectories get null.

    A user column with the same name is replaced.

    Args:
        dataset: The dataset.
        column: Name of the column.
        values: Strings or numbers by trajectory_id.
        out: Local directory that does not exist yet.

    Raises:
        InputError: `needs_dataset`: these are logs; `out_is_free`: `out` exists; `view_query`: `column` is reserved, empty or too
            long, a value is invalid, or `out` is not a local directory.
        ConfigError: `known_trajectory`: a label is for an unknown trajectory.
    """
    stored = dataset.stored_path
    taken = {*COLUMN_BY_NAME, *PREFIX_TYPES, *COMPUTED, *dataset.index.added}
    if not column or column in taken or len(column) > 200:
        finding = f"labels cannot be written to the column {column[:200]!r}"
        hint = "choose a name that neither the rollout table nor the viewer uses"
        raise InputError("view_query", "labels", finding, hint=hint)
    kind = _kind(values)
    for name in values:
        dataset.index.number(name)
    if "://" in out or not out or "\0" in out:
        raise InputError("view_query", "labels", f"{out[:200]!r} is not a local directory")
    if os.path.lexists(out):
        finding, hint = "a file or directory with that name exists", "choose a different name"
        raise InputError("out_is_free", out, finding, hint=hint)
    labelled = _Labelled(column, _cast(values, kind), kind)
    metadata = read_metadata(stored)
    labelled_metadata = metadata.made("view", parent=stored, column=column)
    rewrite(stored, out, labelled, labelled_metadata, decode=True)
    return {"path": out, "num_rows": RowReader(out).num_rows}


def _kind(values: Mapping[str, Any]) -> pa.DataType:
    kinds = {type(value) for value in values.values() if value is not None}
    if kinds <= {str}:
        return pa.string()
    if kinds <= {int, float}:
        if any(isinstance(value, int) and abs(value) > 2**53 for value in values.values()):
            hint = "write it as a string"
            finding = "a label is an integer beyond 2^53, which would be rounded"
            raise InputError("view_query", "labels", finding, hint=hint)
        return pa.float64()
    raise InputError("view_query", "labels", "labels must be either all strings or all numbers")


def _cast(values: Mapping[str, Any], kind: pa.DataType) -> dict[str, Label]:
    if kind == pa.string():
        return dict(values)
    return {name: None if value is None else float(value) for name, value in values.items()}
