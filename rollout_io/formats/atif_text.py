"""The chat of an ATIF trajectory, for runs without token ids.

ATIF logs the agent's view of the exchange, not the messages that were sent to the model. The chat
is reconstructed from the steps:

    source system      a system message if it precedes all other steps; otherwise a note of the
                       harness, which was not sent to the model
    source agent       an answer of the model; a step that is copied or made no call
                       (llm_call_count 0) is part of the prompt
    observation        tool results; a user message if the result has no tool call id
    compaction         keeps the messages before the first answer and drops all others
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rollout_io.formats.atif_document import Agent, Result, StepRecord
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import openai_tools, read_message
from rollout_io.formats.parsing.model_calls import Call

_COMPACTION = "compaction"


class _ToolCall(msgspec.Struct, gc=False):
    function_name: str
    tool_call_id: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _Management(msgspec.Struct, gc=False):
    type: str | None = None


class _Extra(msgspec.Struct, gc=False):
    context_management: _Management | None = None


_CALLS_DECODER = msgspec.json.Decoder(list[_ToolCall] | None)
_EXTRA_DECODER = msgspec.json.Decoder(_Extra | None)


class Chat:
    """Messages of one document, up to the last step read."""

    def __init__(self, logged: Agent, agent: str) -> None:
        """Start an empty chat.

        Args:
            logged: Agent of the document.
            agent: Name of the agent in the `agent` column.
        """
        self._agent = agent
        self._tools = openai_tools(logged.tool_definitions)
        self._temperature = temperature_of(logged.extra)
        self._history: list[Message] = []

    def calls(self, step: StepRecord, where: str) -> Iterator[Call]:
        """Add a step to the chat; yield its call if the step is a model call.

        Args:
            step: The next step of the document.
            where: Location of the step, for error messages.

        Raises:
            InputError: `record_type`, `message`: a field has an unsupported type.
        """
        if step.source == "system":
            self._take_note(step, where)
            return
        message = _message(step, where)
        if step.is_call:
            yield Call(
                where=where,
                prompt=list(self._history),
                reply=message,
                agent=self._agent,
                tools=self._tools,
                temperature=self._temperature,
            )
        self._history.append(message)
        results = step.observation.results if step.observation else None
        self._history += [_result(result, where) for result in results or () if not _is_ref(result)]

    def _take_note(self, step: StepRecord, where: str) -> None:
        if all(message["role"] == "system" for message in self._history):
            self._history.append(_message(step, where))
        elif step.refs or _is_compaction(step, where):
            answers = (i for i, m in enumerate(self._history) if m["role"] == "assistant")
            del self._history[next(answers, len(self._history)) :]


def temperature_of(settings: dict[str, Any] | None) -> float | None:
    """Return the sampling temperature in an agent's settings, if it is a valid number."""
    value = (settings or {}).get("temperature")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1e38 else None


def _is_compaction(step: StepRecord, where: str) -> bool:
    extra = decode_line(_EXTRA_DECODER, bytes(step.extra), f"{where}.extra")
    marked = extra.context_management if extra else None
    return marked is not None and marked.type == _COMPACTION


def _is_ref(result: Result) -> bool:
    return bool(result.subagent_trajectory_ref) and bytes(result.content) == b"null"


def _message(step: StepRecord, where: str) -> Message:
    calls = decode_line(_CALLS_DECODER, bytes(step.tool_calls), f"{where}.tool_calls")
    fields = {
        "role": "assistant" if step.source == "agent" else step.source,
        "content": step.message,
        "reasoning_content": step.reasoning_content,
        "tool_calls": [
            {"id": call.tool_call_id, "name": call.function_name, "arguments": call.arguments}
            for call in calls or ()
        ]
        or None,
    }
    return read_message(msgspec.Raw(msgspec.json.encode(fields)), where)


def _result(result: Result, where: str) -> Message:
    called = result.source_call_id
    fields = {
        "role": "user" if called is None else "tool",
        "content": result.content,
        "tool_call_id": called,
    }
    return read_message(msgspec.Raw(msgspec.json.encode(fields)), f"{where}.observation")
