"""Messages of OpenCode, each with its parts; `formats.opencode` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects.pi import CUT
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    extend,
    json_text,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_document, type_error
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import Contexts, Item

_PARTS = Contents(
    kind="type",
    reads={
        "text": "text ignored",
        "reasoning": "text",
        "tool": "callID tool state.status state.input state.output state.error state.attachments",
        "file": "mime filename url",
        "compaction": "tail_start_id",
        "subtask": "",
        "step-start": "",
    },
    leaves={
        "facts about a part": "*/id */sessionID */messageID */time */metadata */synthetic "
        "tool/state file/source step-start/snapshot compaction/auto compaction/overflow",
        "facts about a step": "step-finish",
        "states of files, for undoing edits": "snapshot patch",
        "calls that failed, and are repeated": "retry",
        "repeats the prompt of a sub-agent, or names an agent": "subtask agent",
    },
)
CONTENTS = Contents(
    kind="role",
    reads={
        "*": "id",
        "assistant": "summary modelID error.name error.data.message",
        "user": "",
        "system": "",
    },
    leaves={
        "facts about a message": "*/sessionID */time */agent */model */parentID */providerID "
        "*/mode */path */cost */tokens */finish */variant assistant/error",
        "shown to the user, not sent": "user/summary",
        "settings of a request": "user/tools user/format",
    },
    inner=dict.fromkeys(("user/parts", "system/parts", "assistant/parts"), _PARTS),
)
"""A message, with its parts under `parts`."""

CLEARED = "tool results that were cleared from later prompts: read in full everywhere"
_ABORTED = "MessageAbortedError"
_COMPACTION = "What did we do so far?"
_SUBTASK = "The following tool was executed by the user"
_NOT_SENT = ("text/plain", "application/x-directory")
_STOPPED = "[Tool execution was interrupted]"


class Record(NamedTuple):
    """A message as decoded JSON, with its parts and their locations."""

    id: str
    message: dict[str, Any]
    parts: Sequence[tuple[dict[str, Any], str]]
    where: str


class _ErrorData(msgspec.Struct, gc=False):
    message: str | None = None


class _Error(msgspec.Struct, gc=False):
    name: str = "error"
    data: _ErrorData | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    summary: Any = None
    model: str | None = msgspec.field(name="modelID", default=None)
    agent: str | None = None
    error: _Error | None = None


class _Times(msgspec.Struct, gc=False):
    compacted: int | float | None = None


class _State(msgspec.Struct, gc=False):
    status: str
    input: Any = None
    output: Any = None
    error: str | None = None
    attachments: list[dict[str, Any]] | None = None
    time: _Times | None = None


class _Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    ignored: bool | None = None
    call_id: str | None = msgspec.field(name="callID", default=None)
    tool: str | None = None
    state: _State | None = None
    mime: str | None = None
    filename: str | None = None
    url: str | None = None
    tail: str | None = msgspec.field(name="tail_start_id", default=None)


def decode_object(content: bytes, where: str) -> dict[str, Any]:
    """Decode a message or a part.

    Raises:
        InputError: `json_document`: it is not JSON; `record_type`: it is no object.
    """
    value: dict[str, Any] = decode_document(msgspec.json.Decoder(dict[str, Any]), content, where)
    return value


def _typed(value: dict[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise type_error(error, where) from None


def add_contexts(
    records: Sequence[Record], contexts: Contexts
) -> tuple[str | None, str | None, str | None]:
    """Add the contexts of a session; return why it failed, its model and its agent.

    Raises:
        InputError: `record_type`: a field has the wrong type.
    """
    items: list[Item] = []
    error, model, agent, tail = None, None, None, None
    for record in records:
        account(CONTENTS, record.message | {"parts": [part for part, _ in record.parts]})
        message = _typed(record.message, _Message, record.where)
        parts = [(_typed(part, _Part, where), where) for part, where in record.parts]
        tail = next((part.tail for part, _ in parts if part.tail), tail)
        if message.role != "assistant":
            items.append(Item(record.id, [_prompt(message.role, parts)], record.where))
            continue
        model, agent = message.model or model, message.agent or agent
        failed = message.error
        error = _told(failed) if failed is not None else None
        if failed is not None and (failed.name != _ABORTED or not parts):
            note(CUT)
            continue
        made = [*_answers(parts)]
        if message.summary is True and failed is None:
            contexts.add(items)
            *before, ask = items or [Item("", (), record.where)]
            keys = [item.key for item in before]
            kept = before[keys.index(tail) :] if tail in keys else []
            items = [ask, Item(record.id, made, record.where, is_given=True), *kept]
            tail = None
            continue
        items.append(Item(record.id, made, record.where))
    contexts.add(items)
    return error, model, agent


def _told(error: _Error) -> str:
    return (error.data.message if error.data is not None else None) or error.name


def _prompt(role: str, parts: Sequence[tuple[_Part, str]]) -> Message:
    found: list[Part] = []
    for part, _ in parts:
        if part.type == "text" and part.text and not part.ignored:
            found.append(Part(text=part.text))
        elif part.type == "file" and part.mime not in _NOT_SENT:
            found.append(_file(part.mime, part.url, part.filename))
        elif part.type == "compaction":
            found.append(Part(text=_COMPACTION))
        elif part.type == "subtask":
            found.append(Part(text=_SUBTASK))
    return {"role": role, "content": shown(found)}


def _file(mime: Any, url: Any, name: Any) -> Part:
    kind = "image" if isinstance(mime, str) and mime.startswith("image/") else "file"
    source = {"url": url if isinstance(url, str) else "", "media_type": mime}
    return Part(type=kind, source=source, filename=name if isinstance(name, str) else None)


def _answers(parts: Sequence[tuple[_Part, str]]) -> Iterator[Message]:
    """Yield the answers of a message, each followed by the results of its calls."""
    reply: Message = {"role": "assistant", "content": ""}
    results: list[Message] = []
    for part, where in parts:
        is_new = part.type == "step-start" or (part.type in {"text", "reasoning"} and results)
        if is_new and (results or reply["content"]):
            yield from (reply, *results)
            reply, results = {"role": "assistant", "content": ""}, []
        piece: Message = {"role": "assistant", "content": ""}
        if part.type == "text":
            piece["content"] = part.text or ""
        elif part.type == "reasoning":
            piece["reasoning_content"] = part.text or ""
        elif part.type == "tool" and part.state is not None:
            raw = NO_JSON if part.state.input is None else msgspec.Raw(_encoded(part.state.input))
            piece["tool_calls"] = [tool_call(part.call_id, part.tool or "", json_text(raw, where))]
            results.append(_result(part.state, part.call_id))
        extend(reply, piece)
    if reply["content"] or reply.keys() & {"reasoning_content", "tool_calls"}:
        yield from (reply, *results)


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _result(state: _State, call_id: str | None) -> Message:
    if state.time is not None and state.time.compacted is not None:
        note(CLEARED)
    text = state.output if state.status == "completed" else state.error
    if state.status not in {"completed", "error"}:
        text = _STOPPED
    if text is not None and not isinstance(text, str):
        text = _encoded(text).decode()
    found = [Part(text=text)] if text else []
    found += [
        _file(a.get("mime"), a.get("url"), a.get("filename")) for a in state.attachments or ()
    ]
    return known({"role": "tool", "content": shown(found), "tool_call_id": call_id})
