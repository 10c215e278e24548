"""The `cline` format: tasks of Cline and Roo Code, one JSON document each.

    tasks/ID/api_conversation_history.json
    [{"role": "user", "content": [{"type": "text", "text": "..."}], "ts": 1795000000000},
     {"role": "assistant", "content": [...], "ts": ..., "modelInfo": {...}}]

    sessions/ID/ID.messages.json
    {"version": 1, "sessionId": "...", "system_prompt": "...", "messages": [{"id": "...", ...}]}

    {"version": 2, "messages": [{"role": "assistant", "content": [{"type": "tool-call", ...}], "ts": ...}]}

Messages are Anthropic's; in Roo's documents of version 2, Vercel's AI SDK's. A task is a run, with those of
the sub-agents that it started. The texts of sessions are those that Cline's CLI sends: without the
`user_input` around the user's, with results and files (`file`) as text, and without the middles of long
results. What is only shown to the user (`displayOnly`) is left out. Both programs keep what they no longer
send (Roo Code, `src/core/task/Task.ts`, `src/core/condense/index.ts`, `src/core/context-management/index.ts`
and `mergeConsecutiveApiMessages.ts`; Cline, `ContextManager.ts` until version 3, since then
`sdk/packages/core/src/session/services/message-builder.ts`):

- A summary replaces all before it. Until 2026 it was an answer, sent behind the first message of the
  task, and stood before the last three messages, which were sent behind it.
- The mark of a truncation stands before the first message that it leaves; half of the messages are
  hidden, by pairs, so that as many are left as it hides, or two more.

Files beside a task say more, if they are there:

- `ID.compaction.json`: what is sent in place of the first messages of a session
  (`sdk/packages/core/src/session/models/session-compaction.ts`).
- `context_history.json`: when Cline replaced or left out messages of a list (`ContextManager.ts`, until
  version 3); answers after the first time are lost, because what was left out is not in these files.

Lists have no system prompt; no log has tool definitions, a reward or token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.engines.records import Records, joined
from rollout_io.formats.engines.sessions import GROUPS
from rollout_io.formats.grammar import account, inner, like
from rollout_io.formats.parsing.content import Message, bad_message, raw_of
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.messages import MESSAGE, PARTS, read_messages
from rollout_io.formats.parsing.records import read_record
from rollout_io.formats.requests import Sends

UNCLEAR = (
    "answers near a summary or a truncation, whose context is not in the log: part of the prompt"
)
WRITTEN = "answers that the program wrote or broke off: part of the prompt"
ORPHANS = "results whose calls a summary replaced: left out, as they are not sent"
_NUM_KEPT = 3
"""Messages before a summary that is an answer which are sent behind it."""
_NUM_UNCLEAR = 2
"""A truncation hides half of the messages, rounded down to pairs: two more may have been there."""
_WRITTEN = re.compile(
    r"\[Response interrupted by [^\]]*\]\s*\Z|\AFailure: I did not provide a response\.\Z"
)
_OF_LISTS = Sends({"user": "\n"}, missing="result missing")
_OF_SESSIONS = Sends(missing="Tool execution was interrupted before a result was produced.")


class _Facts(msgspec.Struct, gc=False, rename="camel"):
    """What Cline says about a message: that it is only shown, or that its compaction kept it."""

    display_only: bool | None = None
    compaction: str | None = None


class _Marks(msgspec.Struct, gc=False, rename="camel"):
    """What Roo says about a message that it no longer sends, or that takes the place of others."""

    role: str | None = None
    type: str | None = None
    is_summary: bool | None = None
    is_truncation_marker: bool | None = None
    truncation_id: str | None = None
    truncation_parent: str | None = None
    model_info: dict[str, Any] | None = None
    metadata: _Facts | None = None
    ts: Any = None

    @property
    def is_reasoning(self) -> bool:
        """True for an item of reasoning of version 2, which precedes its answer."""
        return self.role is None and self.type == "reasoning"

    @property
    def is_mark(self) -> bool:
        return bool(self.is_summary or self.is_truncation_marker)


@dataclass
class _Task:
    """Says the messages of a task in the contexts that Cline and Roo make of them.

    A summary, or the mark of a truncation, may stand before messages that were said before it was
    written: it takes effect behind the last of these.

    Attributes:
        numbers: Number of each message, by its location.
        changes: Numbers of the marks that take effect behind a message, by its number.
        unclear: Numbers of the messages whose context is not known.
        held: Messages of the marks that have not taken effect, and their locations.
    """

    log: Contexts
    marks: Sequence[_Marks]
    numbers: dict[str, int] = field(default_factory=dict)
    changes: dict[int, list[int]] = field(default_factory=dict)
    unclear: set[int] = field(default_factory=set)
    held: dict[int, tuple[list[Message], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = [mark.metadata or _Facts() for mark in self.marks]
        self.unclear |= {number for number, fact in enumerate(facts) if fact.compaction}
        for number, mark in enumerate(self.marks):
            last, num_unclear = number, 0
            if mark.is_summary and mark.role == "assistant":
                if number > 1:
                    last = self._behind(number, _NUM_KEPT)
                else:  # it replaces messages that are not in the log
                    num_unclear = _NUM_KEPT
            elif mark.is_truncation_marker:
                hidden = self._hidden(number)
                last = self._behind(max([number, *hidden]), len(hidden))
                num_unclear = _NUM_UNCLEAR if hidden else 0
            if mark.is_mark:
                self.changes.setdefault(last, []).append(number)
                self.unclear |= {*range(last + 1, self._behind(last, num_unclear) + 1)}

    def _hidden(self, number: int) -> set[int]:
        """Return the numbers of the messages that a truncation removes."""
        name = self.marks[number].truncation_id
        return {i for i, other in enumerate(self.marks) if name and other.truncation_parent == name}

    def _behind(self, number: int, count: int) -> int:
        """Return the number of the message that is so many behind another; marks do not count."""
        behind = [i for i in range(number + 1, len(self.marks)) if not self.marks[i].is_mark]
        return [number, *behind[:count]][-1]

    def say(self, number: int, pieces: list[Message], where: str) -> None:
        """Say a message, or keep a mark until it takes effect, and let those due take it."""
        self.numbers[where] = number
        if self.marks[number].is_mark:
            self.held[number] = pieces, where
        elif pieces:
            last = pieces[-1]
            is_written = last["role"] == "assistant" and _WRITTEN.search(str(last["content"]))
            given = UNCLEAR if number in self.unclear else WRITTEN if is_written else False
            self.log.say(pieces, where, given=given)
        for at in self.changes.get(number, ()):
            self._begin(at)

    def _begin(self, at: int) -> None:
        """Begin the context with a summary, or with the mark of a truncation."""
        mark = self.marks[at]
        path = [(self.numbers.get(node.where, -1), node) for node in self.log.path()]
        if mark.is_summary:
            note(SUMMARIES)
            self.log.sends = self.log.sends._replace(orphans=ORPHANS)
            # Only a summary that is an answer follows the first message.
            is_first = mark.role == "assistant" and path[:1] and path[0][1].role == "user"
            before = [node for _, node in path[:1] if is_first]
            behind = [node for number, node in path if number > at]
        else:
            hidden = self._hidden(at)
            before = [node for number, node in path if number not in hidden and number < at]
            behind = [node for number, node in path if number not in hidden and number > at]
        self.log.replace(before)
        pieces, where = self.held.pop(at)
        # Further messages of the user continue a summary, but not the mark of a truncation.
        self.log.say(pieces, where, given=True, is_alone=not mark.is_summary)
        self.log.keep(behind)


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
        "message": "isSummary isTruncationMarker truncationId truncationParent modelInfo.id "
        "modelInfo.modelId metadata.displayOnly metadata.compaction ts"
    },
    leaves={
        "names of a summary, which replaces all before it": "message/condenseId message/condenseParent",
        "facts about a message": "message/id message/metrics message/modelInfo "
        "message/metadata reasoning/ts reasoning/id",
        "repeats the reasoning, for the API": "message/reasoning_details message/providerOptions",
    },
)
_LEAVES = {
    "facts about a session": "updated_at agent taskType origin.source origin.mode origin.sessionId "
    "origin.version"
}
SHOWN = "messages that are shown to the user only: left out"
UNSENT = "thoughts that are sent again only to models that keep them, before later answers"
CHANGED = "answers after Cline changed or truncated earlier messages: left out"
COMPACTED = "answers before the last compaction: the log does not say whether there was one before"
_CHANGES = "context_history.json"
_UPDATES = msgspec.json.Decoder(
    list[tuple[int, tuple[int, list[tuple[int, list[tuple[float, str, Any, Any]]]]]]]
)
"""Texts in place of a message's: its number and kind, number of the block, and time of each text."""
SHORTENED = (
    "results without their middles: Cline sends 8 000 characters of a text, since CLI 3.0.28"
)
_MAX_RESULT, _MAX_FILE = 8_000, 50_000
_CUT = "\n\n...[truncated {} chars]...\n\n"
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


class _Compaction(msgspec.Struct, gc=False):
    """What is sent in place of the first messages of a session."""

    num_messages: int = msgspec.field(default=0, name="source_message_count")
    messages: list[msgspec.Raw] = []
    system_prompt: str | None = None


_MARKS = msgspec.json.Decoder(_Marks)
_DOCUMENT = msgspec.json.Decoder(_Document)
_COMPACTION = msgspec.json.Decoder(_Compaction)
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
        _say(other, place, main.agent(place.where, name) if i else main)
    return Trajectory(steps=main.steps(), user_values={"model": main.model} if main.model else {})


def _say(document: _Document, place: Place, log: Contexts) -> None:
    log.system = document.system_prompt
    marks = [
        decode_line(_MARKS, bytes(message), f"{place.where}, messages[{number}]")
        for number, message in enumerate(document.messages)
    ]
    log.sends = _OF_LISTS if document.session_id is None else _OF_SESSIONS
    task, thought, changed = _Task(log, marks), "", _changed(document, place)
    compaction = _compaction(document, place)
    for number, message in enumerate(document.messages):
        where, mark = f"{place.where}, messages[{number}]", marks[number]
        fields: dict[str, Any] = decode_line(_ANY, bytes(message), where)
        pieces: list[Message] = []
        if number == compaction.num_messages and compaction.messages:
            note(COMPACTED, sum(other.role == "assistant" for other in marks[:number]))
            _compact(log, compaction, place)
        if mark.metadata and mark.metadata.display_only:
            note(SHOWN)
        elif document.is_roo and mark.is_reasoning:
            items = responses.messages([fields], where)
            thought += "".join(item.get("reasoning_content", "") for item in items)
        elif document.is_roo:
            pieces = frameworks.messages([fields], where)
        else:
            if document.session_id is None and _is_thought(fields):
                log.sends = log.sends._replace(unsent_thoughts=UNSENT)
            sent = message if document.session_id is None else _sent(message, fields)
            pieces = read_messages([sent], where)
        if thought and pieces and pieces[0]["role"] == "assistant":
            pieces[0].setdefault("reasoning_content", thought)
            thought = ""
        if mark.role == "assistant" and isinstance(mark.ts, float | int) and mark.ts > changed:
            changed = inf
            finding = "texts of earlier messages were changed, or left out, before this answer"
            log.lose(bad_message(where, f"{finding} ({_CHANGES})"), where, loss=CHANGED)
        task.say(number, pieces, where)
        for key in ("id", "modelId"):
            log.model = (mark.model_info or {}).get(key) or log.model
    note("reasoning without an answer, left out", bool(thought))


def _compaction(document: _Document, place: Place) -> _Compaction:
    """Return the last compaction of a session, which is in a file beside it."""
    name = f"{document.session_id}.compaction.json"
    path = place.path.parent / name
    # A log's id is no path: one with a slash must not lead anywhere else.
    if document.session_id is None or Path(name).name != name or not path.is_file():
        return _Compaction()
    compaction = decode_document(_COMPACTION, read_input(path), str(path))
    for message in compaction.messages:
        account(_MESSAGE, message, "compaction.messages")
    return compaction


def _compact(log: Contexts, compaction: _Compaction, place: Place) -> None:
    log.replace()
    log.system = compaction.system_prompt or log.system
    for number, message in enumerate(compaction.messages):
        where = f"{place.where}, messages[{number}] of its compaction"
        fields: dict[str, Any] = decode_line(_ANY, bytes(message), where)
        log.say(read_messages([_sent(message, fields)], where), where, given=True)


def _changed(document: _Document, place: Place) -> float:
    """Return the time of the first change of what Cline sends of a list; infinity if there is none."""
    path = place.path.with_name(_CHANGES)
    if document.version is not None or not path.is_file():
        return inf
    history = decode_document(_UPDATES, read_input(path), str(path))
    times = [update[0] for _, (_, blocks) in history for _, updates in blocks for update in updates]
    return min(times, default=inf)


def _is_thought(fields: Mapping[str, Any]) -> bool:
    """True for an answer with thoughts as text, which Roo sends again to few models."""
    content = fields.get("content")
    first = content[0] if isinstance(content, list) and content else None
    return isinstance(first, dict) and first.get("type") == "reasoning" and "text" in first


def _sent(message: msgspec.Raw, fields: dict[str, Any]) -> msgspec.Raw:
    """Return a message of the user, or results of calls, as Cline's CLI sends it."""
    content = fields.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if fields.get("role") != "user" or not isinstance(content, list):
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
        text = _FILE.format(part.get("path"), _shortened(content, _MAX_FILE))
        return {"type": "text", "text": text}
    if kind != "tool_result":
        return part
    shortened = _shortened(content, _MAX_RESULT)
    note(SHORTENED, shortened != content)
    if isinstance(shortened, list) and not like([{"type": str}])(shortened):
        shortened = msgspec.json.encode(shortened).decode()
    return part | {"content": shortened}


def _shortened(value: Any, num_units: int) -> Any:
    """Return a value whose texts lack their middles if they are longer than Cline sends them."""
    if isinstance(value, list):
        return [_shortened(item, num_units) for item in value]
    if isinstance(value, dict) and value.get("type") != "image":
        return {name: _shortened(item, num_units) for name, item in value.items()}
    units = value.encode("utf-16-le") if isinstance(value, str) else b""
    length = len(units) // 2  # as JavaScript counts
    if length <= num_units:
        return value
    num_each, cut, removed = 0, "", length - num_units
    for _ in range(2):  # the length of the mark depends on the number in it
        cut = _CUT.format(removed)
        num_each = (num_units - len(cut)) // 2
        removed = length - 2 * num_each
    return "".join(
        part.decode("utf-16-le", "replace")
        for part in (units[: 2 * num_each], cut.encode("utf-16-le"), units[-2 * num_each :])
    )


def _document(place: Place) -> _Document:
    return decode_document(_DOCUMENT, read_record(place), place.where)


def _names(run: Run) -> tuple[str, str | None]:
    is_list = read_record(run.places[0]).lstrip().startswith(b"[")
    return run.instance_id, None if is_list else _document(run.places[0]).origin.parent


_has_form = like(
    [{"role": object, "content": object, "ts": object}],
    {"version": int, "sessionId": str, "messages": [{"role": object, "content": object}]},
    {"version": _ROO_VERSION, "sessionId": None, "messages": [{"ts": object}]},
)


def _is_task(value: Any) -> bool:
    """True for a document of a session or of Roo, or a list of messages with Cline's times."""
    return _has_form(value) and bool(value["messages"] if isinstance(value, dict) else value)


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
