"""The `cline` format: tasks of Cline and Roo Code, one JSON document each.

    tasks/ID/api_conversation_history.json
    [{"role": "user", "content": [{"type": "text", "text": "..."}], "ts": 1795000000000},
     {"role": "assistant", "content": [...], "ts": ..., "modelInfo": {...}}]

    sessions/ID/ID.messages.json
    {"version": 1, "sessionId": "...", "system_prompt": "...", "messages": [{"id": "...", ...}]}

    {"version": 2, "messages": [{"role": "assistant", "content": [{"type": "tool-call", ...}], "ts": ...}]}

Messages are Anthropic's; in Roo's documents of version 2, Vercel's AI SDK's. A task is a run, with those of
the sub-agents that it started. The texts of sessions are those that Cline's CLI sends: without the
`user_input` around the user's, and with results and files (`file`) as text. What is only shown to the user
(`displayOnly`) is left out. Roo keeps
what it no longer sends: a summary (`isSummary`), or a mark of a truncation, begins a context without the
messages that name it as their parent. Lists have no system prompt; no log has tool definitions, a reward
or token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.engines.records import Records, joined
from rollout_io.formats.engines.sessions import GROUPS
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.content import raw_of
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.messages import MESSAGE, PARTS, read_messages
from rollout_io.formats.parsing.records import read_record

_PARTS = PARTS.plus(
    reads={
        "text": "query result error success",
        "tool-call": "toolCallId toolName input",
        "tool-result": "toolCallId output",
        "image": "image data mediaType",
        "file": "image data mediaType path content",
    },
    leaves={
        "for the provider": "*/providerOptions",
        "repeats the call": "tool-result/toolName tool_result/name",
    },
)
_MESSAGE = MESSAGE.plus(
    inner={"message/content": _PARTS},
    reads={
        "message": "isSummary condenseId condenseParent isTruncationMarker truncationId "
        "truncationParent modelInfo.id modelInfo.modelId metadata.displayOnly"
    },
    leaves={
        "facts about a message": "message/id message/ts message/metrics message/modelInfo "
        "message/metadata reasoning/ts reasoning/id",
        "repeats the reasoning, for the API": "message/reasoning_details message/providerOptions",
    },
)
_LEAVES = {
    "facts about a session": "updated_at agent taskType origin.source origin.mode origin.sessionId "
    "origin.version"
}
SHOWN = "messages that are shown to the user only: left out"


class _Facts(msgspec.Struct, gc=False, rename="camel"):
    display_only: bool | None = None


class _Marks(msgspec.Struct, gc=False, rename="camel"):
    """What Roo says about a message that it no longer sends, or that takes the place of others."""

    role: str | None = None
    type: str | None = None
    is_summary: bool | None = None
    condense_id: str | None = None
    condense_parent: str | None = None
    is_truncation_marker: bool | None = None
    truncation_id: str | None = None
    truncation_parent: str | None = None
    model_info: dict[str, Any] | None = None
    metadata: _Facts | None = None

    @property
    def is_shown_only(self) -> bool:
        """True for a message that the program only shows, such as an error in place of an answer."""
        return self.metadata is not None and bool(self.metadata.display_only)

    @property
    def is_reasoning(self) -> bool:
        """True for an item of reasoning of version 2, which precedes its answer."""
        return self.role is None and self.type == "reasoning"

    @property
    def replaces(self) -> str | None:
        """Name of the messages that it takes the place of; empty if they are not in the log."""
        if self.is_summary:
            return self.condense_id or ""
        return (self.truncation_id or "") if self.is_truncation_marker else None


_ROO_VERSION = 2


class _Origin(msgspec.Struct, gc=False):
    parent: str | None = msgspec.field(default=None, name="parentThreadId")
    agent: str | None = msgspec.field(default=None, name="subagent")


class _Document(msgspec.Struct, gc=False):
    messages: Annotated[list[msgspec.Raw], inner(_MESSAGE)]
    system_prompt: str | None = None
    version: int | None = None
    session_id: str | None = msgspec.field(default=None, name="sessionId")
    origin: _Origin = msgspec.field(default_factory=_Origin)

    @property
    def is_roo(self) -> bool:
        """True for version 2 of Roo's documents; sessions of Cline have an id."""
        return self.version == _ROO_VERSION and self.session_id is None


_MARKS = msgspec.json.Decoder(_Marks)
_DOCUMENT = msgspec.json.Decoder(_Document)
_ANY = msgspec.json.Decoder()
_TYPED = re.compile(r'<user_input mode="[^"]*">(.*)</user_input>', re.DOTALL)
_FILE = '<file_content path="{}">\n{}\n</file_content>'


def run_of(document: _Document, place: Place) -> Run:
    """Return the run of a document, named by its session or by the directory of the task."""
    path = Path(place.where)
    name = document.session_id or path.parent.name or path.stem
    return Run(instance_id=name, repetition_id=0, places=[place], labels={"session": name})


def read(document: _Document, run: Run, _: Options) -> Trajectory:
    """Read the contexts of a task, and of its sub-agents."""
    main = Contexts()
    for i, place in enumerate(run.places):
        other = _document(place) if i else document
        name = other.origin.agent or place.where
        _say(other, place.where, main.agent(place.where, name) if i else main)
    return Trajectory(steps=main.steps(), user_values={"model": main.model} if main.model else {})


def _say(document: _Document, path: str, log: Contexts) -> None:
    log.system = document.system_prompt
    marks_of: dict[str, _Marks] = {}
    thought = ""
    for number, message in enumerate(document.messages):
        where = f"{path}, messages[{number}]"
        marks = decode_line(_MARKS, bytes(message), where)
        if marks.is_shown_only:
            note(SHOWN)
            continue
        if not document.is_roo:
            is_typed = document.session_id is not None and marks.role == "user"
            pieces = read_messages([_sent(message, where) if is_typed else message], where)
        elif not marks.is_reasoning:
            pieces = frameworks.messages([decode_line(_ANY, bytes(message), where)], where)
        else:
            pieces = responses.messages([decode_line(_ANY, bytes(message), where)], where)
            thought += "".join(piece.get("reasoning_content", "") for piece in pieces)
            continue
        if thought and pieces and pieces[0]["role"] == "assistant":
            pieces[0].setdefault("reasoning_content", thought)
            thought = ""
        if (name := marks.replaces) is not None:
            note(SUMMARIES, bool(marks.is_summary))
            of = [(node, marks_of[node.key]) for node in log.path()]
            log.replace(
                node
                for node, other in of
                if not name or name not in (other.condense_parent, other.truncation_parent)
            )
        marks_of[where] = marks
        log.say(pieces, where, given=bool(marks.is_summary))
        for key in ("id", "modelId"):
            log.model = (marks.model_info or {}).get(key) or log.model
    note("reasoning without an answer, left out", bool(thought))


def _sent(message: msgspec.Raw, where: str) -> msgspec.Raw:
    """Return a message of the user, or results of calls, as Cline's CLI sends it."""
    fields: dict[str, Any] = decode_line(_ANY, bytes(message), where)
    content = fields.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return message
    return raw_of(fields | {"content": [*map(_sent_part, content)]})


def _sent_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kind, text, content = part.get("type"), part.get("text"), part.get("content")
    if kind == "text" and isinstance(text, str):
        typed = _TYPED.fullmatch(text)
        return part if typed is None else part | {"text": typed[1]}
    if kind == "file" and isinstance(content, str):
        return {"type": "text", "text": _FILE.format(part.get("path"), content)}
    if kind == "tool_result" and isinstance(content, list) and not all(map(_is_part, content)):
        return part | {"content": msgspec.json.encode(content).decode()}
    return part


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _document(place: Place) -> _Document:
    return decode_document(_DOCUMENT, read_record(place), place.where)


def _names(run: Run) -> tuple[str, str | None]:
    content = read_record(run.places[0])
    is_list = content.lstrip().startswith(b"[")
    return run.instance_id, None if is_list else _document(run.places[0]).origin.parent


def _is_task(value: Any) -> bool:
    """True for a document of a session or of Roo, or a list of messages with Cline's times."""
    if isinstance(value, list):
        return len(value) > 0 and all(map(_is_message, value))
    if not isinstance(value, dict) or not isinstance(value.get("version"), int):
        return False
    if isinstance(value.get("sessionId"), str):
        return _has_messages(value, "role", "content")
    return value["version"] == _ROO_VERSION and _has_messages(value, "ts")


def _has_messages(document: Mapping[str, Any], *names: str) -> bool:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(m, dict) and set(names) <= m.keys() for m in messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content", "ts"} <= value.keys()


ADAPTER = Records(
    records={"": _Document},
    leaves=_LEAVES,
    bare="messages",
    run=run_of,
    read=read,
    is_record=_is_task,
    groups=GROUPS,
    finish=lambda items: joined(items, _names),
).adapter(
    "tasks of Cline and Roo Code, one JSON document each; text only", noun="task", is_agent=True
)
