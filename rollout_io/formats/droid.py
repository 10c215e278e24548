"""The `droid` format: sessions of Factory's Droid, one JSON Lines file each.

    {"type": "session_start", "id": "...", "cwd": "..."}
    {"type": "message", "id": "1", "parentId": null, "message": {"role": "user", "content": [...]}}

Messages are Anthropic's, and form a tree. A compaction does not say what it kept, so all messages are
read. A session is a run; it failed if it ends with an error. The log has no reward, no token ids, no
system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import inner, like
from rollout_io.formats.parsing.content import Content

COMPACTED = "compactions: the log does not say what they kept, so all messages are read"
_LEAVES = {
    "facts about a record": "*/timestamp */messageId */version",
    "facts about the session": "session_start system session_end",
    "settings and state of the harness": "session_settings todo_state agent_turn_outcome "
    "compaction_state",
    "facts about a call": "error/source",
}


class Start(msgspec.Struct, gc=False):
    """The start of a session."""

    id: str | None = None
    cwd: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Annotated[Content, inner(anthropic.BLOCKS)] = None


class _Spoken(msgspec.Struct, gc=False, rename="camel"):
    id: str | None = None
    parent_id: str | None = None
    message: _Message | None = None


class _Error(msgspec.Struct, gc=False):
    message: str | None = None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the tree of a session."""
    for where, kind, record in lines:
        note(COMPACTED, kind == "compaction_state")
        match record:
            case Start(id=str(key)):
                log.say([], where, key)
            case _Spoken(message=_Message() as message):
                if record.id:
                    log.follow(record.parent_id)
                key = record.id if record.id and log.find(record.id) is None else where
                log.say(anthropic.messages_of(message.role, message.content, where), where, key)
            case _Error():
                log.error = record.message or "error"


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the start of a session."""
    start = next((line for line in first if isinstance(line, Start)), Start())
    return Names(start.id or str(path), labels={"cwd": start.cwd})


ADAPTER = Sessions(
    kind="type",
    records={"session_start": Start, "message": _Spoken, "error": _Error},
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like({"type": "session_start", "id": str}),
).adapter("sessions of Factory's Droid: JSONL, a tree of messages; text only")
