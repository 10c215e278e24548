"""Groups of a run: sampled as far ahead of the trainer as allowed, filtered, and kept on disk.

`Collector` has them sampled, and drops those whose returns do not vary. `Groups` is the growing
dataset: one directory per iteration, one shard per group.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import rollout_io
from pipelines.frames import set_column
from pipelines.generation.config import identity
from pipelines.generation.generator import Generator, UnderWay
from pipelines.generation.tasks import Finished, Task, attempts
from rollout_io.dataset.blobs import Blobs, names_in
from rollout_io.dataset.storage import Location
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.terminal import SECONDS_A_LINE
from schemas.columns import TASK
from schemas.errors import InputError, count
from schemas.metadata import DatasetMetadata
from trainer.batch import UNUSED_COLUMNS
from trainer.batches.plan import dataset_returns, make_plan
from trainer.rl.config import DROPPED, ROLLOUTS, UNFINISHED, RlConfig

DROPPED_IN_A_ROW = 30
"""A run ends when its last groups, enough for this number of iterations, all lack variance."""


@dataclass(kw_only=True, slots=True)
class BegunGroup:
    """A group that is being sampled.

    Attributes:
        deadline: Last iteration that may train on the group.
        tables: Rows of its finished trajectories, by repetition.
    """

    deadline: int
    tables: dict[int, pa.Table]


class Collector:
    """Starts groups as `num_allowed` permits, and adds each to `groups` when it finishes.

    At most `max_concurrency` trajectories run at once; a group starts with its first trajectory.
    Leaving the `async with` block cancels running trajectories; finished ones of incomplete groups
    are stored for a later process to resume.

    Args:
        generator: Runs trajectories.
        tasks: Infinite iterator of tasks from `endless_tasks`; tasks that
            are already in `groups` are skipped.
        groups: Stores finished groups.
        config: Configuration of the run.

    Attributes:
        iteration: Current iteration, which is also the number of completed iterations.
    """

    def __init__(
        self, generator: Generator, tasks: Iterator[Task], groups: Groups, config: RlConfig
    ) -> None:
        self.iteration = 0
        self._warnings: list[str] = []
        self._num_said = 0
        self._generator, self._tasks, self._groups, self._config = generator, tasks, groups, config
        self._sampling = config.generation
        self._metadata = generator.metadata.made("rl", config=identity(config.generation))
        self._begun: dict[str, BegunGroup] = {}
        self._under_way = UnderWay(generator)
        self._failure: BaseException | None = None
        self._num_dropped = self._num_in_a_row = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._failure = self._failure or asyncio.CancelledError()
        await self._under_way.cancel()
        begun = [group.tables for group in self._begun.values()]
        self._groups.put_aside([*begun, *self._groups.unfinished.values()], self._metadata)

    @property
    def num_begun(self) -> int:
        """Number of groups that are assigned to iterations or still running."""
        return self._groups.num_kept + len(self._begun)

    def num_newly_dropped(self) -> int:
        """Return the number of groups dropped for lack of variance since the last call."""
        num_dropped, self._num_dropped = self._num_dropped, 0
        return num_dropped

    def new_warnings(self) -> list[str]:
        """Return the warnings added since the last call; each text is returned only once."""
        warnings = self._warnings[self._num_said :]
        self._num_said = len(self._warnings)
        return warnings

    def advance(self, iteration: int) -> None:
        """Start the groups that are allowed once `iteration` iterations have been completed."""
        self.iteration = iteration
        self._start_all()

    async def whole(self, iteration: int, show: Callable[[int], object]) -> None:
        """Wait until all groups of an iteration are finished.

        `show` is called regularly with the number of finished trajectories, in groups of the
        iteration and in groups that are still running.

        Raises:
            RolloutError: `engine_down`, `engine_answer`: the engine fails (raised once running
                trajectories have ended); or the dataset's writer fails.
        """
        while self._groups.num_missing(iteration):
            if self._failure is not None and not self._under_way.running:
                raise self._failure
            self._changed.clear()
            show(self._num_finished(iteration))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), SECONDS_A_LINE)
        show(self._num_finished(iteration))

    def _num_finished(self, iteration: int) -> int:
        size, num_each = self._groups.size, self._sampling.group_size
        whole = (size - self._groups.num_missing(iteration)) * num_each
        begun = sum(len(group.tables) for group in self._begun.values())
        return min(whole + begun, size * num_each)

    def _start_all(self) -> None:
        while self._failure is None and self._under_way.has_room:
            if not self._under_way.waiting and not self._begin_group():
                return
            started = self._under_way.start()
            for task in started:
                task.add_done_callback(self._ended)
            if self._under_way.waiting and not started:
                return

    def _begin_group(self) -> bool:
        """Start another group if allowed, and return whether one was started."""
        config = self._config
        allowed = num_allowed(
            iteration=self.iteration,
            max_staleness=config.loop.max_staleness,
            num_iterations=config.num_iterations,
            size=self._groups.size,
        )
        if self.num_begun >= allowed:
            return False
        task = next(t for t in self._tasks if t.instance_id not in self._groups.names)
        tables = self._groups.unfinished.pop(task.instance_id, {})
        oldest = min([self.iteration, *_versions(tables.values())])
        last = min(oldest + config.loop.max_staleness, config.num_iterations - 1)
        self._begun[task.instance_id] = BegunGroup(deadline=last, tables=tables)
        remaining = attempts(task, self._sampling.group_size)
        missing = [t for t in remaining if t.repetition_id not in tables]
        self._under_way.waiting.extend(self._generator.units(missing))
        self._end_group(task.instance_id)
        return True

    def _ended(self, task: asyncio.Task[list[Finished]]) -> None:
        self._under_way.running.pop(task, None)
        try:
            if not task.cancelled():
                for finished in task.result():
                    self._take(finished)
            self._start_all()
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    def _take(self, finished: Finished) -> None:
        name = finished.task.instance_id
        self._begun[name].tables[finished.task.repetition_id] = _of_task(finished)
        self._warnings += [w for w in finished.warnings if w not in self._warnings]
        self._end_group(name)

    def _end_group(self, name: str) -> None:
        """Write a group if all its trajectories have ended."""
        group = self._begun[name]
        if len(group.tables) < self._sampling.group_size:
            return
        if self._is_dropped(group.tables):
            self._groups.drop(name, group.tables, self._metadata)
            self._num_dropped += 1
            self._num_in_a_row += 1
        else:
            self._num_in_a_row = 0
            others = [other.deadline for n, other in self._begun.items() if n != name]
            rows = name, group.tables, self._metadata
            self._groups.add(*rows, deadline=group.deadline, others=others)
        del self._begun[name]
        self._check_some_vary()

    def _is_dropped(self, tables: Mapping[int, pa.Table]) -> bool:
        """True if `drop_zero_variance_groups` leaves out the group."""
        training = self._config.training
        if not training.data.drop_zero_variance_groups:
            return False
        rows = pl.concat(map(_outcomes, tables.values()), how="diagonal_relaxed")
        returns = dataset_returns(rows.lazy(), training)
        data = dataclasses.replace(training.data, drop_zero_variance_groups=False)
        plan = make_plan(returns, dataclasses.replace(training, data=data))
        return plan.num_groups_without_variance > 0

    def _check_some_vary(self) -> None:
        if self._num_in_a_row >= DROPPED_IN_A_ROW * self._groups.size:
            finding = f"returns do not vary within any of the last {self._num_in_a_row} groups"
            hint = f"run `rollouts stats {self._config.run.out}/{DROPPED}`, and use tasks whose returns vary"
            raise InputError("zero_advantages", "tasks", finding, hint=hint)


def _of_task(finished: Finished) -> pa.Table:
    names = pa.array([finished.task.task_instance_id] * finished.rows.num_rows, pa.string())
    return set_column(finished.rows, TASK, names)


def _outcomes(table: pa.Table) -> pl.DataFrame:
    """Select the columns from which returns and separate rewards are computed."""
    unused = [n for n in UNUSED_COLUMNS if n in table.column_names and n != "metrics"]
    return pl.DataFrame(table.drop_columns(unused))


def _versions(tables: Iterable[pa.Table]) -> list[int]:
    columns = (t["policy_version"] for t in tables if "policy_version" in t.column_names)
    return [version for column in columns for version in column.drop_null().to_pylist()]


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
