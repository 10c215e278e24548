"""The `pi` and `openclaw` formats: sessions of Pi and of OpenClaw, which is built on it; OpenClaw's telemetry.

Records form a tree. A compaction begins a context with the summary and the messages that were kept.
A call without a result, of an interrupted turn, is sent with an empty one. A summary of another branch and a
message of an extension are messages of the user. Sessions of version 1 have no ids: each record
follows the line before.

A session is a run; a fork begins with records of another session, whose answers are trained on in one
of them. A run failed if its last answer did. The log has no reward and no token ids; since 1.6, it has the
system prompt and the tool definitions, as system messages whose sections and tools add up (`dialects.pi`).

The format `openclaw` is telemetry with messages (`telemetry.jsonl`). A file is a run: each session key is
an agent. The messages of each `agent.end` are those that the agent has at that time; what an earlier one
has too is part of the prompt. The run failed if the last `agent.end` of the main agent says so. This log
has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts, Item
from rollout_io.formats.dialects import pi
from rollout_io.formats.dialects.pi import PiMessage
from rollout_io.formats.engines.runs import digest
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import inner, like
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.requests import Sends

EXTENDED = (
    "messages of extensions: what an extension changes when a prompt is sent is not in the log"
)
_SENDS = Sends(missing="No result provided")
_OF_CHAT = _SENDS._replace(
    media_text="Attached image(s) from tool result:", textless="(see attached image)"
)
_LEAVES = {
    "facts about the session": "session/version session/timestamp session/parentSession "
    "session/provider session/modelId session/thinkingLevel",
    "facts about a record": "*/timestamp",
    "settings of the harness": "thinking_level_change model_change/provider leaf",
    "state of extensions and of the screen": "custom label session_info",
    "why a record was edited": "context_edit/reason context_edit/source",
    "details for display": "compaction/usage compaction/details compaction/fromHook compaction/tokensBefore "
    "compaction/firstKeptEntryIndex branch_summary/details branch_summary/fromHook "
    "branch_summary/fromId custom_message/customType custom_message/display custom_message/details",
}


class Record(msgspec.Struct, gc=False, rename="camel"):
    """A record of the tree; the model does not see those without a struct of their own."""

    id: str | None = None
    parent_id: str | None = None


class Head(Record, gc=False):
    """The start of a file."""

    cwd: str | None = None


class _Spoken(Record, gc=False):
    message: Annotated[msgspec.Raw, inner(pi.MESSAGE)] = NO_JSON


class _Custom(Record, gc=False):
    content: Annotated[msgspec.Raw, inner(pi.BLOCKS)] = NO_JSON


class Edit(Record, gc=False, rename="camel"):
    """What stands in the place of another record, or that it is no longer sent."""

    target_id: str | None = None
    replacement: msgspec.Raw = NO_JSON


class BranchSummary(Record, gc=False):
    """What another branch did."""

    summary: str | None = None


class _Compaction(Record, gc=False, rename="camel"):
    summary: str | None = None
    system_message: Annotated[PiMessage | None, inner(pi.MESSAGE)] = None
    first_kept_entry_id: str | None = None


class _ModelChange(Record, gc=False, rename="camel"):
    model_id: str | None = None


_MESSAGE = msgspec.json.Decoder(PiMessage)
_SPOKEN = msgspec.json.Decoder(_Spoken)


def identity(kind: str, fields: bytes) -> str | None:
    """Return the id, time and message of an answer, which a fork copies."""
    if kind != "message":
        return None
    line = _SPOKEN.decode(fields)
    message = _MESSAGE.decode(line.message)
    is_answer = message.role == "assistant" and not message.failure
    return f"{line.id} {bytes(line.message)!r}" if is_answer else None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the tree of a session."""
    log.sends = _SENDS
    heads: dict[str, PiMessage] = {}  # by the name of the record, which its copies have too
    for where, _, record in lines:
        if not isinstance(record, Record):
            continue
        if record.id:
            log.follow(record.parent_id)
        if heads:
            log.system, log.tools = pi.head_of([heads[n.key] for n in log.path() if n.key in heads])
        key = record.id if record.id and log.find(record.id) is None else where
        if isinstance(record, _Spoken | _Custom):
            message = _message(record, where)
            if message.is_head:
                heads[log.say([], where, key).key] = message
            else:
                _add(message, log, where, key, is_new=bool(heads))
            continue
        if isinstance(record, Edit):
            _edit(record, log, where)
        if isinstance(record, _Compaction):
            note(SUMMARIES)
            _compact(record, log, where, heads)
            if record.system_message is not None:
                heads[log.say([], where, f"{where}, system").key] = record.system_message
        elif isinstance(record, _ModelChange):
            log.model = record.model_id or log.model
        text = record.summary if isinstance(record, BranchSummary) else None
        log.say([pi.summary_of(text, is_branch=True)] if text else [], where, key)


def _add(message: PiMessage, log: Contexts, where: str, key: str, *, is_new: bool) -> None:
    """Add a message; `is_new` for versions that log the system prompt."""
    log.model = message.model or log.model
    if message.role == "assistant":
        log.error = message.failure
        log.sends = _OF_CHAT if message.api == "openai-completions" else _SENDS
    others = pi.for_others(message, where, drops_thoughts=is_new)
    log.say(pi.messages_of(message, where), where, key, aliases=message.calls, for_others=others)


def _edit(record: Edit, log: Contexts, where: str) -> None:
    """Begin a context with the edited history, if the record is a part of it."""
    path, target = log.path(), log.find(record.target_id)
    if target is None or target not in path or not target.messages:
        return
    at = path.index(target)
    log.replace(path[:at])
    if bytes(record.replacement) != b"null":
        message = decode_line(_MESSAGE, bytes(record.replacement), f"{where}, replacement")
        log.say(pi.messages_of(message, where), where, given=True)
    log.keep(path[at + 1 :])


def _message(record: _Spoken | _Custom, where: str) -> PiMessage:
    if isinstance(record, _Spoken):
        return decode_line(_MESSAGE, bytes(record.message), f"{where}, message")
    note(EXTENDED)
    fields = b'{"role":"custom","content":%s}' % bytes(record.content)
    return decode_line(_MESSAGE, fields, f"{where}, content")


def _compact(record: _Compaction, log: Contexts, where: str, heads: Collection[str]) -> None:
    path = log.path()
    first = log.find(record.first_kept_entry_id)
    nodes = path[path.index(first) :] if first in path else []
    if record.system_message is not None:  # it has all that the system messages before it say
        nodes = [node for node in nodes if node.key not in heads]
    log.replace()
    log.say([pi.summary_of(record.summary or "", is_branch=False)], where, f"{where}, summary")
    log.keep(nodes)


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the head of a file."""
    head = next((line for line in first if isinstance(line, Head)), Head())
    return Names(head.id or str(path), labels={"cwd": head.cwd})


ADAPTER = Sessions(
    kind="type",
    records={
        "session": Head,
        "message": _Spoken,
        "custom_message": _Custom,
        "branch_summary": BranchSummary,
        "compaction": _Compaction,
        "context_edit": Edit,
        "model_change": _ModelChange,
        **dict.fromkeys(
            ("thinking_level_change", "custom", "label", "session_info", "leaf"), Record
        ),
    },
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like({"type": "session", "id": str, "timestamp": str, "message": None}),
    identity=identity,
).adapter("sessions of Pi and OpenClaw: JSONL, a tree of records; text only")


_SUB = ":subagent:"
TOOLS_ONLY = "sub-agents of which the log has tool calls but no messages: left out"
_TELEMETRY_LEAVES = {
    "facts about an event": "*/agentId */ts */seq */durationMs */timestamp",
    "repeats the messages of `agent.end`": "agent.start/prompt agent.start/promptLength "
    "agent.start/messages tool.start tool.end agent.end/markdown",
    "messages of channels, before and after the agent": "message.in message.out message.sending",
    "facts about calls": "llm.usage",
}


class _Event(msgspec.Struct, gc=False, rename="camel"):
    """An event of an agent."""

    session_key: str | None = None


class _End(_Event, gc=False):
    """The end of an agent's turn, with all messages that the agent has."""

    messages: Annotated[list[PiMessage] | None, inner(pi.MESSAGE)] = None
    success: bool | None = None
    error: str | None = None


def _read_telemetry(lines: Iterator[Line], log: Contexts) -> None:
    """Read the contexts of all agents of a file."""
    callers, ended = set[str](), set[str]()
    for where, kind, event in lines:
        key = (event.session_key if isinstance(event, _Event) else None) or ""
        if kind == "tool.start" and _SUB in key:
            callers.add(key)
        if not isinstance(event, _End) or not event.messages:
            continue
        ended.add(key)
        agent = log.agent(key) if _SUB in key else log
        agent.show(_items(event.messages, where))
        log.model = next((m.model for m in reversed(event.messages) if m.model), log.model)
        if agent is log:
            log.error = (event.error or "failed") if event.success is False else None
    note(TOOLS_ONLY, len(callers - ended))


def _items(messages: Sequence[PiMessage], where: str) -> Iterator[Item]:
    """Yield messages; equal ones have equal keys, whatever the ids of their calls."""
    num_before = Counter[str]()
    for i, message in enumerate(messages):
        place = f"{where}, messages[{i}]"
        pieces = pi.messages_of(message, place)
        bare = [
            {**m, "tool_calls": [c["function"] for c in m.get("tool_calls", ())]} for m in pieces
        ]
        key = digest(*(str({**m, "tool_call_id": None}) for m in bare)).hex()
        num_before[key] += 1
        yield Item(f"{key} {num_before[key]}", pieces, place, mark="")


TELEMETRY = Sessions(
    kind="type",
    records={"agent.start": _Event, "agent.end": _End, "tool.start": _Event},
    leaves=_TELEMETRY_LEAVES,
    read=_read_telemetry,
    is_record=like(
        {"type": {"agent.start", "agent.end", "tool.start", "tool.end"}, "sessionKey": str}
    ),
).adapter("telemetry of OpenClaw with messages: JSONL; text only", noun="run")
