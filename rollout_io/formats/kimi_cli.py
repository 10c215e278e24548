"""The `kimi_cli` format: sessions of Kimi CLI and Kimi Code, one JSON Lines file for each agent.

    {"type": "config.update", "systemPrompt": "..."}
    {"type": "llm.tools_snapshot", "tools": [{"name": "...", "parameters": {...}}]}
    {"type": "context.append_message", "message": {"role": "user", "content": [...]}}
    {"type": "context.append_loop_event", "event": {"type": "step.begin", "uuid": "1"}}
    {"type": "context.append_loop_event", "event": {"type": "content.part", "stepUuid": "1", "part": {...}}}
    {"type": "context.append_loop_event", "event": {"type": "tool.call", "toolCallId": "c", "name": "..."}}

This is `agents/AGENT/wire.jsonl` of Kimi Code; `context.jsonl` of older versions is read too:

    {"role": "_system_prompt", "content": "..."}
    {"role": "assistant", "content": [{"type": "think", "think": "..."}], "tool_calls": [...]}

A step is an answer. A compaction begins a context with the user's messages that it kept and the
summary; `context.clear` and `context.undo` take messages back. A session is a run, with its
sub-agents. The log has no reward and no token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    extend,
    function_tool,
    is_text,
    json_text,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts
from schemas.messages import is_answer

PARTS = Contents(
    kind="type",
    default="text",
    reads={"text": "text", "think": "think", "image_url": "imageUrl image_url"},
    leaves={"encrypted, for the API": "think/encrypted"},
)

_STATE = (
    "metadata tools.set_active_tools llm.request usage.record plan_mode.enter plan_mode.exit "
    "full_compaction.begin full_compaction.complete full_compaction.cancel turn.cancel turn.end "
    "turn.ended task.started task.ended todo.update goal.update permission.set_mode skill.activate "
    "reminder.notified session.meta"
)
CONTENTS = Contents(
    kind="type",
    default="message",
    reads={
        "config.update": "systemPrompt modelAlias",
        "llm.tools_snapshot": "tools",
        "context.append_message": "message.role message.toolCalls message.toolCallId message.origin",
        "context.append_loop_event": "event.type event.uuid event.stepUuid event.toolCallId "
        "event.name event.args event.result.output",
        "context.apply_compaction": "summary contextSummary keptUserMessageCount "
        "keptHeadUserMessageCount compactedCount",
        "context.clear": "",
        "context.undo": "count",
        "message": "role tool_calls tool_call_id",
    },
    leaves={
        "facts about an event": "*/time */agentId context.append_loop_event/event.* "
        "context.append_message/message.* config.update/profileName config.update/subagentNames "
        "config.update/cwd config.update/thinkingEffort context.apply_compaction/tokensBefore "
        "llm.tools_snapshot/hash message/id message/token_count",
        "repeats the messages": "turn.prompt turn.steer",
        "state of the harness": _STATE,
        "answers of the user to questions of the harness": "permission.record_approval_result "
        "interaction.request interaction.response",
    },
    inner={
        "context.append_message/message.content": PARTS,
        "context.append_loop_event/event.part": PARTS,
        "message/content": PARTS,
    },
)


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    think: str | None = None
    image: Any = msgspec.field(name="imageUrl", default=None)
    image_url: Any = None


_Content = str | list[_Part] | None


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Origin(msgspec.Struct, gc=False):
    kind: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: _Content = None
    calls: list[_Call] | None = msgspec.field(name="toolCalls", default=None)
    tool_calls: list[_Call] | None = None
    call_id: str | None = msgspec.field(name="toolCallId", default=None)
    tool_call_id: str | None = None
    origin: _Origin | None = None


class _Result(msgspec.Struct, gc=False):
    output: _Content = None


class _Event(msgspec.Struct, gc=False, rename="camel"):
    type: str
    uuid: str | None = None
    step_uuid: str | None = None
    part: _Part | None = None
    tool_call_id: str | None = None
    name: str | None = None
    args: msgspec.Raw = NO_JSON
    result: _Result | None = None


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str | None = None
    role: str | None = msgspec.field(name="role", default=None)
    system_prompt: str | None = None
    model_alias: str | None = None
    tools: msgspec.Raw = NO_JSON
    message: _Message | None = None
    event: _Event | None = None
    summary: str | None = None
    context_summary: str | None = None
    kept_user_message_count: int | None = None
    kept_head_user_message_count: int | None = None
    compacted_count: int | None = None
    count: int | None = None


_LINE = msgspec.json.Decoder(_Line)
_MESSAGE = msgspec.json.Decoder(_Message)
_ANY = msgspec.json.Decoder()


@dataclass(slots=True)
class _Wire:
    """The context of an agent, as its events change it.

    Attributes:
        prompts: Keys of the items that the user wrote.
        steps: The message of each step, by its uuid.
    """

    contexts: Contexts = field(default_factory=Contexts)
    items: list[Item] = field(default_factory=list)
    prompts: set[str] = field(default_factory=set)
    steps: dict[str, Message] = field(default_factory=dict)
    models: list[str | None] = field(default_factory=list)

    def apply(self, line: _Line, where: str) -> None:
        """Apply an event."""
        self.models.append(line.model_alias)
        if line.type == "config.update" and line.system_prompt:
            self._system(line.system_prompt)
        elif line.type == "llm.tools_snapshot":
            self.contexts.tools = _tools(decode_line(_ANY, bytes(line.tools), where))
        elif line.type == "context.append_message" and line.message is not None:
            self.add(line.message, where)
        elif line.type == "context.append_loop_event" and line.event is not None:
            self._event(line.event, where)
        elif line.type == "context.apply_compaction":
            self.restart(self._compacted(line, where))
        elif line.type == "context.clear":
            self.restart([])
        elif line.type == "context.undo":
            prompts = [i for i, item in enumerate(self.items) if item.key in self.prompts]
            count = min(line.count or 0, len(prompts))
            self.restart(self.items[: prompts[-count]] if count > 0 else list(self.items))

    def _system(self, text: str) -> None:
        if self.items and text != self.contexts.system:
            self._end()
        self.contexts.system = text

    def add(self, message: _Message, where: str) -> None:
        """Add a message."""
        calls = [_call(call, where) for call in message.calls or message.tool_calls or ()]
        made = _said(message.role, message.content)
        made |= known({"tool_calls": calls or None})
        made |= known({"tool_call_id": message.call_id or message.tool_call_id})
        if message.role == "user" and (message.origin is None or message.origin.kind == "user"):
            self.prompts.add(where)
        self.items.append(Item(where, [made], where))

    def restart(self, items: list[Item]) -> None:
        """End the context, and begin another one."""
        self._end()
        self.items = items

    def _end(self) -> None:
        """Add the context, without steps in which the model wrote nothing: calls that failed."""
        self.items = [item for item in self.items if not any(map(_is_empty, item.messages))]
        self.contexts.add(self.items)

    def _event(self, event: _Event, where: str) -> None:
        if event.type == "step.begin":
            self._step(event.uuid, where)
        elif event.type == "content.part" and event.part is not None:
            piece = _said("assistant", [event.part])
            extend(self._step(event.step_uuid, where), piece)
        elif event.type == "tool.call":
            call = tool_call(event.tool_call_id, event.name or "", json_text(event.args, where))
            piece = {"role": "assistant", "content": "", "tool_calls": [call]}
            extend(self._step(event.step_uuid, where), piece)
        elif event.type == "tool.result":
            made = _said("tool", event.result.output if event.result is not None else None)
            made |= known({"tool_call_id": event.tool_call_id})
            self.items.append(Item(where, [made], where))

    def _step(self, uuid: str | None, where: str) -> Message:
        key = uuid or where
        if key not in self.steps:
            self.steps[key] = {"role": "assistant", "content": ""}
            self.items.append(Item(key, [self.steps[key]], where))
        return self.steps[key]

    def _compacted(self, line: _Line, where: str) -> list[Item]:
        summary = {"role": "user", "content": line.context_summary or line.summary or ""}
        found = Item(where, [summary], where)
        if line.kept_user_message_count is None:  # older versions keep the end of the history
            return [found, *self.items[line.compacted_count or 0 :]]
        prompts = [item for item in self.items if item.key in self.prompts]
        num_head = min(line.kept_head_user_message_count or 0, len(prompts))
        num_tail = max(line.kept_user_message_count - num_head, 0)
        kept = prompts[:num_head] + prompts[max(num_head, len(prompts) - num_tail) :]
        return [*kept, found]


def _is_empty(message: Message) -> bool:
    return message["role"] == "assistant" and not is_answer(message)


def _said(role: str, content: _Content) -> Message:
    listed = [_Part(text=content)] if isinstance(content, str) else content or []
    thoughts = [part.think for part in listed if part.type == "think" and part.think]
    parts = [
        Part(type=p.type, text=p.text, image_url=p.image or p.image_url)
        for p in listed
        if p.type != "think"
    ]
    parts = [part for part in parts if part.media is not None or is_text(part)]
    made = {"role": role, "content": shown(parts)}
    return made | known({"reasoning_content": "\n".join(thoughts) or None})


def _call(call: _Call, where: str) -> Message:
    function = call.function or _Function(call.name or "", call.arguments)
    return tool_call(call.id, function.name, json_text(function.arguments, where))


def _tools(given: Any) -> list[Message] | None:
    found = [
        function_tool(each["name"], each.get("description"), each.get("parameters"))
        for each in (given if isinstance(given, list) else ())
        if isinstance(each, Mapping) and isinstance(each.get("name"), str)
    ]
    return found or None


def read_session(records: Sequence[Record]) -> Session:
    """Read the contexts of an agent."""
    wire = _Wire()
    for place, content in records:
        line = decode_line(_LINE, content, place.where)
        if line.role == "_system_prompt":
            message = decode_line(_MESSAGE, content, place.where)
            wire.contexts.system = str(_said("system", message.content)["content"])
        elif line.role is not None and not line.role.startswith("_"):
            wire.add(decode_line(_MESSAGE, content, place.where), place.where)
        else:
            wire.apply(line, place.where)
    wire.restart([])
    return Session(wire.contexts, values=texts(wire.models))


def _names(path: Path, _: Sequence[Mapping[str, Any]]) -> Names:
    if path.name == "wire.jsonl" and path.parent.parent.name == "agents":
        session, agent = path.parents[2].name, path.parent.name
        return Names(session) if agent == "main" else Names(f"{session}/{agent}", session, agent)
    if path.stem == "context":
        return Names(path.parent.name or str(path))
    if path.stem.startswith("context_"):  # what a compaction replaced
        return Names(f"{path.parent.name}/{path.stem}", path.parent.name, "")
    return Names(str(path))


def _is_session(record: Mapping[str, Any]) -> bool:
    if record.get("type") == "metadata" and isinstance(record.get("protocol_version"), str):
        return "timestamp" not in record
    is_event = str(record.get("type")).startswith(("context.append_", "llm.tools_snapshot"))
    is_state = record.get("role") in {"_checkpoint", "_usage", "_system_prompt"}
    return is_state or (is_event and "time" in record)


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_session,
    marks=(b'"protocol_version"', b'"context.append_', b'"llm.', b'"_'),
).adapter("sessions of Kimi CLI and Kimi Code (wire.jsonl, context.jsonl); text only")
