"""Trajectories, many at once: each finished one comes out as it is written."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from pipelines.generation.agents import AgentTrajectory, Client, find_agent
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engine import Engine
from pipelines.generation.environments import environment_class, maker_of
from pipelines.generation.tasks import Task
from pipelines.generation.texts import encodable
from pipelines.generation.trajectory import (
    ENDS_THE_RUN,
    GymTrajectory,
    apply_stop_rules,
    without_outcome,
)
from rollout_io.conversion.rows import Settled
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A trajectory that ended, well or not.

    Attributes:
        task: What it was about.
        settled: As it is written.
        warnings: What went wrong and does not matter to it.
    """

    task: Task
    settled: Settled
    warnings: list[str] = field(default_factory=list)


class Generator:
    """Runs tasks against an engine, in environments or by an agent.

    Args:
        engine: Entered already.
        tokenizer: The engine's, with the chat template of the configuration.
        config: How. Its `tasks` and `out` are not used.

    Raises:
        RolloutError: agent, environment, extra_installed: there is no such thing.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, config: GenerateConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self._agent = None if config.agent is None else find_agent(config.agent)
        self._maker = maker_of(config.environment, config.env_config, config.max_turns)

    def check(self, tasks: Sequence[Task]) -> None:
        """Look whether every environment is there.

        Raises:
            RolloutError: environment, extra_installed.
        """
        if self._agent is None:
            for name in {task.env_class or self.config.environment for task in tasks}:
                environment_class(name)

    @property
    def metadata(self) -> DatasetMetadata:
        """What a dataset of its trajectories says about itself."""
        tokens = self.config.history != "retokenize"
        return DatasetMetadata(
            tokenizer=self.tokenizer.name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            chat_template_fingerprint=self.tokenizer.template_fingerprint,
            logprobs_mode=self.engine.logprobs_mode if tokens else None,
        )

    async def run(self, tasks: Sequence[Task]) -> AsyncGenerator[Finished, None]:
        """Each trajectory as it ends, `max_concurrency` of them under way at once.

        A trajectory that fails comes out with its `error`, whatever its environment or agent did.

        Raises:
            RolloutError: engine_down, engine_answer: no other trajectory is begun; raised once those
                under way have ended, well or by the same error.
        """
        broken: BaseException | None = None
        waiting, most = iter(tasks), self.config.max_concurrency
        running = {self._start(task) for task in islice(waiting, most)}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    if error := ended.exception():
                        broken = broken or error
                    else:
                        yield ended.result()
                if broken is None:
                    running |= {self._start(t) for t in islice(waiting, most - len(running))}
            if broken is not None:
                raise broken
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def collect(self, tasks: Sequence[Task]) -> list[Finished]:
        """All of them, in the order of the tasks.

        Raises:
            RolloutError: As `run`.
        """
        order = {task.trajectory_id: index for index, task in enumerate(tasks)}
        async with aclosing(self.run(tasks)) as found:
            ended = [finished async for finished in found]
        return sorted(ended, key=lambda f: order[f.task.trajectory_id])

    def _start(self, task: Task) -> asyncio.Task[Finished]:
        return asyncio.create_task(self.finish(task), name=task.trajectory_id)

    async def finish(self, task: Task) -> Finished:
        """One trajectory, to its end, well or not.

        Raises:
            RolloutError: engine_down, engine_answer.
        """
        trajectory, failure = self._trajectory(task), None
        try:
            await trajectory.run()
        except RolloutError as error:
            if error.rule in ENDS_THE_RUN:
                raise
            steps = without_outcome(trajectory.steps, task.source)
            failure = encodable(str(error))
        else:
            steps = trajectory.steps
            apply_stop_rules(steps, self.config)
        settled = Settled(
            instance_id=task.instance_id,
            repetition_id=task.repetition_id,
            steps=steps,
            error=failure,
        )
        return Finished(task=task, settled=settled, warnings=trajectory.warnings)

    def _trajectory(self, task: Task) -> GymTrajectory | AgentTrajectory:
        task = copy.deepcopy(task)  # its own: other attempts at it see nothing of what is changed
        if self._agent is None:
            make = self._maker(task)
            return GymTrajectory(task, make, self.engine, self.tokenizer, self.config)
        client = Client(self.engine, self.tokenizer, task, self.config)
        return AgentTrajectory(self._agent, client, task, self.config.agent_timeout_s)
