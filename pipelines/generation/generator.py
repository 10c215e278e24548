"""Generate many trajectories concurrently, and yield each as it finishes.

What waits for what:

    tasks ---> UnderWay.start: a unit (a task, or a custom generator's group) starts if there is room
                   |           (max_concurrency trajectories)
                   v
               Pace.wait: trajectories_per_s
                   v
               attempt: an environment, agent, harness or custom generator, and the engine in turns
                   |                                          a harness's calls come by HTTP, and
                   |                                          each waits for its turn on the engine
          failed ? +---> again, up to max_retries, without a place in a queue
                   v
    run: waits for the first unit that ends ---> yields its trajectories ---> starts others

    engine fails ---> nothing starts any more ---> running units end ---> the error is raised
    caller stops ---> running units are cancelled and waited for
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from itertools import groupby
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENDS_THE_RUN, Engine
from pipelines.generation.environments import environment_class, environment_of, maker_of
from pipelines.generation.tasks import Finished, Task, finished_of
from pipelines.generation.trajectory import (
    AgentTrajectory,
    Client,
    GymTrajectory,
    apply_stop_rules,
    find_agent,
)
from pipelines.harness.launchers import Endpoint, find_harness
from rollout_io.dataset.blobs import Blobs
from rollout_io.formats.base import Step
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import ConfigError, RolloutError
from schemas.imports import requires_extra
from schemas.metadata import DatasetMetadata

if TYPE_CHECKING:
    from pipelines.generation.skyrl import OwnGenerator, TrainingPhase
    from pipelines.harness.recorded_calls import Calls

Unit = Sequence[Task]
"""Tasks that start together."""


class Trajectory(Protocol):
    """One attempt at a task.

    Attributes:
        steps: Steps so far; kept if the trajectory fails.
        warnings: Problems that do not affect the steps.
    """

    steps: list[Step]
    warnings: list[str]

    async def run(self) -> None:
        """Run the entire attempt.

        Raises:
            RolloutError: The attempt fails.
        """
        ...


class Generator:
    """Runs tasks on an engine, in environments or with an agent, harness or custom generator.

    Args:
        engine: An engine whose context has been entered.
        tokenizer: Tokenizer of the engine, with the configured chat template.
        config: Settings; `tasks` and `out` are not used.
        calls: Server of harness calls, or endpoint of a custom generator, from `open_calls`; or None.
        phase: Purpose of the batches, passed to a custom generator.
        store: Store of the pictures that environments return; None refuses them.

    Raises:
        RolloutError: `agent`, `environment`, `generator`, `harness`: the configured function, class
            or command line cannot be used; `extra_installed`: a required package is missing.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: GenerateConfig,
        calls: Calls | Endpoint | None = None,
        phase: TrainingPhase = "train",
        store: Blobs | None = None,
    ) -> None:
        self._store = store
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        endpoint = calls if isinstance(calls, Endpoint) else None
        self._calls = None if isinstance(calls, Endpoint) else calls
        self._harness = None if config.harness is None else find_harness(config.harness)
        self._own: OwnGenerator | None = None
        if config.generator is not None:
            from pipelines.generation.skyrl import OwnGenerator  # it imports this module

            self._own = OwnGenerator(engine, tokenizer, config, phase, endpoint)
        self._agent = None if config.agent is None else find_agent(config.agent)
        self._maker, self._pace = maker_of(config), Pace(config.trajectories_per_s)

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that all environments exist, or that the harness accepts every task.

        Raises:
            RolloutError: `environment`: an environment does not exist; `harness`: the harness
                cannot run a task; `extra_installed`: a required package is missing.
        """
        if self._harness is not None:
            _harness_calls()
            self._harness.check(tasks)
        elif self._agent is None and self._own is None:
            for name in {environment_of(task, self.config) for task in tasks}:
                environment_class(name)

    @property
    def metadata(self) -> DatasetMetadata:
        """Metadata for a dataset of this generator's trajectories."""
        tokens = self.config.history != "retokenize"
        return DatasetMetadata(
            tokenizer=self.tokenizer.name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            chat_template_fingerprint=self.tokenizer.template_fingerprint,
            logprobs_mode=self.engine.logprobs_mode if tokens else None,
            outcome=self.config.outcome,
        )

    def units(self, tasks: Sequence[Task]) -> list[Unit]:
        """Split the tasks, in order, into units for `finish`."""
        if self._own is None:
            return [[task] for task in tasks]
        return [list(group) for _, group in groupby(tasks, key=attrgetter("instance_id"))]

    async def run(self, tasks: Sequence[Task]) -> AsyncGenerator[Finished, None]:
        """Yield each trajectory as it ends, running up to `max_concurrency` of them at once.

        A failed trajectory is yielded with its `error`, whatever its environment or agent raised.

        Raises:
            EngineError: `engine_down`, `engine_answer`: the engine fails; no further trajectory is
                started, and the error is raised once the running ones have ended.
        """
        broken: BaseException | None = None
        under_way = UnderWay(self, self.units(tasks))
        under_way.start()
        try:
            while under_way.running:
                done, _ = await asyncio.wait(under_way.running, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    under_way.running.pop(ended)
                    if error := ended.exception():
                        broken = broken or error
                        continue
                    for finished in ended.result():
                        yield finished
                if broken is None:
                    under_way.start()
            if broken is not None:
                raise broken
        finally:
            await under_way.cancel()

    async def collect(self, tasks: Sequence[Task]) -> list[Finished]:
        """Run all tasks and return their trajectories in the order of the tasks.

        Raises:
            RolloutError: As for `run`.
        """
        order = {task.trajectory_id: index for index, task in enumerate(tasks)}
        async with aclosing(self.run(tasks)) as found:
            ended = [finished async for finished in found]
        return sorted(ended, key=lambda f: order[f.task.trajectory_id])

    async def finish(self, unit: Unit) -> list[Finished]:
        """Run the trajectories of a unit; failed ones are retried up to `max_retries` times.

        Raises:
            EngineError: `engine_down`, `engine_answer`: the engine fails.
        """
        finished = await self._try(unit)
        for number in range(1, self.config.max_retries + 1):
            failed = {f.task.trajectory_id: f.error for f in finished if f.error is not None}
            if not failed:
                break
            again = await self._try([f.task for f in finished if f.error is not None])
            for one in again:
                name = one.task.trajectory_id
                one.warnings.append(f"{name}: try {number} failed: {failed[name]}")
            finished = [f for f in finished if f.error is None] + again
        return finished

    async def _try(self, unit: Unit) -> list[Finished]:
        await self._pace.wait(len(unit))
        if self._own is not None:
            return await self._own.finish(unit)
        return [await self._try_alone(task) for task in unit]

    async def _try_alone(self, task: Task) -> Finished:
        trajectory = self._trajectory(task)
        error: RolloutError | None = None
        try:
            await trajectory.run()
        except RolloutError as raised:
            if raised.rule in ENDS_THE_RUN:
                raise
            error = raised
        else:
            apply_stop_rules(trajectory.steps, self.config)
        return finished_of(task, trajectory.steps, error, trajectory.warnings)

    def _trajectory(self, task: Task) -> Trajectory:
        task = copy.deepcopy(task)  # user code may modify the task, and retries must not see that
        if self._harness is not None:
            from pipelines.harness.recorded_calls import HarnessTrajectory

            if self._calls is None:
                finding, hint = "a harness needs `calls`", "pass the result of `open_calls`"
                raise ConfigError("harness", "Generator", finding, hint=hint)
            return HarnessTrajectory(self._harness, self._calls, task, self.config)
        if self._agent is None:
            make = self._maker(task)
            return GymTrajectory(task, make, self.engine, self.tokenizer, self.config, self._store)
        client = Client(self.engine, self.tokenizer, task, self.config)
        return AgentTrajectory(self._agent, client, task, self.config.agent_timeout_s)


@asynccontextmanager
async def open_calls(
    config: GenerateConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> AsyncIterator[Calls | Endpoint | None]:
    """Serve the calls of harnesses (`pipelines.harness.recorded_calls.open_calls`), if configured.

    A custom generator gets an endpoint (`open_endpoint`) if `port` or `served_model_name` is set.

    Raises:
        MissingExtra: `extra_installed`: a required package is missing.
        ConfigError: `address`: there is no free port.
    """
    if config.generator is not None and (config.port or config.served_model_name):
        async with _harness_calls().open_endpoint(config, engine, tokenizer, turn) as endpoint:
            yield endpoint
        return
    if config.harness is None:
        yield None
        return
    async with _harness_calls().open_calls(config, engine, tokenizer, turn) as opened:
        yield opened


def _harness_calls() -> ModuleType:
    with requires_extra("generate,record", "harness"):
        from pipelines.harness import recorded_calls
    return recorded_calls


class Pace:
    """Starts trajectories at a limited rate.

    Args:
        per_s: Trajectories per second; None: unlimited.
    """

    def __init__(self, per_s: float | None) -> None:
        self._per_s, self._next_start_s = per_s, 0.0

    async def wait(self, num: int) -> None:
        """Wait until a number of trajectories may start."""
        if self._per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + num / self._per_s
        await asyncio.sleep(start_s - now_s)


class UnderWay:
    """Units of tasks that run concurrently, up to `max_concurrency` trajectories in total.

    A unit that is larger than the limit runs alone.

    Args:
        generator: Runs the units.
        waiting: Units to start, in order.

    Attributes:
        waiting: Units not started yet.
        running: Running units, with their numbers of trajectories.
    """

    def __init__(self, generator: Generator, waiting: Sequence[Unit] = ()) -> None:
        self.waiting = deque(waiting)
        self.running: dict[asyncio.Task[list[Finished]], int] = {}
        self._generator = generator

    @property
    def has_room(self) -> bool:
        """True if another trajectory may start."""
        return sum(self.running.values()) < self._generator.config.max_concurrency

    def start(self) -> list[asyncio.Task[list[Finished]]]:
        """Start the units for which there is room."""
        started = []
        while self.waiting and self._fits(self.waiting[0]):
            unit = self.waiting.popleft()
            task = asyncio.create_task(self._generator.finish(unit), name=unit[0].trajectory_id)
            self.running[task] = len(unit)
            started.append(task)
        return started

    def _fits(self, unit: Unit) -> bool:
        under_way = sum(self.running.values())
        return not under_way or under_way + len(unit) <= self._generator.config.max_concurrency

    async def cancel(self) -> None:
        """Cancel all running units and wait for them."""
        running = list(self.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
