"""The `gemini_cli` format: sessions of Gemini CLI, one JSON document per file.

    {"sessionId": "...", "projectHash": "...", "messages": [
        {"type": "user", "content": "..."},
        {"type": "gemini", "content": "...", "thoughts": [...], "toolCalls": [...], "model": "..."}]}

A session is a run with one conversation. Tool calls contain their results; thoughts are Gemini's
summaries of its reasoning (a subject and a description). Messages of other types (info, warning,
error) are only for display. The log has no reward, no token ids, no system prompt and no tool
definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects.gemini import (
    PARTS,
    Part,
    Parts,
    answer_text,
    joined_content,
    parts_in,
)
from rollout_io.formats.parsing.content import NO_JSON, Message, joined, json_text, tool_call
from rollout_io.formats.parsing.documents import find_documents, is_document
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.lines import read_record
from rollout_io.formats.parsing.media import part_of_data
from schemas.errors import InputError

_GROUPS = "inferred: each session is a separate instance"
_MARKS = (b'"sessionId"',)


_MESSAGE = Contents(
    kind="type",
    reads={
        "*": "id timestamp model",
        "user": "",
        "gemini": "thoughts.subject thoughts.description toolCalls.id toolCalls.name toolCalls.args",
    },
    leaves={
        "shown to the user, not sent": "info warning error gemini/toolCalls.displayName "
        "gemini/toolCalls.description gemini/toolCalls.resultDisplay user/displayContent",
        "facts about a call": "gemini/toolCalls.status gemini/toolCalls.timestamp gemini/tokens "
        "gemini/thoughts.timestamp",
    },
    inner={"*/content": PARTS, "gemini/toolCalls.result": PARTS},
)
CONTENTS = Contents(
    reads={"": "sessionId projectHash"},
    leaves={"facts about the session": "startTime lastUpdated summary kind directories meta"},
    inner={"messages": _MESSAGE},
)


class _Thought(msgspec.Struct, gc=False):
    subject: str | None = None
    description: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    name: str
    id: str | None = None
    args: msgspec.Raw = NO_JSON
    result: Parts = None


class _Message(msgspec.Struct, gc=False):
    type: Literal["user", "gemini", "info", "warning", "error"]
    content: Parts = None
    thoughts: list[_Thought] | None = None
    tool_calls: list[_ToolCall] | None = msgspec.field(name="toolCalls", default=None)
    model: str | None = None


class _Session(msgspec.Struct, gc=False):
    session: str = msgspec.field(name="sessionId")
    messages: list[_Message]
    project: str | None = msgspec.field(name="projectHash", default=None)


class _Spoken(msgspec.Struct, gc=False):
    type: str


class _Shape(msgspec.Struct, gc=False):
    session: str = msgspec.field(name="sessionId")
    messages: list[_Spoken]
    project: str | None = msgspec.field(name="projectHash", default=None)


_DECODER = msgspec.json.Decoder(_Session)
_SHAPE_DECODER = msgspec.json.Decoder(_Shape)


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per file."""
    yield About("groups", _GROUPS)
    yield from find_documents(inputs, progress, _find_session)


def _find_session(place: Place, document: bytes) -> Iterator[Run]:
    head = decode_document(_SHAPE_DECODER, document, place.where)
    labels = {"session": head.session} | ({"project": head.project} if head.project else {})
    yield Run(instance_id=head.session, repetition_id=0, places=[place], labels=labels)


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the conversation of a session.

    Raises:
        InputError: `record_type`: a field has the wrong type; `no_calls`: there is no model
            response.
    """
    (place,) = run.places
    content = read_record(place)
    session = decode_document(_DECODER, content, place.where)
    account(CONTENTS, content)
    messages: list[Message] = []
    for i, logged in enumerate(session.messages):
        messages += _messages(logged, f"{place.where}, messages[{i}]")
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", place.where, "the session has no model response")
    models = [m.model for m in session.messages if m.model]
    step = Conversation(source=place.where, messages=messages)
    return Trajectory(steps=[step], user_values={"model": models[-1]} if models else {})


def _messages(logged: _Message, where: str) -> Iterator[Message]:
    if logged.type == "user":
        yield {"role": "user", "content": _text(logged.content, where)}
    if logged.type != "gemini":
        return
    made: Message = {"role": "assistant", "content": _text(logged.content, where)}
    thoughts = [joined(t.subject or "", t.description or "") for t in logged.thoughts or ()]
    if any(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    calls = logged.tool_calls or []
    ids = [call.id or f"call_{i}" for i, call in enumerate(calls)]
    if calls:
        named = zip(ids, calls, strict=True)
        made["tool_calls"] = [tool_call(i, c.name, json_text(c.args, where)) for i, c in named]
    yield made
    for call_id, call in zip(ids, calls, strict=True):
        if call.result is not None:
            text = _text(call.result, where)
            yield {"role": "tool", "tool_call_id": call_id, "content": text}


def _text(parts: Parts, where: str) -> str | list[Message]:
    """Return the text of all parts, or a list of parts if one is neither text nor a tool result."""
    return joined_content(_part_content(part, where) for part in parts_in(parts))


def _part_content(part: Part, where: str) -> str | list[Message]:
    if part.function_response is not None:
        return answer_text(part.function_response.response, where)
    data = part.inline_data or part.file_data
    if data is not None or part.text is None:
        return [part_of_data(data or {}) or {"type": "data"}]
    return part.text


def recognizes(path: Path) -> bool:
    """True if a file is a session, with `sessionId` and typed `messages`."""
    return is_document(path, _SHAPE_DECODER, _MARKS)


ADAPTER = Adapter(
    summary="sessions of Gemini CLI, one JSON document each; text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    contents=CONTENTS,
    noun="session",
)
