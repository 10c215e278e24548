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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects import pi
from rollout_io.formats.parsing.forks import digest
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts

_SUB = ":subagent:"
TOOLS_ONLY = "sub-agents of which the log has tool calls but no messages: left out"
CONTENTS = Contents(
    kind="type",
    reads={
        "*": "sessionKey agentId",
        "agent.end": "success error",
    },
    leaves={
        "facts about an event": "*/ts */seq */durationMs */timestamp",
        "repeats the messages of `agent.end`": "agent.start/prompt agent.start/promptLength "
        "agent.start/messages tool.start tool.end agent.end/markdown",
        "messages of channels, before and after the agent": "message.in message.out "
        "message.sending",
        "facts about calls": "llm.usage",
    },
    inner={"agent.end/messages": pi.MESSAGE},
)


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str
    session_key: str | None = None
    messages: list[msgspec.Raw] | None = None
    success: bool | None = None
    error: str | None = None


_LINE = msgspec.json.Decoder(_Line)
_MESSAGE = msgspec.json.Decoder(pi.PiMessage)


def read_session(records: Sequence[Record]) -> Session:
    """Read the contexts of all agents of a file."""
    agents: dict[str, Contexts] = {}
    tools, models, error = set[str](), list[str | None](), None
    for place, content in records:
        line = decode_line(_LINE, content, place.where)
        key = line.session_key or ""
        if line.type == "tool.start":
            tools.add(key)
        if line.type != "agent.end" or not line.messages:
            continue
        contexts = agents.setdefault(key, Contexts())
        contexts.add(_items(line.messages, place.where, models))
        if _SUB not in key:
            error = (line.error or "failed") if line.success is False else None
    note(TOOLS_ONLY, len({key for key in tools - agents.keys() if _SUB in key}))
    found = Contexts()
    for key, contexts in sorted(agents.items(), key=lambda each: _SUB in each[0]):
        for step in contexts.found:
            step.agent = key if _SUB in key else None
        found.found += contexts.found
    return Session(found, error, texts(models))


def _items(raws: Sequence[msgspec.Raw], where: str, models: list[str | None]) -> list[Item]:
    """Convert messages; equal ones have equal keys, whatever the ids of their calls."""
    seen = Counter[str]()
    items: list[Item] = []
    for i, raw in enumerate(raws):
        place = f"{where}, messages[{i}]"
        given = decode_line(_MESSAGE, bytes(raw), place)
        made = pi.messages_of(given, place)
        models.append(given.model)
        said = [{**m, "tool_calls": [c["function"] for c in m.get("tool_calls", ())]} for m in made]
        key = digest(*(str({**m, "tool_call_id": None}) for m in said)).hex()
        seen[key] += 1
        items.append(Item(f"{key} {seen[key]}", made, place))
    return items


def _names(path: Path, _: Sequence[Mapping[str, Any]]) -> Names:
    return Names(str(path))


def _is_telemetry(record: Mapping[str, Any]) -> bool:
    kind = record.get("type")
    is_of_agent = kind in {"agent.start", "agent.end", "tool.start", "tool.end"}
    return is_of_agent and isinstance(record.get("sessionKey"), str)


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_telemetry,
    marks=(b'"sessionKey"',),
).adapter("telemetry of OpenClaw with messages: JSONL; text only", noun="run")
