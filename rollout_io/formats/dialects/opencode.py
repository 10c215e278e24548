"""Messages of OpenCode, each with its parts; `formats.opencode` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
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
from rollout_io.formats.parsing.sessions import SUMMARIES, Contexts, Item
from schemas.messages import is_answer

_PARTS = Contents(
    kind="type",
    reads={
        "text": "text ignored synthetic",
        "reasoning": "text",
        "tool": "callID tool state.status state.input state.output state.error state.attachments "
        "state.metadata.interrupted state.metadata.output",
        "file": "mime filename url",
        "compaction": "tail_start_id",
        "subtask": "",
        "step-start": "",
    },
    leaves={
        "facts about a part": "*/id */sessionID */messageID */time */metadata "
        "tool/state tool/state.metadata file/source file/synthetic step-start/snapshot compaction/auto compaction/overflow",
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
        "assistant": "summary modelID parentID error.name error.data.message",
        "user": "",
        "system": "",
    },
    leaves={
        "facts about a message": "*/sessionID */time */agent */model user/parentID system/parentID */providerID "
        "*/mode */path */cost */tokens */finish */variant assistant/error",
        "shown to the user, not sent": "user/summary",
        "settings of a request": "user/tools user/format",
    },
    inner=dict.fromkeys(("user/parts", "system/parts", "assistant/parts"), _PARTS),
)
"""A message, with its parts under `parts`."""

CLEARED = "tool results that were cleared from later prompts: read in full everywhere"
FILES = "files beside an answer, which are not sent with it: left out"
WRITTEN = "answers that the program wrote, such as a command of the user: part of the prompt"
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
    parent: str | None = msgspec.field(name="parentID", default=None)
    agent: str | None = None
    error: _Error | None = None


class _Times(msgspec.Struct, gc=False):
    compacted: int | float | None = None


class _Facts(msgspec.Struct, gc=False):
    interrupted: bool | None = None
    output: Any = None


class _State(msgspec.Struct, gc=False):
    status: str
    input: Any = None
    output: Any = None
    error: str | None = None
    attachments: list[dict[str, Any]] | None = None
    time: _Times | None = None
    metadata: _Facts | None = None


class _Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    ignored: bool | None = None
    synthetic: bool | None = None
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

    The program writes texts too (`synthetic`), and the answers to what the user ran: a command or a
    sub-agent. The model sees these as its own, but did not sample them.

    Raises:
        InputError: `record_type`: a field has the wrong type.
    """
    items: list[Item] = []
    error, model, agent, tail = None, None, None, None
    ran: str | None = None
    for record in records:
        account(CONTENTS, record.message | {"parts": [part for part, _ in record.parts]})
        message = _typed(record.message, _Message, record.where)
        parts = [(_typed(part, _Part, where), where) for part, where in record.parts]
        tail = next((part.tail for part, _ in parts if part.tail), tail)
        if message.role != "assistant":
            items.append(Item(record.id, [_prompt(message.role, parts)], record.where))
            ran = record.id if any(_is_run(part) for part, _ in parts) else None
            continue
        model, agent = message.model or model, message.agent or agent
        failed = message.error
        error = _told(failed) if failed is not None else None
        if failed is not None and (failed.name != _ABORTED or not parts):
            note(CUT)
            continue
        is_ran = ran is not None and message.parent in {None, ran}
        is_written = is_ran and all(part.type != "step-start" for part, _ in parts)
        made = [*_answers(parts, is_written=is_written)]
        note(WRITTEN, sum(is_given and is_answer(each) for each, is_given in made))
        note(FILES, sum(part.type == "file" for part, _ in parts))
        if message.summary is True and failed is None:
            contexts.add(items)
            *before, ask = items or [Item("", (), record.where)]
            keys = [item.key for item in before]
            kept = before[keys.index(tail) :] if tail in keys else []
            note(SUMMARIES)
            said = [each for each, _ in made]
            items = [ask, Item(record.id, said, record.where, is_given=True), *kept]
            tail = None
            continue
        for i, (is_given, each) in enumerate(groupby(made, key=lambda each: each[1])):
            key = f"{record.id}/{i}" if i else record.id
            items.append(Item(key, [m for m, _ in each], record.where, is_given=is_given))
    contexts.add(items)
    return error, model, agent


def _is_run(part: _Part) -> bool:
    """True if a part of a prompt says that the user ran a tool, or asks for a sub-agent."""
    return part.type == "subtask" or (part.synthetic is True and part.text == _SUBTASK)


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


def _answers(
    parts: Sequence[tuple[_Part, str]], *, is_written: bool
) -> Iterator[tuple[Message, bool]]:
    """Yield the answers of a message, each followed by the results of its calls.

    Args:
        parts: Parts of the message.
        is_written: True if the program wrote the message.

    Yields:
        Each message, and whether the program wrote it.
    """
    reply, results, was_written = _reply(), list[Message](), is_written
    for part, where in parts:
        by_program = is_written or (part.type == "text" and part.synthetic is True)
        is_spoken = part.type in {"text", "reasoning"}
        is_new = part.type == "step-start" or (is_spoken and results)
        is_other = by_program != was_written and (is_spoken or part.type == "tool")
        if (is_new or is_other) and (results or _says(reply)):
            yield from ((each, was_written) for each in (reply, *results))
            reply, results = _reply(), []
        if is_spoken or part.type == "tool":
            was_written = by_program
        piece = _reply()
        if part.type == "text":
            piece["content"] = part.text or ""
        elif part.type == "reasoning":
            piece["reasoning_content"] = part.text or ""
        elif part.type == "tool" and part.state is not None:
            raw = NO_JSON if part.state.input is None else msgspec.Raw(_encoded(part.state.input))
            piece["tool_calls"] = [tool_call(part.call_id, part.tool or "", json_text(raw, where))]
            results.append(_result(part.state, part.call_id))
        extend(reply, piece)
    if _says(reply):
        yield from ((each, was_written) for each in (reply, *results))


def _reply() -> Message:
    return {"role": "assistant", "content": ""}


def _says(reply: Message) -> bool:
    return bool(reply["content"] or reply.keys() & {"reasoning_content", "tool_calls"})


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _result(state: _State, call_id: str | None) -> Message:
    if state.time is not None and state.time.compacted is not None:
        note(CLEARED)
    text = state.output if state.status == "completed" else state.error
    facts = state.metadata
    if state.status == "error" and facts is not None and facts.interrupted is True:
        text = facts.output if isinstance(facts.output, str) else text
    if state.status not in {"completed", "error"}:
        text = _STOPPED
    if text is not None and not isinstance(text, str):
        text = _encoded(text).decode()
    found = [Part(text=text)] if text else []
    found += [
        _file(a.get("mime"), a.get("url"), a.get("filename")) for a in state.attachments or ()
    ]
    return known({"role": "tool", "content": shown(found), "tool_call_id": call_id})
