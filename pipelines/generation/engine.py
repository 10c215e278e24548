"""The interface of engines: exact tokens in, exact tokens and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from schemas.errors import RolloutError
from schemas.metadata import LogprobsMode

ENGINE_DOWN = "engine_down"
"""Rule of the error of an engine that does not answer, after all retries: no fault of the request."""

CONTEXT_LENGTH = "context_length"
"""Rule of the error of a prompt that leaves the model no room for a response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a response is sampled.

    Attributes:
        temperature: Logits are divided by it; 0: the most likely token.
        top_p: The fewest most likely tokens whose probabilities reach this sum; 1: all.
        top_k: That many most likely tokens; None: all.
        min_p: Tokens at least this times as likely as the most likely one; 0: all.
        max_tokens: Of the response; fewer where the model's context ends before.
        stop: Strings after which the response ends. `Sampled.text` ends with the one that was met,
            `Sampled.response_ids` with the token that completed it.
        seed: None: the engine's own. Requests with one seed and one prompt get one answer, so the
            repetitions of a group need seeds of their own.
        extra: Further fields of the request, as the engine calls them.

    Raises:
        RolloutError: sampling: a value that no engine can sample with.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        top_k = self.top_k is None or self.top_k >= 1
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", top_k, "at least 1; leave it out to sample from all tokens"),
            ("min_p", 0 <= self.min_p < 1, "at least 0, below 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "no empty string"),
        ):
            if not holds:
                raise RolloutError("sampling", name, repr(getattr(self, name)), expected)

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled: their probability goes to the others."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One response, exact.

    Attributes:
        prompt_token_ids: [P] ids that the engine saw; after `chat`, its template's.
        response_ids: [R >= 1] ids that it sampled, the end-of-sequence token included.
        rollout_logprobs: [R] nats, of what the engine's `logprobs_mode` says.
        stop_reason: `stop` (end of sequence, or a stop string), `length`, `tool_calls`, or another
            word of the engine.
        text: The response without special tokens.
        policy_version: Weights that began to sample it.
        message: The assistant message as the engine parsed it (content, tool_calls, reasoning), to
            go on with in `chat`; None after `sample`.
        rollout_expert_indices: [1 to P + R tokens, layers, topk] int16, where the engine says.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    stop_reason: str
    text: str
    policy_version: int
    message: dict[str, Any] | None = None
    rollout_expert_indices: npt.NDArray[np.int16] | None = None


class Engine(Protocol):
    """What samples responses; any number of calls may wait at once, and each can be cancelled.

    An engine is an asynchronous context manager: what it opened is closed at its end.
    """

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """What its log-probabilities are of, known once the engine was entered.

        The model's distribution at temperature 1 (`raw`), or the one that was sampled, after
        temperature and truncation (`processed`).
        """
        ...

    @property
    def policy_version(self) -> int:
        """Of its present weights."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """Continue exact tokens.

        Args:
            prompt_token_ids: [P >= 1] ids; `Sampled.prompt_token_ids` are the same.
            sampling: How.
            session: Calls of one session go to one server, which still has their prefix.

        Raises:
            RolloutError: engine_down: no answer, after all retries; context_length: the prompt
                leaves no room for a response; engine_refused: the request is at fault;
                engine_answer: the engine does not say what is needed, and what it lacks.
        """
        ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """Answer a conversation, rendered by the engine's own chat template.

        Args:
            messages: OpenAI-style messages.
            sampling: How.
            tools: OpenAI-style definitions of tools.
            session: As in `sample`.

        Raises:
            RolloutError: As in `sample`; chat_template: one that does not take the messages.
        """
        ...

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """Sample from other weights from now on.

        Calls that are under way may go on with the new weights: their `policy_version` stays that
        of their beginning.

        Args:
            path: A Hugging Face model directory that the engine can read.
            policy_version: What to call them.

        Raises:
            RolloutError: engine_down; model_directory; engine_refused, model_load: weights that
                the engine does not take.
        """
        ...
