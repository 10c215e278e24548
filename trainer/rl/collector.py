"""Samples groups of trajectories, as far ahead of the trainer as it may."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa

from pipelines.generation.config import identity
from pipelines.generation.generator import Finished, Generator
from pipelines.generation.tasks import Task, attempts
from rollout_io.conversion.rows import table_of
from trainer.rl.config import RlConfig
from trainer.rl.groups import Groups
from trainer.rl.rules import num_allowed


@dataclass(kw_only=True, slots=True)
class UnderWay:
    """A group that has begun.

    Attributes:
        deadline: The last iteration that it may train.
        tables: Rows of its finished trajectories, by repetition.
    """

    deadline: int
    tables: dict[int, pa.Table] = field(default_factory=dict)


class Collector:
    """Begins groups while the rule of `num_allowed` lets it, and adds each to `groups` as it ends.

    At most `max_concurrency` trajectories are under way at once; a group begins when one of its
    trajectories does. Leaving the `async with` block cancels those under way.

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
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._failure = self._failure or asyncio.CancelledError()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @property
    def num_begun(self) -> int:
        """Groups that have finished or are under way."""
        return len(self._groups.names) + len(self._under_way)

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
            if not self._waiting and not self._begin_group():
                return
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
        last = min(self.iteration + config.max_staleness, num_iterations - 1)
        self._under_way[task.instance_id] = UnderWay(deadline=last)
        self._waiting.extend(attempts(task, self._sampling.group_size))
        return True

    def _ended(self, task: asyncio.Task[Finished]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            try:
                self._take(task.result())
            except Exception as error:
                self._failure = self._failure or error
        self._start_all()
        self._changed.set()

    def _take(self, finished: Finished) -> None:
        name = finished.task.instance_id
        group = self._under_way[name]
        group.tables[finished.task.repetition_id] = table_of([finished.settled])
        self._warnings += [w for w in finished.warnings if w not in self._warnings]
        if len(group.tables) < self._sampling.group_size:
            return
        tables = [group.tables[number] for number in sorted(group.tables)]
        del self._under_way[name]
        others = [other.deadline for other in self._under_way.values()]
        self._groups.add(name, tables, self._metadata, deadline=group.deadline, others=others)
