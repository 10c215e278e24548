"""The finished groups of a run: a dataset that grows, a directory an iteration, a shard a group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

import rollout_io
from rollout_io.storage import Location
from rollout_io.writer import RolloutWriter
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from trainer.rl.rules import place


class Groups:
    """What was sampled for each iteration, on disk; begun with what is there.

    Args:
        folder: Holds `iteration_00000/`, ...
        size: Groups of an iteration.
        num_iterations: Of the run.

    Attributes:
        names: Instance ids of all groups.

    Raises:
        RolloutError: resume_rollouts: an iteration has too many groups, or one that is not its own.
    """

    def __init__(self, folder: Path, *, size: int, num_iterations: int) -> None:
        self.folder, self.size = folder, size
        self.names: set[str] = set()
        self._room = [size] * num_iterations
        for iteration in range(num_iterations):
            self._read(iteration)

    def path(self, iteration: int) -> Path:
        """The dataset of an iteration."""
        return self.folder / f"iteration_{iteration:05d}"

    def is_whole(self, iteration: int) -> bool:
        """Whether all groups of an iteration are there."""
        return self._room[iteration] == 0

    def add(
        self,
        name: str,
        tables: Sequence[pa.Table],
        metadata: DatasetMetadata,
        *,
        deadline: int,
        others: Sequence[int],
    ) -> int:
        """Write a finished group; the iteration that it is for.

        Args:
            name: Its instance id.
            tables: Rows of its trajectories.
            metadata: Of the dataset.
            deadline: The last iteration that it may train.
            others: Those of the groups still under way.

        Raises:
            RolloutError: What the writer refuses; there is no room on the disk.
        """
        first = next(number for number, free in enumerate(self._room) if free)
        room = self._room[first : max(deadline, *others, first) + 1]
        iteration = first + place(room, [other - first for other in others])
        with RolloutWriter(self.path(iteration), metadata=metadata, append=True) as writer:
            for table in tables:
                writer.write(table)
        self.names.add(name)
        self._room[iteration] -= 1
        return iteration

    def _read(self, iteration: int) -> None:
        path = self.path(iteration)
        if not Location.of(path).shards():
            return
        rows = rollout_io.scan(path).select("instance_id").unique().collect()
        found = set(rows["instance_id"])
        if len(found) > self.size or found & self.names:
            got = f"{len(found)} groups, {len(found & self.names)} of them in other iterations too"
            expected = f"at most {self.size}, each once"
            hint = "remove that directory, and its groups are sampled again"
            raise RolloutError("resume_rollouts", str(path), got, expected, hint)
        self.names |= found
        self._room[iteration] -= len(found)
