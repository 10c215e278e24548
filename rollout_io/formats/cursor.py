"""The `cursor` format: transcripts of Cursor's agent.

    {"role": "user", "message": {"content": [{"type": "text", "text": "..."}]}}
    {"role": "assistant", "message": {"content": [{"type": "tool_use", "name": "Shell", "input": {...}}]}}

A file is a run; files in `subagents/` beside it are its sub-agents. Transcripts may lack the results of
tools, and the ids of calls, which then follow from the order. The log has no reward, no token ids, no
system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.contexts import Contexts
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import Part

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
_LEAVES = {
    "facts about a record": "*/metadata */conversation */annotations */timestamp_ms */model_call_id",
    "settings of the harness": "cursor_session_meta cursor_available_tools",
    "facts about the run": "turn_ended",
}
_CALLS = frozenset({"tool_use", "tool-use", "tool_call", "tool-call"})
_RESULTS = frozenset({"tool_result", "tool-result"})


class _Message(msgspec.Struct, gc=False):
    role: str | None = None
    content: Annotated[str | list[Part] | None, inner(_BLOCKS)] = None


class _Record(msgspec.Struct, gc=False):
    role: str | None = None
    message: _Message | None = None
    model: str | None = None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a file, which are one context."""
    waiting: list[str] = []
    for where, kind, record in lines:
        if record is None or record.message is None:
            continue
        log.model = record.model or log.model
        role = record.role or record.message.role or (kind if kind != "transcript" else "user")
        parts = _parts(record.message.content, where, waiting)
        log.say(anthropic.messages_of(role, parts, where), where)


def _parts(content: str | list[Part] | None, where: str, waiting: list[str]) -> list[Part]:
    """Return the blocks in Anthropic's form, with ids for calls and results that have none."""
    if content is None or isinstance(content, str):
        return [Part(text=content)] if content else []
    blocks: list[Part] = []
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
        blocks.append(part)
    return blocks


def names(path: Path, _: Sequence[Any]) -> Names:
    """Return the names that are in a file's path."""
    if path.parent.name == "subagents":
        return Names(f"{path.parent.parent.name}/{path.stem}", path.parent.parent.name, path.stem)
    return Names(path.stem if path.stem == path.parent.name else str(path))


ADAPTER = Sessions(
    kind="type",
    default="transcript",
    records=dict.fromkeys(("transcript", "user", "assistant"), _Record),
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like({"role": {"user", "assistant"}, "message": {"content": list}, "type": None}),
).adapter("transcripts of Cursor's agent: JSONL; text only")
