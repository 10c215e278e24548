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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from rollout_io.formats.base import Step
from rollout_io.formats.contents import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    all_text,
    extend,
    function_tool,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions
from rollout_io.formats.parsing.tokens import INT32_MAX

_TEXTS = Contents(
    kind="type",
    default="text",
    reads={"text": "text", "image": "image_urls"},
    leaves={"for the API's cache": "*/cache_prompt", "details for the API": "*/enable_truncation"},
)
_REASONING = "reasoning_content thinking_blocks responses_reasoning_item"
_CALL = "tool_call_id tool_name"
_RUN = (
    "ConversationStateUpdateEvent PauseEvent InterruptEvent CondensationRequest "
    "LLMCompletionLogEvent StreamingDeltaEvent HookExecutionEvent"
)
CONTENTS = Contents(
    kind="kind",
    reads={
        "*": "id source",
        "SystemPromptEvent": "system_prompt dynamic_context tools",
        "MessageEvent": "llm_message.role llm_message.tool_calls llm_message.tool_call_id "
        "llm_message.name llm_response_id "
        + " ".join(f"llm_message.{name}" for name in _REASONING.split()),
        "ActionEvent": f"tool_call {_CALL} llm_response_id {_REASONING}",
        "ObservationEvent": f"{_CALL} observation.output observation.text observation.is_error "
        "observation.metadata observation.kind",
        "UserRejectObservation": f"{_CALL} rejection_reason",
        "AgentErrorEvent": f"{_CALL} error",
        "Condensation": "forgotten_event_ids summary summary_offset",
        "CondensationSummaryEvent": "summary",
        "ConversationErrorEvent": "code detail",
        "TokenEvent": "prompt_token_ids response_token_ids",
    },
    leaves={
        "facts about an event": "*/timestamp */sender */activated_skills */activated_microagents "
        "*/critic_result */llm_response_id */action_id MessageEvent/llm_message "
        "AgentErrorEvent/classification UserRejectObservation/rejection_source",
        "repeats the call, as the tool parsed it": "ActionEvent/action ActionEvent/security_risk "
        "ActionEvent/summary",
        "details of a result that are not sent": "ObservationEvent/observation",
        "encrypted, for the API": "ActionEvent/reasoning_details",
        "state of the conversation": _RUN,
    },
    inner={
        "MessageEvent/llm_message.content": _TEXTS,
        "MessageEvent/extended_content": _TEXTS,
        "ActionEvent/thought": _TEXTS,
        "ObservationEvent/observation.content": _TEXTS,
        "ObservationEvent/extended_content": _TEXTS,
    },
)
_ERROR = "[An error occurred during execution.]"


_Id = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _Text(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    image_urls: list[str] | None = None


_Texts = str | list[_Text] | None


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
    kind: str
    id: str | None = None
    system_prompt: _Text | None = None
    dynamic_context: _Text | None = None
    tools: list[dict[str, Any]] | None = None
    llm_message: _Message | None = None
    extended_content: list[_Text] | None = None
    thought: _Texts = None
    tool_call: _Call | None = None
    tool_call_id: str | None = None
    llm_response_id: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[Part] | None = None
    responses_reasoning_item: _Reasoning | None = None
    observation: msgspec.Raw = NO_JSON
    rejection_reason: str | None = None
    error: str | None = None
    detail: str | None = None
    code: str | None = None
    forgotten_event_ids: list[str] | None = None
    summary: str | None = None
    summary_offset: int | None = None
    prompt_token_ids: list[_Id] | None = None
    response_token_ids: list[_Id] | None = None


_EVENT = msgspec.json.Decoder(_Event)
_OBSERVATION = msgspec.json.Decoder(_Observation | None)


def read_session(records: Sequence[Record]) -> Session:
    """Read the contexts of a conversation."""
    contexts, view = Contexts(), list[tuple[str, str, Message, str]]()
    error, exact = None, list[Step]()
    for place, content in records:
        where = place.where
        event = decode_line(_EVENT, content, where)
        key = event.id or where
        if event.kind == "Condensation":
            contexts.add(_items(view))
            view = _condensed(event, key, view, where)
            continue
        if event.kind == "SystemPromptEvent":
            contexts.tools = _tools(event.tools) or contexts.tools
        if event.kind == "ConversationErrorEvent":
            error = event.detail or event.code or "error"
        if event.kind == "TokenEvent" and event.response_token_ids:
            exact.append(_step(event, view, where))
        made = _message(event, where)
        if made is not None:
            error = None if made["role"] == "assistant" else error
            view.append((key, event.llm_response_id or key, made, where))
    contexts.add(_items(view))
    return Session(contexts, error, exact=exact)


def _step(event: _Event, view: Sequence[tuple[str, str, Message, str]], where: str) -> Step:
    """Return the call of a token event; the messages are those that were sent, without the answer."""
    sent = [message for _, _, message, _ in view]
    while sent and sent[-1]["role"] == "assistant":
        sent.pop()
    return Step(
        source=where,
        prompt_token_ids=np.array(event.prompt_token_ids or [], np.int32),
        response_ids=np.array(event.response_token_ids, np.int32),
        messages=msgspec.json.encode(sent).decode(),
    )


def _items(view: Sequence[tuple[str, str, Message, str]]) -> list[Item]:
    """Return an item for each event; calls of one response are one answer."""
    items: list[Item] = []
    replies: dict[str, Message] = {}
    for _, response, message, where in view:
        is_call = message["role"] == "assistant" and "tool_calls" in message
        if is_call and response in replies:
            extend(replies[response], message)
            continue
        made = dict(message)
        if is_call:
            replies[response] = made
        items.append(Item(response, [made], where))
    return items


def _condensed(
    event: _Event, key: str, view: Sequence[tuple[str, str, Message, str]], where: str
) -> list[tuple[str, str, Message, str]]:
    forgotten = set(event.forgotten_event_ids or ())
    kept = [each for each in view if each[0] not in forgotten]
    if event.summary and event.summary_offset is not None:
        message = {"role": "user", "content": event.summary}
        kept.insert(max(event.summary_offset, 0), (f"{key} summary", key, message, where))
    return kept


def _message(event: _Event, where: str) -> Message | None:
    if event.kind == "SystemPromptEvent":
        prompt = [event.system_prompt, event.dynamic_context]
        return {"role": "system", "content": _shown([text for text in prompt if text is not None])}
    if event.kind == "MessageEvent" and event.llm_message is not None:
        return _said(event.llm_message, event.extended_content or ())
    if event.kind == "ActionEvent" and event.tool_call is not None:
        message = _Message(
            "assistant",
            event.thought,
            [event.tool_call],
            reasoning_content=event.reasoning_content,
            thinking_blocks=event.thinking_blocks,
            responses_reasoning_item=event.responses_reasoning_item,
        )
        return _said(message, ())
    result: Any = None
    if event.kind == "ObservationEvent":
        found = decode_line(_OBSERVATION, bytes(event.observation), f"{where}, observation")
        result = _shown([*_observed(found or _Observation()), *(event.extended_content or ())])
    elif event.kind == "UserRejectObservation":
        result = f"Action rejected: {event.rejection_reason or ''}"
    elif event.kind == "AgentErrorEvent" and event.tool_call_id is not None:
        result = event.error or ""
    elif event.kind == "CondensationSummaryEvent":
        return {"role": "user", "content": event.summary or ""}
    if result is None:
        return None
    return known({"role": "tool", "content": result, "tool_call_id": event.tool_call_id})


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


def _observed(given: _Observation) -> list[_Text]:
    """Return what is sent of a result: after an error a line that says so, and the terminal's state."""
    found = _listed(given.content if given.content is not None else given.output)
    if not found and given.text:
        found = [_Text(text=given.text)]
    state = given.metadata
    if state is not None:
        text = "".join(each.text or "" for each in found)
        text = f"{state.prefix or ''}{text}{state.suffix or ''}"
        if state.working_dir:
            text += f"\n[Current working directory: {state.working_dir}]"
        if state.py_interpreter_path:
            text += f"\n[Python interpreter: {state.py_interpreter_path}]"
        if state.exit_code not in {-1, None}:
            text += f"\n[Command finished with exit code {state.exit_code}]"
        found = [_Text(text=text)]
    return [_Text(text=_ERROR), *found] if given.is_error else found


def _listed(content: _Texts) -> list[_Text]:
    return [_Text(text=content)] if isinstance(content, str) else content or []


def _shown(content: Sequence[_Text]) -> str | list[Message]:
    parts: list[Part] = []
    for each in content:
        if each.type == "image" or each.image_urls:
            urls = each.image_urls or []
            parts += [Part(type="image_url", image_url={"url": url}) for url in urls]
        elif each.text:
            parts.append(Part(text=each.text))
    return shown(parts)


def _tools(given: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """Return the tools that are logged in OpenAI's form, or by a name and a description."""
    found: list[Message] = []
    for each in given or ():
        if isinstance(each.get("function"), Mapping):
            found.append(dict(each))
        elif isinstance(each.get("name"), str):
            found.append(function_tool(each["name"], each.get("description"), _schema(each)))
    return found or None


def _schema(tool: Mapping[str, Any]) -> Any:
    schemas = (tool.get(name) for name in ("parameters", "inputSchema", "input_schema"))
    return next((schema for schema in schemas if isinstance(schema, Mapping)), None)


def _names(path: Path, _: Sequence[Mapping[str, Any]]) -> Names:
    return Names(str(path))


def _is_event(record: Mapping[str, Any]) -> bool:
    kind = record.get("kind")
    is_event = isinstance(kind, str) and kind in CONTENTS.types
    return is_event and {"id", "timestamp", "source"} <= record.keys()


ADAPTER = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_event,
    marks=(b'"kind"',),
    files="events/*.json",
).adapter("conversations of OpenHands' SDK (v1): events as JSONL, or a directory; text only")
