"""The `qwen_code` format: sessions of Qwen Code, one JSON Lines file each.

    {"uuid": "1", "parentUuid": null, "sessionId": "...", "type": "user",
     "message": {"role": "user", "parts": [{"text": "..."}]}}
    {"uuid": "2", "parentUuid": "1", "type": "assistant", "model": "...",
     "message": {"role": "model", "parts": [{"text": "...", "thought": true}, {"functionCall": {...}}]}}
    {"uuid": "3", "parentUuid": "2", "type": "tool_result", "message": {"role": "user", "parts": [...]}}
    {"uuid": "4", "parentUuid": "3", "type": "system", "subtype": "chat_compression",
     "systemPayload": {"compressedHistory": [...]}}

Messages are contents of Gemini's API. Records form a tree, whose branches become contexts
(`parsing.trees`); records with one uuid are parts of one message. A compression begins a context with
the history that replaces the messages, and so does the history that a forked sub-agent starts with.

A session is a run; a branch in a file of its own begins with records of another session, whose answers
are trained on in one of them. The files of its sub-agents (`isSidechain`) belong to it. The log has no reward, no
token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects import gemini
from rollout_io.formats.dialects.gemini import Part, parts_in
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts
from rollout_io.formats.parsing.trees import Node, add_branches

_ROLES = {"user": "user", "tool_result": "user", "assistant": "assistant"}
CONTENTS = Contents(
    kind="type",
    subkind="subtype",
    reads={
        "*": "uuid parentUuid sessionId",
        "assistant": "model",
        "system:chat_compression": "",
        "system:agent_bootstrap": "systemPayload.systemInstruction systemPayload.tools",
    },
    leaves={
        "facts about a record, the process and its settings": "*/timestamp */cwd */version "
        "*/gitBranch */agentId */agentName */agentColor */isSidechain */agentRunId "
        "*/provenance */goalContext */backgroundTurn */promptId */daemonPromptId */forkedFrom "
        "*/externalInputKind assistant/usageMetadata assistant/contextWindowSize",
        "repeats what is in the message, for display": "user/systemPayload "
        "tool_result/toolCallResult tool_result/systemPayload assistant/systemPayload",
        "facts about a compression": "system:chat_compression/systemPayload.info "
        "system:chat_compression/systemPayload.notes "
        "system:chat_compression/systemPayload.promptIds "
        "system:chat_compression/systemPayload.completedToolCallIds "
        "system:agent_bootstrap/systemPayload.kind",
        "state of the harness, shown to the user or read when a session is resumed": "system",
    },
    inner={
        "user/message": gemini.CONTENT,
        "tool_result/message": gemini.CONTENT,
        "assistant/message": gemini.CONTENT,
        "system:chat_compression/systemPayload.compressedHistory": gemini.CONTENT,
        "system:agent_bootstrap/systemPayload.history": gemini.CONTENT,
    },
)


class _Message(msgspec.Struct, gc=False):
    parts: gemini.Parts = None


class _Payload(msgspec.Struct, gc=False, rename="camel"):
    compressed_history: list[msgspec.Raw] | None = None
    history: list[msgspec.Raw] | None = None
    system_instruction: msgspec.Raw = NO_JSON


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str
    uuid: str | None = None
    parent_uuid: str | None = None
    subtype: str | None = None
    model: str | None = None
    message: _Message | None = None
    system_payload: msgspec.Raw = NO_JSON


class _Answer(msgspec.Struct, gc=False):
    type: str
    uuid: str
    message: msgspec.Raw


_ANSWER = msgspec.json.Decoder(_Answer)
_LINE = msgspec.json.Decoder(_Line)
_ANY = msgspec.json.Decoder()
_PAYLOAD = msgspec.json.Decoder(_Payload)
_HISTORIES = frozenset({"chat_compression", "agent_bootstrap"})


def answer(content: bytes) -> str | None:
    """Return the id and the message of an answer, which a branch in another file copies."""
    try:
        line = _ANSWER.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the reader reports the damage
    return f"{line.uuid} {bytes(line.message)!r}" if line.type == "assistant" else None


def read_session(records: Sequence[Record], copied: Collection[str] = ()) -> Session:
    """Read the branches of a session, and each of its compressions, as contexts."""
    contexts, models = Contexts(copied=copied), list[str | None]()
    parts: dict[str, list[Part | str]] = {}
    nodes: dict[str, Node] = {}
    for place, content in records:
        where = place.where
        line = decode_line(_LINE, content, where)
        key = line.uuid or where
        role = _ROLES.get(line.type)
        parts[key] = [*parts.get(key, []), *parts_in(line.message.parts if line.message else None)]
        made = gemini.messages_of(role, parts[key], where) if role and parts[key] else []
        parent = nodes[key].parent if key in nodes else line.parent_uuid
        node = Node(parent, Item(key, made, where))
        if line.type == "system" and line.subtype in _HISTORIES:
            node = node._replace(compacts=_history(line, where, contexts))
        nodes[key] = node
        models.append(line.model)
    add_branches(list(nodes.values()), contexts)
    return Session(contexts, values=texts(models))


def _history(line: _Line, where: str, contexts: Contexts) -> Callable[[Sequence[Node]], list[Item]]:
    """Return the history that replaces all messages before it."""
    payload = decode_line(_PAYLOAD, bytes(line.system_payload), f"{where}, systemPayload")
    if bytes(payload.system_instruction) != b"null":
        contexts.system = _instruction(payload.system_instruction, where)
    found = payload.compressed_history or payload.history or []
    messages = gemini.messages(found, f"{where}, systemPayload")
    items = [Item(f"{where}, history", messages, where, is_given=True)]
    return lambda _: list(items)


def _instruction(raw: msgspec.Raw, where: str) -> str:
    given = decode_line(_ANY, bytes(raw), where)
    return gemini.system_prompt(given, where)


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    head = next((r for r in records if isinstance(r.get("sessionId"), str)), {})
    session = head.get("sessionId") or str(path)
    cwd, agent = head.get("cwd"), head.get("agentName") or head.get("agentId")
    labels = {"cwd": cwd} if isinstance(cwd, str) and cwd else {}
    if head.get("isSidechain") is True:
        return Names(f"{session}/{path.stem}", session, str(agent or path.stem), labels)
    return Names(session, labels=labels)


def _is_session(record: Mapping[str, Any]) -> bool:
    message = record.get("message")
    is_record = {"uuid", "parentUuid", "sessionId"} <= record.keys()
    if record.get("type") == "system" and "systemPayload" in record:
        return is_record
    is_spoken = isinstance(message, Mapping) and isinstance(message.get("parts"), list)
    return is_record and is_spoken and record.get("type") in _ROLES


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_session,
    marks=(b'"parentUuid"',),
    answer=answer,
).adapter("sessions of Qwen Code: JSONL, a tree of records; text only")
