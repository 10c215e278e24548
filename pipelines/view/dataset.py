"""A dataset that a viewer shows: its index, rows, tokenizer and description."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import polars as pl
import pyarrow as pa

from pipelines.view.tokenizers import Found, Tokenizers
from pipelines.view.trajectory_index import COMPUTED, TrajectoryIndex, kind_of
from pipelines.view.verdict_tables import (
    FAULT_NATS,
    FAULTS,
    faults_of,
    shares_of,
)
from rollout_io.dataset.reader import RowReader, read_layout, read_metadata, scan
from rollout_io.retokenize import ChatTokenizer
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import ConfigError


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
