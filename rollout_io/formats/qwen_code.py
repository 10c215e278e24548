"""The `qwen_code` format: sessions of Qwen Code, one JSON Lines file each.

    {"uuid": "1", "parentUuid": null, "sessionId": "...", "type": "user",
     "message": {"role": "user", "parts": [{"text": "..."}]}}
    {"uuid": "2", "parentUuid": "1", "type": "assistant", "model": "...",
     "message": {"role": "model", "parts": [{"text": "...", "thought": true}, {"functionCall": {...}}]}}
    {"uuid": "3", "parentUuid": "2", "type": "tool_result", "message": {"role": "user", "parts": [...]}}
    {"uuid": "4", "parentUuid": "3", "type": "system", "subtype": "chat_compression",
     "systemPayload": {"compressedHistory": [...]}}

Messages are contents of Gemini's API. Records form a tree; records with one uuid are parts of one
message. A compression begins a context with
the history that replaces the messages, and so does the history that a forked sub-agent starts with.

A session is a run; a branch in a file of its own begins with records of another session, whose answers
are trained on in one of them. The files of its sub-agents (`isSidechain`) belong to it. The log has no
reward, no token ids, no system prompt, no tool definitions, and not the reminder about skills and the
environment that the program sends before the first message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note_run
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.dialects import gemini
from rollout_io.formats.dialects.gemini import Part, parts_in
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import inner, like
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line

REMINDER = (
    "runs without the reminder (skills, environment, folder) that Qwen Code sends before the first "
)
REMINDER += "message: it is not in the log"
_LEAVES = {
    "facts about a record, the process and its settings": "*/timestamp */version "
    "*/gitBranch */agentColor */agentRunId */provenance */goalContext */backgroundTurn */promptId "
    "*/daemonPromptId */forkedFrom */externalInputKind assistant/usageMetadata "
    "assistant/contextWindowSize",
    "repeats what is in the message, for display": "user/systemPayload "
    "tool_result/toolCallResult tool_result/systemPayload assistant/systemPayload",
    "facts about a compression": "system:chat_compression/systemPayload.info "
    "system:chat_compression/systemPayload.notes system:chat_compression/systemPayload.promptIds "
    "system:chat_compression/systemPayload.completedToolCallIds "
    "system:agent_bootstrap/systemPayload.kind",
    "state of the harness, shown to the user or read when a session is resumed": "system",
}
_Contents = Annotated[list[msgspec.Raw] | None, inner(gemini.CONTENT)]


class Record(msgspec.Struct, gc=False, rename="camel"):
    """A record of the tree; the model does not see those of other types than these."""

    uuid: str | None = None
    parent_uuid: str | None = None
    session_id: str | None = None
    cwd: str | None = None
    is_sidechain: bool | None = None
    agent_id: str | None = None
    agent_name: str | None = None


class _Message(msgspec.Struct, gc=False):
    contents = gemini.CONTENT

    parts: gemini.Parts = None


class Spoken(Record, gc=False, rename="camel"):
    """A message, or a part of one."""

    message: _Message | None = None


class Answer(Spoken, gc=False, rename="camel"):
    """A message of the model."""

    model: str | None = None


class _Compression(msgspec.Struct, gc=False, rename="camel"):
    compressed_history: _Contents = None


class _Bootstrap(msgspec.Struct, gc=False, rename="camel"):
    history: _Contents = None
    system_instruction: msgspec.Raw = NO_JSON
    tools: Any = None


class Compression(Record, gc=False, rename="camel"):
    """A history that replaces all messages before it."""

    system_payload: _Compression | None = None


class Bootstrap(Record, gc=False, rename="camel"):
    """The history with which a sub-agent starts."""

    system_payload: _Bootstrap | None = None


class _Copy(msgspec.Struct, gc=False):
    uuid: str
    message: msgspec.Raw


_COPY = msgspec.json.Decoder(_Copy)
_ANY = msgspec.json.Decoder()
_ROLES = {"user": "user", "tool_result": "user", "assistant": "assistant"}


def identity(kind: str, fields: bytes) -> str | None:
    """Return the id and the message of an answer, which a branch in another file copies."""
    try:
        line = _COPY.decode(fields) if kind == "assistant" else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the reader reports the damage
    return None if line is None else f"{line.uuid} {bytes(line.message)!r}"


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the tree of a session."""
    parts: dict[str, list[Part | str]] = {}
    note_run(REMINDER)
    for where, kind, record in lines:
        if not isinstance(record, Record):
            continue
        key = record.uuid or where
        begun = log.find(key) if key in parts else None
        if begun is None and record.uuid:
            log.follow(record.parent_uuid)
        if isinstance(record, Compression | Bootstrap):
            _replace(record, log, where)
            log.say([], where, key)
        elif isinstance(record, Spoken):
            content = parts_in(record.message.parts if record.message else None)
            parts[key] = [*parts.get(key, []), *content]
            messages = gemini.messages_of(_ROLES[kind], parts[key], where) if parts[key] else []
            if isinstance(record, Answer):
                log.model = record.model or log.model
            node = begun or log.say(messages, where, key)
            node.messages, node.where = messages, where
        else:
            log.say([], where, key)


def _replace(record: Compression | Bootstrap, log: Contexts, where: str) -> None:
    """Begin a context with a history."""
    payload, place = record.system_payload, f"{where}, systemPayload"
    history: Sequence[msgspec.Raw] = ()
    if isinstance(payload, _Compression):
        history = payload.compressed_history or ()
    elif payload is not None:
        history = payload.history or ()
        if bytes(payload.system_instruction) != b"null":
            instruction = decode_line(_ANY, bytes(payload.system_instruction), where)
            log.system = gemini.system_prompt(instruction, where)
        log.tools = gemini.tools(payload.tools) or log.tools
    log.replace()
    log.say(gemini.messages(history, place), where, f"{where}, history", given=True)


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the first record of a file."""
    head = next((r for r in first if isinstance(r, Record) and r.session_id), Record())
    session = head.session_id or str(path)
    labels = {"cwd": head.cwd}
    if head.is_sidechain:
        agent = head.agent_name or head.agent_id or path.stem
        return Names(f"{session}/{path.stem}", session, agent, labels=labels)
    return Names(session, labels=labels)


_IDS = {"uuid": object, "parentUuid": object, "sessionId": object}
ADAPTER = Sessions(
    kind="type",
    subkind="subtype",
    records={
        "user": Spoken,
        "tool_result": Spoken,
        "assistant": Answer,
        "system:chat_compression": Compression,
        "system:agent_bootstrap": Bootstrap,
        "system": Record,
    },
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like(
        {**_IDS, "type": "system", "systemPayload": object},
        {**_IDS, "type": {*_ROLES}, "message": {"parts": list}},
    ),
    identity=identity,
).adapter("sessions of Qwen Code: JSONL, a tree of records; text only")
