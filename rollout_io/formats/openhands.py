"""The `openhands` format: OpenHands' evaluation and resolver outputs, and lists of events.

    output.jsonl         {"instance_id": ..., "history": [event, ...], "test_result": {...},
                          "metrics": {...}, "error": null}
    the resolver's       {"issue": {"owner": ..., "repo": ..., "number": 5}, "history": [...],
                          "success": true}
    a list of events     [{"id": 5, "source": "agent", "action": "run", "args": {...},
                           "tool_call_metadata": {"model_response": {...}, ...}}, ...]

Each line, and each list of events, is a run. The raw responses of the model may contain the engine's
tokens. Events become the calls of agents:

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
from the agent are left out, and counted. The workspace description that OpenHands renders from a recall
is missing from the messages, because the log does not contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import NO_JSON, Message, same_json
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import read_message
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.records import numbers, run_of_file, with_group_rule
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


def _read_calls(history: Sequence[msgspec.Raw], where: str) -> Iterator[Call]:
    """Yield the calls of a history in order, including calls of sub-agents."""
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
            task = str((args.inputs or {}).get("task", args.thought or ""))
            prompt: Message = {"role": "user", "content": task}
            agents.append(_Agent(name=args.agent, view=[(identity, [prompt])]))
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


def _events(history: Sequence[msgspec.Raw], where: str) -> Iterator[tuple[str, msgspec.Raw]]:
    """Yield the events; in old logs, an element is a pair of an action and its observation."""
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


_SUFFIXES = (".events.json", ".json")
_LIMITS = ("reached maximum", "AgentStuckInLoopError")
_MAX_DEPTH = 3
_LEAVES = {
    "the task's data: what the agent saw of it is a message": "instance instruction issue_type "
    "base_commit",
    "the result of the run": "git_patch comment_success result_explanation",
    "settings": "metadata",
    "facts about the issue": "issue",
}


class _Issue(msgspec.Struct, gc=False):
    owner: str
    repo: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.repo}#{self.number}"


class _LlmConfig(msgspec.Struct, gc=False):
    model: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    llm_config: _LlmConfig | None = None


class _Row(msgspec.Struct, gc=False):
    history: Annotated[list[msgspec.Raw], inner(EVENT)] | None
    instance_id: str | None = None
    issue: _Issue | None = None
    metadata: _Metadata | None = None
    test_result: msgspec.Raw = NO_JSON
    report: msgspec.Raw = NO_JSON
    metrics: msgspec.Raw = NO_JSON
    resolved: bool | None = None
    success: bool | None = None
    error: str | None = None


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _run_of(row: _Row, place: Place) -> Run:
    """Return the run of a row, or of a list of events, whose instance its file name tells."""
    if place.part is not None:
        return run_of_file(place, None, _SUFFIXES)
    instance = row.instance_id or (row.issue.name if row.issue else None)
    if not instance:
        hint = "keep the lines as OpenHands wrote them, because instance_id identifies the group"
        raise InputError("group", place.where, "the run has no `instance_id`", hint=hint)
    labels = {"instance_id": instance}
    config = row.metadata.llm_config if row.metadata else None
    if config is not None and config.model is not None:
        labels["model"] = config.model
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def _read(row: _Row, run: Run, _: Options) -> Trajectory:
    """Read the calls and the evaluation of a run.

    The reward is the first of these fields that exists: `test_result.report.resolved`,
    `test_result.resolved`, `report.resolved`, `resolved`, and the resolver's `success`. It is
    unknown if the evaluation failed (`error_eval`). All numbers and booleans become metrics.
    `error` marks the run as failed, unless the agent used up its iterations or budget, or was stuck
    in a loop; the error is then only stored as `exit_status`.
    """
    (place,) = run.places
    history = row.history or []
    error = row.error if row.error and not any(mark in row.error for mark in _LIMITS) else None
    name = "history" if place.part is None else "events"
    calls = list(_read_calls(history, f"{place.where}, {name}"))
    metrics = _metrics(row, place.where)
    texts = {"exit_status": row.error, "model": run.labels.get("model")}
    if calls and not any(b'"tool_call_metadata"' in bytes(raw) for raw in history):
        texts["text_source"] = "reconstructed from thoughts and actions"
    return Trajectory(
        steps=steps_of(calls, place.where, failed=run.failed or error is not None),
        reward=_reward(row, metrics),
        error=error,
        metrics=metrics,
        user_values={name: text for name, text in texts.items() if text},
    )


def _reward(row: _Row, metrics: dict[str, float]) -> float | None:
    if any(metrics.get(f"{name}.error_eval") for name in ("test_result.report", "report")):
        return None
    order = ("test_result.report.resolved", "test_result.resolved", "report.resolved")
    stated = next((metrics[name] for name in order if name in metrics), None)
    for flag in (row.resolved, row.success):
        if stated is None and flag is not None:
            stated = float(flag)
    return stated


def _metrics(row: _Row, where: str) -> dict[str, float]:
    """Return all numbers and booleans of the evaluation and the cost metrics."""
    metrics: dict[str, float] = {}
    for name in ("test_result", "report", "metrics"):
        metrics |= _numbers(name, getattr(row, name), where)
    for name in ("resolved", "success"):
        if (flag := getattr(row, name)) is not None:
            metrics[name] = float(flag)
    return metrics


def _numbers(name: str, raw: msgspec.Raw, where: str, depth: int = 0) -> dict[str, float]:
    """Return the numbers in an object, at any depth, by path: "test_result.report.resolved"."""
    if bytes(raw).startswith(b"{") and depth < _MAX_DEPTH:
        fields = decode_line(_OBJECT, bytes(raw), f"{where}, {name}").items()
        parts = [_numbers(f"{name}.{key}", value, where, depth + 1) for key, value in fields]
        return {key: value for part in parts for key, value in part.items()}
    return numbers({name: raw}, where) if depth else {}


_EVENT = {"id": int, "source": str}
_is_event = like({**_EVENT, "action": str}, {**_EVENT, "observation": str})
_is_issue = like("owner repo number")


def _is_run(value: Any) -> bool:
    """True for a run with a history of events, or a list of events."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_event, value))
    history = value.get("history", "") if isinstance(value, dict) else ""
    if history is not None and not isinstance(history, list):
        return False
    if not all(isinstance(event, dict | list) for event in history or ()):
        return False
    is_evaluated = any(value.get(name) is not None for name in ("test_result", "metadata"))
    is_row = isinstance(value.get("instance_id"), str) and is_evaluated
    return is_row or _is_issue(value.get("issue"))


ADAPTER = Records(
    records={"": _Row},
    leaves=_LEAVES,
    bare="history",
    run=_run_of,
    read=_read,
    is_record=_is_run,
    is_whole=lambda start: start.head.lstrip().startswith(b"["),
    is_unique=True,
    finish=with_group_rule,
).adapter("OpenHands: evaluation and resolver outputs (JSONL), lists of events (JSON)")
