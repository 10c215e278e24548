"""Agents: any `async def agent(client, task) -> reward`; its client makes every call a step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engine import Engine, Sampled, Sampling
from pipelines.generation.environments import as_number, resolve
from pipelines.generation.histories import as_json
from pipelines.generation.tasks import Task
from pipelines.generation.texts import encodable
from pipelines.generation.trajectory import ENDS_THE_RUN, seed_of, step_of
from pipelines.generation.waiting import in_time
from rollout_io.adapters import Step
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import RolloutError

Agent = Callable[["Client", Task], Awaitable[float]]


class Client:
    """What an agent samples with; every call is recorded as a step, its exact tokens.

    Example:
        An agent of two calls, the second of which sees the answer to the first:

        >>> async def agent(client, task):
        ...     first = await client.chat(task.prompt)
        ...     more = [*task.prompt, first.message, {"role": "user", "content": "Sure?"}]
        ...     last = await client.chat(more, temperature=0.5, agent="checker")
        ...     return 1.0 if "yes" in last.text else 0.0

    Attributes:
        tokenizer: The engine's.
        steps: The calls so far, as they were answered.
        failure: What ends not this trajectory alone but the run, even if the agent caught it.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, task: Task, config: GenerateConfig
    ) -> None:
        self.tokenizer, self.steps = tokenizer, list[Step]()
        self._engine, self._task, self._config = engine, task, config
        self._num_calls, self._is_open = 0, True
        self.failure: RolloutError | None = None

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str | None = None,
        **changes: Any,
    ) -> Sampled:
        """Answer a conversation, rendered by the engine's chat template.

        Args:
            messages: OpenAI-style messages; `Sampled.message` is the answer as another one.
            tools: OpenAI-style definitions of tools.
            agent: Who calls ("main", "checker"): the column of that name.
            changes: Fields of `Sampling` that differ from the configuration's.

        Raises:
            RolloutError: As `Engine.chat`.
        """
        sampling = self._sampling(changes)
        session = self._task.trajectory_id
        call = self._engine.chat(messages, sampling, tools=tools, session=session)
        answer = await self._answer(call)
        return self._recorded(answer, sampling, as_json(messages), agent)

    async def sample(
        self, prompt_token_ids: Sequence[int], *, agent: str | None = None, **changes: Any
    ) -> Sampled:
        """Continue exact tokens: as `chat`.

        Raises:
            RolloutError: As `Engine.sample`.
        """
        sampling = self._sampling(changes)
        session = self._task.trajectory_id
        answer = await self._answer(
            self._engine.sample(prompt_token_ids, sampling, session=session)
        )
        return self._recorded(answer, sampling, None, agent)

    def close(self) -> None:
        """Take no more calls: the trajectory is over."""
        self._is_open = False

    def _sampling(self, changes: Mapping[str, Any]) -> Sampling:
        where = f"trajectory {self._task.trajectory_id!r}"
        if not self._is_open:
            raise RolloutError("agent_calls", where, "a call after the agent's end", "none")
        unknown = changes.keys() - {f.name for f in dataclasses.fields(Sampling)}
        if unknown:
            raise RolloutError("sampling", where, repr(min(unknown)), "a field of Sampling")
        seed = seed_of(self._config.seed, self._task.trajectory_id, self._num_calls)
        self._num_calls += 1
        return dataclasses.replace(self._config.sampling, **{"seed": seed, **changes})

    async def _answer(self, call: Awaitable[Sampled]) -> Sampled:
        try:
            return await call
        except RolloutError as error:
            if error.rule in ENDS_THE_RUN:
                self.failure = error
            raise

    def _recorded(
        self, answer: Sampled, sampling: Sampling, messages: str | None, agent: str | None
    ) -> Sampled:
        if self._is_open:
            step = step_of(answer, sampling, messages, self._task.source)
            step.agent = None if agent is None else encodable(agent)
            self.steps.append(step)
        return answer


class AgentTrajectory:
    """A trajectory that an agent makes.

    Attributes:
        steps: The steps so far: those of a trajectory that fails stay.
        warnings: None.
    """

    def __init__(self, agent: Agent, client: Client, task: Task, timeout_s: float) -> None:
        self._agent, self._client, self._task, self._timeout_s = agent, client, task, timeout_s
        self.where = f"trajectory {task.trajectory_id!r}"
        self.steps = client.steps
        self.warnings: list[str] = []

    async def run(self) -> None:
        """The whole run; its reward goes to the last step, 0 to those before.

        Raises:
            RolloutError: agent_raised, agent_timeout; agent_reward: no finite number; agent_calls:
                not one call; and as the engine does.
        """
        try:
            reward = await in_time(self._reward(), self._timeout_s, "agent", self.where)
        finally:
            self._client.close()
            if self._client.failure is not None:
                raise self._client.failure
        number = as_number(reward)
        if number is None:
            raise RolloutError("agent_reward", self.where, f"{reward!r:.60}", "a finite number")
        if not self.steps:
            raise RolloutError("agent_calls", self.where, "no call", "at least one")
        for step in self.steps:
            step.reward = 0.0
        self.steps[-1].reward = number

    async def _reward(self) -> float:
        try:
            return await self._agent(self._client, self._task)
        except SystemExit as error:  # out of a task it would end the process
            raise RuntimeError(f"SystemExit: {error}") from error


def find_agent(name: str) -> Agent:
    """The agent that `module:function` names.

    Raises:
        RolloutError: agent: it is not there, or no `async def`.
    """
    agent = resolve(name, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise RolloutError("agent", name, "a function that is not async", "an `async def`")
    return agent
