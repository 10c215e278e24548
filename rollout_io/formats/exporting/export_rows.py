"""Code shared by exporters: checked rows, failures, and counts of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.checking import checked_tables
from rollout_io.dataset.reader import scan
from schemas.errors import InputError, count
from schemas.ragged import BoolArray
from schemas.types import cast_table, with_absent

Failed = Literal["group", "trajectory"]
PathLike = str | os.PathLike[str]

FAILED = "from failed trajectories"
IN_FAILED_GROUP = "from the group of a failed trajectory"


@dataclass(kw_only=True, slots=True)
class Exported:
    """Counts of an export: rows read = rows written + rows left out.

    Attributes:
        left_out: Number of rows that were not written, by reason.
        remarks: Warnings and notes about the exported file.
    """

    num_rows_read: int = 0
    num_rows_written: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, num_rows: int) -> None:
        """Count rows that are not written."""
        if num_rows:
            self.left_out[reason] = self.left_out.get(reason, 0) + num_rows

    def close(self, dataset: PathLike) -> Exported:
        """Check the counts, and reject an export without rows."""
        assert self.num_rows_read == self.num_rows_written + sum(self.left_out.values())
        if self.num_rows_written == 0:
            got, hint = "the dataset has no rows", None
            if self.num_rows_read:
                got = "every group has a failed trajectory"
                hint = "pass --failed trajectory to export the other trajectories of a group"
            raise InputError("some_rows", os.fspath(dataset), got, hint=hint)
        return self

    def text(self) -> str:
        """Return the counts as one line."""
        why = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items())
        left = sum(self.left_out.values())
        return (
            f"{count(self.num_rows_read, 'row')} read: {self.num_rows_written:,} written, "
            f"{left:,} left out" + (f" ({why})" if why else "")
        )


def declared_tables(dataset: PathLike) -> Iterator[pa.Table]:
    """Yield tables of complete trajectories, checked and cast to the declared types.

    Raises:
        ValidationError: The dataset breaks a named invariant.
    """
    for table in checked_tables(dataset):
        yield cast_table(table).combine_chunks()


@dataclass(frozen=True, slots=True)
class Failures:
    """Ids of failed trajectories in a dataset.

    Attributes:
        trajectories: Ids of the trajectories with an `error`.
        groups: Instances whose other trajectories are masked as well; empty with
            `failed="trajectory"`.
    """

    trajectories: pa.Array
    groups: pa.Array

    @classmethod
    def of(cls, dataset: PathLike, failed: Failed) -> Failures:
        """Read the ids of a dataset's failed trajectories, without reading token columns."""
        failed_rows = with_absent(scan(dataset), ["error"]).filter(pl.col("error").is_not_null())
        ids = failed_rows.select("trajectory_id", "instance_id").collect()
        groups = ids["instance_id"].unique() if failed == "group" else ids["instance_id"].head(0)
        return cls(*(pa.array(s.to_list(), pa.string()) for s in (ids["trajectory_id"], groups)))

    def failed(self, table: pa.Table) -> BoolArray:
        """Return [N] booleans: true for rows of failed trajectories."""
        return np.asarray(pc.is_in(table.column("trajectory_id"), self.trajectories))

    def masked(self, table: pa.Table) -> BoolArray:
        """Return [N] booleans: true for failed trajectories and for trajectories masked with them."""
        in_group: BoolArray = np.asarray(pc.is_in(table.column("instance_id"), self.groups))
        return self.failed(table) | in_group

    def leave_out(self, table: pa.Table, done: Exported) -> pa.Table:
        """Return the rows that are not masked, and count all rows."""
        failed, masked = self.failed(table), self.masked(table)
        done.num_rows_read += table.num_rows
        done.num_rows_written += int((~masked).sum())
        done.leave_out(FAILED, int(failed.sum()))
        done.leave_out(IN_FAILED_GROUP, int((masked & ~failed).sum()))
        return table.filter(pa.array(~masked)).combine_chunks()


@dataclass(slots=True)
class Groups:
    """Instances and trajectories, numbered by first appearance, with counts of their rows."""

    num_rows_of_instance: dict[str, int] = field(default_factory=dict)
    num_rows_of_trajectory: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, table: pa.Table) -> tuple[list[int], list[int]]:
        """Count rows; return the instance number of each row, and its trajectory number."""
        instances = self._add(table, "instance_id", self.num_rows_of_instance)
        return instances, self._add(table, "trajectory_id", self.num_rows_of_trajectory)

    def _add(self, table: pa.Table, name: str, counts: dict[str, int]) -> list[int]:
        numbers, found = self._numbers.setdefault(name, {}), []
        for key in table.column(name).to_pylist():
            counts[key] = counts.get(key, 0) + 1
            found.append(numbers.setdefault(key, len(numbers)))
        return found

    def remarks(self, peer: str, size: str) -> Iterator[str]:
        """Yield remarks for users of a trainer that treats every row as a sample.

        Args:
            peer: Name of the trainer.
            size: The trainer's name for the number of samples per group.
        """
        several = sum(num_rows > 1 for num_rows in self.num_rows_of_trajectory.values())
        if several:
            yield (
                f"{several} of {len(self.num_rows_of_trajectory)} trajectories have more than one "
                f"row, and {peer}'s baseline treats each row as a sample with the row's "
                "reward. Run `rollouts merge` first to join rows that continue each other"
            )
        sizes = set(self.num_rows_of_instance.values())
        if len(sizes) > 1:
            yield (
                f"groups have {min(sizes)} to {max(sizes)} rows, but {peer} expects {size} rows "
                "in every group"
            )


class Uniform:
    """A check that a column has a value in every row or in none, as some formats require."""

    def __init__(self, dataset: PathLike, names: Sequence[str]) -> None:
        self._where, self._names = os.fspath(dataset), names
        self._has_values: dict[str, bool] = {}

    def check(self, table: pa.Table) -> None:
        """Check the next rows.

        Raises:
            InputError: `all_or_none`: a column is null in only some rows.
        """
        for name in self._names:
            if name in table.column_names and table.num_rows:
                valid = np.asarray(pc.is_valid(table.column(name)))
                expected = self._has_values.setdefault(name, bool(valid[0]))
                odd = np.flatnonzero(valid != expected)
                if len(odd):
                    self._refuse(table, name, int(odd[0]))

    def has_values(self, name: str) -> bool:
        """True if the rows so far have values in the column."""
        return self._has_values.get(name, False)

    def _refuse(self, table: pa.Table, name: str, row: int) -> None:
        got = "the column has values in only some of the rows"
        hint = f"drop the column, or keep only the rows with a value (`{name} IS NOT NULL`)"
        raise InputError("all_or_none", _place(self._where, table, name, row), got, hint=hint)


def rewards_of(dataset: PathLike, table: pa.Table) -> list[float]:
    """Return the reward of each row.

    Raises:
        InputError: `reward_known`: the reward of a trajectory that did not fail is null.
    """
    name = "reward"
    values: list[Any] = [None] * table.num_rows
    if name in table.column_names:
        values = table.column(name).to_pylist()
    if None in values:
        where = _place(os.fspath(dataset), table, name, values.index(None))
        hint = "convert with --rewards FILE, filter out these trajectories, or set their `error`"
        raise InputError("reward_known", where, "the reward is null", hint=hint)
    return values


def _place(where: str, table: pa.Table, name: str, row: int) -> str:
    key, step = (table.column(n)[row].as_py() for n in ("trajectory_id", "step_index"))
    return f"{where}, trajectory {key!r}, step_index {step}, column {name!r}"
