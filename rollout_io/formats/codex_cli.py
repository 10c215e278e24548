"""The `codex_cli` format: rollout files of Codex CLI (rollout-*.jsonl), one session per file.

    {"timestamp": "...", "type": "session_meta", "payload": {"id": "...", ...}}
    {"timestamp": "...", "type": "response_item", "payload": {"type": "message", ...}}

A file is a run, with the files of its sub-agents (`parent_thread_id`); its `response_item` lines are the conversation, and `compacted` begins a new
context (`codex_cli_thread`). `token_usage_record` lines end a model call. `event_msg` lines repeat the
conversation for display; only rollbacks are read from them. A fork (`forked_from_id`) begins with the
lines of another session. The log has no reward and no token ids; encrypted reasoning is not readable.
Of the tool definitions, it has only those that a client added (`dynamic_tools`, `additional_tools`).

A `developer` message becomes a `system` message before the first
answer, and a `user` message after it, as chat templates require.

If an item cannot be read (its type is unknown, or it is encrypted, such as the summary of a
compaction), the answers that depend on it are left out and noted: all that follow it in its
context, and the answer that it belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

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
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.codex_cli_thread import Thread
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.detect import has_record
from rollout_io.formats.dialects.responses import ITEMS, Item, tools
from rollout_io.formats.parsing.content import NO_JSON, Message, canonical_json
from rollout_io.formats.parsing.forks import COPIED, copied_answers, digest, run_of
from rollout_io.formats.parsing.jsonl import decode_line, refuse_not_utf8
from rollout_io.formats.parsing.lines import incomplete, lines_of, read_record
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import SUMMARIES
from schemas.errors import InputError, RolloutError

_Kind = Literal[
    "session_meta",
    "turn_context",
    "response_item",
    "event_msg",
    "compacted",
    "world_state",
    "token_usage_record",
]
_GROUPS = "inferred: each session is a separate instance"
LOST = "answers after items that are encrypted or of an unknown type: left out"
EDITED = "sessions with the model's own instructions, of which Codex may have sent only a part: it "
EDITED += "leaves out sections about tools that are off, which the log does not tell"
_ROLLED_BACK = "thread_rolled_back"


CONTENTS = Contents(
    kind="type",
    reads={
        "*": "timestamp",
        "session_meta": "payload.id payload.session_id payload.forked_from_id payload.cwd "
        "payload.parent_thread_id payload.agent_nickname payload.agent_role "
        "payload.originator payload.cli_version payload.base_instructions.text payload.dynamic_tools",
        "turn_context": "payload.model",
        "compacted": "payload.message payload.compaction_response_id",
        "token_usage_record": "payload.response_id",
    },
    leaves={
        "facts about the session": "session_meta/payload.timestamp session_meta/payload.source "
        "session_meta/payload.model_provider session_meta/payload.git "
        "session_meta/payload.instructions session_meta/payload.memory_mode "
        "session_meta/payload.base_instructions.provenance session_meta/payload.history_mode "
        "session_meta/payload.runtime_workspace_roots session_meta/payload.thread_source "
        "session_meta/payload.context_window session_meta/payload.agent_path "
        "session_meta/payload.multi_agent_version session_meta/payload.account_scoped",
        "settings, which the harness sends as messages": "turn_context/payload world_state",
        "facts about items and calls": "response_item/metadata token_usage_record/payload",
        "for resuming": "compacted/payload.replacement_history_metadata "
        "compacted/payload.resume_metadata compacted/payload.retained_context "
        "compacted/payload.latest_token_usage_record compacted/payload.first_window_id "
        "compacted/payload.window_id compacted/payload.previous_window_id",
        "repeats the conversation for display; only rollbacks are read": "event_msg",
    },
    inner={"response_item/payload": ITEMS, "compacted/payload.replacement_history": ITEMS},
)


class _Head(msgspec.Struct, gc=False):
    type: str
    payload: msgspec.Raw = NO_JSON


class _Shape(msgspec.Struct, gc=False):
    type: _Kind
    payload: dict[str, msgspec.Raw]
    timestamp: str


class _Provenance(msgspec.Struct, gc=False):
    type: str | None = None


class _Instructions(msgspec.Struct, gc=False):
    text: str | None = None
    provenance: _Provenance | None = None


class _Meta(msgspec.Struct, gc=False):
    id: str | None = None
    forked_from: str | None = msgspec.field(name="forked_from_id", default=None)
    parent: str | None = msgspec.field(name="parent_thread_id", default=None)
    nickname: str | None = msgspec.field(name="agent_nickname", default=None)
    agent_role: str | None = None
    cwd: str | None = None
    originator: str | None = None
    cli_version: str | None = None
    base_instructions: _Instructions | str | None = None
    tools: Any = msgspec.field(name="dynamic_tools", default=None)


class _Turn(msgspec.Struct, gc=False):
    model: str | None = None


class _Usage(msgspec.Struct, gc=False):
    response: str | None = msgspec.field(name="response_id", default=None)


class _Compacted(msgspec.Struct, gc=False):
    response: str | None = msgspec.field(name="compaction_response_id", default=None)
    message: str | None = None
    replacement_history: list[Item] | None = None


class _Event(msgspec.Struct, gc=False):
    type: str | None = None
    num_turns: int | None = None


_SHAPE_DECODER = msgspec.json.Decoder(_Shape)
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_META_DECODER = msgspec.json.Decoder(_Meta)
_ITEM_DECODER = msgspec.json.Decoder(Item)
_USAGE_DECODER = msgspec.json.Decoder(_Usage)
_TURN_DECODER = msgspec.json.Decoder(_Turn)
_COMPACTED_DECODER = msgspec.json.Decoder(_Compacted)
_EVENT_DECODER = msgspec.json.Decoder(_Event)
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Session:
    """A file.

    Attributes:
        forked_from: Session whose lines the file begins with; None if it is not a fork.
        parent: Session that started this one as a sub-agent; None if it is none.
        items: Digest of each item of the conversation, by the index of its place.
    """

    places: list[Place] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    forked_from: str | None = None
    parent: str | None = None
    items: dict[int, bytes] = field(default_factory=dict)

    def add(self, place: Place, head: _Head) -> None:
        """Add a line."""
        if head.type in {"response_item", "compacted"}:
            self.items[len(self.places)] = _digest_of(head.payload)
        elif head.type == "session_meta" and not self.labels:
            meta = decode_line(_META_DECODER, bytes(head.payload), place.where)
            self.labels, self.forked_from = _labels(meta), meta.forked_from
            self.parent = meta.parent
        self.places.append(place)

    def answers(self, family: str) -> dict[int, list[bytes]]:
        """Return a digest of each item and of all items before it, by index."""
        found, before = dict[int, list[bytes]](), family
        for i, item in self.items.items():
            before = digest(before, item.hex()).hex()
            found[i] = [bytes.fromhex(before)]
        return found


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per session, with the files of its sub-agents; a damaged file is rejected.

    The items with which a fork and its origin begin are copies if all items before them are.
    """
    yield About("groups", _GROUPS)
    sessions: dict[str, _Session] = {}
    for given in inputs:
        session = _Session()
        yield from _find_session(given, progress, session)
        if session.places:
            sessions[given.name] = session
    origins = {s.labels.get("session"): s.forked_from for s in sessions.values()}
    families = {n: _family(s.labels.get("session", n), origins) for n, s in sessions.items()}
    forked = {families[name] for name, session in sessions.items() if session.forked_from}
    answers = {
        name: session.answers(families[name]) if families[name] in forked else {}
        for name, session in sessions.items()
    }
    copies = copied_answers(dict(sorted(answers.items(), key=lambda each: len(each[1]))))
    names = {session.labels.get("session", name): name for name, session in sessions.items()}
    roots = {name: _root_of(name, sessions, names) for name in sessions}
    for name, session in sessions.items():
        if roots[name] != name:
            continue
        places, own, copied = list[Place](), dict[int, list[bytes]](), dict[int, str]()
        for each in (name, *(n for n, root in roots.items() if root == name != n)):
            start = len(places)
            places += sessions[each].places
            own |= {start + i: digests for i, digests in answers[each].items()}
            copied |= {
                start + i: sessions[keeper].labels.get("session", keeper)
                for i, keeper in copies[each].items()
            }
        instance = session.labels.get("session", name)
        yield from run_of(instance, places, session.labels, own, copied)


def _root_of(name: str, sessions: Mapping[str, _Session], names: Mapping[str, str]) -> str:
    """Return the session that a sub-agent belongs to: the first of a chain, or itself."""
    root, seen = name, {name}
    while (parent := names.get(sessions[root].parent or "")) is not None:
        if parent in seen:
            return name
        seen.add(parent)
        root = parent
    return root


def _digest_of(payload: msgspec.Raw) -> bytes:
    """Return a digest of an item without its id, which a fork may change."""
    try:
        fields = _FIELDS_DECODER.decode(payload)
    except msgspec.MsgspecError:
        return digest(repr(bytes(payload)))  # the reader reports the damage
    texts = (f"{name} {canonical_json(bytes(value))}" for name, value in fields.items())
    return digest(*sorted(text for text in texts if not text.startswith("id ")))


def _family(session: str, origins: Mapping[str | None, str | None]) -> str:
    """Return the first session of a chain of forks."""
    seen: set[str] = set()
    while session not in seen and (origin := origins.get(session)) is not None:
        seen.add(session)
        session = origin
    return min(seen, default=session) if session in seen else session


def _find_session(given: Input, progress: Progress, session: _Session) -> Iterator[Rejected]:
    damage: RolloutError | None = None
    for place, content in lines_of([given], progress):
        try:
            refuse_not_utf8(content, place.where)
            head = decode_line(_HEAD_DECODER, content, place.where)
            session.add(place, head)
        except RolloutError as error:
            damage = damage or error
            yield Rejected(place, error)
    if damage is not None:
        yield from incomplete(session.places, damage)
        session.places = []


def _labels(meta: _Meta) -> dict[str, str]:
    found = {
        "session": meta.id,
        "cwd": meta.cwd,
        "originator": meta.originator,
        "version": meta.cli_version,
    }
    return {name: value for name, value in found.items() if value}


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session and its sub-agents as text.

    Each `source` is the location of the last item.

    Raises:
        InputError: `record_type`: a line is damaged; `message`: every answer depends on an item that
            is encrypted or of an unknown type; `no_calls`: there is no model response.
    """
    texts, steps = dict[str, str](), list[Conversation]()
    unread: InputError | None = None
    files = groupby(enumerate(run.places), key=lambda each: each[1].path)
    for number, (_, group) in enumerate(files):
        found, values, agent, lost = _read_file([*group], run.copied)
        for step in found:
            step.agent = agent if number else None
        unread = unread or lost
        texts = texts or values
        steps += found
    if not steps and unread is not None:
        raise unread
    if not steps:
        raise InputError("no_calls", run.places[0].where, "the session has no model response")
    return Trajectory(steps=steps, user_values=texts)


def _read_file(
    places: Sequence[tuple[int, Place]], copied: Collection[int]
) -> tuple[list[Conversation], dict[str, str], str | None, InputError | None]:
    """Return the contexts of a file, its model, its agent, and why an answer cannot be read."""
    thread, texts, agent = Thread(), dict[str, str](), None
    last_copy = max((i for i, _ in places if i in copied), default=-1)
    num_copied, num_summaries = 0, 0
    defined: list[Message] | None = None
    edited = False
    for i, place in places:
        content = read_record(place)
        refuse_not_utf8(content, place.where)
        line = decode_line(_HEAD_DECODER, content, place.where)
        account(CONTENTS, content)
        payload, where = bytes(line.payload), f"{place.where}, payload"
        if line.type == "response_item":
            thread.add(decode_line(_ITEM_DECODER, payload, where), where)
        elif line.type == "token_usage_record":
            thread.end_call(decode_line(_USAGE_DECODER, payload, where).response)
        elif line.type == "compacted":
            compacted = decode_line(_COMPACTED_DECODER, payload, where)
            num_summaries += thread.drop_call(compacted.response)
            thread.compact(compacted.message, compacted.replacement_history, where)
        elif line.type == "session_meta":
            meta = decode_line(_META_DECODER, payload, where)
            thread.instruct(_instructions(meta))
            edited |= _are_edited(meta)
            agent = meta.nickname or meta.agent_role or meta.id or agent
            defined = tools(meta.tools) or defined
        elif line.type == "turn_context":
            model = decode_line(_TURN_DECODER, payload, where).model
            texts |= {"model": model} if model else {}
        elif line.type == "event_msg":
            event = decode_line(_EVENT_DECODER, payload, where)
            if event.type == _ROLLED_BACK:
                thread.roll_back(event.num_turns or 0)
        if i == last_copy:
            num_copied = thread.give()
    steps = [
        Conversation(source=c.where, messages=c.known, tools=defined, num_given=c.num_given)
        for c in thread.answered()
    ]
    note(SUMMARIES, num_summaries)
    note(EDITED, int(edited))
    note(LOST, thread.num_lost)
    note(COPIED, num_copied)
    return steps, texts, agent, thread.unread


def _are_edited(meta: _Meta) -> bool:
    found = meta.base_instructions
    kind = found.provenance if isinstance(found, _Instructions) else None
    return kind is not None and kind.type == "model"


def _instructions(meta: _Meta) -> str | None:
    found = meta.base_instructions
    return found.text if isinstance(found, _Instructions) else found


def recognizes(path: Path) -> bool:
    """True if a file has lines of a Codex rollout."""
    return has_record(path, _SHAPE_DECODER)


ADAPTER = Adapter(
    summary="sessions of Codex CLI (rollout-*.jsonl); text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    noun="session",
    is_agent=True,
    line=_Shape,
    contents=CONTENTS,
)
