"""Samples groups of trajectories, as far ahead of the trainer as it may."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import polars as pl
import pyarrow as pa

import pipelines
from pipelines.generation.config import identity
from pipelines.generation.generator import Finished, Generator
from pipelines.generation.tasks import Task, attempts
from rollout_io.conversion.rows import table_of
from schemas.errors import RolloutError
from trainer.data import UNUSED_COLUMNS
from trainer.plan import make_plan
from trainer.rl.config import DROPPED, RlConfig
from trainer.rl.groups import Groups
from trainer.rl.rules import num_allowed

DROPPED_IN_A_ROW = 30
"""Iterations' worth of groups without variance, none with any between, after which a run ends."""


@dataclass(kw_only=True, slots=True)
class UnderWay:
    """A group that has begun.

    Attributes:
        deadline: The last iteration that it may train.
        tables: Rows of its finished trajectories, by repetition.
    """

    deadline: int
    tables: dict[int, pa.Table]


class Collector:
    """Begins groups while the rule of `num_allowed` lets it, and adds each to `groups` as it ends.

    At most `max_concurrency` trajectories are under way at once; a group begins when one of its
    trajectories does. Leaving the `async with` block cancels those under way; finished ones of groups
    that are not complete are put aside, for another process to go on with.

    Args:
        generator: Runs trajectories.
        draws: Tasks without end, as `trainer.rl.draws.draw` has them; those of `groups` are passed
            over.
        groups: Where finished groups go.
        config: The run's configuration.

    Attributes:
        iteration: The one that is worked on: as many have been trained.
    """

    def __init__(
        self, generator: Generator, draws: Iterator[Task], groups: Groups, config: RlConfig
    ) -> None:
        self.iteration = 0
        self._warnings: list[str] = []
        self._num_said = 0
        self._generator, self._draws, self._groups, self._config = generator, draws, groups, config
        self._sampling = config.generation
        self._metadata = generator.metadata.made("rl", config=identity(config.generation))
        self._under_way: dict[str, UnderWay] = {}
        self._waiting: deque[Task] = deque()
        self._running: set[asyncio.Task[Finished]] = set()
        self._failure: BaseException | None = None
        self._num_dropped = self._num_dropped_said = self._num_in_a_row = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._failure = self._failure or asyncio.CancelledError()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        begun = [group.tables for group in self._under_way.values()]
        self._groups.put_aside([*begun, *self._groups.unfinished.values()], self._metadata)

    @property
    def num_begun(self) -> int:
        """Groups that count: those of the iterations, and those under way."""
        return self._groups.num_kept + len(self._under_way)

    def num_newly_dropped(self) -> int:
        """Groups without variance since the last call."""
        found = self._num_dropped - self._num_dropped_said
        self._num_dropped_said = self._num_dropped
        return found

    def new_warnings(self) -> list[str]:
        """What went wrong since the last call and does not matter to the dataset; each text once."""
        found = self._warnings[self._num_said :]
        self._num_said = len(self._warnings)
        return found

    def advance(self, iteration: int) -> None:
        """Begin what may begin once so many iterations were trained and the engine knows it."""
        self.iteration = iteration
        self._start_all()

    async def whole(self, iteration: int) -> None:
        """Wait until all groups of an iteration are there.

        Raises:
            RolloutError: engine_down, engine_answer: once the trajectories under way have ended,
                well or by the same error; what the dataset's writer refuses.
        """
        while not self._groups.is_whole(iteration):
            if self._failure is not None and not self._running:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def _start_all(self) -> None:
        most = self._sampling.max_concurrency
        while self._failure is None and len(self._running) < most:
            if not self._waiting:
                if not self._begin_group():
                    return
                continue
            task = self._waiting.popleft()
            started = asyncio.create_task(self._generator.finish(task), name=task.trajectory_id)
            self._running.add(started)
            started.add_done_callback(self._ended)

    def _begin_group(self) -> bool:
        """Whether another group may begin; then it has."""
        config, num_iterations = self._config, self._config.num_iterations
        allowed = num_allowed(
            iteration=self.iteration,
            max_staleness=config.max_staleness,
            num_iterations=num_iterations,
            size=self._groups.size,
        )
        if self.num_begun >= allowed:
            return False
        task = next(t for t in self._draws if t.instance_id not in self._groups.names)
        tables = self._groups.unfinished.pop(task.instance_id, {})
        oldest = min([self.iteration, *_versions(tables.values())])
        last = min(oldest + config.max_staleness, num_iterations - 1)
        self._under_way[task.instance_id] = UnderWay(deadline=last, tables=tables)
        left = attempts(task, self._sampling.group_size)
        self._waiting.extend(t for t in left if t.repetition_id not in tables)
        self._end_group(task.instance_id)
        return True

    def _ended(self, task: asyncio.Task[Finished]) -> None:
        self._running.discard(task)
        try:
            if not task.cancelled():
                self._take(task.result())
            self._start_all()
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    def _take(self, finished: Finished) -> None:
        name = finished.task.instance_id
        table = table_of([finished.settled])
        self._under_way[name].tables[finished.task.repetition_id] = table
        self._warnings += [w for w in finished.warnings if w not in self._warnings]
        self._end_group(name)

    def _end_group(self, name: str) -> None:
        """Write a group, if all its trajectories have ended."""
        group = self._under_way[name]
        if len(group.tables) < self._sampling.group_size:
            return
        if self._is_dropped(group.tables):
            self._groups.drop(name, group.tables, self._metadata)
            self._num_dropped += 1
            self._num_in_a_row += 1
        else:
            self._num_in_a_row = 0
            others = [other.deadline for n, other in self._under_way.items() if n != name]
            settings = (name, group.tables, self._metadata)
            self._groups.add(*settings, deadline=group.deadline, others=others)
        del self._under_way[name]
        self._check_some_vary()

    def _is_dropped(self, tables: Mapping[int, pa.Table]) -> bool:
        """Whether `drop_zero_variance_groups` leaves out the group."""
        training = self._config.training
        if not training.drop_zero_variance_groups:
            return False
        rows = pl.concat(map(_outcomes, tables.values()), how="diagonal_relaxed")
        returns = pipelines.trajectory_returns(rows.lazy(), training.outcome).collect()
        kept = dataclasses.replace(training, drop_zero_variance_groups=False)
        return make_plan(returns, kept).num_groups_without_variance > 0

    def _check_some_vary(self) -> None:
        if self._num_in_a_row >= DROPPED_IN_A_ROW * self._groups.size:
            got = f"{self._num_in_a_row} groups in a row, each with equal returns"
            hint = f"rollouts stats {self._config.out}/{DROPPED}"
            raise RolloutError("zero_advantages", "tasks", got, "some whose returns vary", hint)


def _outcomes(table: pa.Table) -> pl.DataFrame:
    """What returns are made of."""
    unused = [name for name in UNUSED_COLUMNS if name in table.column_names]
    return pl.DataFrame(table.drop_columns(unused))


def _versions(tables: Iterable[pa.Table]) -> list[int]:
    """Policy versions of rows that were sampled."""
    columns = [
        table["policy_version"] for table in tables if "policy_version" in table.column_names
    ]
    return [version for column in columns for version in column.drop_null().to_pylist()]
