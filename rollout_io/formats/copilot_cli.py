"""The `copilot_cli` format: sessions of GitHub Copilot CLI (`events.jsonl`), as JSON Lines.

    {"type": "session.start", "data": {"sessionId": "...", "context": {"cwd": "..."}}, "id": "e1"}
    {"type": "user.message", "data": {"content": "...", "transformedContent": "..."}, "id": "e2"}
    {"type": "assistant.message", "data": {"content": "...", "reasoningText": "...",
        "toolRequests": [{"toolCallId": "c", "name": "bash", "arguments": {...}}]}, "id": "e3"}
    {"type": "tool.execution_complete", "data": {"toolCallId": "c", "result": {"content": "..."}}}

A session is a run. Events with a `parentToolCallId` are those of the sub-agent that the call started,
whose prompt is an argument of the call. A compaction begins a context with the summary, and a rewind
takes events back. The run failed if it ends with an error. The log has no reward, no token ids and no
tool definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.parsing.content import NO_JSON, Message, json_text, known, tool_call
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts

_STATE = (
    "session.info session.resume session.shutdown session.usage_checkpoint session.usage_info "
    "session.auto_mode_resolved session.idle session.handoff session.task_complete session.title "
    "session.compaction_start session.mode_changed session.plan_changed session.context_changed "
    "session.workspace_file_changed assistant.turn_start assistant.turn_end assistant.usage "
    "assistant.intent hook.start hook.end abort pending_messages.modified permission.requested "
    "permission.completed tool.user_requested subagent.completed subagent.failed"
)
CONTENTS = Contents(
    kind="type",
    reads={
        "*": "id parentId data.parentToolCallId",
        "session.start": "data.sessionId data.context.cwd data.selectedModel",
        "session.model_change": "data.newModel",
        "session.error": "data.message",
        "session.compaction_complete": "data.summaryContent",
        "session.truncation": "",
        "session.snapshot_rewind": "data.upToEventId",
        "system.message": "data.content",
        "system.notification": "data.content",
        "user.message": "data.content data.transformedContent",
        "assistant.message": "data.content data.reasoningText data.toolRequests.toolCallId "
        "data.toolRequests.type data.toolRequests.name data.toolRequests.arguments data.model",
        "assistant.reasoning": "data.content",
        "tool.execution_complete": "data.toolCallId data.result.content data.error data.success",
        "subagent.started": "data.toolCallId data.agentName",
    },
    leaves={
        "facts about an event": "*/timestamp */agentId */ephemeral session.start/data "
        "session.model_change/data session.error/data session.compaction_complete/data "
        "session.truncation/data session.snapshot_rewind/data system.message/data.role "
        "system.message/data.interactionId system.message/data.name "
        "system.notification/data.kind user.message/data.delivery user.message/data.interactionId "
        "user.message/data.source user.message/data.agentMode "
        "user.message/data.supportedNativeDocumentMimeTypes user.message/data.parentAgentTaskId "
        "assistant.message/data assistant.reasoning/data.reasoningId subagent.started/data",
        "repeats the call": "tool.execution_start tool.execution_partial_result "
        "tool.execution_progress",
        "for display": "tool.execution_complete/data",
        "state of the harness": _STATE,
    },
)
TRUNCATED = "contexts from which the harness dropped messages, without saying which"
UNPROMPTED = "sub-agents without a prompt in the log: left out"


class _Request(msgspec.Struct, gc=False, rename="camel"):
    name: str
    tool_call_id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Text(msgspec.Struct, gc=False):
    content: str | None = None


class _Failure(msgspec.Struct, gc=False):
    message: str | None = None


class _Data(msgspec.Struct, gc=False, rename="camel"):
    content: str | None = None
    transformed_content: str | None = None
    reasoning_text: str | None = None
    tool_requests: list[_Request] | None = None
    parent_tool_call_id: str | None = None
    tool_call_id: str | None = None
    result: _Text | None = None
    error: _Failure | str | None = None
    message: str | None = None
    agent_name: str | None = None
    model: str | None = None
    new_model: str | None = None
    selected_model: str | None = None
    summary_content: str | None = None
    up_to_event_id: str | None = None


class _Line(msgspec.Struct, gc=False):
    type: str
    id: str | None = None
    data: _Data = msgspec.field(default_factory=_Data)


_LINE = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class _Agent:
    contexts: Contexts = field(default_factory=Contexts)
    items: list[Item] = field(default_factory=list)
    name: str | None = None
    thought: str | None = None

    def add(self, line: _Line, where: str) -> None:
        """Apply an event."""
        data, key = line.data, line.id or where
        if line.type == "system.message" and data.content:
            if data.content != self.contexts.system:
                self.contexts.add(self.items)
            self.contexts.system = data.content
        elif line.type in {"user.message", "system.notification"}:
            text = data.transformed_content or data.content or ""
            self.items.append(Item(key, [{"role": "user", "content": text}], where))
        elif line.type == "assistant.reasoning":
            self.thought = data.content
        elif line.type == "assistant.message":
            self.items.append(Item(key, [_answer(data, self.thought, where)], where))
            self.thought = None
        elif line.type == "tool.execution_complete":
            made = {"role": "tool", "content": _result(data), "tool_call_id": data.tool_call_id}
            self.items.append(Item(key, [known(made)], where))
        elif line.type == "session.compaction_complete" and data.summary_content:
            self.contexts.add(self.items)
            made = {"role": "user", "content": data.summary_content}
            self.items = [Item(key, [made], where)]
        elif line.type == "session.snapshot_rewind":
            self.contexts.add(self.items)
            keys = [item.key for item in self.items]
            if data.up_to_event_id in keys:
                self.items = self.items[: keys.index(data.up_to_event_id)]


def _answer(data: _Data, thought: str | None, where: str) -> Message:
    calls = [
        tool_call(request.tool_call_id, request.name, json_text(request.arguments, where))
        for request in data.tool_requests or ()
    ]
    fields = {
        "role": "assistant",
        "content": data.content or "",
        "reasoning_content": data.reasoning_text or thought or None,
        "tool_calls": calls or None,
    }
    return known(fields)


def _result(data: _Data) -> str:
    if data.result is not None and data.result.content is not None:
        return data.result.content
    return (data.error if isinstance(data.error, str) else data.error and data.error.message) or ""


class _Prompt(msgspec.Struct, gc=False):
    prompt: str | None = None


def read_session(records: Sequence[Record]) -> Session:
    """Read the contexts of a session and of its sub-agents."""
    main = _Agent()
    agents: dict[str, _Agent] = {}
    prompts: dict[str, str] = {}
    models, error = list[str | None](), None
    for place, content in records:
        line = decode_line(_LINE, content, place.where)
        data = line.data
        for request in data.tool_requests or ():
            prompt = _prompt(request)
            if request.tool_call_id and prompt:
                prompts[request.tool_call_id] = prompt
        models += [data.selected_model, data.new_model, data.model]
        agent = main
        if line.type == "subagent.started" or data.parent_tool_call_id:
            call = data.parent_tool_call_id or data.tool_call_id or place.where
            agent = agents.setdefault(call, _Agent(name=call))
            agent.name = data.agent_name or agent.name
            if not agent.items and call in prompts:
                asked = {"role": "user", "content": prompts[call]}
                agent.items.append(Item(call, [asked], place.where))
        note(TRUNCATED, line.type == "session.truncation")
        if line.type == "session.error":
            error = data.message or "error"
        elif line.type == "assistant.message" and agent is main:
            error = None
        agent.add(line, place.where)
    for call, agent in {"": main, **agents}.items():
        if agent is main or call in prompts:
            agent.contexts.add(agent.items)
        elif agent.items:
            note(UNPROMPTED)
        if agent is not main:
            for step in agent.contexts.found:
                step.agent = agent.name
            main.contexts.found += agent.contexts.found
    return Session(main.contexts, error, texts(models))


def _prompt(request: _Request) -> str | None:
    try:
        return msgspec.json.decode(bytes(request.arguments), type=_Prompt).prompt
    except (msgspec.MsgspecError, ValueError):
        return None


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    starts = [r["data"] for r in records if isinstance(r.get("data"), Mapping)]
    found = (d for d in starts if isinstance(d.get("sessionId"), str))
    data: Mapping[str, Any] = next(found, {})
    context = data.get("context")
    cwd = context.get("cwd") if isinstance(context, Mapping) else None
    labels = {"cwd": cwd} if isinstance(cwd, str) and cwd else {}
    return Names(data.get("sessionId") or str(path), labels=labels)


def _is_event(record: Mapping[str, Any]) -> bool:
    is_event = isinstance(record.get("data"), Mapping) and "parentId" in record
    return is_event and record.get("type") in CONTENTS.types


ADAPTER = Sessions(
    contents=CONTENTS, names=_names, read=read_session, is_record=_is_event, marks=(b'"parentId"',)
).adapter("sessions of GitHub Copilot CLI (events.jsonl); text only")
