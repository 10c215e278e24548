"""The `gemini_cli` format: sessions of Gemini CLI, JSON Lines since 0.39 and one document before.

    {"sessionId": "...", "projectHash": "...", "startTime": "...", "kind": "main"}
    {"id": "1", "type": "user", "content": [{"text": "..."}]}
    {"id": "2", "type": "gemini", "content": "...", "thoughts": [...], "toolCalls": [...], "model": "..."}
    {"$set": {"messages": [...]}}
    {"$rewindTo": "1"}

    {"sessionId": "...", "projectHash": "...", "messages": [...]}

An answer in a history of `$set` that no line has before, without a model, is the program's own: it is
part of the prompt. A line with the id of an earlier message replaces it; `$set` replaces the whole history (a compaction,
a resumed session), and `$rewindTo` takes back a message and all after it. What the model wrote before
such a change stays a context of its own. Calls of tools contain their results, which newer versions
repeat in the next message. Thoughts are Gemini's summaries of its reasoning (a subject and a
description). Messages of other types (info, warning, error) are only for display.

A session is a run; sub-agents (`chats/SESSION/ID.jsonl`) belong to the run of their session. The log
has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import SELF, Contents
from rollout_io.formats.dialects import gemini
from rollout_io.formats.dialects.gemini import Part, Parts, joined_content, parts_in, result_content
from rollout_io.formats.parsing.content import NO_JSON, Message, joined, json_text, tool_call
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.media import part_of_data
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
from schemas.messages import is_answer

_SPOKEN = frozenset({"user", "gemini", "model"})
_SHOWN = "*/displayContent */tokens */timestamp"
CONTENTS = Contents(
    kind="type",
    default="session",
    reads={
        "session": "sessionId projectHash kind $rewindTo",
        "user": "id",
        "gemini": "id model thoughts.subject thoughts.description toolCalls.id toolCalls.name "
        "toolCalls.args toolCalls.result",
        "model": "id",
    },
    leaves={
        "shown to the user, not sent": f"info warning error {_SHOWN} gemini/toolCalls "
        "session/summary session/$set.summary",
        "facts about the session": "session/startTime session/lastUpdated session/directories "
        "session/meta session/$set.lastUpdated session/$set.directories session/$set.sessionId "
        "session/$set.memoryScratchpad session/$set.hasUserOrAssistantMessage",
        "facts about a thought": "gemini/thoughts.timestamp",
    },
    inner={
        "user/content": gemini.PARTS,
        "gemini/content": gemini.PARTS,
        "model/content": gemini.PARTS,
        "model/parts": gemini.PARTS,
        "session/messages": SELF,
        "session/$set.messages": SELF,
    },
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
    type: str
    id: str | None = None
    content: Parts = None
    parts: Parts = None
    thoughts: list[_Thought] | None = None
    tool_calls: list[_ToolCall] | None = msgspec.field(name="toolCalls", default=None)
    model: str | None = None


class _Set(msgspec.Struct, gc=False):
    messages: list[_Message] | None = None


class _Line(msgspec.Struct, gc=False):
    id: str | None = None
    type: str | None = None
    messages: list[_Message] | None = None
    set: _Set | None = msgspec.field(name="$set", default=None)
    rewind: str | None = msgspec.field(name="$rewindTo", default=None)


WRITTEN = "answers that the program wrote, in the history after a compaction: part of the prompt"
THOUGHTS = "thoughts that are not sent again, before later answers of their context"
_LINE = msgspec.json.Decoder(_Line)
_MESSAGE = msgspec.json.Decoder(_Message)
_State = dict[str, tuple[_Message, str]]
"""Messages by id, in order, each with its location."""


def read_session(records: Sequence[Record]) -> Session:
    """Read the contexts of a session; a context ends where messages are replaced or taken back."""
    contexts, state, models = Contexts(), _State(), list[str | None]()
    logged, written = set[str](), set[str]()
    for place, content in records:
        where = place.where
        decode = decode_line if place.part is None else decode_document
        line = decode(_LINE, content, where)
        history = line.messages if line.set is None else line.set.messages
        if line.rewind is not None:
            contexts.add(_items(state, written))
            ids = list(state)
            end = ids.index(line.rewind) if line.rewind in state else 0
            state = dict(list(state.items())[:end])
        elif history is not None:
            path = f"{where}, {'messages' if line.set is None else '$set.messages'}"
            new = _state(history, path)
            if not _extends(new, state):
                contexts.add(_items(state, written))
            state = new
            if line.set is not None:
                own = {key for key, (m, _) in new.items() if m.type != "user" and m.model is None}
                note(WRITTEN, len(own - logged - written))
                note(SUMMARIES, bool(own - logged - written))
                written |= own - logged
        elif line.type is not None:
            message = decode_line(_MESSAGE, content, where)
            state[message.id or where] = (message, where)
            logged.add(message.id or where)
            models.append(message.model)
    contexts.add(_items(state, written))
    for step in contexts.found:
        thought = [
            "reasoning_content" in m for m in step.messages[step.num_given :] if is_answer(m)
        ]
        note(THOUGHTS, sum(thought[:-1]))
    models += [message.model for message, _ in state.values()]
    return Session(contexts, values=texts(models))


def _state(history: Sequence[_Message], where: str) -> _State:
    found = _State()
    for i, message in enumerate(history):
        place = f"{where}[{i}]"
        found[message.id if message.id and message.id not in found else place] = (message, place)
    return found


def _extends(new: _State, old: _State) -> bool:
    """True if a history begins with the messages so far."""
    if not {*old} <= {*new}:
        return False
    kept = {key: value for key, value in new.items() if key in old}
    return _chat(_items(kept, ())) == _chat(_items(old, ()))


def _chat(items: Sequence[Item]) -> list[Message]:
    return [message for item in items for message in item.messages]


def _items(state: _State, written: Collection[str]) -> list[Item]:
    answered = {
        part.function_response.id
        for message, _ in state.values()
        if message.type == "user"
        for part in parts_in(message.content)
        if part.function_response is not None
    }
    items: list[Item] = []
    for key, (message, where) in state.items():
        if message.type not in _SPOKEN:
            continue
        made = (
            [*_answer(message, answered, where)]
            if message.type != "user"
            else gemini.messages_of("user", message.content, where)
        )
        items.append(Item(key, made, where, is_given=key in written))
    return items


def _answer(logged: _Message, answered: set[str | None], where: str) -> Iterator[Message]:
    content = logged.content if logged.parts is None else logged.parts
    made = gemini.messages_of("assistant", content, where)
    thoughts = [joined(t.subject or "", t.description or "") for t in logged.thoughts or ()]
    if any(thoughts) and all("reasoning_content" not in message for message in made):
        made[0]["reasoning_content"] = "\n".join(thoughts)
    called = {c.get("id") for message in made for c in message.get("tool_calls", ())}
    calls = [(call.id or f"call_{i}", call) for i, call in enumerate(logged.tool_calls or ())]
    more = [
        tool_call(name, call.name, json_text(call.args, where))
        for name, call in calls
        if name not in called
    ]
    if more:
        made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), *more]
    yield from made
    for name, call in calls:
        if call.result is not None and name not in answered:
            text = _text(call.result, where)
            yield {"role": "tool", "tool_call_id": name, "content": text}


def _text(parts: Parts, where: str) -> str | list[Message]:
    """Return the text of all parts, or a list of parts if one is neither text nor a tool result."""
    return joined_content(_part_content(part, where) for part in parts_in(parts))


def _part_content(part: Part, where: str) -> str | list[Message]:
    if part.function_response is not None:
        return result_content(part.function_response, where)
    data = part.inline_data or part.file_data
    if data is not None or part.text is None:
        return [part_of_data(data or {}) or {"type": "data"}]
    return part.text


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    head = next((r for r in records if isinstance(r.get("sessionId"), str)), {})
    session = head.get("sessionId") or str(path)
    project = head.get("projectHash")
    labels = {"project": project} if isinstance(project, str) and project else {}
    parent = path.parent.name if head.get("kind") == "subagent" else None
    return Names(session, parent, path.stem, labels)


def _is_session(record: Mapping[str, Any]) -> bool:
    if not isinstance(record.get("sessionId"), str):
        return False
    messages = record.get("messages")
    if isinstance(messages, list):
        kinds = [m.get("type") if isinstance(m, dict) else None for m in messages]
        return all(isinstance(kind, str) for kind in kinds)
    return isinstance(record.get("projectHash"), str) and isinstance(record.get("startTime"), str)


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_session,
    marks=(b'"sessionId"',),
    has_documents=True,
).adapter("sessions of Gemini CLI (JSON Lines, or one JSON document each); text only")
