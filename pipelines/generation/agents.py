"""Agents: user-defined `async def agent(client, task) -> reward`; the client records each call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine, Sampled, Sampling
from pipelines.generation.engines.wrapper import Watched
from pipelines.generation.environments import as_number, resolve
from pipelines.generation.histories import as_json
from pipelines.generation.tasks import Task
from pipelines.generation.trajectory import seed_of, step_of
from pipelines.generation.user_code import encodable, in_time, without_exit
from rollout_io.formats.base import Step
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import ConfigError, InputError, RolloutError

Agent = Callable[["Client", Task], Awaitable[float]]


class Client:
    """An agent's client: samples responses and records each call as a step, with exact tokens.

    Example:
        An agent that makes two calls; the second sees the response to the first:

        >>> async def agent(client, task):
        ...     first = await client.chat(task.prompt)
        ...     more = [*task.prompt, first.message, {"role": "user", "content": "Sure?"}]
        ...     last = await client.chat(more, temperature=0.5, agent="checker")
        ...     return 1.0 if "yes" in last.text else 0.0

    Attributes:
        tokenizer: Tokenizer of the engine.
        steps: Calls recorded so far.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, task: Task, config: GenerateConfig
    ) -> None:
        self.tokenizer, self.steps = tokenizer, list[Step]()
        self._engine, self._task, self._config = Watched(engine), task, config
        self._num_calls, self._is_open = 0, True

    @property
    def failure(self) -> RolloutError | None:
        """Error that must end the entire run, even if the agent caught it; None if there is none."""
        return self._engine.failure

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str | None = None,
        trains: bool = True,
        **changes: Any,
    ) -> Sampled:
        """Sample a response to a conversation, which the engine renders with its chat template.

        Args:
            messages: OpenAI-style messages; `Sampled.message` is the response in the same form.
            tools: OpenAI-style tool definitions.
            agent: Name of the caller ("main", "checker"), for the column `agent`.
            trains: Whether to train on the response; false writes an all-false loss mask.
            changes: Fields of `Sampling` that override the configuration.

        Raises:
            RolloutError: As for `Engine.chat`.
        """
        sampling = self._sampling(changes)
        session = self._task.trajectory_id
        arguments = self._config.chat_template_kwargs
        answer = await self._engine.chat(
            messages, sampling, tools=tools, chat_template_kwargs=arguments, session=session
        )
        return self._recorded(answer, sampling, as_json(messages), agent, trains=trains)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        *,
        agent: str | None = None,
        trains: bool = True,
        **changes: Any,
    ) -> Sampled:
        """Sample a continuation of exact prompt tokens; the other arguments are as in `chat`.

        Raises:
            RolloutError: As for `Engine.sample`.
        """
        sampling = self._sampling(changes)
        session = self._task.trajectory_id
        answer = await self._engine.sample(prompt_token_ids, sampling, session=session)
        return self._recorded(answer, sampling, None, agent, trains=trains)

    def close(self) -> None:
        """Reject further calls: the trajectory has ended."""
        self._is_open = False

    def _sampling(self, changes: Mapping[str, Any]) -> Sampling:
        where = f"trajectory {self._task.trajectory_id!r}"
        if not self._is_open:
            finding = "the agent called the model after it had finished"
            raise InputError("agent_calls", where, finding)
        unknown = changes.keys() - {f.name for f in dataclasses.fields(Sampling)}
        if unknown:
            raise ConfigError("sampling", where, repr(min(unknown)), "a field of Sampling")
        seed = seed_of(self._config.seed, self._task.trajectory_id, self._num_calls)
        self._num_calls += 1
        return dataclasses.replace(self._config.sampling, **{"seed": seed, **changes})

    def _recorded(
        self,
        answer: Sampled,
        sampling: Sampling,
        messages: str | None,
        agent: str | None,
        *,
        trains: bool,
    ) -> Sampled:
        if self._is_open:
            step = step_of(answer, sampling, messages, self._task.source)
            step.agent = None if agent is None else encodable(agent)
            step.trains = trains
            self.steps.append(step)
        return answer


class AgentTrajectory:
    """A trajectory produced by an agent.

    Attributes:
        steps: Steps so far; kept if the trajectory fails.
        warnings: Always empty.
    """

    def __init__(self, agent: Agent, client: Client, task: Task, timeout_s: float) -> None:
        self._agent, self._client, self._task, self._timeout_s = agent, client, task, timeout_s
        self.where = f"trajectory {task.trajectory_id!r}"
        self.steps = client.steps
        self.warnings: list[str] = []

    async def run(self) -> None:
        """Run the agent; the last step gets the agent's reward, earlier steps get 0.

        Raises:
            InputError: `agent_raised`: the agent raises; `agent_timeout`: it does not return in
                time; `agent_reward`: its reward is not a finite number; `agent_calls`: it made no
                calls.
            EngineError: See `Engine.chat`; `engine_down` and `engine_answer` are raised even if the
                agent caught them.
        """
        try:
            call = without_exit(self._agent(self._client, self._task))
            reward = await in_time(call, self._timeout_s, "agent", self.where)
        finally:
            self._client.close()
            if self._client.failure is not None:
                raise self._client.failure
        number = as_number(reward)
        if number is None:
            finding = f"the reward {reward!r:.60}"
            raise InputError("agent_reward", self.where, finding, "a finite number")
        if not self.steps:
            raise InputError("agent_calls", self.where, "the agent made no calls to the model")
        for step in self.steps:
            step.reward = 0.0
        self.steps[-1].reward = number


def find_agent(name: str) -> Agent:
    """Import the agent named by `module:function`.

    Raises:
        ConfigError: `agent`: the agent cannot be imported or is not an `async def`.
    """
    agent = resolve(name, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError("agent", name, "the agent is not an `async def`")
    return agent
