"""The `pi` format: sessions of Pi, and of OpenClaw, which is built on it; one file each.

    {"type": "session", "version": 3, "id": "...", "timestamp": "...", "cwd": "..."}
    {"type": "message", "id": "a1", "parentId": null, "message": {"role": "user", "content": [...]}}
    {"type": "compaction", "id": "b2", "parentId": "a1", "summary": "...", "firstKeptEntryId": "a1"}

Records form a tree; its branches become contexts, the live one last (`parsing.trees`). A compaction
begins a context with the summary and the messages that were kept. A summary of another branch and a
message of an extension are messages of the user. Sessions of version 1 have no ids: each record
follows the line before.

A session is a run; a fork begins with records of another session, whose answers are trained on in one
of them. A run failed if its last answer did. The log has no reward, no token ids, no system
prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects import pi
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import (
    SUMMARIES,
    Contexts,
    Item,
    Names,
    Session,
    Sessions,
    texts,
)
from rollout_io.formats.parsing.trees import Node, add_branches

CONTENTS = Contents(
    kind="type",
    reads={
        "*": "id parentId",
        "session": "cwd",
        "compaction": "summary firstKeptEntryId firstKeptEntryIndex",
        "branch_summary": "summary",
        "custom_message": "",
        "model_change": "modelId",
    },
    leaves={
        "facts about the session": "session/version session/timestamp session/parentSession "
        "session/provider session/modelId session/thinkingLevel",
        "facts about a record": "*/timestamp",
        "settings of the harness": "thinking_level_change model_change/provider leaf",
        "state of extensions and of the screen": "custom label session_info",
        "details for display": "compaction/details compaction/fromHook compaction/tokensBefore "
        "branch_summary/details branch_summary/fromHook branch_summary/fromId "
        "custom_message/customType custom_message/display custom_message/details",
    },
    inner={"message/message": pi.MESSAGE, "custom_message/content": pi.BLOCKS},
)


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    parent_id: str | None = None
    message: msgspec.Raw = NO_JSON
    content: msgspec.Raw = NO_JSON
    summary: str | None = None
    first_kept_entry_id: str | None = None
    model_id: str | None = None


_LINE = msgspec.json.Decoder(_Line)
_MESSAGE = msgspec.json.Decoder(pi.PiMessage)


def answer(content: bytes) -> str | None:
    """Return the id, time and message of an answer, which a fork copies."""
    try:
        line = _LINE.decode(content)
        given = _MESSAGE.decode(line.message) if line.type == "message" else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the reader reports the damage
    is_answer = given is not None and given.role == "assistant" and given.failure is None
    return f"{line.id} {bytes(line.message)!r}" if is_answer else None


def read_session(records: Sequence[Record], copied: Collection[str] = ()) -> Session:
    """Read the branches of a session, and each of its compactions, as contexts."""
    nodes: dict[str, Node] = {}
    models: list[str | None] = []
    error, before = None, None
    for place, content in records:
        where = place.where
        line = decode_line(_LINE, content, where)
        made, aliases = list[Message](), list[str]()
        if line.type in {"message", "custom_message"}:
            given = _message(line, where)
            made, aliases = pi.messages_of(given, where), given.calls
            models.append(given.model)
            error = given.failure if given.role == "assistant" else error
        elif line.type == "branch_summary" and line.summary:
            made = [pi.summary_of(line.summary, is_branch=True)]
        models.append(line.model_id)
        key = line.id if line.id and line.id not in nodes else where
        parent = line.parent_id if line.id else before
        node = Node(parent, Item(key, made, where), None, aliases)
        if line.type == "compaction":
            note(SUMMARIES)
            node = node._replace(compacts=_compaction(line, where))
        nodes[key] = node
        before = key
    contexts = Contexts(copied=copied)
    add_branches(list(nodes.values()), contexts)
    return Session(contexts, error, texts(models))


def _message(line: _Line, where: str) -> pi.PiMessage:
    if line.type == "message":
        return decode_line(_MESSAGE, bytes(line.message), f"{where}, message")
    fields = b'{"role":"custom","content":%s}' % bytes(line.content)
    return decode_line(_MESSAGE, fields, f"{where}, content")


def _compaction(line: _Line, where: str) -> Any:
    def compacted(path: Sequence[Node]) -> list[Item]:
        keys = [node.item.key for node in path]
        first = line.first_kept_entry_id
        kept = path[keys.index(first) :] if first in keys else []
        summary = pi.summary_of(line.summary or "", is_branch=False)
        return [Item(f"{where}, summary", [summary], where), *(node.item for node in kept)]

    return compacted


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    head = next((r for r in records if r.get("type") == "session"), {})
    session, cwd = head.get("id"), head.get("cwd")
    labels = {"cwd": cwd} if isinstance(cwd, str) and cwd else {}
    return Names(session if isinstance(session, str) and session else str(path), labels=labels)


def _is_session(record: Mapping[str, Any]) -> bool:
    is_head = record.get("type") == "session" and isinstance(record.get("id"), str)
    return is_head and isinstance(record.get("timestamp"), str) and "message" not in record


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_session,
    marks=(b'"session"',),
    answer=answer,
).adapter("sessions of Pi and OpenClaw: JSONL, a tree of records; text only")
