"""The `openhands_sdk` format: conversations of OpenHands' SDK (v1), as JSON Lines or a directory.

    {"kind": "SystemPromptEvent", "system_prompt": {"text": "..."}, "tools": [...]}
    {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": [...]}}
    {"kind": "ActionEvent", "thought": [...], "tool_call": {"name": "...", "arguments": "..."},
     "llm_response_id": "r1"}
    {"kind": "ObservationEvent", "tool_call_id": "c", "observation": {"content": [...]}}
    {"kind": "Condensation", "forgotten_event_ids": [...], "summary": "...", "summary_offset": 2}

A directory has `base_state.json` and one file per event (`events/*.json`). Actions of one response are
one answer. A condensation begins a context without the events that it forgets, with the summary in
their place. Results of the terminal end with the lines that the SDK sends after them. A conversation is
a run; it failed if its last error is not followed by an answer. A
`TokenEvent` has the exact tokens of a call: if there are any, each is a step, and the text is not
tokenized again. The log has no reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from rollout_io.formats.base import Step
from rollout_io.formats.contexts import Contexts, Item
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import (
    Message,
    Part,
    all_text,
    extend,
    function_tool,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.tokens import INT32_MAX

_TEXTS = Contents(
    kind="type",
    default="text",
    reads={"text": "text", "image": "image_urls"},
    leaves={"for the API's cache": "*/cache_prompt", "details for the API": "*/enable_truncation"},
)
_RUN = (
    "ConversationStateUpdateEvent PauseEvent InterruptEvent CondensationRequest "
    "LLMCompletionLogEvent StreamingDeltaEvent HookExecutionEvent"
)
_LEAVES = {
    "facts about an event": "*/source */timestamp */sender */activated_skills */activated_microagents "
    "*/critic_result */llm_response_id */action_id */tool_name MessageEvent/llm_message.name "
    "MessageEvent/llm_message.cache_enabled MessageEvent/llm_message.vision_enabled "
    "MessageEvent/llm_message.function_calling_enabled MessageEvent/llm_message.force_string_serializer "
    "MessageEvent/llm_message.send_reasoning_content "
    "AgentErrorEvent/classification UserRejectObservation/rejection_source",
    "repeats the call, as the tool parsed it": "ActionEvent/action ActionEvent/security_risk "
    "ActionEvent/summary ActionEvent/tool_call.origin",
    "details of a result that are not sent": "ObservationEvent/observation "
    "ObservationEvent/observation.metadata",
    "encrypted, for the API": "ActionEvent/reasoning_details",
    "state of the conversation": _RUN,
}
_ERROR = "[An error occurred during execution.]"


_Id = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _Text(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    image_urls: list[str] | None = None


_Texts = Annotated[str | list[_Text] | None, inner(_TEXTS)]


class _Call(msgspec.Struct, gc=False):
    name: str
    arguments: str | None = None
    id: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    summary: list[str] | None = None
    content: list[str] | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: _Texts = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[Part] | None = None
    responses_reasoning_item: _Reasoning | None = None


class _Terminal(msgspec.Struct, gc=False):
    exit_code: int | None = None
    working_dir: str | None = None
    py_interpreter_path: str | None = None
    prefix: str | None = None
    suffix: str | None = None


class _Observation(msgspec.Struct, gc=False):
    content: _Texts = None
    output: _Texts = None
    text: str | None = None
    is_error: bool | None = None
    metadata: _Terminal | None = None


class _Event(msgspec.Struct, gc=False):
    id: str | None = None


class _SystemPrompt(_Event, gc=False):
    system_prompt: _Text | None = None
    dynamic_context: _Text | None = None
    tools: list[dict[str, Any]] | None = None


class _Spoken(_Event, gc=False):
    llm_message: _Message | None = None
    extended_content: _Texts = None
    llm_response_id: str | None = None


class Action(_Event, gc=False):
    """A call of a tool; the calls of one response are one answer."""

    thought: _Texts = None
    tool_call: _Call | None = None
    tool_call_id: str | None = None
    llm_response_id: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[Part] | None = None
    responses_reasoning_item: _Reasoning | None = None


class _Result(_Event, gc=False):
    tool_call_id: str | None = None
    observation: _Observation | None = None
    extended_content: _Texts = None


class Rejection(_Event, gc=False):
    """A call that the user rejected."""

    tool_call_id: str | None = None
    rejection_reason: str | None = None


class _AgentError(_Event, gc=False):
    tool_call_id: str | None = None
    error: str | None = None


class Condensation(_Event, gc=False):
    """A compaction: events that the model no longer sees, and what stands in their place."""

    forgotten_event_ids: list[str] | None = None
    summary: str | None = None
    summary_offset: int | None = None


class Summary(_Event, gc=False):
    """A summary, as an event of its own."""

    summary: str | None = None


class _Failure(_Event, gc=False):
    code: str | None = None
    detail: str | None = None


class Tokens(_Event, gc=False):
    """The engine's tokens of a call."""

    prompt_token_ids: list[_Id] | None = None
    response_token_ids: list[_Id] | None = None


_RECORDS = {
    "SystemPromptEvent": _SystemPrompt,
    "MessageEvent": _Spoken,
    "ActionEvent": Action,
    "ObservationEvent": _Result,
    "UserRejectObservation": Rejection,
    "AgentErrorEvent": _AgentError,
    "Condensation": Condensation,
    "CondensationSummaryEvent": Summary,
    "ConversationErrorEvent": _Failure,
    "TokenEvent": Tokens,
}


class _View(NamedTuple):
    """An event that the model sees."""

    name: str
    answer: str
    message: Message
    where: str


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the contexts of a conversation."""
    view: list[_View] = []
    for where, _, event in lines:
        if not isinstance(event, _Event):
            continue
        name = event.id or where
        match event:
            case _SystemPrompt():
                log.tools = _tools(event.tools) or log.tools
            case _Failure():
                log.error = event.detail or event.code or "error"
            case Tokens() if event.response_token_ids:
                log.exact.append(_step(event, view, where))
            case Condensation():
                log.show(_items(view))
                view = _condensed(event, name, view, where)
        if (message := _said_by(event)) is not None:
            log.error = None if message["role"] == "assistant" else log.error
            response = event.llm_response_id if isinstance(event, Action | _Spoken) else None
            view.append(_View(name, response or name, message, where))
    log.show(_items(view))


def _step(event: Tokens, view: Sequence[_View], where: str) -> Step:
    """Return the call of a token event; the messages are those that were sent, without the answer."""
    sent = [seen.message for seen in view]
    while sent and sent[-1]["role"] == "assistant":
        sent.pop()
    return Step(
        source=where,
        prompt_token_ids=np.array(event.prompt_token_ids or [], np.int32),
        response_ids=np.array(event.response_token_ids, np.int32),
        messages=msgspec.json.encode(sent).decode(),
    )


def _items(view: Sequence[_View]) -> Iterator[Item]:
    """Yield an item for each event; calls of one response are one answer."""
    items: list[Item] = []
    replies: dict[str, Message] = {}
    for seen in view:
        is_call = seen.message["role"] == "assistant" and "tool_calls" in seen.message
        if is_call and seen.answer in replies:
            extend(replies[seen.answer], seen.message)
            continue
        message = dict(seen.message)
        if is_call:
            replies[seen.answer] = message
        items.append(Item(seen.answer, [message], seen.where))
    yield from items


def _condensed(event: Condensation, name: str, view: Sequence[_View], where: str) -> list[_View]:
    forgotten = set(event.forgotten_event_ids or ())
    remaining = [seen for seen in view if seen.name not in forgotten]
    if event.summary and event.summary_offset is not None:
        summary = {"role": "user", "content": event.summary}
        seen = _View(f"{name} summary", name, summary, where)
        remaining.insert(max(event.summary_offset, 0), seen)
    return remaining


def _said_by(event: _Event) -> Message | None:
    result: Any = None
    match event:
        case _SystemPrompt():
            prompt = filter(None, [event.system_prompt, event.dynamic_context])
            return {"role": "system", "content": _shown([*prompt])}
        case _Spoken(llm_message=_Message() as message):
            return _said(message, _listed(event.extended_content))
        case Action(tool_call=_Call() as call):
            message = _Message(
                "assistant",
                event.thought,
                [call],
                reasoning_content=event.reasoning_content,
                thinking_blocks=event.thinking_blocks,
                responses_reasoning_item=event.responses_reasoning_item,
            )
            return _said(message, ())
        case Summary():
            return {"role": "user", "content": event.summary or ""}
        case _Result():
            observed = _observed(event.observation or _Observation())
            result = _shown([*observed, *_listed(event.extended_content)])
        case Rejection():
            result = f"Action rejected: {event.rejection_reason or ''}"
        case _AgentError(tool_call_id=str()):
            result = event.error or ""
        case _:
            return None
    call_id = getattr(event, "tool_call_id", None)
    return known({"role": "tool", "content": result, "tool_call_id": call_id})


def _said(message: _Message, more: Sequence[_Text]) -> Message:
    item = message.responses_reasoning_item
    thoughts = (
        message.reasoning_content,
        all_text(message.thinking_blocks),
        "\n".join((item.content or item.summary or []) if item is not None else []),
    )
    calls = [tool_call(c.id, c.name, c.arguments or "{}") for c in message.tool_calls or ()]
    fields = {
        "role": message.role,
        "content": _shown([*_listed(message.content), *more]),
        "reasoning_content": next((text for text in thoughts if text), None),
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return known(fields)


def _observed(observation: _Observation) -> list[_Text]:
    """Return what is sent of a result: after an error a line that says so, and the terminal's state."""
    parts = _listed(observation.content if observation.content is not None else observation.output)
    if not parts and observation.text:
        parts = [_Text(text=observation.text)]
    state = observation.metadata
    if state is not None:
        text = "".join(part.text or "" for part in parts)
        text = f"{state.prefix or ''}{text}{state.suffix or ''}"
        if state.working_dir:
            text += f"\n[Current working directory: {state.working_dir}]"
        if state.py_interpreter_path:
            text += f"\n[Python interpreter: {state.py_interpreter_path}]"
        if state.exit_code not in {-1, None}:
            text += f"\n[Command finished with exit code {state.exit_code}]"
        parts = [_Text(text=text)]
    return [_Text(text=_ERROR), *parts] if observation.is_error else parts


def _listed(content: _Texts) -> list[_Text]:
    return [_Text(text=content)] if isinstance(content, str) else content or []


def _shown(content: Sequence[_Text]) -> str | list[Message]:
    parts: list[Part] = []
    for block in content:
        if block.type == "image" or block.image_urls:
            urls = block.image_urls or []
            parts += [Part(type="image_url", image_url={"url": url}) for url in urls]
        elif block.text:
            parts.append(Part(text=block.text))
    return shown(parts)


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """Return the tools that are logged in OpenAI's form, or by a name and a description."""
    converted: list[Message] = []
    for tool in tools or ():
        if isinstance(tool.get("function"), Mapping):
            converted.append(dict(tool))
        elif isinstance(tool.get("name"), str):
            schemas = (tool.get(name) for name in ("parameters", "inputSchema", "input_schema"))
            schema = next((one for one in schemas if isinstance(one, Mapping)), None)
            converted.append(function_tool(tool["name"], tool.get("description"), schema))
    return converted or None


ADAPTER = Sessions(
    kind="kind",
    records=_RECORDS,
    leaves=_LEAVES,
    names=lambda path, _: Names(str(path)),
    read=read,
    is_record=like(
        {"kind": {*_RECORDS, *_RUN.split()}, "id": object, "timestamp": object, "source": object}
    ),
    files="events/*.json",
).adapter("conversations of OpenHands' SDK (v1): events as JSONL, or a directory; text only")
