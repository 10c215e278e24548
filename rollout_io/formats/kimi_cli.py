"""The `kimi_cli` format: sessions of Kimi CLI and Kimi Code, one JSON Lines file for each agent.

The file is `agents/AGENT/wire.jsonl` of Kimi Code; `context.jsonl` of older versions is read too.
A step is an answer. A compaction begins a context with the user's messages that it kept and the
summary; `context.clear` and `context.undo` take messages back. The messages of the log become those
of a request as in Kimi Code (`loopEventFold.ts`, `toolResultRender.ts`, `contextOps.ts`): results say
that their call failed or was interrupted, what the user writes meanwhile follows the results, prompts in
a row are one message (`projection.ts`), and an undo ends at a compaction. A session is a run, with its
sub-agents. The log has no reward and no token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts, Said
from rollout_io.formats.dialects.responses import tools
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    bad_message,
    extend,
    is_text,
    json_text,
    known,
    shown,
    tool_call,
    tool_result,
)
from rollout_io.formats.requests import Sends

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
_FACTS = (
    "*/time */agentId config.update/profileName config.update/subagentNames config.update/cwd "
    "config.update/thinkingEffort context.apply_compaction/tokensBefore llm.tools_snapshot/hash "
    "message/id message/token_count context.append_message/message.name "
    "context.append_message/message.providerMessageId context.append_message/message.origin "
    "context.append_loop_event/event.turnId context.append_loop_event/event.messageId "
    "context.append_loop_event/event.parentUuid context.append_loop_event/event.extras "
    "context.append_loop_event/event.description context.append_loop_event/event.display "
    "context.append_loop_event/event.usage context.append_loop_event/event.providerFinishReason "
    "context.append_loop_event/event.rawFinishReason"
)
_LEAVES = {
    "facts about an event": _FACTS,
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


_FAILED = "<system>ERROR: Tool execution failed.</system>"
_EMPTY = "Tool output is empty."
_INTERRUPTED = (
    "Tool execution was interrupted before its result was recorded. "
    "Do not assume the tool completed successfully."
)
_SENDS = Sends({"user": "\n\n"}, missing=f"{_FAILED}\n{_INTERRUPTED}")
LATE = "results of calls that have one or are not in the context, which are not sent: left out"
_CUT = "answers after a compaction that cut off the user's messages: left out"
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


class _Origin(msgspec.Struct, gc=False, rename="camel"):
    kind: str | None = None
    trigger: str | None = None
    owner_prompt_id: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: _Told = None
    calls: list[_Call] | None = msgspec.field(name="toolCalls", default=None)
    tool_call_id: str | None = msgspec.field(name="toolCallId", default=None)
    is_error: bool | None = msgspec.field(name="isError", default=None)
    note: str | None = None
    id: str | None = None
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
    note: str | None = None


class _Event(msgspec.Struct, gc=False, rename="camel"):
    type: str
    uuid: str | None = None
    step_uuid: str | None = None
    part: Annotated[_Part | None, inner(PARTS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    args: msgspec.Raw = NO_JSON
    result: _Result | None = None
    finish_reason: str | None = None


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

    summary: str | _Message | None = None
    context_summary: str | None = None
    kept_user_message_count: int | None = None
    kept_head_user_message_count: int | None = None
    compacted_count: int | None = None
    count: int | None = None
    legacy_tail: bool | None = None


class Clear(msgspec.Struct, gc=False):
    """The end of a context."""


class Undo(msgspec.Struct, gc=False):
    """Turns that are taken back."""

    count: int | None = None


@dataclass(slots=True)
class _Wire:
    """Tells the contexts of an agent what its events say.

    Attributes:
        prompts: What the user wrote, each with its id.
        owners: Reminders that belong to a prompt, each with the prompt's id.
        summaries: Summaries of compactions.
        open_calls: Calls of the current step that have no result yet.
        waiting: Messages that follow the results of these calls.
    """

    log: Contexts
    prompts: dict[Said, str | None] = field(default_factory=dict)
    owners: dict[Said, str | None] = field(default_factory=dict)
    summaries: set[Said] = field(default_factory=set)
    open_calls: set[str | None] = field(default_factory=set)
    waiting: list[tuple[_Message | Logged, str]] = field(default_factory=list)

    def add(self, message: _Message | Logged, where: str) -> None:
        """Add a message; an answer without anything is a call that failed."""
        if self.open_calls:
            self.waiting.append((message, where))
            return
        calls = list[Message]()
        for call in message.calls or ():
            function = call.function or _Function(call.name or "", call.arguments)
            arguments = json_text(function.arguments, where)
            calls.append(tool_call(call.id, function.name, arguments))
        sent = _said(message.role or "", message.content)
        sent |= known({"tool_calls": calls or None, "tool_call_id": message.tool_call_id})
        if isinstance(message, _Message) and message.role == "tool":
            result = _Result(message.content, message.is_error, message.note)
            sent = _result(result, message.tool_call_id)
        origin = message.origin if isinstance(message, _Message) else None
        is_typed = origin is not None and origin.kind == "user"
        node = self.log.say([sent], where, is_alone=not is_typed)
        origin = origin or _Origin("user")
        if message.role == "user" and (origin.kind == "user" or origin.trigger == "user-slash"):
            self.prompts[node] = message.id if isinstance(message, _Message) else None
        elif origin.owner_prompt_id is not None:
            self.owners[node] = origin.owner_prompt_id

    def event(self, event: _Event, where: str) -> None:
        """Add an event of a step."""
        self.log.sends = _SENDS
        if event.type == "step.begin":
            self._settle()
            self._step(event.uuid, where)
        elif event.type == "step.end" and event.finish_reason not in {"interrupted", "error"}:
            self._settle()
        elif event.type == "content.part" and event.part is not None:
            extend(self._step(event.step_uuid, where), _said("assistant", [event.part]))
        elif event.type == "tool.call":
            call = tool_call(event.tool_call_id, event.name or "", json_text(event.args, where))
            piece = {"role": "assistant", "content": "", "tool_calls": [call]}
            extend(self._step(event.step_uuid, where), piece)
            self.open_calls.add(event.tool_call_id)
        elif event.type == "tool.result" and event.tool_call_id not in self.open_calls:
            note(LATE)
        elif event.type == "tool.result":
            self.log.say([_result(event.result or _Result(), event.tool_call_id)], where)
            self.open_calls.discard(event.tool_call_id)
            if not self.open_calls:
                self._settle()

    def _settle(self) -> None:
        """End a step: what waited for results that never came is said."""
        self.open_calls.clear()
        while self.waiting:
            self.add(*self.waiting.pop(0))

    def end(self) -> None:
        """Forget the current step, as its context ends."""
        self.open_calls.clear()
        self.waiting.clear()

    def _step(self, uuid: str | None, where: str) -> Message:
        key = uuid or where
        node = self.log.find(key)
        if node is None:
            node = self.log.say([{"role": "assistant", "content": ""}], where, key)
        return node.messages[0]

    def compact(self, line: Compaction, where: str) -> None:
        """Begin a context with a summary."""
        log, path, num_kept = self.log, self.log.path(), line.kept_user_message_count
        self.end()
        log.replace()
        text = line.context_summary or line.summary or ""
        summary: Message = (
            {"role": "user", "content": text}
            if isinstance(text, str)
            else _said("user", text.content)
        )
        if line.legacy_tail or (line.legacy_tail is None and num_kept is None):
            self.summaries.add(log.say([summary], where, is_alone=True))
            num_compacted = line.compacted_count or line.count or 0
            self._keep(path[num_compacted:])
            return
        if line.kept_head_user_message_count is not None:
            finding = "a compaction cut off the user's messages, and the log does not say where"
            log.lose(bad_message(where, finding), where, loss=_CUT)
        prompts = [node for node in path if node in self.prompts]
        self._keep(prompts[max(len(prompts) - (num_kept or 0), 0) :])
        self.summaries.add(log.say([summary], where, is_alone=True))

    def _keep(self, nodes: Sequence[Said]) -> None:
        for node, copy in zip(nodes, self.log.keep(nodes), strict=True):
            for names in (self.prompts, self.owners):
                if node in names:
                    names[copy] = names[node]

    def undo(self, count: int) -> None:
        """Take back turns of the user, each with its reminders: all of them, or none."""
        path, cut = self.log.path(), None
        for at in range(len(path) - 1, -1, -1):
            if path[at] in self.summaries or count <= 0:
                break
            if path[at] in self.prompts:
                cut, count, prompt = at, count - 1, self.prompts[path[at]]
                while cut > 0 and prompt and self.owners.get(path[cut - 1]) == prompt:
                    cut -= 1
        if cut is not None and count <= 0:
            self.end()
            self.log.rewind(path[cut].before)


def _result(result: _Result, call_id: str | None) -> Message:
    """Return a result as the model is sent it: with its status, and the note about it."""
    content: Any = _said("tool", result.output)["content"]
    if isinstance(content, str):
        if result.is_error:
            empty = f"{_FAILED[:-9]} {_EMPTY}</system>"
            content = f"{_FAILED}\n{content}" if content else empty
        elif content.strip() in {"", _EMPTY}:
            content = f"<system>{_EMPTY}</system>"
        content += f"\n{result.note}" if result.note else ""
    else:
        around = ([_FAILED] if result.is_error else [], [result.note] if result.note else [])
        before, behind = ([{"type": "text", "text": text} for text in texts] for texts in around)
        content = [*before, *content, *behind]
    return tool_result(content, call_id, is_error=result.is_error)


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
                wire.end()
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
