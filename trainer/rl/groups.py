"""Groups of a run on disk: a growing dataset, one directory per iteration, one shard per group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import rollout_io
from rollout_io.dataset.blobs import Blobs, names_in
from rollout_io.dataset.storage import Location
from rollout_io.dataset.writer import RolloutWriter
from schemas.errors import InputError, count
from schemas.metadata import DatasetMetadata
from trainer.rl.config import DROPPED, ROLLOUTS, UNFINISHED, RlConfig

Tables = Mapping[int, pa.Table]
"""Rows of a group's trajectories, by repetition."""


class Groups:
    """Sampled groups of each iteration, including groups already on disk.

    Attributes:
        size: Groups per iteration.
        names: Instance ids of all finished groups, including dropped ones.
        num_kept: Number of groups assigned to iterations.
        store: Store of all pictures that environments return; each dataset takes those of its rows.
        unfinished: Finished trajectories of groups that an earlier process left incomplete, by
            group.

    Raises:
        InputError: `resume_rollouts`: an iteration has too many groups, or a group that is also in
            a different iteration.
    """

    def __init__(self, config: RlConfig) -> None:
        self._out, self.size = Path(config.run.out), config.training.batch.groups_per_batch
        self.store = Blobs.of(self._out / ROLLOUTS)
        self._room = [self.size] * config.num_iterations
        self.names = _names_in(self._out / DROPPED)
        self.num_kept = 0
        for iteration in range(config.num_iterations):
            self._read(iteration)
        self.unfinished = self._read_unfinished()

    def path(self, iteration: int) -> Path:
        """Return the dataset path of an iteration."""
        return self._out / ROLLOUTS / f"iteration_{iteration:05d}"

    def is_whole(self, iteration: int) -> bool:
        """True if all groups of an iteration are finished."""
        return self.num_missing(iteration) == 0

    def num_missing(self, iteration: int) -> int:
        """Return the number of unfinished groups of an iteration."""
        return self._room[iteration]

    def add(
        self,
        name: str,
        tables: Tables,
        metadata: DatasetMetadata,
        *,
        deadline: int,
        others: Sequence[int],
    ) -> int:
        """Write a finished group, and return the iteration that trains on it.

        `deadline` is the last iteration that may train on it; `others` are the deadlines of the
        groups still running.

        Raises:
            RolloutError: The writer fails, for example because the disk is full.
        """
        first = next(number for number, free in enumerate(self._room) if free)
        room = self._room[first : max(deadline, *others, first) + 1]
        iteration = first + place(room, [other - first for other in others])
        self._write(self.path(iteration), [tables], metadata)
        self.names.add(name)
        self.num_kept += 1
        self._room[iteration] -= 1
        return iteration

    def drop(self, name: str, tables: Tables, metadata: DatasetMetadata) -> None:
        """Write a finished group that no iteration trains on.

        Raises:
            RolloutError: See `add`.
        """
        self._write(self._out / DROPPED, [tables], metadata)
        self.names.add(name)

    def put_aside(self, groups: Sequence[Tables], metadata: DatasetMetadata) -> None:
        """Store the finished trajectories of incomplete groups, for a later process.

        Raises:
            RolloutError: See `add`.
        """
        before = Location.of(self._out / UNFINISHED).shards()
        if any(groups):
            self._write(self._out / UNFINISHED, [tables for tables in groups if tables], metadata)
        for path in before:
            Path(path).unlink()

    def _write(self, path: Path, groups: Iterable[Tables], metadata: DatasetMetadata) -> None:
        """Append one shard, with the pictures that it refers to."""
        store = Blobs.of(path)
        with RolloutWriter(path, metadata=metadata, append=True) as writer:
            for tables in groups:
                for number in sorted(tables):
                    for name in names_in(tables[number]):
                        store.take(name, [self.store])
                    writer.write(tables[number])

    def _read(self, iteration: int) -> None:
        path = self.path(iteration)
        names = _names_in(path)
        again = names & self.names
        if len(names) > self.size or again:
            finding = (
                f"{count(len(names), 'group')}, {len(again)} of which are also in other iterations"
            )
            expected = f"at most {self.size}, each in one iteration"
            hint = "remove this directory: its groups will be sampled again"
            raise InputError("resume_rollouts", str(path), finding, expected, hint)
        self.names |= names
        self.num_kept += len(names)
        self._room[iteration] -= len(names)

    def _read_unfinished(self) -> dict[str, dict[int, pa.Table]]:
        """Read unfinished groups, without duplicates left by a process killed in `put_aside`."""
        unfinished: dict[str, dict[int, pa.Table]] = {}
        for path in Location.of(self._out / UNFINISHED).shards():
            table = rollout_io.read(path)
            ids = pl.DataFrame(table.select(["instance_id", "repetition_id"])).unique()
            for name, repetition in ids.iter_rows():
                is_its = pc.and_(
                    pc.equal(table["instance_id"], name),
                    pc.equal(table["repetition_id"], repetition),
                )
                unfinished.setdefault(name, {})[repetition] = table.filter(is_its)
        return {name: tables for name, tables in unfinished.items() if name not in self.names}


def _names_in(path: Path) -> set[str]:
    if not Location.of(path).shards():
        return set()
    return set(rollout_io.scan(path).select("instance_id").unique().collect()["instance_id"])


def num_allowed(*, iteration: int, max_staleness: int, num_iterations: int, size: int) -> int:
    """Compute how many groups, finished or not, may have been started by a given iteration.

        min(max_staleness + iteration + 1, num_iterations) * size

    `iteration` counts from 0; `size` is the number of groups per iteration.

    Example:
        >>> num_allowed(iteration=0, max_staleness=0, num_iterations=9, size=4)
        4
        >>> num_allowed(iteration=3, max_staleness=2, num_iterations=9, size=4)
        24
    """
    return min(max_staleness + iteration + 1, num_iterations) * size


def place(room: Sequence[int], deadlines: Sequence[int]) -> int:
    """Choose the iteration that trains on a finished group.

    This is the first iteration with a free slot that no running group needs: every running group
    still gets a slot in its last allowed iteration or earlier. The trainer thus waits for a slow
    group instead of training on it too late. `num_allowed` guarantees that there is an
    iteration with such a slot, and that it is not too late for the finished group itself.

    Args:
        room: Number of free slots of each iteration.
        deadlines: Last allowed iteration of each running group.

    Example:
        >>> place([1, 2], [])
        0
        >>> place([1, 2], [0])
        1
    """
    latest = sorted(deadlines)
    spare = [
        free - bisect_right(latest, number) for number, free in enumerate(accumulate(room))
    ]  # spare[j]: free slots up to j, minus the running groups that need one of them
    needed = len(room)
    while needed and spare[needed - 1] > 0:
        needed -= 1
    places = [number for number, free in enumerate(room) if free and number >= needed]
    assert places, "more groups than slots"
    return places[0]
