"""The `grok_cli` format: sessions of Grok's CLI (`chat_history.jsonl`), as JSON Lines.

    {"type": "system", "content": "..."}
    {"type": "user", "content": [{"type": "text", "text": "..."}]}
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "..."}]}
    {"type": "assistant", "content": "...", "tool_calls": [{"id": "c", "name": "...", "arguments": "..."}]}
    {"type": "tool_result", "tool_call_id": "c", "content": "..."}

A file is a run, named after its directory, and its lines are those that Grok Build sends (`conversation.rs`,
`compaction_utils.rs`). A compaction writes it again: answers before the last user message of its
(`synthetic_reason`) are part of the prompt. Reasoning belongs to the answer after it; calls of tools that the API
runs (`backend_tool_call`) are calls without a result. Not in a log: memories in the system prompt of some
calls, and which long results of earlier turns were shortened (`request_builder.rs`). The log has no
reward, no token ids and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import NO_JSON, Part, json_text, known, shown, tool_call

KEPT = "answers before a compaction, which wrote the log again: part of the prompt"
SHORTENED = "long results of earlier turns, which Grok with memories shortens once half of its window is full"
_COMPACTION = "compaction_meta"
_NUM_TURNS = 3
"""Turns at the end whose results are whole."""
_MAX_CHARS = 4000
_PARTS = Contents(kind="type", default="text", reads={"text": "text", "image": "url"})
_SUMMARY = Contents(kind="type", default="summary_text", reads={"summary_text": "text"})
_THOUGHTS = Contents(kind="type", default="reasoning_text", reads={"reasoning_text": "text"})
_LEAVES = {
    "facts about a record": "*/id */status */model_fingerprint */reasoning_effort "
    "*/prompt_index */cwd_generation */prior_turn_interrupt */timestamp backend_tool_call/kind.status "
    "backend_tool_call/kind.call_id backend_tool_call/kind.container_id",
    "results of the API's tools": "backend_tool_call/kind.outputs",
    "encrypted, for the API": "reasoning/encrypted_content",
}


class _Part(msgspec.Struct, gc=False):
    text: str | None = None
    url: str | None = None


class _Call(msgspec.Struct, gc=False):
    name: str
    id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Kind(msgspec.Struct, gc=False):
    tool_type: str = "tool"
    name: str | None = None
    action: msgspec.Raw = NO_JSON
    input: msgspec.Raw = NO_JSON
    code: str | None = None
    id: str | None = None

    def arguments(self, where: str) -> str:
        """Return what the tool was called with, as JSON."""
        if self.code is not None:
            return msgspec.json.encode({"code": self.code}).decode()
        return json_text(self.action if bytes(self.action) != bytes(NO_JSON) else self.input, where)


class Message(msgspec.Struct, gc=False):
    """A message of the user, the system or a tool."""

    content: Annotated[str | list[_Part] | None, inner(_PARTS)] = None
    tool_call_id: str | None = None
    images: Annotated[list[_Part] | None, inner(_PARTS)] = None
    synthetic_reason: str | None = None


class Answer(Message, gc=False):
    """A message of the model."""

    tool_calls: list[_Call] | None = None
    model_id: str | None = None


class Reasoning(msgspec.Struct, gc=False):
    """Reasoning, which precedes its answer."""

    summary: Annotated[list[_Part] | None, inner(_SUMMARY)] = None
    content: Annotated[list[_Part] | None, inner(_THOUGHTS)] = None


class BackendCall(msgspec.Struct, gc=False):
    """A call of a tool that the API runs."""

    kind: _Kind | None = None


_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool_result": "tool"}


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session, which are one context."""
    thoughts: list[str] = []
    records = list(lines)
    num_kept = max(
        (i + 1 for i, line in enumerate(records) if _is_compaction(line.record)), default=0
    )
    note(SHORTENED, _num_long(records))
    for i, (where, kind, record) in enumerate(records):
        fields: dict[str, Any]
        if isinstance(record, Reasoning):
            parts = [*(record.summary or ()), *(record.content or ())]
            thoughts += [part.text for part in parts if part.text]
            continue
        if isinstance(record, BackendCall) and record.kind is not None:
            kind_of = record.kind
            calls = [
                tool_call(kind_of.id, kind_of.name or kind_of.tool_type, kind_of.arguments(where))
            ]
            fields = {"role": "assistant", "content": "", "tool_calls": calls}
        elif isinstance(record, Message):
            fields = {"role": _ROLES[kind], "content": _content(record)}
            fields["tool_call_id"] = record.tool_call_id
        else:
            continue
        if isinstance(record, Answer):
            calls = [
                tool_call(call.id, call.name, json_text(call.arguments, where))
                for call in record.tool_calls or ()
            ]
            fields["tool_calls"] = calls or None
            log.model = record.model_id or log.model
        if thoughts and fields["role"] == "assistant":
            fields["reasoning_content"], thoughts = "\n".join(thoughts), []
        log.say([known(fields)], where, given=KEPT if i < num_kept else False)


def _is_compaction(record: Any) -> bool:
    return isinstance(record, Message) and record.synthetic_reason == _COMPACTION


def _num_long(records: Sequence[Line]) -> int:
    """Return the number of long results before the last turns."""
    turns = [i for i, line in enumerate(records) if line.kind == "user"]
    end = turns[-_NUM_TURNS - 1] if len(turns) > _NUM_TURNS else 0
    results = [line.record for line in records[:end] if line.kind == "tool_result"]
    texts = [result.content for result in results if isinstance(result, Message)]
    return sum(isinstance(text, str) and len(text) > _MAX_CHARS for text in texts)


def _content(message: Message) -> Any:
    content = message.content
    parts = [_Part(text=content)] if isinstance(content, str) else content or []
    parts = [*parts, *(message.images or ())]
    return shown(
        [
            Part(type="image", source={"url": part.url}) if part.url else Part(text=part.text)
            for part in parts
            if part.url or part.text
        ]
    )


def names(path: Path, _: Sequence[Any]) -> Names:
    """Return the name of a session's directory."""
    is_named = path.name == "chat_history.jsonl" and path.parent.name
    return Names(path.parent.name if is_named else str(path))


ADAPTER = Sessions(
    kind="type",
    records={
        "system": Message,
        "user": Message,
        "assistant": Answer,
        "tool_result": Message,
        "reasoning": Reasoning,
        "backend_tool_call": BackendCall,
    },
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like(
        {"type": "assistant", "content": str, "model_id": object},
        {"type": "tool_result", "tool_call_id": str},
    ),
).adapter("sessions of Grok's CLI (chat_history.jsonl); text only")
