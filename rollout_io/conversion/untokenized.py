"""Conversion of logged text to steps without tokens, to read a log before it is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
        messages = conversation.messages[conversation.num_given :]
        spans = [(0, 0) for message in messages if is_answer(message)]
        return step_of(conversation, spans=spans, columns=conversation.columns)

    def completion(self, text: Completion) -> Step:
        """Return a prompt and a response without roles as one row."""
        return step_of(text, response_text=text.response)


_COMMON = [f.name for f in fields(Completion) if f.name in Step.__struct_fields__]


def step_of(logged: Conversation | Completion, **values: Any) -> Step:
    """Return the step of a logged text: what both have, and these values."""
    sent = logged.messages if isinstance(logged, Conversation) else logged.prompt
    common = {name: getattr(logged, name) for name in _COMMON}
    return Step(**common, **values, token_source=RETOKENIZED, messages=json_of(sent))


def json_of(sent: Sequence[Mapping[str, Any]] | str) -> str:
    """Return messages, or a prompt, as JSON."""
    return msgspec.json.encode(sent).decode()
