"""The groups of a run on disk: a dataset that grows, a directory an iteration, a shard a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import rollout_io
from rollout_io.storage import Location
from rollout_io.writer import RolloutWriter
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from trainer.rl.config import DROPPED, ROLLOUTS, UNFINISHED, RlConfig
from trainer.rl.rules import place

Tables = Mapping[int, pa.Table]
"""Rows of a group's trajectories, by repetition."""


class Groups:
    """What was sampled for each iteration; begun with what is there.

    Args:
        config: The run's configuration.

    Attributes:
        size: Groups of an iteration.
        names: Instance ids of all groups that finished, those that were dropped among them.
        num_kept: Groups of the iterations.
        unfinished: Trajectories of groups that an earlier process did not finish, by group.

    Raises:
        RolloutError: resume_rollouts: an iteration has too many groups, or one that is not its own.
    """

    def __init__(self, config: RlConfig) -> None:
        self._out, self.size = Path(config.out), config.training.groups_per_batch
        self._room = [self.size] * config.num_iterations
        self.names = _names_in(self._out / DROPPED)
        self.num_kept = 0
        for iteration in range(config.num_iterations):
            self._read(iteration)
        self.unfinished = self._read_unfinished()

    def path(self, iteration: int) -> Path:
        """The dataset of an iteration."""
        return self._out / ROLLOUTS / f"iteration_{iteration:05d}"

    def is_whole(self, iteration: int) -> bool:
        """Whether all groups of an iteration are there."""
        return self._room[iteration] == 0

    def add(
        self,
        name: str,
        tables: Tables,
        metadata: DatasetMetadata,
        *,
        deadline: int,
        others: Sequence[int],
    ) -> int:
        """Write a finished group; the iteration that it is for.

        Args:
            name: Its instance id.
            tables: Its rows.
            metadata: Of the dataset.
            deadline: The last iteration that it may train.
            others: Those of the groups still under way.

        Raises:
            RolloutError: What the writer refuses; there is no room on the disk.
        """
        first = next(number for number, free in enumerate(self._room) if free)
        room = self._room[first : max(deadline, *others, first) + 1]
        iteration = first + place(room, [other - first for other in others])
        _write(self.path(iteration), [tables], metadata)
        self.names.add(name)
        self.num_kept += 1
        self._room[iteration] -= 1
        return iteration

    def drop(self, name: str, tables: Tables, metadata: DatasetMetadata) -> None:
        """Write a finished group that no iteration trains.

        Raises:
            RolloutError: As `add`.
        """
        _write(self._out / DROPPED, [tables], metadata)
        self.names.add(name)

    def put_aside(self, groups: Sequence[Tables], metadata: DatasetMetadata) -> None:
        """Keep the finished trajectories of groups that are not complete, for another process.

        Raises:
            RolloutError: As `add`.
        """
        before = Location.of(self._out / UNFINISHED).shards()
        if any(groups):
            _write(self._out / UNFINISHED, [tables for tables in groups if tables], metadata)
        for path in before:
            Path(path).unlink()

    def _read(self, iteration: int) -> None:
        path = self.path(iteration)
        found = _names_in(path)
        again = found & self.names
        if len(found) > self.size or again:
            got = f"{len(found)} groups, {len(again)} of them elsewhere too"
            expected = f"at most {self.size}, each once"
            hint = "remove that directory, and its groups are sampled again"
            raise RolloutError("resume_rollouts", str(path), got, expected, hint)
        self.names |= found
        self.num_kept += len(found)
        self._room[iteration] -= len(found)

    def _read_unfinished(self) -> dict[str, dict[int, pa.Table]]:
        """A process killed in `put_aside` leaves trajectories twice, in two shards: one is taken."""
        found: dict[str, dict[int, pa.Table]] = {}
        for path in Location.of(self._out / UNFINISHED).shards():
            table = rollout_io.read(path)
            ids = pl.DataFrame(table.select(["instance_id", "repetition_id"])).unique()
            for name, repetition in ids.iter_rows():
                is_its = pc.and_(
                    pc.equal(table["instance_id"], name),
                    pc.equal(table["repetition_id"], repetition),
                )
                found.setdefault(name, {})[repetition] = table.filter(is_its)
        return {name: tables for name, tables in found.items() if name not in self.names}


def _names_in(path: Path) -> set[str]:
    if not Location.of(path).shards():
        return set()
    return set(rollout_io.scan(path).select("instance_id").unique().collect()["instance_id"])


def _write(path: Path, groups: Iterable[Tables], metadata: DatasetMetadata) -> None:
    """One more shard."""
    with RolloutWriter(path, metadata=metadata, append=True) as writer:
        for tables in groups:
            for number in sorted(tables):
                writer.write(tables[number])
