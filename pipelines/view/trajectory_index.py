"""Index of a dataset's short columns in memory: one line per row, and one per trajectory.

The index is built in one pass, which also checks the dataset. Windows, filters and histograms then
need no file access, unless a condition uses a column that the index lacks.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.filtering import collect
from pipelines.frames import Frame, as_lazy
from pipelines.rewards import Outcome, fold_trajectories
from pipelines.view.index_columns import LENGTHS, add_starts, cut_texts, kept_columns, short_rows
from rollout_io.dataset.checking import checked_tables
from rollout_io.dataset.conditions import types_in
from rollout_io.dataset.reader import scan
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_conditions import (
    COMPUTED,
    TrajectoryCondition,
    decided,
    row_values,
    trajectory_columns,
)
from rollout_io.dataset.trajectory_facts import (
    CALLED,
    count_calls,
    dataset_outcome,
    num_steps,
    tool_calls,
)
from schemas.columns import COLUMN_BY_NAME, TASK
from schemas.errors import ConfigError
from schemas.ragged import BoolArray, IntArray
from schemas.types import with_absent

_IN_MEMORY = frozenset(COMPUTED) - {"task_text", "num_agents"}
"""Computed columns whose values conditions read from memory; `task_text` is the group's there."""

_RETURN_COLUMNS = ("instance_id", "trajectory_id", "reward", "error", "segments")
_IDS = ("instance_id", "trajectory_id", "repetition_id")
_NUM_CACHED = 16
_NUMBERED = frozenset({"instance_id", "trajectory_id"})
_NUMBER = "number of "
_KEY = f"{_NUMBER}trajectory_id"
_PARTITIONED = frozenset({"Over", "Window"})


@dataclass(kw_only=True)
class TrajectoryIndex:
    """The short columns of a dataset; rows are numbered as in `RowReader`.

    Attributes:
        path: The dataset.
        rows: [N] short columns of each row, and its number of tokens.
        trajectories: [T] one line per trajectory.
        starts: [T + 1] first row of each trajectory.
        cut: Text columns with values that are longer than `MAX_TEXT`; conditions on them are
            evaluated on disk.
        added: Columns that `add` added to the trajectories; conditions may use them.
        columns: Columns of the rows if they are those of logs; None: of the dataset at `path`.
    """

    path: PathLike
    rows: pl.DataFrame
    trajectories: pl.DataFrame
    starts: IntArray
    cut: frozenset[str]
    added: tuple[str, ...] = ()
    columns: frozenset[str] | None = None
    _masks: dict[str, BoolArray] = field(default_factory=dict)
    _orders: dict[tuple[str, bool], IntArray] = field(default_factory=dict)
    _ids: dict[str, pl.Series] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def read(cls, path: PathLike) -> TrajectoryIndex:
        """Read and check a dataset.

        Raises:
            ValidationError: The dataset breaks a named invariant.
        """
        outcome = dataset_outcome(path)
        names, cut = None, set[str]()
        parts, returns, calls, texts = [], [], [], dict[str, str | None]()
        for table in checked_tables(path, decode=False):
            names = names or kept_columns(table.schema)
            parts.append(short_rows(table, names, cut))
            add_starts(table, texts)
            calls.append(_calls(table))
            if "segments" in table.column_names:
                present = [name for name in _RETURN_COLUMNS if name in table.column_names]
                folded = _returns(table.select(present), outcome)
                returns.append(folded.with_columns(cut_texts(folded["error"]).alias("error")))
        rows = pl.concat(parts).rechunk()
        folded = pl.concat(returns) if returns else _returns(rows, outcome)
        starts = _starts(rows)
        trajectories = _trajectories(rows, folded, starts, texts)
        trajectories = trajectories.with_columns(pl.concat(calls) if calls else ())
        return cls(
            path=path, rows=rows, trajectories=trajectories, starts=starts, cut=frozenset(cut)
        )

    @classmethod
    def of_rows(
        cls, path: PathLike, rows: pl.DataFrame, columns: frozenset[str], cut: frozenset[str]
    ) -> TrajectoryIndex:
        """Index the short rows of logs.

        Args:
            path: The logs, for messages.
            rows: [N] result of `short_rows`, of complete trajectories.
            columns: All columns of the rows.
            cut: See `TrajectoryIndex`.
        """
        starts = _starts(rows)
        texts: dict[str, str | None] = dict.fromkeys(rows["instance_id"].unique())
        trajectories = _trajectories(rows, _returns(rows, "last"), starts, texts)
        # Text has no tokens, so their number is unknown, not 0.
        tokens = [name for name in COMPUTED if name.endswith("_tokens")]
        known = pl.col("longest_row_tokens") > 0
        trajectories = trajectories.with_columns(pl.when(known).then(pl.col(tokens)))
        return cls(
            path=path,
            rows=rows,
            trajectories=trajectories,
            starts=starts,
            cut=cut,
            columns=columns,
        )

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.trajectories)

    def add(self, columns: pl.DataFrame) -> None:
        """Add columns to the table of trajectories, joined on `trajectory_id`.

        They replace user columns with the same names. Call this before evaluating any condition.
        """
        names = [name for name in columns.columns if name != "trajectory_id"]
        ids = self.trajectories.select("trajectory_id")
        found = ids.join(columns, on="trajectory_id", how="left", maintain_order="left")
        self.trajectories = self.trajectories.with_columns(found[names])
        self.added += tuple(names)

    def number(self, trajectory_id: str) -> int:
        """Return the position of a trajectory.

        Raises:
            ConfigError: `known_trajectory`: no trajectory has this id.
        """
        ids = self.trajectories["trajectory_id"]
        at = ids.index_of(trajectory_id)
        if at is None:
            finding = f"no trajectory has the id {trajectory_id!r}"
            raise ConfigError("known_trajectory", str(self.path), finding)
        return at

    def group(self, name: str, columns: Sequence[str] = ("instance_id", TASK)) -> IntArray:
        """Return the positions of the trajectories of a group, or else of a task.

        Raises:
            ConfigError: `known_trajectory`: no trajectory has this id.
        """
        for column in columns:
            found = np.flatnonzero((self.trajectories[column] == name).to_numpy())
            if len(found):
                return found
        finding = f"no trajectory has the {columns[0]} {name!r}"
        raise ConfigError("known_trajectory", str(self.path), finding)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first row of a trajectory, and the row after its last."""
        return int(self.starts[number]), int(self.starts[number + 1])

    def matching(self, where: str | None) -> BoolArray | None:
        """Return the mask ([T] bool) of trajectories with a row that satisfies a condition.

        Without a condition, return None.

        Args:
            where: SQL over the columns of the dataset, `COMPUTED` and `added`; None or "": no
                condition.

        Raises:
            ConfigError: `condition`: the condition is not SQL or cannot be evaluated on each row;
                `known_column`: it uses an unknown column.
        """
        if not where:
            return None
        if where not in self._masks:
            mask = self._evaluated(where)
            with self._lock:
                if len(self._masks) >= _NUM_CACHED:
                    self._masks.pop(next(iter(self._masks)))
                self._masks[where] = mask
        return self._masks[where]

    def order(self, column: str, *, descending: bool) -> IntArray:
        """Return the positions of all trajectories ([T]), sorted by a column; nulls and NaN last.

        Raises:
            ConfigError: `known_column`: the table of trajectories has no such column.
        """
        self.refuse_unknown(column)
        key = column, descending
        if key not in self._orders:
            values = self.trajectories[column]
            values = values.fill_nan(None) if values.dtype.is_float() else values
            position = pl.arg_sort_by(
                column, descending=descending, nulls_last=True, maintain_order=True
            )
            order = pl.DataFrame({column: values}).select(position).to_series().to_numpy()
            with self._lock:
                if len(self._orders) >= _NUM_CACHED:
                    self._orders.pop(next(iter(self._orders)))
                self._orders[key] = order
        return self._orders[key]

    def refuse_unknown(self, column: str) -> None:
        """Raise an error unless the table of trajectories has this column.

        Raises:
            ConfigError: `known_column`: the table of trajectories has no such column.
        """
        if column not in self.trajectories.columns:
            hint = f"use one of {', '.join(self.trajectories.columns)}"
            finding = f"the table of trajectories has no column {column!r}"
            raise ConfigError("known_column", str(self.path), finding, hint=hint)

    def _evaluated(self, where: str) -> BoolArray:
        condition = TrajectoryCondition.parse(where, "" if self.columns is not None else self.path)
        used = set(condition.names)
        for name in sorted(used & self.hidden):
            finding = f"{name} is both a column of the dataset and one that the viewer computes"
            hint = "rename the column of the dataset"
            raise ConfigError("condition", where, finding, hint=hint)
        rows = self._rows_with(used)
        key, frame = "trajectory_id", self._stored_with(used) if rows is None else rows.lazy()
        computed = trajectory_columns(frame, dataset_outcome(self.path)) if rows is None else {}
        if rows is not None:
            condition, windows = _by_numbers_in(condition)
            numbers = dict.fromkeys(["trajectory_id", *windows])
            key, frame = _KEY, frame.with_columns(self._numbers(name) for name in numbers)
        types = types_in(sorted(used), frame.collect_schema())
        values = row_values(frame, condition, computed, where, key).select("holds")
        found = collect(values, where, types, "streaming" if rows is None else "in-memory")
        kept = np.broadcast_to(found["holds"].to_numpy(), len(self.rows))  # a constant is one value
        if not len(self):
            return kept
        first, ids = self.starts[:-1], self.trajectories["trajectory_id"]
        folds = {"some": np.logical_or, "every": np.logical_and}
        by = {name: fold.reduceat(kept, first) for name, fold in folds.items()}
        return decided(pl.DataFrame({"trajectory_id": ids, **by}), condition, where).to_numpy()

    def _rows_with(self, used: set[str]) -> pl.DataFrame | None:
        """Return the rows with indexed and computed columns; None if a column is only on disk."""
        names = self._stored_names
        indexed = [n for n in self.rows.columns if n in names and n not in self.cut | LENGTHS]
        on_disk = (used & names).difference(indexed) | (used & COMPUTED.keys()) - _IN_MEMORY
        if on_disk.difference(self.added):
            return None
        return self.rows.select(indexed).with_columns(self._computed(used - names))

    def _stored_with(self, used: set[str]) -> pl.LazyFrame:
        """Scan the rows on disk, plus added columns in `used`."""
        if self.columns is not None:
            hint = "search for text with the box Find, or convert the logs"
            missing = sorted(used & self.columns - {*self.rows.columns})
            finding = f"logs have no index of {', '.join(missing)}"
            raise ConfigError("condition", str(self.path), finding, hint=hint)
        stored = scan(self.path)
        added = self._computed(used & {*self.added})
        return pl.concat([stored, pl.LazyFrame(added)], how="horizontal") if added else stored

    @cached_property
    def hidden(self) -> frozenset[str]:
        """Columns of the dataset that have the same name as a computed column."""
        return frozenset(self._stored_names & {*COMPUTED, *self.added})

    @cached_property
    def _stored_names(self) -> set[str]:
        return (
            set(scan(self.path).collect_schema().names())
            if self.columns is None
            else {*self.columns}
        )

    def _computed(self, used: set[str]) -> list[pl.Series]:
        number = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return [
            self.trajectories[name][number] for name in sorted(used & _IN_MEMORY.union(self.added))
        ]

    def _numbers(self, name: str) -> pl.Series:
        """[N] Map the distinct ids in a column to integers; return one integer per row."""
        if name not in self._ids:
            values, run = self.rows[name], self.rows[name].rle_id()
            first = values.filter((run != run.shift()).fill_null(value=True))
            # Run ids are sorted, so that Polars groups them without hashing.
            is_whole = name == "trajectory_id" or first.n_unique() == len(first)
            self._ids[name] = run if is_whole else first.rank("dense").gather(run)
        return self._ids[name].alias(f"{_NUMBER}{name}")


def _by_numbers_in(condition: TrajectoryCondition) -> tuple[TrajectoryCondition, list[str]]:
    """Apply `by_numbers` to all expressions of a condition."""
    outer, windows = by_numbers(condition.outer)
    parts = {}
    for name, (row, fold) in condition.parts.items():
        replaced, names = by_numbers(row)
        parts[name], windows = (replaced, fold), [*windows, *names]
    return dataclasses.replace(condition, outer=outer, parts=parts), windows


def by_numbers(condition: pl.Expr) -> tuple[pl.Expr, list[str]]:
    """Make window expressions partition by integers instead of ids, which is several times faster.

    Returns:
        The condition with columns `number of NAME` in place of NAME; and the list of these NAMEs.

    Example:
        >>> over = pl.sql_expr("max(reward) OVER (PARTITION BY instance_id) > 0")
        >>> by_numbers(over)[1]
        ['instance_id']
    """
    columns: list[str] = []

    def replaced(node: Any) -> Any:
        if isinstance(node, list):
            return [replaced(one) for one in node]
        if not isinstance(node, dict):
            return node
        copy = {key: replaced(value) for key, value in node.items()}
        for key in _PARTITIONED & copy.keys():
            for by in copy[key].get("partition_by") or ():
                if isinstance(by, dict) and by.get("Column") in _NUMBERED:
                    columns.append(by["Column"])
                    by["Column"] = f"{_NUMBER}{by['Column']}"
        return copy

    try:
        tree = replaced(json.loads(condition.meta.serialize(format="json")))
        if columns:
            text = io.StringIO(json.dumps(tree))
            return pl.Expr.deserialize(text, format="json"), list(dict.fromkeys(columns))
    except (pl.exceptions.PolarsError, ValueError, TypeError, AttributeError, RecursionError):
        pass  # other versions of Polars may serialise expressions differently
    return condition, []


def _starts(rows: pl.DataFrame) -> IntArray:
    ids = rows["trajectory_id"]
    first = np.flatnonzero((ids != ids.shift()).fill_null(value=True).to_numpy())
    return np.append(first, len(rows)).astype(np.int64)


def _returns(rows: Frame, outcome: Outcome) -> pl.DataFrame:
    """Compute the returns and the numbers of steps of complete trajectories."""
    frame = as_lazy(rows)
    turns = num_steps(frame), pl.Expr.sum
    return fold_trajectories(frame, outcome, {"num_turns": turns}).collect()


def _calls(table: pa.Table) -> pl.DataFrame:
    names = [name for name in ("trajectory_id", *CALLED) if name in table.column_names]
    rows = with_absent(as_lazy(table.select(names)), CALLED).select("trajectory_id", c=tool_calls())
    total, errors = count_calls(pl.col("c")), count_calls(pl.col("c"), failed=True)
    counted = rows.group_by("trajectory_id", maintain_order=True).agg(
        num_tool_calls=total.cast(pl.Int32), num_tool_errors=errors.cast(pl.Int32)
    )
    return counted.drop("trajectory_id").collect()


def _trajectories(
    rows: pl.DataFrame, returns: pl.DataFrame, starts: IntArray, texts: dict[str, str | None]
) -> pl.DataFrame:
    """Build the table of trajectories: ids, computed columns, user columns of the last row."""
    first, last = starts[:-1], starts[1:] - 1
    one_row = len(first) == len(rows)
    final = rows if one_row else rows[last]
    columns: dict[str, Any] = {name: final[name] for name in _IDS}
    columns[TASK] = _or_null(final, TASK, pl.String).fill_null(final["instance_id"])
    columns["num_rows"] = pl.Series(np.diff(starts).astype(np.int32))
    columns["num_turns"] = returns["num_turns"].cast(pl.Int32)
    columns["return"] = returns["return"]
    prompt, response, sampled, trained = (
        rows[f"num tokens: {name}"].to_numpy()
        for name in ("prompt", "response", "sampled", "trained")
    )
    for name, values in (("prompt", prompt), ("response", sampled), ("trained", trained)):
        columns[f"{name}_tokens"] = pl.Series(_reduced(np.add, values.astype(np.int64), first))
    whole = prompt.astype(np.int64) + response
    columns["longest_row_tokens"] = pl.Series(_reduced(np.maximum, whole, first))
    columns["stop_reason"] = _or_null(final, "stop_reason", pl.String)
    columns["error"] = returns["error"]
    columns["policy_version"] = _oldest(rows, starts)
    columns["agents"] = _agents(rows, starts)
    task_text = pl.col("instance_id").replace_strict(texts, return_dtype=pl.String)
    columns["task_text"] = final.select(task_text).to_series()
    user_names = [n for n in final.columns if n not in COLUMN_BY_NAME and n not in LENGTHS]
    columns |= {name: final[name] for name in user_names if name not in columns}
    return pl.DataFrame(columns)


def _reduced(fold: Any, values: IntArray, first: IntArray) -> IntArray:
    reduced: IntArray = fold.reduceat(values, first) if len(first) else values
    return reduced


def _or_null(rows: pl.DataFrame, name: str, kind: Any) -> pl.Series:
    return rows[name] if name in rows.columns else pl.Series([None] * len(rows), dtype=kind)


def _trajectory_of(starts: IntArray) -> pl.Series:
    return pl.Series("trajectory", np.repeat(np.arange(len(starts) - 1), np.diff(starts)))


def _oldest(rows: pl.DataFrame, starts: IntArray) -> pl.Series:
    versions = _or_null(rows, "policy_version", pl.Int32)
    if len(rows) == len(starts) - 1:
        return versions
    frame = pl.DataFrame([_trajectory_of(starts), versions.alias("version")])
    return frame.group_by("trajectory", maintain_order=True).agg(pl.col("version").min())["version"]


def _agents(rows: pl.DataFrame, starts: IntArray) -> pl.Series:
    agents = _or_null(rows, "agent", pl.String)
    if len(rows) == len(starts) - 1:
        return agents
    frame = pl.DataFrame([_trajectory_of(starts), agents.alias("agent")])
    names = pl.col("agent").drop_nulls().unique(maintain_order=True)
    joined = frame.group_by("trajectory", maintain_order=True).agg(names)
    texts = pl.when(pl.col("agent").list.len() > 0).then(pl.col("agent").list.join(", "))
    return joined.select(texts).to_series()
