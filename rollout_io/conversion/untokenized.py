"""Conversion of logged text to steps without tokens, to read a log before it is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from rollout_io.formats.base import Completion, Conversation, Step
from schemas.messages import RETOKENIZED, is_answer


@dataclass(frozen=True, slots=True)
class Untokenized:
    """Stands in for a `Retokenizer` where there is no tokenizer: the steps have text and empty ids.

    All other values are those of the conversion. A conversation has one empty segment per answer, so
    that its turns can be counted.

    Example:
        >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> step = Untokenized().conversation(
        ...     Conversation(source="a:1", messages=chat, num_given=1)
        ... )
        >>> len(step.response_ids), step.spans
        (0, [(0, 0)])
    """

    directory: ClassVar[str] = ""

    def conversation(self, conversation: Conversation) -> Step:
        """Return a conversation as one row."""
        said = conversation.messages[conversation.num_given :]
        step = self._step(conversation, _json(conversation.messages))
        step.spans = [(0, 0) for message in said if is_answer(message)]
        step.columns = conversation.columns
        return step

    def completion(self, text: Completion) -> Step:
        """Return a prompt and a response without roles as one row."""
        step = self._step(text, _json(text.prompt))
        step.response_text = text.response
        return step

    def _step(self, logged: Conversation | Completion, messages: str) -> Step:
        return Step(
            source=logged.source,
            trains=logged.trains,
            token_source=RETOKENIZED,
            reward=logged.reward,
            stop_reason=logged.stop_reason,
            temperature=logged.temperature,
            top_p=logged.top_p,
            agent=logged.agent,
            messages=messages,
            metrics=logged.metrics,
        )


def _json(sent: Sequence[Mapping[str, Any]] | str) -> str:
    return msgspec.json.encode(sent).decode()
