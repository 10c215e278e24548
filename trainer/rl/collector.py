"""Sample groups of trajectories, as far ahead of the trainer as allowed, and order their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import polars as pl
import pyarrow as pa

from pipelines.frames import set_column
from pipelines.generation.config import identity
from pipelines.generation.generator import Generator, UnderWay
from pipelines.generation.tasks import Finished, Task, attempts
from rollout_io.terminal import SECONDS_A_LINE
from schemas.columns import TASK
from schemas.errors import InputError
from trainer.batch import UNUSED_COLUMNS
from trainer.batches.plan import dataset_returns, make_plan
from trainer.rl.config import DROPPED, RlConfig, TaskOrder
from trainer.rl.groups import Groups, num_allowed

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
        tasks: Infinite iterator of tasks from `trainer.rl.collector.endless_tasks`; tasks that
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
        while not self._groups.is_whole(iteration):
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
    """Add the column of the task to the rows of an attempt."""
    names = pa.array([finished.task.task_instance_id] * finished.rows.num_rows, pa.string())
    return set_column(finished.rows, TASK, names)


def _outcomes(table: pa.Table) -> pl.DataFrame:
    """Select the columns from which returns and separate rewards are computed."""
    unused = [n for n in UNUSED_COLUMNS if n in table.column_names and n != "metrics"]
    return pl.DataFrame(table.drop_columns(unused))


def _versions(tables: Iterable[pa.Table]) -> list[int]:
    """List the policy versions of sampled rows."""
    columns = (t["policy_version"] for t in tables if "policy_version" in t.column_names)
    return [version for column in columns for version in column.drop_null().to_pylist()]


def endless_tasks(tasks: Sequence[Task], order: TaskOrder, seed: int) -> Iterator[Task]:
    """Yield tasks endlessly; each visit has an `instance_id` of its own: `a`, `a@2`, `a@3`.

    `task_instance_id` is the task's own id. Numbers that would repeat the id of a task are skipped.

    Args:
        tasks: The tasks.
        order: `shuffled`: the seed and the number of a pass determine its order; `listed`: each
            pass has the order of `tasks`, such as a curriculum.
        seed: Seed of the order.

    Example:
        >>> tasks = [Task(instance_id=name, repetition_id=0, prompt=[]) for name in "ba"]
        >>> found = itertools.islice(endless_tasks(tasks, "listed", 0), 4)
        >>> [task.instance_id for task in found]
        ['b', 'a', 'b@2', 'a@2']
    """
    ids = {task.instance_id for task in tasks}
    visits = {name: _visits(name, ids) for name in ids}
    for number in itertools.count(1):
        order_of_pass = list(tasks)
        if order == "shuffled":
            random.Random(f"{seed}/{number}").shuffle(order_of_pass)
        for task in order_of_pass:
            name = task.instance_id
            yield dataclasses.replace(task, instance_id=next(visits[name]), task_instance_id=name)


def _visits(name: str, ids: Collection[str]) -> Iterator[str]:
    yield name
    yield from (visit for n in itertools.count(2) if (visit := f"{name}@{n}") not in ids)
