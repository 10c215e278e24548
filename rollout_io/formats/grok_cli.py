"""The `grok_cli` format: sessions of Grok's CLI (`chat_history.jsonl`), as JSON Lines.

    {"type": "system", "content": "..."}
    {"type": "user", "content": [{"type": "text", "text": "..."}]}
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "..."}]}
    {"type": "assistant", "content": "...", "tool_calls": [{"id": "c", "name": "...", "arguments": "..."}]}
    {"type": "tool_result", "tool_call_id": "c", "content": "..."}

A file is a run, named after its directory. Reasoning belongs to the answer after it; calls of tools that
the API runs (`backend_tool_call`) are calls without a result. The log has no reward, no token ids and no
tool definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    json_text,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts

_PARTS = Contents(kind="type", default="text", reads={"text": "text", "image": "url"})
CONTENTS = Contents(
    kind="type",
    reads={
        "system": "",
        "user": "",
        "reasoning": "summary",
        "assistant": "tool_calls model_id",
        "tool_result": "tool_call_id",
        "backend_tool_call": "kind.tool_type kind.action",
    },
    leaves={
        "facts about a record": "*/id */status */model_fingerprint */reasoning_effort "
        "*/prompt_index */synthetic_reason */prior_turn_interrupt */timestamp "
        "backend_tool_call/kind",
        "encrypted, for the API": "reasoning/encrypted_content",
    },
    inner=dict.fromkeys(
        ("system/content", "user/content", "assistant/content", "tool_result/content"), _PARTS
    ),
)


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    url: str | None = None


class _Call(msgspec.Struct, gc=False):
    name: str
    id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Kind(msgspec.Struct, gc=False):
    tool_type: str = "tool"
    action: msgspec.Raw = NO_JSON
    id: str | None = None


class _Line(msgspec.Struct, gc=False):
    type: str
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    kind: _Kind | None = None
    model_id: str | None = None


_LINE = msgspec.json.Decoder(_Line)
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool_result": "tool"}


def read_session(records: Sequence[Record]) -> Session:
    """Read the messages of a session, which are one context."""
    contexts, items, models = Contexts(), list[Item](), list[str | None]()
    thoughts: list[str] = []
    for place, content in records:
        line = decode_line(_LINE, content, place.where)
        models.append(line.model_id)
        if line.type == "reasoning":
            thoughts += [part.text for part in line.summary or () if part.text]
        made = _message(line, place.where)
        if made is None:
            continue
        if made["role"] == "assistant" and thoughts:
            made["reasoning_content"], thoughts = "\n".join(thoughts), []
        items.append(Item(place.where, [made], place.where))
    contexts.add(items)
    return Session(contexts, values=texts(models))


def _message(line: _Line, where: str) -> Message | None:
    calls = [tool_call(c.id, c.name, json_text(c.arguments, where)) for c in line.tool_calls or ()]
    if line.type == "backend_tool_call" and line.kind is not None:
        kind = line.kind
        calls = [tool_call(kind.id, kind.tool_type, json_text(kind.action, where))]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    role = _ROLES.get(line.type)
    if role is None:
        return None
    listed = [_Part(text=line.content)] if isinstance(line.content, str) else line.content or []
    made = {
        "role": role,
        "content": shown([part for each in listed if (part := _part(each)) is not None]),
        "tool_calls": calls or None,
        "tool_call_id": line.tool_call_id,
    }
    return known(made)


def _part(part: _Part) -> Part | None:
    if part.url is not None:
        return Part(type="image", source={"url": part.url})
    return Part(text=part.text) if part.text else None


def _names(path: Path, _: Sequence[Mapping[str, Any]]) -> Names:
    is_named = path.name == "chat_history.jsonl" and path.parent.name
    return Names(path.parent.name if is_named else str(path))


def _is_line(record: Mapping[str, Any]) -> bool:
    kind, content = record.get("type"), record.get("content")
    if kind == "assistant":
        return isinstance(content, str) and "model_id" in record
    return kind == "tool_result" and isinstance(record.get("tool_call_id"), str)


ADAPTER = Sessions(
    contents=CONTENTS, names=_names, read=read_session, is_record=_is_line, marks=(b'"type"',)
).adapter("sessions of Grok's CLI (chat_history.jsonl); text only")
