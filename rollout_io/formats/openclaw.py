"""The `openclaw` format: telemetry of OpenClaw with messages (`telemetry.jsonl`), as JSON Lines.

    {"type": "agent.start", "sessionKey": "agent:main:main", "prompt": "..."}
    {"type": "tool.start", "toolName": "exec", "params": {...}, "sessionKey": "agent:main:main"}
    {"type": "agent.end", "sessionKey": "agent:main:main", "messages": [...], "success": true}

The sessions that OpenClaw keeps itself are the format `pi`. A file is a run: each session key is an
agent. The messages of each `agent.end` are those that the agent has at that time; what an earlier one
has too is part of the prompt. The run failed if the last `agent.end` of the main agent says so. The
log has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts, Item
from rollout_io.formats.dialects import pi
from rollout_io.formats.engines.runs import digest
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import inner
from rollout_io.formats.start import like

_SUB = ":subagent:"
TOOLS_ONLY = "sub-agents of which the log has tool calls but no messages: left out"
_LEAVES = {
    "facts about an event": "*/agentId */ts */seq */durationMs */timestamp",
    "repeats the messages of `agent.end`": "agent.start/prompt agent.start/promptLength "
    "agent.start/messages tool.start tool.end agent.end/markdown",
    "messages of channels, before and after the agent": "message.in message.out message.sending",
    "facts about calls": "llm.usage",
}


class Event(msgspec.Struct, gc=False, rename="camel"):
    """An event of an agent."""

    session_key: str | None = None


class End(Event, gc=False):
    """The end of an agent's turn, with all messages that the agent has."""

    messages: Annotated[list[pi.PiMessage] | None, inner(pi.MESSAGE)] = None
    success: bool | None = None
    error: str | None = None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the contexts of all agents of a file."""
    callers, ended = set[str](), set[str]()
    for where, kind, event in lines:
        key = (event.session_key if isinstance(event, Event) else None) or ""
        if kind == "tool.start" and _SUB in key:
            callers.add(key)
        if not isinstance(event, End) or not event.messages:
            continue
        ended.add(key)
        agent = log.agent(key) if _SUB in key else log
        agent.show(_items(event.messages, where))
        log.model = next((m.model for m in reversed(event.messages) if m.model), log.model)
        if agent is log:
            log.error = (event.error or "failed") if event.success is False else None
    note(TOOLS_ONLY, len(callers - ended))


def _items(messages: Sequence[pi.PiMessage], where: str) -> Iterator[Item]:
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


ADAPTER = Sessions(
    kind="type",
    records={"agent.start": Event, "agent.end": End, "tool.start": Event},
    leaves=_LEAVES,
    names=lambda path, _: Names(str(path)),
    read=read,
    is_record=like(
        {"type": {"agent.start", "agent.end", "tool.start", "tool.end"}, "sessionKey": str}
    ),
).adapter("telemetry of OpenClaw with messages: JSONL; text only", noun="run")
