"""One trajectory: an environment or an agent and a model take turns; every call becomes a step."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.filters import RAN_OUT_OF_TOKENS
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import (
    CONTEXT_LENGTH,
    Engine,
    Picture,
    Sampled,
    Sampling,
    Watched,
)
from pipelines.generation.environments import Environment, as_number
from pipelines.generation.histories import Conversation, as_json, begin, final_rendering
from pipelines.generation.pictures import Pictures
from pipelines.generation.tasks import Task
from pipelines.generation.user_code import encodable, in_time, without_exit
from rollout_io.dataset.blobs import Blobs
from rollout_io.formats.base import Step
from rollout_io.formats.parsing.bodies import sampling_extra
from rollout_io.plugins import resolve
from rollout_io.retokenize.tokenizer import ChatTokenizer, Tools
from schemas.errors import ConfigError, EngineError, InputError, RolloutError
from schemas.messages import RETOKENIZED

MAX_TURNS = "max_turns"
"""Stop reason of a trajectory that its environment had not ended after the last turn it may have."""

COMPLETED = frozenset({"stop", "tool_calls", "complete", MAX_TURNS})
"""Stop reasons of a turn that was not cut off."""


def seed_of(seed: int | None, trajectory_id: str, call: int) -> int | None:
    """Derive the seed of one call: reproducible, but different for each call."""
    if seed is None:
        return None
    text = f"{seed}/{trajectory_id}/{call}"
    # 31 bits: vLLM and torch accept any non-negative int32.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def step_of(sampled: Sampled, sampling: Sampling, messages: str | None, source: str) -> Step:
    """Build a step from one call."""
    return Step(
        source=source,
        prompt_token_ids=np.array(sampled.prompt_token_ids, np.int32),
        response_ids=np.array(sampled.response_ids, np.int32),
        rollout_logprobs=np.array(sampled.rollout_logprobs, np.float32),
        rollout_expert_indices=sampled.rollout_expert_indices,
        sampling_support=sampled.sampling_support,
        stop_reason=sampled.stop_reason,
        policy_version=sampled.policy_version,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        sampling_extra=sampling_extra({**sampling.extra, "min_p": sampling.min_p}),
        messages=messages,
        response_text=sampled.text,
    )


class GymTrajectory:
    """A trajectory in an environment.

    Args:
        task: The task to attempt.
        make: Constructs the environment.
        engine: The engine that samples.
        tokenizer: Tokenizer of the engine.
        config: Settings of the generation.
        store: Store of the pictures that the environment returns; None refuses them.

    Attributes:
        steps: Steps so far; kept if the trajectory fails.
        warnings: Problems that do not affect the steps.
    """

    def __init__(
        self,
        task: Task,
        make: Callable[[], Any],
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: GenerateConfig,
        store: Blobs | None = None,
    ) -> None:
        self.task, self.engine, self.config = task, engine, config
        self.where = f"trajectory {task.trajectory_id!r}"
        self._pictures = Pictures(tokenizer, engine, config, store, self.where)
        self.tokenizer = self._pictures.tokenizer
        self.steps: list[Step] = []
        self.warnings: list[str] = []
        self._environment = Environment(make, self.where, config.env_timeout_s)
        self._said: list[dict[str, Any]] = []
        self._tools: Tools | None = None

    async def run(self) -> None:
        """Run turns until the environment is done or a limit is reached.

        Raises:
            InputError: `env_raised`, `env_timeout`, `env_output`: the environment fails;
                `picture_file`, `picture_tokens`: a picture, or a placeholder that was sampled, cannot
                be shown to the model.
            EngineError: `context_length`: the first prompt is too long; `engine_pictures`: the
                engine shows no pictures; or the engine fails.
        """
        try:
            messages, self._tools = await self._environment.init(self.task.prompt)
            prompt = await self._pictures.marked(messages)
            history = self.config.history
            self._warn_of_unseen_tools(prompt)
            await self._turns(begin(history, prompt, self.tokenizer, self.where, self._tools))
            self.steps[-1].metrics = await self._environment.metrics() or None
        finally:
            await self._close()
        if self.config.history == "retokenize":
            self._retokenize()

    def _warn_of_unseen_tools(self, prompt: Sequence[Mapping[str, Any]]) -> None:
        if not self._tools:
            return
        texts = (self.tokenizer.render(prompt, t, where=self.where) for t in (self._tools, None))
        if len(set(texts)) == 1:
            text = "the chat template ignores tools, so the model does not see those of `init`"
            self.warnings.append(f"{self.where}: {text}. Set chat_template")

    async def _turns(self, talk: Conversation) -> None:
        for turn in range(self.config.max_turns):
            try:
                sampled, sampling, shown = await self._sample(talk, turn)
            except RolloutError as error:
                if error.rule != CONTEXT_LENGTH or not self.steps:
                    raise
                self.steps[-1].stop_reason = CONTEXT_LENGTH
                return
            messages = as_json(self._pictures.stored(talk.messages))
            step = step_of(sampled, sampling, messages, self.task.source)
            step.pictures = _entries(shown)
            self.steps.append(step)
            self._pictures.refuse_sampled(sampled.response_ids)
            self._said = [*talk.messages, {"role": "assistant", "content": sampled.text}]
            outcome = await self._environment.step(sampled.text)
            step.reward = outcome.reward
            if outcome.replaced is not None:
                self._said[-1]["content"] = outcome.replaced
            if outcome.is_done:
                return
            if turn + 1 == self.config.max_turns:
                if step.stop_reason in COMPLETED:
                    step.stop_reason = MAX_TURNS
                return
            observations = await self._pictures.marked(outcome.observations)
            self._extend(talk, sampled, outcome.replaced, observations)

    async def _sample(
        self, talk: Conversation, turn: int
    ) -> tuple[Sampled, Sampling, tuple[Picture, ...]]:
        """Sample a turn; also return its settings and the pictures of its prompt."""
        ids, most = talk.prompt_ids(), self.config.max_input_tokens
        if most is not None and len(ids) > most:
            finding, expected = (
                f"a prompt of {len(ids)} tokens",
                f"at most {most} (max_input_tokens)",
            )
            raise EngineError(CONTEXT_LENGTH, self.where, finding, expected)
        seed = seed_of(self.config.seed, self.task.trajectory_id, turn)
        sampling = dataclasses.replace(self.config.sampling, seed=seed)
        session, shown = self.task.trajectory_id, self._pictures.shown(talk.messages, ids)
        if shown and self._pictures.by == "chat":
            sampled = await self.engine.chat(
                self._pictures.sent(talk.messages),
                sampling,
                tools=self._tools,
                chat_template_kwargs=self.config.chat_template_kwargs,
                session=session,
            )
            if (sampled.message or {}).keys() - {"role", "content"}:  # a parser has cut the text
                text = self.tokenizer.backend.decode(sampled.response_ids, skip_special_tokens=True)
                sampled = dataclasses.replace(sampled, text=text)
            shown = self._pictures.shown(talk.messages, sampled.prompt_token_ids)
        else:
            pictures: Any = {"pictures": shown} if shown else {}
            sampled = await self.engine.sample(ids, sampling, session=session, **pictures)
        return sampled, sampling, shown

    def _extend(
        self,
        talk: Conversation,
        sampled: Sampled,
        replaced: str | None,
        observations: Sequence[Mapping[str, Any]],
    ) -> None:
        response, step = sampled.response_ids, self.steps[-1]
        kept = talk.extend(response, sampled.text, replaced, observations)
        if len(kept) < len(response):
            step.response_ids = np.array(kept, np.int32)
            step.rollout_logprobs = np.array(sampled.rollout_logprobs[: len(kept)], np.float32)
            if sampled.sampling_support is not None:
                step.sampling_support = sampled.sampling_support[: len(kept)]
            routes = sampled.rollout_expert_indices
            if routes is not None:
                step.rollout_expert_indices = routes[: len(sampled.prompt_token_ids) + len(kept)]

    def _retokenize(self) -> None:
        """Replace the sampled tokens with the template's rendering of the entire conversation."""
        num = len(self.steps)
        messages = self._pictures.expanded(self._said)
        ids, spans = final_rendering(messages, num, self.tokenizer, self.where, self._tools)
        answers = [i for i, message in enumerate(self._said) if message["role"] == "assistant"]
        for step, (start, end), answer in zip(self.steps, spans, answers[-num:], strict=True):
            step.prompt_token_ids = np.array(ids[:start], np.int32)
            step.response_ids = np.array(ids[start:end], np.int32)
            step.rollout_logprobs = step.rollout_expert_indices = step.sampling_support = None
            step.token_source = RETOKENIZED
            step.messages = as_json(self._pictures.stored(self._said[: answer + 1]))
            step.pictures = _entries(self._pictures.shown(self._said[:answer], ids[:start]))

    async def _close(self) -> None:
        try:
            await self._environment.close()
        except RolloutError as error:
            self.warnings.append(str(error))


def _entries(shown: Sequence[Picture]) -> list[dict[str, Any]] | None:
    """Return the entries of the column `pictures`; None if there are none."""
    names = ("sha256", "start", "length")
    return [{name: getattr(one, name) for name in names} for one in shown] or None


def apply_stop_rules(steps: Sequence[Step], config: GenerateConfig) -> None:
    """Apply `zero_reward_on_non_stop` and `mask_overlong`, based on the last step's stop reason."""
    reason = steps[-1].stop_reason or ""
    if config.zero_reward_on_non_stop and reason not in COMPLETED:
        for step in steps:
            step.reward = 0.0
    if config.mask_overlong and reason.lower() in RAN_OUT_OF_TOKENS:
        for step in steps:
            step.trains = False


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
