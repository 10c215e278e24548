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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.contexts import Contexts, Said
from rollout_io.formats.dialects.responses import tools
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import Contents, inner
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    extend,
    is_text,
    json_text,
    known,
    shown,
    tool_call,
    tool_result,
)
from rollout_io.formats.start import like

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
_LEAVES = {
    "facts about an event": "*/time */agentId context.append_loop_event/event.* "
    "context.append_message/message.* context.append_message/message.origin.* config.update/profileName config.update/subagentNames "
    "config.update/cwd config.update/thinkingEffort context.apply_compaction/tokensBefore "
    "llm.tools_snapshot/hash message/id message/token_count",
    "repeats the messages": "turn.prompt turn.steer",
    "state of the harness": _STATE,
    "answers of the user to questions of the harness": "permission.record_approval_result "
    "interaction.request interaction.response",
}


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    think: str | None = None
    image: Any = msgspec.field(name="imageUrl", default=None)
    image_url: Any = None


_Content = str | list[_Part] | None
_Told = Annotated[_Content, inner(PARTS)]


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
    content: _Told = None
    calls: list[_Call] | None = msgspec.field(name="toolCalls", default=None)
    tool_call_id: str | None = msgspec.field(name="toolCallId", default=None)
    origin: _Origin | None = None


class Logged(msgspec.Struct, gc=False):
    """A message of `context.jsonl`."""

    role: str | None = None
    content: _Told = None
    calls: list[_Call] | None = msgspec.field(name="tool_calls", default=None)
    tool_call_id: str | None = None


class _Result(msgspec.Struct, gc=False):
    output: _Content = None
    is_error: bool | None = msgspec.field(name="isError", default=None)


class _Event(msgspec.Struct, gc=False, rename="camel"):
    type: str
    uuid: str | None = None
    step_uuid: str | None = None
    part: Annotated[_Part | None, inner(PARTS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    args: msgspec.Raw = NO_JSON
    result: _Result | None = None


class _Config(msgspec.Struct, gc=False, rename="camel"):
    system_prompt: str | None = None
    model_alias: str | None = None


class Tools(msgspec.Struct, gc=False):
    """The tools of the calls that follow."""

    tools: Any = None


class _Appended(msgspec.Struct, gc=False):
    message: _Message | None = None


class Looped(msgspec.Struct, gc=False):
    """An event of a step."""

    event: _Event | None = None


class Compaction(msgspec.Struct, gc=False, rename="camel"):
    """A summary, with the messages of the user that were kept."""

    summary: str | None = None
    context_summary: str | None = None
    kept_user_message_count: int | None = None
    kept_head_user_message_count: int | None = None
    compacted_count: int | None = None


class Clear(msgspec.Struct, gc=False):
    """The end of a context."""


class Undo(msgspec.Struct, gc=False):
    """Turns that are taken back."""

    count: int | None = None


@dataclass(slots=True)
class _Wire:
    """Tells the contexts of an agent what its events say.

    Attributes:
        prompts: What the user wrote.
    """

    log: Contexts
    prompts: set[Said] = field(default_factory=set)

    def add(self, message: _Message | Logged, where: str) -> None:
        """Add a message; an answer without anything is a call that failed."""
        calls = [_call(call, where) for call in message.calls or ()]
        sent = _said(message.role or "", message.content)
        sent |= known({"tool_calls": calls or None, "tool_call_id": message.tool_call_id})
        node = self.log.say([sent], where)
        origin = message.origin if isinstance(message, _Message) else None
        if message.role == "user" and (origin is None or origin.kind == "user"):
            self.prompts.add(node)

    def event(self, event: _Event, where: str) -> None:
        """Add an event of a step."""
        if event.type == "step.begin":
            self._step(event.uuid, where)
        elif event.type == "content.part" and event.part is not None:
            extend(self._step(event.step_uuid, where), _said("assistant", [event.part]))
        elif event.type == "tool.call":
            call = tool_call(event.tool_call_id, event.name or "", json_text(event.args, where))
            piece = {"role": "assistant", "content": "", "tool_calls": [call]}
            extend(self._step(event.step_uuid, where), piece)
        elif event.type == "tool.result":
            result = event.result or _Result()
            content = _said("tool", result.output)["content"]
            message = tool_result(content, event.tool_call_id, is_error=result.is_error)
            self.log.say([message], where)

    def _step(self, uuid: str | None, where: str) -> Message:
        key = uuid or where
        node = self.log.find(key)
        if node is None:
            node = self.log.say([{"role": "assistant", "content": ""}], where, key)
        return node.messages[0]

    def compact(self, line: Compaction, where: str) -> None:
        """Begin a context with a summary."""
        log, path = self.log, self.log.path()
        summary: Message = {"role": "user", "content": line.context_summary or line.summary or ""}
        log.replace()
        if line.kept_user_message_count is None:  # older versions keep the end of the history
            log.say([summary], where)
            log.keep(path[line.compacted_count or 0 :])
            return
        prompts = [node for node in path if node in self.prompts]
        num_head = min(line.kept_head_user_message_count or 0, len(prompts))
        num_tail = max(line.kept_user_message_count - num_head, 0)
        nodes = prompts[:num_head] + prompts[max(num_head, len(prompts) - num_tail) :]
        self.prompts |= {*log.keep(nodes)}
        log.say([summary], where)

    def undo(self, count: int) -> None:
        """Take back turns of the user."""
        prompts = [node for node in self.log.path() if node in self.prompts]
        count = min(count, len(prompts))
        if count > 0:
            self.log.rewind(prompts[-count].before)


def _said(role: str, content: _Content) -> Message:
    listed = [_Part(text=content)] if isinstance(content, str) else content or []
    thoughts = [part.think for part in listed if part.type == "think" and part.think]
    parts = [
        Part(type=p.type, text=p.text, image_url=p.image or p.image_url)
        for p in listed
        if p.type != "think"
    ]
    parts = [part for part in parts if part.media is not None or is_text(part)]
    message = {"role": role, "content": shown(parts)}
    return message | known({"reasoning_content": "\n".join(thoughts) or None})


def _call(call: _Call, where: str) -> Message:
    function = call.function or _Function(call.name or "", call.arguments)
    return tool_call(call.id, function.name, json_text(function.arguments, where))


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the events or messages of an agent."""
    wire = _Wire(log)
    for where, _, record in lines:
        match record:
            case Logged(role="_system_prompt"):
                log.system = str(_said("system", record.content)["content"])
            case Logged(role=str(role)) if not role.startswith("_"):
                wire.add(record, where)
            case _Config():
                log.system = record.system_prompt or log.system
                log.model = record.model_alias or log.model
            case Tools():
                log.tools = tools(record.tools)
            case _Appended(message=_Message() as message):
                wire.add(message, where)
            case Looped(event=_Event() as event):
                wire.event(event, where)
            case Compaction():
                wire.compact(record, where)
            case Clear():
                log.replace()
            case Undo():
                wire.undo(record.count or 0)


def identity(kind: str, record: bytes) -> str | None:
    """Return a record that is a part of the conversation; a fork begins with copies of them."""
    return repr(record) if kind.startswith("context.") or kind == "message" else None


def names(path: Path, _: Sequence[Any]) -> Names:
    """Return the names that are in a file's path."""
    if path.name == "wire.jsonl" and path.parent.parent.name == "agents":
        session, agent = path.parents[2].name, path.parent.name
        return Names(session) if agent == "main" else Names(f"{session}/{agent}", session, agent)
    if path.stem == "context":
        return Names(path.parent.name or str(path))
    if path.stem.startswith("context_"):  # what a compaction replaced
        return Names(f"{path.parent.name}/{path.stem}", path.parent.name, "")
    return Names(str(path))


ADAPTER = Sessions(
    kind="type",
    default="message",
    records={
        "message": Logged,
        "config.update": _Config,
        "llm.tools_snapshot": Tools,
        "context.append_message": _Appended,
        "context.append_loop_event": Looped,
        "context.apply_compaction": Compaction,
        "context.clear": Clear,
        "context.undo": Undo,
    },
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like(
        {"type": "metadata", "protocol_version": str, "timestamp": None},
        {"role": {"_checkpoint", "_usage", "_system_prompt"}},
        {
            "type": {"context.append_message", "context.append_loop_event", "llm.tools_snapshot"},
            "time": object,
        },
    ),
    identity=identity,
    is_prefix=True,
    names_origin=False,
).adapter("sessions of Kimi CLI and Kimi Code (wire.jsonl, context.jsonl); text only")
