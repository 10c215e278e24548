"""The `opencode` format: sessions of OpenCode, in its database or in the files of older versions.

    opencode.db: tables `session` (id, parent_id, ...), `message` and `part` (id, session_id, data);
                 since version 2, `session_v2` and `session_message` (id, session_id, type, seq, data)
    storage/session/PROJECT/*.json, storage/message/SESSION/*.json, storage/part/MESSAGE/*.json

    message: {"id": "m1", "role": "assistant", "modelID": "...", "error": {...}}
    part: {"id": "p1", "type": "text", "text": "..."}
    part: {"id": "p2", "type": "tool", "callID": "c", "tool": "bash",
           "state": {"status": "completed", "input": {...}, "output": "..."}}

A session is a run; sessions with a `parentID` are its sub-agents. A step is an answer. A fork copies
the messages of another session under new ids. A compaction (an answer with `summary`) begins a context
with the summary and the end of the history that was kept. An answer that failed is not sent again, and
left out; the run failed if its last answer did. Thoughts are sent to another model as text. The
database is never opened where it is: with a write-ahead log beside it, a copy of both is read. A session
that is in several tables or in files too is read from the newest table.

The log has no reward, no token ids, no system prompt, no tool definitions, and not the reminders that
the program adds to a prompt when it sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts, Said
from rollout_io.formats.dialects.pi import CUT
from rollout_io.formats.engines.sessions import Line, Rows
from rollout_io.formats.grammar import Contents, inner
from rollout_io.formats.opencode_stores import Span, is_store, open_store
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    extend,
    json_text,
    raw_of,
    shown,
    tool_call,
    tool_result,
)
from rollout_io.formats.requests import Sends

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
_MESSAGE = Contents(
    kind="role",
    reads={
        "*": "id",
        "assistant": "summary modelID providerID parentID error.name error.data.message agent "
        "finish time.completed time.created",
        "user": "agent time.created",
        "system": "time.created",
    },
    leaves={
        "facts about a message": "*/sessionID */time */agent */model user/parentID system/parentID "
        "*/providerID */mode */path */cost */tokens */variant assistant/error",
        "shown to the user, not sent": "user/summary",
        "settings of a request": "user/tools user/format",
    },
)
CLEARED = "tool results that were cleared from later prompts: read in full everywhere"
FILES = "files beside an answer, which are not sent with it: left out"
WRITTEN = "answers that the program wrote, such as a command of the user: part of the prompt"
_ABORTED = "MessageAbortedError"
_COMPACTION = "What did we do so far?"
_SUBTASK = "The following tool was executed by the user"
_NOT_SENT = ("text/plain", "application/x-directory")
_STOPPED = "[Tool execution was interrupted]"
REMINDED = (
    "prompts of the plan agent or after it, without the reminder that OpenCode adds when it sends "
    "them"
)
INVALID = (
    "answers with a call that the log has not, because there is no such tool or it was taken back: "
    "part of the prompt"
)
UNENDED = "answers that broke off, of which the log may lack a part: part of the prompt"
MEDIA = (
    "results with a picture or file, which is sent in a message of the user behind them, as to "
    "providers of chat completions"
)
_PLAN, _INVALID, _CALLED = "plan", "invalid", "tool-calls"
_OF_CHAT = Sends(media_text="Attached media from tool result:")
_WITH_MEDIA = {"anthropic", "openai", "amazon-bedrock", "google-vertex-anthropic"}
"""Providers whose APIs have pictures in results; others are taken for chat completions."""


class _ErrorData(msgspec.Struct, gc=False):
    message: str | None = None


class _Error(msgspec.Struct, gc=False):
    name: str = "error"
    data: _ErrorData | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    summary: Any = None
    model: str | None = msgspec.field(name="modelID", default=None)
    provider: str | None = msgspec.field(name="providerID", default=None)
    parent: str | None = msgspec.field(name="parentID", default=None)
    agent: str | None = None
    error: _Error | None = None
    finish: str | None = None
    time: Span | None = None


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


class Row(msgspec.Struct, gc=False):
    """A message with its parts."""

    id: str
    message: Annotated[_Message, inner(_MESSAGE)]
    parts: Annotated[list[_Part], inner(_PARTS)]


class _Copy(msgspec.Struct, gc=False):
    message: _Message
    parts: list[dict[str, Any]]


_COPY = msgspec.json.Decoder(_Copy)
_IDS = frozenset({"id", "messageID", "sessionID"})


def identity(_: str, row: bytes) -> str | None:
    """Return an answer with its time and without its ids, which a fork changes."""
    copy = _COPY.decode(row)
    time = copy.message.time
    if copy.message.role != "assistant" or time is None or time.created is None:
        return None
    parts = [{name: part[name] for name in part.keys() - _IDS} for part in copy.parts]
    return f"{time.created} {msgspec.json.encode(parts, order='sorted')!r}"


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session.

    The program writes texts too (`synthetic`), and the answers to what the user ran: a command or a
    sub-agent. The model sees these as its own, but did not sample them.
    """
    tail: str | None = None
    ran: str | None = None
    agents = set[str | None]()
    for where, _, row in lines:
        message, parts = row.message, row.parts
        tail = next((part.tail for part in parts if part.tail), tail)
        if message.role != "assistant":
            agents.add(message.agent)
            note(REMINDED, _PLAN in agents)
            log.say([_prompt(message.role, parts)], where, row.id)
            # The user ran a tool, or asked for a sub-agent.
            is_run = any(p.type == "subtask" or (p.synthetic and p.text == _SUBTASK) for p in parts)
            ran = row.id if is_run else None
            continue
        log.model, log.name = message.model or log.model, log.name and (message.agent or log.name)
        has_media = message.provider in _WITH_MEDIA
        log.sends = Sends() if has_media else _OF_CHAT
        log.error = None
        if message.error is not None:
            log.error = (message.error.data or _ErrorData()).message or message.error.name
        if message.error is not None and (message.error.name != _ABORTED or not parts):
            note(CUT)
            continue
        is_ran = ran is not None and message.parent in {None, ran}
        is_written = is_ran and all(part.type != "step-start" for part in parts)
        note(FILES, sum(part.type == "file" for part in parts))
        attached = [part for part in parts if part.state is not None and part.state.attachments]
        note(MEDIA, 0 if has_media else len(attached))
        answers = [*_answers(parts, where, is_written=is_written)]
        if message.summary is True and message.error is None:
            _compact(log, row.id, where, answers, tail)
            tail = None
            continue
        reason = _why_given(message, parts)
        for i, (is_given, group) in enumerate(groupby(answers, key=lambda answer: answer[1])):
            why = WRITTEN if is_given else reason
            messages = [m for m, _ in group]
            key = f"{row.id}/{i}" if i else row.id
            log.say(messages, where, key, given=why, for_others=_as_text(messages))


def _why_given(message: _Message, parts: Sequence[_Part]) -> str | bool:
    """Return why an answer is not what the model wrote; False if it is."""
    calls = [part for part in parts if part.type == "tool"]
    if any(part.tool == _INVALID for part in calls) or (message.finish == _CALLED and not calls):
        return INVALID
    is_ended = message.finish or any(part.type == "step-finish" for part in parts)
    time = message.time or Span()
    is_dated = time.created is not None and any(part.type == "step-start" for part in parts)
    return UNENDED if is_dated and not is_ended and time.completed is None else False


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return answers with their thoughts as text, in front of the other text."""
    sent = []
    for message in messages:
        thought = message.get("reasoning_content", "")
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        if thought and isinstance(message["content"], str):
            rest["content"] = thought + message["content"]
        sent.append(rest)
    return sent


def _compact(
    log: Contexts, key: str, where: str, answers: Sequence[tuple[Message, bool]], tail: str | None
) -> None:
    """Begin a context with the request for a summary, the summary, and what was kept."""
    note(SUMMARIES)
    *before, ask = log.path() or [Said(where, [], where)]
    first = log.find(tail)
    tail_nodes = before[before.index(first) :] if first in before else []
    log.replace([ask])
    log.say([message for message, _ in answers], where, key, given=True)
    log.keep(tail_nodes)


def _prompt(role: str, parts: Sequence[_Part]) -> Message:
    sent: list[Part] = []
    for part in parts:
        if part.type == "text" and part.text and not part.ignored:
            sent.append(Part(text=part.text))
        elif part.type == "file" and part.mime not in _NOT_SENT:
            sent.append(_file(part.mime, part.url, part.filename))
        elif part.type == "compaction":
            sent.append(Part(text=_COMPACTION))
        elif part.type == "subtask":
            sent.append(Part(text=_SUBTASK))
    return {"role": role, "content": shown(sent)}


def _file(mime: Any, url: Any, name: Any) -> Part:
    kind = "image" if isinstance(mime, str) and mime.startswith("image/") else "file"
    source = {"url": url if isinstance(url, str) else "", "media_type": mime}
    return Part(type=kind, source=source, filename=name if isinstance(name, str) else None)


def _answers(
    parts: Sequence[_Part], where: str, *, is_written: bool
) -> Iterator[tuple[Message, bool]]:
    """Yield the answers of a message, each followed by the results of its calls.

    Each is given with whether the program wrote it, as all of a message `is_written`.
    """
    reply, results, was_written = _reply(), list[Message](), is_written
    for part in parts:
        by_program = is_written or (part.type == "text" and part.synthetic is True)
        is_spoken = part.type in {"text", "reasoning"}
        is_new = part.type == "step-start" or (is_spoken and results)
        is_other = by_program != was_written and (is_spoken or part.type == "tool")
        if (is_new or is_other) and (results or _says(reply)):
            yield from ((message, was_written) for message in (reply, *results))
            reply, results = _reply(), []
        if is_spoken or part.type == "tool":
            was_written = by_program
        piece = _reply()
        if part.type == "text":
            piece["content"] = part.text or ""
        elif part.type == "reasoning":
            piece["reasoning_content"] = part.text or ""
        elif part.type == "tool" and part.state is not None:
            raw = NO_JSON if part.state.input is None else raw_of(part.state.input)
            piece["tool_calls"] = [tool_call(part.call_id, part.tool or "", json_text(raw, where))]
            results.append(_result(part.state, part.call_id))
        extend(reply, piece)
    if _says(reply):
        yield from ((message, was_written) for message in (reply, *results))


def _reply() -> Message:
    return {"role": "assistant", "content": ""}


def _says(reply: Message) -> bool:
    return bool(reply["content"] or reply.keys() & {"reasoning_content", "tool_calls"})


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
        text = msgspec.json.encode(text).decode()
    shown_parts = [Part(text=text)] if text else []
    shown_parts += [
        _file(a.get("mime"), a.get("url"), a.get("filename")) for a in state.attachments or ()
    ]
    return tool_result(shown(shown_parts), call_id, is_error=state.status == "error")


ADAPTER = Rows(
    records={"": Row},
    read=read,
    identity=identity,
    is_store=is_store,
    open=open_store,
).adapter("sessions of OpenCode: its database (opencode.db), or its storage directory; text only")
