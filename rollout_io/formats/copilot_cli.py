"""The `copilot_cli` format: sessions of GitHub Copilot CLI (`events.jsonl`), as JSON Lines.

A session is a run. Events with an `agentId`, or in older versions a `parentToolCallId`, are those of a
sub-agent; its prompt is its first message, or an argument of the call that started it. A compaction begins a context with the summary, and a rewind
takes events back. The run failed if it ends with an error. The log has no reward, no token ids and no
tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import NO_JSON, json_text, known, tool_call, tool_result

_STATE = (
    "session.info session.resume session.shutdown session.usage_checkpoint session.usage_info "
    "session.auto_mode_resolved session.idle session.handoff session.task_complete session.title "
    "session.compaction_start session.mode_changed session.plan_changed session.context_changed "
    "session.workspace_file_changed assistant.turn_start assistant.turn_end assistant.usage "
    "assistant.intent hook.start hook.end abort pending_messages.modified permission.requested "
    "permission.completed tool.user_requested subagent.completed subagent.failed subagent.selected "
    "subagent.deselected session.warning session.remote_steerable_changed session.schedule_created "
    "session.schedule_cancelled session.schedule_rearmed session.autopilot_objective_changed "
    "session.session_limits_changed session.permissions_changed tool_search.activated "
    "external_tool.requested session.canvas.recorded session.canvas.removed session.error/data "
    "session.start/data session.model_change/data session.truncation/data subagent.started/data "
    "session.compaction_complete/data session.context_cleared/data.messagesCleared"
)
_FACTS = {
    "user.message": "agentMode delivery source isAutopilotContinuation parentAgentTaskId",
    "system.message": "role name metadata",
    "system.notification": "kind",
    "assistant.reasoning": "reasoningId",
    "assistant.message": "messageId requestId serviceRequestId clientRequestId apiCallId phase "
    "reasoningWireField toolRequests.type toolRequests.intentionSummary toolRequests.toolTitle "
    "toolRequests.mcpServerName toolRequests.mcpToolName",
    "tool.execution_complete": "model toolDescription toolTelemetry",
}
"""Keys of `data` that say something about a message and are not sent, by the type of the event."""
_LEAVES = {
    "facts about an event": "*/id */parentId */timestamp */ephemeral "
    + " ".join(
        f"{kind}/data.{key}"
        for kind, keys in _FACTS.items()
        for key in f"{keys} interactionId turnId".split()
    ),
    "encrypted, for the API": "assistant.message/data.encryptedContent "
    "assistant.message/data.reasoningOpaque",
    "shown to the user, not sent": "tool.execution_complete/data.result.detailedContent "
    "tool.execution_complete/data.result.uiResource",
    "repeats the text of the result": "tool.execution_complete/data.result.contents "
    "tool.execution_complete/data.result.structuredContent",
    "what the model may cite": "tool.execution_complete/data.result.citableSources",
    "repeats the call": "tool.execution_start tool.execution_partial_result tool.execution_progress",
    "state of the harness": _STATE,
}
TRUNCATED = "contexts from which the harness dropped messages, without saying which"
UNPROMPTED = "sub-agents without a prompt in the log: left out"


class _Owner(msgspec.Struct, gc=False, rename="camel"):
    parent_tool_call_id: str | None = None
    agent_id: str | None = None


class _Context(msgspec.Struct, gc=False):
    cwd: str | None = None


class _Start(msgspec.Struct, gc=False, rename="camel"):
    session_id: str | None = None
    context: _Context | None = None
    selected_model: str | None = None


class _Change(msgspec.Struct, gc=False, rename="camel"):
    new_model: str | None = None


class _Error(msgspec.Struct, gc=False):
    message: str | None = None


class _Said(_Owner, gc=False, rename="camel"):
    content: str | None = None
    transformed_content: str | None = None


class _Request(msgspec.Struct, gc=False, rename="camel"):
    name: str
    tool_call_id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Answer(_Owner, gc=False, rename="camel"):
    content: str | None = None
    reasoning_text: str | None = None
    tool_requests: list[_Request] | None = None
    model: str | None = None


class _Text(msgspec.Struct, gc=False):
    content: str | None = None


class _Result(_Owner, gc=False, rename="camel"):
    tool_call_id: str | None = None
    result: _Text | None = None
    error: _Error | str | None = None


class _Started(_Owner, gc=False, rename="camel"):
    tool_call_id: str | None = None
    agent_name: str | None = None


class _Compacted(_Owner, gc=False, rename="camel"):
    summary_content: str | None = None


class _Cleared(_Owner, gc=False, rename="camel"):
    """The end of a context."""


class _Rewind(_Owner, gc=False, rename="camel"):
    up_to_event_id: str | None = None


def _event(data: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the struct of an event with this data."""
    fields: list[Any] = [
        ("id", str | None, None),
        ("agent_id", str | None, msgspec.field(name="agentId", default=None)),
        ("data", data, msgspec.field(default_factory=data)),
    ]
    return msgspec.defstruct(f"Event{data.__name__}", fields, gc=False)


_RECORDS = {
    "session.start": _event(_Start),
    "session.model_change": _event(_Change),
    "session.error": _event(_Error),
    "session.compaction_complete": _event(_Compacted),
    "session.context_cleared": _event(_Cleared),
    "session.truncation": _event(_Owner),
    "session.snapshot_rewind": _event(_Rewind),
    "system.message": _event(_Said),
    "system.notification": _event(_Said),
    "user.message": _event(_Said),
    "assistant.message": _event(_Answer),
    "assistant.reasoning": _event(_Said),
    "tool.execution_complete": _event(_Result),
    "subagent.started": _event(_Started),
}


class _Session:
    """Tells the contexts of a session and its sub-agents what the events say.

    Attributes:
        log: Contexts of the main agent.
        prompts: The prompt that is an argument of a call, by the call's id.
        calls: The call that started a sub-agent, by the sub-agent's id.
        thoughts: Reasoning that is logged before its answer, by agent.
    """

    def __init__(self, log: Contexts) -> None:
        self.log = log
        self.prompts: dict[str, str] = {}
        self.calls: dict[str, str] = {}
        self.thoughts: dict[str | None, str | None] = {}

    def contexts(self, event: Any, kind: str, where: str) -> Contexts:
        """Return the contexts of an event's agent."""
        data = event.data
        owner = data if isinstance(data, _Owner) else _Owner()
        call, agent = owner.parent_tool_call_id, event.agent_id or owner.agent_id
        if kind == "subagent.started":
            call = call or data.tool_call_id or where
        if call is not None and agent is not None:
            self.calls[agent] = call
        key = call or (agent and self.calls.get(agent, agent))
        if key is None:
            return self.log
        log = self.log.agent(key)
        if kind == "subagent.started":
            log.name = data.agent_name or log.name
        elif (
            log.tip is None
            and kind not in {"user.message", "system.message"}
            and key in self.prompts
        ):
            log.say([{"role": "user", "content": self.prompts[key]}], where, key)
        return log

    def add(self, kind: str, event: Any, where: str) -> None:
        """Add what an event says."""
        log, data, key = self.contexts(event, kind, where), event.data, event.id or where
        match data:
            case _Said() if kind == "system.message":
                log.system = data.content or log.system
            case _Said() if kind == "assistant.reasoning":
                self.thoughts[log.name] = data.content
            case _Said():
                text = data.transformed_content or data.content or ""
                log.say([{"role": "user", "content": text}], where, key)
            case _Answer():
                self._answer(data, log, where, key)
            case _Result():
                failed = data.error is not None
                result = tool_result(_result(data), data.tool_call_id, is_error=failed)
                log.say([result], where, key)
            case _Compacted(summary_content=str(summary)) if summary:
                note(SUMMARIES)
                log.replace()
                log.say([{"role": "user", "content": summary}], where, key)
            case _Cleared():
                log.replace()
            case _Rewind():
                back = log.find(data.up_to_event_id)
                if back is not None and back in log.path():
                    log.rewind(back.before)
            case _Start():
                log.model = data.selected_model or log.model
            case _Change():
                log.model = data.new_model or log.model
            case _Error():
                log.error = data.message or "error"

    def _answer(self, data: _Answer, log: Contexts, where: str, key: str) -> None:
        calls = list[Any]()
        for request in data.tool_requests or ():
            arguments = json_text(request.arguments, where)
            calls.append(tool_call(request.tool_call_id, request.name, arguments))
            if request.tool_call_id and (prompt := _prompt(request)):
                self.prompts[request.tool_call_id] = prompt
        thought = data.reasoning_text or self.thoughts.pop(log.name, None)
        answer = {"role": "assistant", "content": data.content or ""}
        log.model, log.error = data.model or log.model, None
        more = {"reasoning_content": thought or None, "tool_calls": calls or None}
        log.say([answer | known(more)], where, key)


def _result(data: _Result) -> str:
    if data.result is not None and data.result.content is not None:
        return data.result.content
    return (data.error.message if isinstance(data.error, _Error) else data.error) or ""


class _Prompt(msgspec.Struct, gc=False):
    prompt: str | None = None


def _prompt(request: _Request) -> str | None:
    try:
        return msgspec.json.decode(bytes(request.arguments), type=_Prompt).prompt
    except (msgspec.MsgspecError, ValueError):
        return None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the contexts of a session and of its sub-agents."""
    session = _Session(log)
    for where, kind, event in lines:
        note(TRUNCATED, kind == "session.truncation")
        if event is not None:
            session.add(kind, event, where)
    for key, agent in [*log.agents.items()]:
        path = agent.path()
        if path and path[0].role not in {"user", None}:
            note(UNPROMPTED)
            del log.agents[key]


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the first event."""
    start = next((e.data for e in first if e and isinstance(e.data, _Start)), _Start())
    cwd = start.context.cwd if start.context is not None else None
    return Names(start.session_id or str(path), labels={"cwd": cwd})


ADAPTER = Sessions(
    kind="type",
    records=_RECORDS,
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like(
        {
            "type": {*_RECORDS, *_STATE.split(), "tool.execution_start"},
            "data": dict,
            "parentId": object,
        }
    ),
).adapter("sessions of GitHub Copilot CLI (events.jsonl); text only")
