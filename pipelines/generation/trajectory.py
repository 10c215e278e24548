"""One trajectory: an environment and a model take turns, and every call becomes a step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipelines.filtering.filters import RAN_OUT_OF_TOKENS
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import CONTEXT_LENGTH, ENGINE_DOWN, Engine, Sampled, Sampling
from pipelines.generation.environments import Environment, Outcome
from pipelines.generation.histories import Conversation, as_json, begin, final_rendering
from pipelines.generation.tasks import Task
from rollout_io.formats.base import Step
from rollout_io.formats.parsing.sampling import sampling_extra
from rollout_io.retokenize.tokenizer import ChatTokenizer, Tools
from schemas.errors import EngineError, RolloutError
from schemas.messages import RETOKENIZED

MAX_TURNS = "max_turns"
"""Stop reason of a trajectory that its environment had not ended after the last turn it may have."""

COMPLETED = frozenset({"stop", "tool_calls", "complete", MAX_TURNS})
"""Stop reasons of a turn that was not cut off."""


ENDS_THE_RUN = frozenset({ENGINE_DOWN, "engine_answer"})
"""Rules of errors that every trajectory would hit, because the engine is at fault."""


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
    ) -> None:
        self.task, self.engine, self.tokenizer, self.config = task, engine, tokenizer, config
        self.where = f"trajectory {task.trajectory_id!r}"
        self.steps: list[Step] = []
        self.warnings: list[str] = []
        self._environment = Environment(make, self.where, config.env_timeout_s)
        self._said: list[dict[str, Any]] = []
        self._tools: Tools | None = None

    async def run(self) -> None:
        """Run turns until the environment is done or a limit is reached.

        Raises:
            InputError: `env_raised`, `env_timeout`, `env_output`: the environment fails.
            EngineError: `context_length`: the first prompt is too long; or the engine fails.
        """
        try:
            prompt, self._tools = await self._environment.init(self.task.prompt)
            history = self.config.history
            self._warn_of_unseen_tools(prompt)
            await self._turns(begin(history, prompt, self.tokenizer, self.where, self._tools))
            self.steps[-1].metrics = await self._environment.metrics() or None
        finally:
            await self._close()
        if self.config.history == "retokenize":
            self._retokenize()

    def _warn_of_unseen_tools(self, prompt: Sequence[dict[str, Any]]) -> None:
        if not self._tools:
            return
        texts = (self.tokenizer.render(prompt, t, where=self.where) for t in (self._tools, None))
        if len(set(texts)) == 1:
            text = "the chat template ignores tools, so the model does not see those of `init`"
            self.warnings.append(f"{self.where}: {text}. Set chat_template")

    async def _turns(self, talk: Conversation) -> None:
        for turn in range(self.config.max_turns):
            try:
                sampled, sampling = await self._sample(talk, turn)
            except RolloutError as error:
                if error.rule != CONTEXT_LENGTH or not self.steps:
                    raise
                self.steps[-1].stop_reason = CONTEXT_LENGTH
                return
            step = step_of(sampled, sampling, as_json(talk.messages), self.task.source)
            self.steps.append(step)
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
            self._extend(talk, sampled, outcome)

    async def _sample(self, talk: Conversation, turn: int) -> tuple[Sampled, Sampling]:
        ids, most = talk.prompt_ids(), self.config.max_input_tokens
        if most is not None and len(ids) > most:
            finding, expected = (
                f"a prompt of {len(ids)} tokens",
                f"at most {most} (max_input_tokens)",
            )
            raise EngineError(CONTEXT_LENGTH, self.where, finding, expected)
        seed = seed_of(self.config.seed, self.task.trajectory_id, turn)
        sampling = dataclasses.replace(self.config.sampling, seed=seed)
        return await self.engine.sample(ids, sampling, session=self.task.trajectory_id), sampling

    def _extend(self, talk: Conversation, sampled: Sampled, outcome: Outcome) -> None:
        response, step = sampled.response_ids, self.steps[-1]
        kept = talk.extend(response, sampled.text, outcome.replaced, outcome.observations)
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
        ids, spans = final_rendering(self._said, num, self.tokenizer, self.where, self._tools)
        answers = [i for i, message in enumerate(self._said) if message["role"] == "assistant"]
        for step, (start, end), answer in zip(self.steps, spans, answers[-num:], strict=True):
            step.prompt_token_ids = np.array(ids[:start], np.int32)
            step.response_ids = np.array(ids[start:end], np.int32)
            step.rollout_logprobs = step.rollout_expert_indices = step.sampling_support = None
            step.token_source = RETOKENIZED
            step.messages = as_json(self._said[: answer + 1])

    async def _close(self) -> None:
        try:
            await self._environment.close()
        except RolloutError as error:
            self.warnings.append(str(error))


def apply_stop_rules(steps: Sequence[Step], config: GenerateConfig) -> None:
    """Apply `zero_reward_on_non_stop` and `mask_overlong`, based on the last step's stop reason."""
    reason = steps[-1].stop_reason or ""
    if config.zero_reward_on_non_stop and reason not in COMPLETED:
        for step in steps:
            step.reward = 0.0
    if config.mask_overlong and reason.lower() in RAN_OUT_OF_TOKENS:
        for step in steps:
            step.trains = False
