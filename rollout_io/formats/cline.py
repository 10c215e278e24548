"""The `cline` format: tasks of Cline and Roo Code, one JSON document each.

    tasks/ID/api_conversation_history.json
    [{"role": "user", "content": [{"type": "text", "text": "..."}], "ts": 1795000000000},
     {"role": "assistant", "content": [...], "ts": ..., "modelInfo": {...}}]

    sessions/ID/ID.messages.json
    {"version": 1, "sessionId": "...", "system_prompt": "...", "messages": [{"id": "...", ...}]}

    {"version": 2, "messages": [{"role": "assistant", "content": [{"type": "tool-call", ...}], "ts": ...}]}

Messages are Anthropic's; in Roo's documents of version 2, Vercel's AI SDK's. A task is a run. Roo keeps
what it no longer sends: a summary (`isSummary`), or a mark of a truncation, begins a context without the
messages that name it as their parent. Lists have no system prompt; no log has tool definitions, a reward
or token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.engines.records import Records
from rollout_io.formats.engines.sessions import GROUPS
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, PARTS, read_messages
from rollout_io.formats.parsing.notes import note

_PARTS = PARTS.plus(
    reads={
        "tool-call": "toolCallId toolName input",
        "tool-result": "toolCallId output",
        **dict.fromkeys(("image", "file"), "image data mediaType"),
    },
    leaves={"for the provider": "*/providerOptions", "repeats the call": "tool-result/toolName"},
)
_MESSAGE = MESSAGE.plus(
    inner={"message/content": _PARTS},
    reads={
        "message": "isSummary condenseId condenseParent isTruncationMarker truncationId "
        "truncationParent modelInfo.id modelInfo.modelId"
    },
    leaves={
        "facts about a message": "message/id message/ts message/metrics message/modelInfo "
        "message/metadata reasoning/ts reasoning/id",
        "repeats the reasoning, for the API": "message/reasoning_details message/providerOptions",
    },
)
_LEAVES = {"facts about a session": "updated_at agent taskType"}


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


class Document(msgspec.Struct, gc=False):
    """A task."""

    messages: Annotated[list[msgspec.Raw], inner(_MESSAGE)]
    system_prompt: str | None = None
    version: int | None = None
    session_id: str | None = msgspec.field(default=None, name="sessionId")

    @property
    def is_roo(self) -> bool:
        """True for version 2 of Roo's documents; sessions of Cline have an id."""
        return self.version == _ROO_VERSION and self.session_id is None


_MARKS = msgspec.json.Decoder(_Marks)
_ANY = msgspec.json.Decoder()


def run_of(document: Document, place: Place) -> Run:
    """Return the run of a document, named by its session or by the directory of the task."""
    path = Path(place.where)
    name = document.session_id or path.parent.name or path.stem
    return Run(instance_id=name, repetition_id=0, places=[place], labels={"session": name})


def read(document: Document, run: Run, _: Options) -> Trajectory:
    """Read the contexts of a task."""
    log = Contexts(system=document.system_prompt)
    marks_of: dict[str, _Marks] = {}
    thought = ""
    for number, message in enumerate(document.messages):
        where = f"{run.places[0].where}, messages[{number}]"
        marks = decode_line(_MARKS, bytes(message), where)
        if not document.is_roo:
            said = read_messages([message], where)
        elif not marks.is_reasoning:
            said = frameworks.messages([decode_line(_ANY, bytes(message), where)], where)
        else:
            said = responses.messages([decode_line(_ANY, bytes(message), where)], where)
            thought += "".join(each.get("reasoning_content", "") for each in said)
            continue
        if thought and said and said[0]["role"] == "assistant":
            said[0].setdefault("reasoning_content", thought)
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
        log.say(said, where, given=bool(marks.is_summary))
        for key in ("id", "modelId"):
            log.model = (marks.model_info or {}).get(key) or log.model
    note("reasoning without an answer, left out", bool(thought))
    return Trajectory(steps=log.steps(), user_values={"model": log.model} if log.model else {})


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
    records={"": Document},
    leaves=_LEAVES,
    bare="messages",
    run=run_of,
    read=read,
    is_record=_is_task,
    groups=GROUPS,
).adapter(
    "tasks of Cline and Roo Code, one JSON document each; text only", noun="task", is_agent=True
)
