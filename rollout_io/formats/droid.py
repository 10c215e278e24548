"""The `droid` format: sessions of Factory's Droid, and the events that `droid exec` prints.

    {"type": "session_start", "id": "...", "cwd": "..."}
    {"type": "message", "id": "m1", "parentId": "...", "message": {"role": "user", "content": [...]}}

    {"type": "system", "subtype": "init", "session_id": "...", "model": "..."}
    {"type": "message", "session_id": "...", "role": "user", "text": "..."}
    {"type": "tool_call", "session_id": "...", "id": "c", "toolName": "...", "parameters": {...}}
    {"type": "tool_result", "session_id": "...", "id": "c", "value": "..."}
    {"type": "completion", "session_id": "...", "finalText": "..."}

Messages of a session are Anthropic's; they form a tree, as in `pi`. A session is a run; a printed one
failed if it ends with an error. The log does not say what a compaction kept: the messages are read as
if there was none, which is counted. The log has no reward, no token ids and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Message,
    extend,
    json_text,
    known,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts
from rollout_io.formats.parsing.trees import Node, add_branches

CONTENTS = Contents(
    kind="type",
    reads={
        "session_start": "id cwd",
        "message": "id parentId session_id sessionId role text message.role",
        "system": "session_id sessionId model cwd",
        "tool_call": "session_id sessionId id toolCallId toolName parameters",
        "tool_result": "session_id sessionId id toolCallId value",
        "completion": "session_id sessionId finalText",
        "error": "session_id sessionId message",
        "compaction_state": "",
    },
    leaves={
        "facts about a record": "*/timestamp */messageId */toolId */version */parentId */id",
        "facts about the session": "session_start system session_end",
        "settings and state of the harness": "session_settings todo_state agent_turn_outcome "
        "compaction_state",
        "facts about a call": "tool_result/isError completion/usage completion/numTurns "
        "completion/durationMs error/source",
    },
    inner={"message/message.content": anthropic.BLOCKS},
)
COMPACTED = "compactions: the log does not say what they kept, so all messages are read"


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Content = None


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    parent_id: str | None = None
    message: _Message | str | None = None
    role: str | None = None
    text: str | None = None
    model: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    parameters: msgspec.Raw = NO_JSON
    value: msgspec.Raw = NO_JSON
    final_text: str | None = None


_LINE = msgspec.json.Decoder(_Line)


def read_session(records: Sequence[Record]) -> Session:
    """Read the branches of a session, or the printed messages."""
    nodes: dict[str, Node] = {}
    printed: list[Message] = []
    models, error, before, end = list[str | None](), None, None, ""
    for place, content in records:
        where = place.where
        line = decode_line(_LINE, content, where)
        models.append(line.model)
        note(COMPACTED, line.type == "compaction_state")
        if line.type == "error" and not isinstance(line.message, _Message):
            error = line.message or "error"
        if line.type == "message" and isinstance(line.message, _Message):
            made = anthropic.messages_of(line.message.role, line.message.content, where)
            key = line.id if line.id and line.id not in nodes else where
            nodes[key] = Node(line.parent_id if line.id else before, Item(key, made, where))
            before = key
        elif line.type == "session_start" and line.id:
            nodes[line.id] = Node(None, Item(line.id, (), where))
        else:
            end = where if _print(line, printed, where) else end
    contexts = Contexts()
    add_branches(list(nodes.values()), contexts)
    contexts.add([Item("printed", printed, end)])
    return Session(contexts, error, texts(models))


def _print(line: _Line, messages: list[Message], where: str) -> bool:
    """Add what an event says to the messages; return false if it is nothing."""
    call_id = line.tool_call_id or line.id
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if line.type == "message" and line.role is not None:
        messages.append({"role": line.role, "content": line.text or ""})
    elif line.type == "tool_call":
        call = tool_call(call_id, line.tool_name or "", json_text(line.parameters, where))
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        extend(last, {"role": "assistant", "content": "", "tool_calls": [call]})
    elif line.type == "tool_result":
        made = {"role": "tool", "content": json_text(line.value, where), "tool_call_id": call_id}
        messages.append(known(made))
    elif line.type == "completion" and line.final_text:
        if last is not None and last["content"] == line.final_text:
            return False
        messages.append({"role": "assistant", "content": line.final_text})
    else:
        return False
    return True


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    heads = [r.get("id") for r in records if r.get("type") == "session_start"]
    named = [r.get(name) for r in records for name in ("session_id", "sessionId")]
    session = next((n for n in [*heads, *named] if isinstance(n, str) and n), str(path))
    cwd = next((r["cwd"] for r in records if isinstance(r.get("cwd"), str) and r["cwd"]), None)
    return Names(session, labels={"cwd": cwd} if cwd else {})


def _is_record(record: Mapping[str, Any]) -> bool:
    kind = record.get("type")
    if kind == "session_start":
        return isinstance(record.get("id"), str)
    is_of_session = isinstance(record.get("session_id", record.get("sessionId")), str)
    if kind == "message":
        return is_of_session and isinstance(record.get("text"), str)
    return is_of_session and kind in {"tool_call", "completion"} and "tool_call" not in record


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_record,
    marks=(b'"session_start"', b'"session_id"', b'"sessionId"'),
).adapter("sessions of Factory's Droid, and the events of droid exec: JSONL; text only")
