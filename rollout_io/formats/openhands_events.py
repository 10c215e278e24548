r"""Conversion of OpenHands events to the calls of its agents.

    action with tool_call_metadata    a tool call of its `model_response`; all events with the same
                                      `model_response` are one assistant message
    observation with the same field   the tool message of that call
    message                           an assistant message if from the agent, else a user message
    system                            the system message, and the tools
    other actions of the agent        text of an older agent: the thought, then the action in its
                                      tags (<execute_bash> ... </execute_bash>)
    other observations                a user message
    condensation                      removes the forgotten events from the agent's view, and adds
                                      the summary as a user message
    delegate                          start of a sub-agent with a separate context, which ends at
                                      the observation of this action

Events that concern only the program are ignored: recall, state changes, null. Events that are `hidden`
from the agent are left out, and counted. The workspace
description that OpenHands renders from a recall is missing from the messages, because the log does
not contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contents import Contents
from rollout_io.formats.parsing.content import NO_JSON, Message, same_json
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import read_message
from rollout_io.formats.parsing.model_calls import Call
from schemas.errors import InputError

_TAGS = {
    "run": "execute_bash",
    "run_ipython": "execute_ipython",
    "browse": "execute_browse",
    "browse_interactive": "execute_browse",
}
EVENT = Contents(
    reads={
        "": "id source action observation args content tool_call_metadata.tool_call_id "
        "tool_call_metadata.function_name tool_call_metadata.model_response thought command code "
        "summary extras.hidden"
    },
    leaves={
        "shown to the user: repeats the event": "message",
        "facts about the event and its call": "timestamp cause llm_metrics timeout "
        "tool_call_metadata.total_calls_in_response success images_urls image_urls file_urls "
        "wait_for_response action_risk keep_prompt is_confirmed command_id exit_code kernel_init_code "
        "outputs",
        "details of an observation, of which `content` is the text": "extras.command extras.metadata "
        "extras.path extras.impl_source extras.old_content extras.new_content extras.diff "
        "extras._diff_cache extras.error_id extras.agent_state extras.reason extras.code "
        "extras.image_urls extras.recall_type extras.repo_branch",
    },
)
"""An event. What OpenHands renders from a recall (the rest of `extras`) is not read: it is counted."""

HIDDEN = "events that are hidden from the agent: left out"
_SAYS = frozenset({"finish", "think", "reject"})
_ACTS = frozenset({"delegate", "read", "write", "edit", "call_tool_mcp"})
_SILENT = frozenset({"recall", "agent_state_changed", "null", "change_agent_state", "success"})


class _Args(msgspec.Struct, gc=False):
    """Arguments of an action; in the oldest events they are fields of the event itself."""

    content: str | None = None
    thought: str | None = None
    final_thought: str | None = None
    command: str | None = None
    code: str | None = None
    browser_actions: str | None = None
    path: str | None = None
    agent: str | None = None
    inputs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    forgotten_event_ids: list[int] | None = None
    forgotten_events_start_id: int | None = None
    forgotten_events_end_id: int | None = None
    summary: str | None = None
    summary_offset: int | None = None
    hidden: bool | None = None


class _Extras(msgspec.Struct, gc=False):
    hidden: bool | None = None


class _Choice(msgspec.Struct, gc=False):
    message: msgspec.Raw
    finish_reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    choices: list[_Choice]


class _ToolCall(msgspec.Struct, gc=False):
    tool_call_id: str | None = None
    function_name: str | None = None
    model_response: msgspec.Raw = NO_JSON


class _Event(msgspec.Struct, gc=False):
    id: int | None = None
    source: str | None = None
    action: str | None = None
    observation: str | None = None
    args: _Args | None = None
    extras: _Extras | None = None
    content: msgspec.Raw = NO_JSON
    tool_call_metadata: _ToolCall | None = None


@dataclass(slots=True)
class _Agent:
    """The messages that an agent sees, with the id of the event that each comes from."""

    name: str | None = None
    view: list[tuple[int, list[Message]]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    response: bytes | None = None

    @property
    def messages(self) -> list[Message]:
        return [message for _, messages in self.view for message in messages]


_EVENT_DECODER = msgspec.json.Decoder(_Event)
_ARGS_DECODER = msgspec.json.Decoder(_Args)
_PAIR_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_RESPONSE_DECODER = msgspec.json.Decoder(_Response)
_CONTENT_DECODER = msgspec.json.Decoder(str | None)


def read_calls(history: Sequence[msgspec.Raw], where: str) -> Iterator[Call]:
    """Yield the calls of a history in order, including calls of sub-agents.

    Args:
        history: Events; in old logs, pairs of an action and its observation.
        where: Location of the history, for error messages.

    Raises:
        InputError: `record_type`: a field has the wrong type; `message`: a response has no choices,
            or its message is invalid.
    """
    agents = [_Agent()]
    for number, (here, raw) in enumerate(_events(history, where)):
        event = decode_line(_EVENT_DECODER, bytes(raw), here)
        args = event.args or decode_line(_ARGS_DECODER, bytes(raw), here)
        identity = number if event.id is None else event.id
        if args.hidden or (event.extras is not None and event.extras.hidden):
            note(HIDDEN)
            continue
        if event.action == "delegate":
            yield from _act(agents[-1], event, args, identity, here)
            agents.append(_delegate(args, identity))
            continue
        if event.observation == "delegate" and len(agents) > 1:
            agents.pop()
        agent = agents[-1]
        if event.action == "condensation":
            _condense(agent, args, identity)
        elif event.observation is not None:
            agent.view.append((identity, _observed(event, here)))
        elif event.action == "system":
            agent.tools = args.tools or agent.tools
            agent.view.append((identity, [{"role": "system", "content": args.content or ""}]))
        elif event.action == "message" and event.source != "agent":
            agent.view.append((identity, [{"role": "user", "content": args.content or ""}]))
        else:
            yield from _act(agent, event, args, identity, here)


def is_reconstructed(history: Sequence[msgspec.Raw]) -> bool:
    """True if no response was logged: the model's text is then reconstructed from its actions."""
    return bool(history) and not any(b'"tool_call_metadata"' in bytes(raw) for raw in history)


def _events(history: Sequence[msgspec.Raw], where: str) -> Iterator[tuple[str, msgspec.Raw]]:
    for index, raw in enumerate(history):
        here = f"{where}[{index}]"
        if bytes(raw).startswith(b"["):
            pair: list[msgspec.Raw] = decode_line(_PAIR_DECODER, bytes(raw), here)
            for part, event in enumerate(pair):
                yield f"{here}[{part}]", event
        else:
            yield here, raw


def _act(agent: _Agent, event: _Event, args: _Args, identity: int, where: str) -> Iterator[Call]:
    """Yield the LLM call that produced an action, unless an earlier action already yielded it."""
    logged = event.tool_call_metadata
    raw = logged.model_response if logged else NO_JSON
    if bytes(raw) != b"null":
        if agent.response is not None and same_json(bytes(raw), agent.response):
            agent.view.append((identity, []))
            return
        agent.response = bytes(raw)
        response = decode_line(_RESPONSE_DECODER, bytes(raw), f"{where}, model_response")
        if not response.choices:
            hint = "copy the log again from its source: it is damaged"
            raise InputError("message", where, "the response has no choices", hint=hint)
        choice = response.choices[0]
        reply = read_message(choice.message, f"{where}, model_response.choices[0].message")
        reason, answer = choice.finish_reason, raw
    else:
        text = _text_of(event, args)
        if text is None:
            agent.view.append((identity, []))
            return
        reply, reason, answer = {"role": "assistant", "content": text}, None, None
    yield Call(
        where=where,
        prompt=agent.messages,
        reply=reply,
        answer=answer,
        agent=agent.name,
        tools=agent.tools,
        stop_reason=reason,
    )
    agent.view.append((identity, [reply]))


def _text_of(event: _Event, args: _Args) -> str | None:
    """Return the text with which an older version of the agent expressed an action, or None."""
    if event.action == "message":
        return args.content or ""
    thought = args.thought or ""
    if event.action in _TAGS:
        tag, inner = _TAGS[event.action], args.command or args.code or args.browser_actions or ""
        return f"{thought}\n<{tag}>\n{inner}\n</{tag}>".lstrip("\n")
    if event.action in _SAYS:
        return args.final_thought or thought
    if event.action in _ACTS:
        task = (args.inputs or {}).get("task", args.path)
        return f"{thought}\n{task or ''}".strip("\n")
    return None


def _observed(event: _Event, where: str) -> list[Message]:
    if event.observation in _SILENT:
        return []
    text = decode_line(_CONTENT_DECODER, bytes(event.content), f"{where}, content") or ""
    call = event.tool_call_metadata
    if call is None or call.tool_call_id is None:
        return [{"role": "user", "content": text}]
    message = {"role": "tool", "content": text, "tool_call_id": call.tool_call_id}
    return [message | ({"name": call.function_name} if call.function_name else {})]


def _delegate(args: _Args, identity: int) -> _Agent:
    task = str((args.inputs or {}).get("task", args.thought or ""))
    return _Agent(name=args.agent, view=[(identity, [{"role": "user", "content": task}])])


def _condense(agent: _Agent, args: _Args, identity: int) -> None:
    """Remove the events that a condensation forgets, and insert its summary, if any."""
    first, last = args.forgotten_events_start_id, args.forgotten_events_end_id
    forgotten = set(args.forgotten_event_ids or ())
    remaining = [
        entry
        for entry in agent.view
        if entry[0] not in forgotten
        and not (first is not None and last is not None and first <= entry[0] <= last)
    ]
    if args.summary is not None:
        at = len(remaining) if args.summary_offset is None else max(args.summary_offset, 0)
        remaining.insert(at, (identity, [{"role": "user", "content": args.summary}]))
    agent.view = remaining
