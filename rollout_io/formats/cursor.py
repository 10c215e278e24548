"""The `cursor` format: transcripts of Cursor's agent, and the events that its CLI prints.

    {"role": "user", "message": {"content": [{"type": "text", "text": "..."}]}}
    {"role": "assistant", "message": {"content": [{"type": "tool_use", "name": "Shell", "input": {...}}]}}

    {"type": "system", "subtype": "init", "session_id": "...", "model": "...", "permissionMode": "..."}
    {"type": "assistant", "message": {"role": "assistant", "content": [...]}, "session_id": "..."}
    {"type": "tool_call", "subtype": "completed", "call_id": "c", "session_id": "...",
     "tool_call": {"readToolCall": {"args": {...}, "result": {...}}}}

A file is a run; files in `subagents/` beside it are its sub-agents. Transcripts may lack the results of
tools, and the ids of calls, which then follow from the order. A printed run failed if its result says
so. The log has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.parsing.content import NO_JSON, Message, Part, extend, json_text, tool_call
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts

_BLOCKS = Contents(
    kind="type",
    default="text",
    reads={
        "text": "text",
        "thinking": "thinking text",
        **dict.fromkeys(("tool_use", "tool-use", "tool_call", "tool-call"), "id name input"),
        **dict.fromkeys(("tool_result", "tool-result"), "tool_use_id content name"),
        "image": "source",
    },
    leaves={"facts about a block": "*/metadata thinking/signature"},
)
CONTENTS = Contents(
    kind="type",
    subkind="subtype",
    default="transcript",
    reads={
        "transcript": "role message.role",
        "user": "message.role session_id",
        "assistant": "message.role session_id model",
        "system": "session_id model cwd",
        "tool_call": "call_id tool_call session_id",
        "result": "is_error session_id",
    },
    leaves={
        "facts about a record": "*/metadata */model */conversation */annotations */timestamp_ms "
        "*/model_call_id",
        "settings of the harness": "system/apiKeySource system/permissionMode "
        "cursor_session_meta cursor_available_tools",
        "repeats the last answer": "result/result result/subtype",
        "facts about the run": "result/usage result/request_id turn_ended",
    },
    inner=dict.fromkeys(
        ("transcript/message.content", "user/message.content", "assistant/message.content"),
        _BLOCKS,
    ),
)
_CALLS = frozenset({"tool_use", "tool-use", "tool_call", "tool-call"})
_RESULTS = frozenset({"tool_result", "tool-result"})


class _Message(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | list[Part] | None = None


class _Line(msgspec.Struct, gc=False):
    type: str | None = None
    subtype: str | None = None
    role: str | None = None
    message: _Message | None = None
    model: str | None = None
    call_id: str | None = None
    tool_call: dict[str, Any] | None = None
    is_error: bool | None = None
    result: str | None = None


class _Tool(msgspec.Struct, gc=False):
    args: msgspec.Raw = NO_JSON
    result: msgspec.Raw = NO_JSON


_LINE = msgspec.json.Decoder(_Line)
_SUFFIX = "ToolCall"


def read_session(records: Sequence[Record]) -> Session:
    """Read the messages of a file, which are one context."""
    contexts, messages = Contexts(), list[Message]()
    models, error, end = list[str | None](), None, ""
    waiting: list[str] = []
    for place, content in records:
        where = place.where
        line = decode_line(_LINE, content, where)
        models.append(line.model)
        if line.type == "result" and line.is_error:
            error = line.result or "error"
        elif line.type == "tool_call" and line.subtype == "completed" and line.tool_call:
            _add_tool(line, messages, where)
        elif line.message is not None and line.type in {None, "user", "assistant"}:
            role = line.role or line.message.role or line.type or "user"
            parts = _parts(line.message.content, where, waiting)
            messages += anthropic.messages_of(role, parts, where)
            end = where
    contexts.add([Item("transcript", messages, end)])
    return Session(contexts, error, texts(models))


def _parts(content: str | list[Part] | None, where: str, waiting: list[str]) -> list[Part]:
    """Return the blocks in Anthropic's form, with ids for calls and results that have none."""
    if content is None or isinstance(content, str):
        return [Part(text=content)] if content else []
    found: list[Part] = []
    for i, part in enumerate(content):
        if part.type in _CALLS:
            part.type, part.id = "tool_use", part.id or f"{where.rpartition(':')[2]}_{i}"
            part.input = msgspec.Raw(b"{}") if bytes(part.input) == b"null" else part.input
            waiting.append(part.id)
        elif part.type in _RESULTS:
            open_id = waiting[0] if waiting else None
            part.type, part.tool_use_id = "tool_result", part.tool_use_id or open_id
            if part.tool_use_id in waiting:
                waiting.remove(part.tool_use_id)
        elif part.type == "thinking":
            part.thinking = part.thinking or part.text
        elif part.type not in {"text", "image"}:
            continue
        found.append(part)
    return found


def _add_tool(line: _Line, messages: list[Message], where: str) -> None:
    """Add a call to the last answer, and its result."""
    name, value = next(iter((line.tool_call or {}).items()))
    raw = msgspec.json.encode(value)
    tool = decode_line(msgspec.json.Decoder(_Tool), raw, f"{where}, tool_call")
    call = tool_call(line.call_id, name.removesuffix(_SUFFIX), json_text(tool.args, where))
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    extend(last, {"role": "assistant", "content": "", "tool_calls": [call]})
    made = {"role": "tool", "content": json_text(tool.result, where)}
    messages.append(made | ({"tool_call_id": line.call_id} if line.call_id else {}))


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    named = next((r["session_id"] for r in records if isinstance(r.get("session_id"), str)), None)
    if path.parent.name == "subagents":
        return Names(f"{path.parent.parent.name}/{path.stem}", path.parent.parent.name, path.stem)
    return Names(named or (path.stem if path.stem == path.parent.name else str(path)))


def _is_record(record: Mapping[str, Any]) -> bool:
    message = record.get("message")
    if record.get("type") == "tool_call" and "call_id" in record:
        return isinstance(record.get("tool_call"), Mapping)
    if record.get("type") == "system":
        return "permissionMode" in record and "apiKeySource" in record and "uuid" not in record
    if "type" in record or not isinstance(message, Mapping):
        return False
    return record.get("role") in {"user", "assistant"} and isinstance(message.get("content"), list)


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_record,
    marks=(b'"message"', b'"call_id"', b'"permissionMode"'),
).adapter("transcripts of Cursor's agent, and the events of its CLI: JSONL; text only")
