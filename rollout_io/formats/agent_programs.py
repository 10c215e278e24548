"""The `cursor`, `droid` and `grok_cli` formats: sessions of agent programs.

None of these logs has a reward, token ids or tool definitions, and only Grok's has the system prompt.

Transcripts of Cursor's agent have Anthropic's messages. A file is a run; files in `subagents/` beside it
are its sub-agents. Transcripts may lack the results of tools, and the ids of calls, which then follow
from the order.

In sessions of Factory's Droid, Anthropic's messages form a tree. A compaction does not say what it kept,
so all messages are read. A session is a run; it failed if it ends with an error.

Grok's CLI writes `chat_history.jsonl`. A file is a run, named after its directory, and its lines are
those that Grok Build sends (`conversation.rs`, `compaction_utils.rs`). A compaction writes it again:
answers before the last user message of its (`synthetic_reason`) are part of the prompt. Reasoning belongs
to the answer after it; calls of tools that the API runs (`backend_tool_call`) are calls without a result.
Not in a log: memories in the system prompt of some calls, and which long results of earlier turns were
shortened (`request_builder.rs`).
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
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Part,
    json_text,
    known,
    parts_in,
    shown,
    tool_call,
)

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
_CURSOR_LEAVES = {
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


def _read_transcript(lines: Iterator[Line], log: Contexts) -> None:
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
    blocks: list[Part] = []
    for i, part in enumerate(parts_in(content)):
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


def _names_in_path(path: Path, _: Sequence[Any]) -> Names:
    if path.parent.name == "subagents":
        return Names(f"{path.parent.parent.name}/{path.stem}", path.parent.parent.name, path.stem)
    return Names(path.stem if path.stem == path.parent.name else str(path))


CURSOR = Sessions(
    kind="type",
    default="transcript",
    records=dict.fromkeys(("transcript", "user", "assistant"), _Record),
    leaves=_CURSOR_LEAVES,
    names=_names_in_path,
    read=_read_transcript,
    is_record=like({"role": {"user", "assistant"}, "message": {"content": list}, "type": None}),
).adapter("transcripts of Cursor's agent: JSONL; text only")


COMPACTED = "compactions: the log does not say what they kept, so all messages are read"
_DROID_LEAVES = {
    "facts about a record": "*/timestamp */messageId */version",
    "facts about the session": "session_start system session_end",
    "settings and state of the harness": "session_settings todo_state agent_turn_outcome "
    "compaction_state",
    "facts about a call": "error/source",
}


class _Start(msgspec.Struct, gc=False):
    id: str | None = None
    cwd: str | None = None


class _Turn(msgspec.Struct, gc=False):
    role: str
    content: Annotated[Content, inner(anthropic.BLOCKS)] = None


class _Spoken(msgspec.Struct, gc=False, rename="camel"):
    id: str | None = None
    parent_id: str | None = None
    message: _Turn | None = None


class _Error(msgspec.Struct, gc=False):
    message: str | None = None


def _read_tree(lines: Iterator[Line], log: Contexts) -> None:
    for where, kind, record in lines:
        note(COMPACTED, kind == "compaction_state")
        match record:
            case _Start(id=str(key)):
                log.say([], where, key)
            case _Spoken(message=_Turn() as message):
                if record.id:
                    log.follow(record.parent_id)
                key = record.id if record.id and log.find(record.id) is None else where
                log.say(anthropic.messages_of(message.role, message.content, where), where, key)
            case _Error():
                log.error = record.message or "error"


def _names(path: Path, first: Sequence[Any]) -> Names:
    start = next((line for line in first if isinstance(line, _Start)), _Start())
    return Names(start.id or str(path), labels={"cwd": start.cwd})


DROID = Sessions(
    kind="type",
    records={"session_start": _Start, "message": _Spoken, "error": _Error},
    leaves=_DROID_LEAVES,
    names=_names,
    read=_read_tree,
    is_record=like({"type": "session_start", "id": str}),
).adapter("sessions of Factory's Droid: JSONL, a tree of messages; text only")


KEPT = "answers before a compaction, which wrote the log again: part of the prompt"
SHORTENED = "long results of earlier turns, which Grok with memories shortens once half of its window is full"
_COMPACTION = "compaction_meta"
_NUM_TURNS = 3
"""Turns at the end whose results are whole."""
_MAX_CHARS = 4000
_GROK_PARTS = Contents(kind="type", default="text", reads={"text": "text", "image": "url"})
_SUMMARY = Contents(kind="type", default="summary_text", reads={"summary_text": "text"})
_THOUGHTS = Contents(kind="type", default="reasoning_text", reads={"reasoning_text": "text"})
_GROK_LEAVES = {
    "facts about a record": "*/id */status */model_fingerprint */reasoning_effort "
    "*/prompt_index */cwd_generation */prior_turn_interrupt */timestamp backend_tool_call/kind.status "
    "backend_tool_call/kind.call_id backend_tool_call/kind.container_id",
    "results of the API's tools": "backend_tool_call/kind.outputs",
    "encrypted, for the API": "reasoning/encrypted_content",
}


class _Block(msgspec.Struct, gc=False):
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


class _Said(msgspec.Struct, gc=False):
    content: Annotated[str | list[_Block] | None, inner(_GROK_PARTS)] = None
    tool_call_id: str | None = None
    images: Annotated[list[_Block] | None, inner(_GROK_PARTS)] = None
    synthetic_reason: str | None = None


class _Answer(_Said, gc=False):
    tool_calls: list[_Call] | None = None
    model_id: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    summary: Annotated[list[_Block] | None, inner(_SUMMARY)] = None
    content: Annotated[list[_Block] | None, inner(_THOUGHTS)] = None


class _BackendCall(msgspec.Struct, gc=False):
    kind: _Kind | None = None


_GROK_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool_result": "tool"}


def _read_history(lines: Iterator[Line], log: Contexts) -> None:
    thoughts: list[str] = []
    records = list(lines)
    num_kept = max(
        (i + 1 for i, line in enumerate(records) if _is_compaction(line.record)), default=0
    )
    note(SHORTENED, _num_long(records))
    for i, (where, kind, record) in enumerate(records):
        fields: dict[str, Any]
        if isinstance(record, _Reasoning):
            parts = [*(record.summary or ()), *(record.content or ())]
            thoughts += [part.text for part in parts if part.text]
            continue
        if isinstance(record, _BackendCall) and record.kind is not None:
            kind_of = record.kind
            calls = [
                tool_call(kind_of.id, kind_of.name or kind_of.tool_type, kind_of.arguments(where))
            ]
            fields = {"role": "assistant", "content": "", "tool_calls": calls}
        elif isinstance(record, _Said):
            fields = {"role": _GROK_ROLES[kind], "content": _content(record)}
            fields["tool_call_id"] = record.tool_call_id
        else:
            continue
        if isinstance(record, _Answer):
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
    return isinstance(record, _Said) and record.synthetic_reason == _COMPACTION


def _num_long(records: Sequence[Line]) -> int:
    """Return the number of long results before the last turns."""
    turns = [i for i, line in enumerate(records) if line.kind == "user"]
    end = turns[-_NUM_TURNS - 1] if len(turns) > _NUM_TURNS else 0
    results = [line.record for line in records[:end] if line.kind == "tool_result"]
    texts = [result.content for result in results if isinstance(result, _Said)]
    return sum(isinstance(text, str) and len(text) > _MAX_CHARS for text in texts)


def _content(message: _Said) -> Any:
    content = message.content
    parts = [_Block(text=content)] if isinstance(content, str) else content or []
    parts = [*parts, *(message.images or ())]
    return shown(
        [
            Part(type="image", source={"url": part.url}) if part.url else Part(text=part.text)
            for part in parts
            if part.url or part.text
        ]
    )


def _name_of_folder(path: Path, _: Sequence[Any]) -> Names:
    is_named = path.name == "chat_history.jsonl" and path.parent.name
    return Names(path.parent.name if is_named else str(path))


GROK = Sessions(
    kind="type",
    records={
        "system": _Said,
        "user": _Said,
        "assistant": _Answer,
        "tool_result": _Said,
        "reasoning": _Reasoning,
        "backend_tool_call": _BackendCall,
    },
    leaves=_GROK_LEAVES,
    names=_name_of_folder,
    read=_read_history,
    is_record=like(
        {"type": "assistant", "content": str, "model_id": object},
        {"type": "tool_result", "tool_call_id": str},
    ),
).adapter("sessions of Grok's CLI (chat_history.jsonl); text only")
