"""An engine of chat completions with token ids, which calls the tools that a prompt asks for.

It is what a recorder stands in front of: prompts are those of `engine`, answers are told apart by
their number, and each has a thought, a text and the calls of the next line of the prompt.
"""

from __future__ import annotations

import json
import zlib
from itertools import count
from typing import Any

from tests.helpers.dialect_helpers import SpokenAnswer, SpokenEngine
from tests.real_harnesses.engine import planned, texts_in


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[str, bool, str]]:
    """Return (role, whether it is a result of a tool, text) of each message."""
    return [
        (
            "user" if message["role"] == "tool" else message["role"],
            message["role"] == "tool",
            "\n".join(map(_unquoted, texts_in(message.get("content") or ""))),
        )
        for message in messages
    ]


def _unquoted(text: str) -> str:
    """Return the prompt that OpenCode puts in quotes as it is."""
    if len(text) > 1 and text[0] == text[-1] == '"' and '\\"' in text:
        return text[1:-1].replace('\\"', '"')
    return text


def prompt_of(messages: list[dict[str, Any]]) -> list[int]:
    """Return the prompt: 100 ids for each text, thought and call, as few as a limit needs to matter."""
    ids: list[int] = []
    for message in messages:
        said = [message.get(name) for name in ("content", "reasoning_content") if message.get(name)]
        for each in [*said, *message.get("tool_calls", ())]:
            first = zlib.crc32(json.dumps(each).encode()) % 1000
            ids += [first + i for i in range(100)]
    return ids


class ExactAnswer(SpokenAnswer):
    """An answer to a prompt of few tokens."""

    def __init__(self, body: dict[str, Any], said: dict[str, Any], name: str) -> None:
        super().__init__(body, said, name)
        self.prompt = prompt_of(body["messages"])


class ExactEngine(SpokenEngine):
    """The engine; `answers` are those that it gave, in order, each with its request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.answers: list[tuple[dict[str, Any], ExactAnswer]] = []
        self._numbers = count()

    def answer_to(self, body: dict[str, Any], path: str) -> ExactAnswer:  # noqa: ARG002
        """Decide on an answer; a request that only asks for text gets one."""
        number = next(self._numbers)
        calls = planned(turns_of(body["messages"])) if body.get("tools") else []
        said = {
            "reasoning": f"This is thought number {number}.",
            "content": f"This is answer number {number}.",
            "tool_calls": [(call["name"], json.dumps(call["input"])) for call in calls],
        }
        made = ExactAnswer(body, said, str(number))
        self.answers.append((body, made))
        return made
