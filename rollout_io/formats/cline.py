"""The `cline` format: tasks of Cline and Roo Code, one JSON document each.

    tasks/ID/api_conversation_history.json
    [{"role": "user", "content": [{"type": "text", "text": "..."}], "ts": 1795000000000},
     {"role": "assistant", "content": [...], "ts": ..., "modelInfo": {...}}]

    sessions/ID/ID.messages.json
    {"version": 1, "sessionId": "...", "system_prompt": "...", "messages": [{"id": "...", ...}]}

    {"version": 2, "messages": [{"role": "assistant", "content": [{"type": "tool-call", ...}], "ts": ...}]}

Messages are Anthropic's; in Roo's documents of version 2, Vercel's AI SDK's. A task is a run. Roo keeps what it no longer sends: a summary (`isSummary`),
or a mark of a truncation, begins a context without the messages that name it as their parent. Lists
have no system prompt; no log has tool definitions, a reward or token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.parsing.lines import Record, read_record
from rollout_io.formats.parsing.messages import MESSAGE, PARTS, read_messages
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.records import decode_record, find_records, first_values
from rollout_io.formats.parsing.sessions import GROUPS, SUMMARIES, Contexts, Item, texts
from schemas.errors import InputError

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
CONTENTS = Contents(
    reads={"": "version sessionId system_prompt"},
    leaves={"facts about a session": "updated_at agent taskType"},
    inner={"messages": _MESSAGE},
)


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


class _Document(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]
    system_prompt: str | None = None
    version: int | None = None
    session_id: str | None = msgspec.field(default=None, name="sessionId")

    @property
    def is_roo(self) -> bool:
        """True for version 2 of Roo's documents; sessions of Cline have an id."""
        return self.version == _ROO_VERSION and self.session_id is None


_DOCUMENT = msgspec.json.Decoder(_Document | list[msgspec.Raw])
_MARKS = msgspec.json.Decoder(_Marks)


def find_tasks(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per document, named by the session or by the directory of the task."""
    yield About("groups", GROUPS)

    def find(record: Record) -> Iterator[Found]:
        value: Any = decode_record(record)
        path = Path(record.place.where)
        stated = value.get("sessionId") if isinstance(value, Mapping) else None
        name = stated if isinstance(stated, str) and stated else path.parent.name or path.stem
        places = [record.place]
        yield Run(instance_id=name, repetition_id=0, places=places, labels={"session": name})

    yield from find_records(inputs, progress, find)


def read_task(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a task.

    Raises:
        InputError: `record_type`, `message`: a message is damaged; `no_calls`: there is no answer.
    """
    place = run.places[0]
    found = decode_record(Record(place, read_record(place)), _DOCUMENT)
    document = _Document(found) if isinstance(found, list) else found
    raw = msgspec.json.encode(document) if isinstance(found, list) else read_record(place)
    account(CONTENTS, raw)
    contexts = Contexts(system=document.system_prompt)
    kept: list[tuple[_Marks, Item]] = []
    models: list[Any] = []
    thought = ""
    for number, message in enumerate(document.messages):
        where = f"{place.where}, messages[{number}]"
        marks = decode_record(Record(place, bytes(message)), _MARKS)
        if document.is_roo:
            fields: Any = decode_record(Record(place, bytes(message)))
            of_kind = responses if marks.is_reasoning else frameworks
            made = of_kind.messages([fields], where)
        else:
            made = read_messages([message], where)
        if document.is_roo and marks.is_reasoning:
            thought += "".join(each.get("reasoning_content", "") for each in made)
            continue
        if thought and made and made[0]["role"] == "assistant":
            made[0].setdefault("reasoning_content", thought)
            thought = ""
        item = Item(where, made, where, is_given=bool(marks.is_summary))
        replaced = marks.replaces
        if replaced is not None:
            note(SUMMARIES, bool(marks.is_summary))
            contexts.add([each for _, each in kept])
            parents = [(m.condense_parent, m.truncation_parent) for m, _ in kept]
            kept = [
                k for k, p in zip(kept, parents, strict=True) if not replaced or replaced not in p
            ]
        kept.append((marks, item))
        models += [(marks.model_info or {}).get(name) for name in ("id", "modelId")]
    note("reasoning without an answer, left out", bool(thought))
    contexts.add([each for _, each in kept])
    if not contexts.found:
        raise InputError("no_calls", place.where, "the task has no model response")
    return Trajectory(steps=contexts.found, user_values=texts(models))


def recognizes(path: Path) -> bool:
    """True for a document of a session or of Roo, or a list of messages with Cline's times."""
    values = first_values(path) if path.is_file() else []
    if len(values) != 1:
        return False
    first = values[0]
    if isinstance(first, list):
        return len(first) > 0 and all(map(_is_message, first))
    if not isinstance(first, dict) or not isinstance(first.get("version"), int):
        return False
    if isinstance(first.get("sessionId"), str):
        return _has_messages(first, "role", "content")
    return first["version"] == _ROO_VERSION and _has_messages(first, "ts")


def _has_messages(document: Mapping[str, Any], *names: str) -> bool:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(m, dict) and set(names) <= m.keys() for m in messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content", "ts"} <= value.keys()


ADAPTER = Adapter(
    summary="tasks of Cline and Roo Code, one JSON document each; text only",
    recognizes=recognizes,
    find=find_tasks,
    read=read_task,
    is_text=True,
    noun="task",
    is_agent=True,
    contents=CONTENTS,
)
