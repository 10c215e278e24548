"""The `openhands_sdk` and `openhands_llm` formats: conversations of OpenHands' SDK (v1), and logs of model calls.

A directory has `base_state.json` and one file per event (`events/*.json`). Actions of one response are
one answer. A condensation begins a context without the events that it forgets, with the summary in
their place. Results of the terminal end with the lines that the SDK sends after them. A conversation is
a run; it failed if its last error is not followed by an answer. A
`TokenEvent` has the exact tokens of a call: if there are any, each is a step, and the text is not
tokenized again. The log has no reward.

The format `openhands_llm` is a log of model calls by the SDK and older versions, one document each.
Calls of the Responses API have `input` and `instructions` in place of messages. The files of a
directory are one run, in the order of their times. A call whose prompt begins with the messages of an
earlier call continues its context. The tokens are exact if the responses have the engine's ids. The log
has no reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from rollout_io.formats.base import Found, Options, Place, Run, Step, Trajectory
from rollout_io.formats.contexts import Contexts, Item
from rollout_io.formats.dialects.bodies import answers_of, prompt_of
from rollout_io.formats.engines.records import Records
from rollout_io.formats.engines.sessions import Line, Sessions
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import (
    Message,
    Part,
    all_text,
    extend,
    function_tool,
    known,
    raw_of,
    shown,
    tool_call,
    tool_result,
)
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.records import natural_key, read_record
from rollout_io.formats.parsing.tokens import INT32_MAX
from schemas.errors import InputError

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


class _Action(_Event, gc=False):
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


class _Rejection(_Event, gc=False):
    tool_call_id: str | None = None
    rejection_reason: str | None = None


class _AgentError(_Event, gc=False):
    tool_call_id: str | None = None
    error: str | None = None


class _Condensation(_Event, gc=False):
    forgotten_event_ids: list[str] | None = None
    summary: str | None = None
    summary_offset: int | None = None


class _Summary(_Event, gc=False):
    summary: str | None = None


class _Failure(_Event, gc=False):
    code: str | None = None
    detail: str | None = None


class _Tokens(_Event, gc=False):
    prompt_token_ids: list[_Id] | None = None
    response_token_ids: list[_Id] | None = None


_RECORDS = {
    "SystemPromptEvent": _SystemPrompt,
    "MessageEvent": _Spoken,
    "ActionEvent": _Action,
    "ObservationEvent": _Result,
    "UserRejectObservation": _Rejection,
    "AgentErrorEvent": _AgentError,
    "Condensation": _Condensation,
    "CondensationSummaryEvent": _Summary,
    "ConversationErrorEvent": _Failure,
    "TokenEvent": _Tokens,
}


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the contexts of a conversation."""
    view: list[tuple[str, Item]] = []  # what the model sees, with the names of the events
    for where, _, event in lines:
        if not isinstance(event, _Event):
            continue
        name = event.id or where
        match event:
            case _SystemPrompt():
                log.tools = _tools(event.tools) or log.tools
            case _Failure():
                log.error = event.detail or event.code or "error"
            case _Tokens() if event.response_token_ids:
                log.exact.append(_step(event, view, where))
            case _Condensation():
                log.show(_answers(view))
                forgotten = set(event.forgotten_event_ids or ())
                view = [(other, item) for other, item in view if other not in forgotten]
                if event.summary and event.summary_offset is not None:
                    summary = Item(name, [{"role": "user", "content": event.summary}], where)
                    view.insert(max(event.summary_offset, 0), (f"{name} summary", summary))
        if (message := _said_by(event)) is not None:
            log.error = None if message["role"] == "assistant" else log.error
            response = event.llm_response_id if isinstance(event, _Action | _Spoken) else None
            view.append((name, Item(response or name, [message], where)))
    log.show(_answers(view))


def _step(event: _Tokens, view: Sequence[tuple[str, Item]], where: str) -> Step:
    """Return the call of a token event; the messages are those that were sent, without the answer."""
    sent = [message for _, item in view for message in item.messages]
    while sent and sent[-1]["role"] == "assistant":
        sent.pop()
    return Step(
        source=where,
        prompt_token_ids=np.array(event.prompt_token_ids or [], np.int32),
        response_ids=np.array(event.response_token_ids, np.int32),
        messages=msgspec.json.encode(sent).decode(),
    )


def _answers(view: Sequence[tuple[str, Item]]) -> list[Item]:
    """Return what the model sees; calls of one response are one answer."""
    items: list[Item] = []
    replies: dict[str, Message] = {}
    for _, item in view:
        message = dict(item.messages[0])
        if message["role"] == "assistant" and "tool_calls" in message:
            if item.key in replies:
                extend(replies[item.key], message)
                continue
            replies[item.key] = message
        items.append(item._replace(messages=[message]))
    return items


def _said_by(event: _Event) -> Message | None:
    result: Any = None
    match event:
        case _SystemPrompt():
            prompt = filter(None, [event.system_prompt, event.dynamic_context])
            return {"role": "system", "content": _shown(prompt)}
        case _Spoken(llm_message=_Message() as message):
            content = [*_listed(message.content), *_listed(event.extended_content)]
            spoken = _said(message.role, content, message.tool_calls, message)
            return spoken | known({"tool_call_id": message.tool_call_id})
        case _Action(tool_call=_Call() as call):
            return _said("assistant", _listed(event.thought), [call], event)
        case _Summary():
            return {"role": "user", "content": event.summary or ""}
        case _Result():
            observed = _observed(event.observation or _Observation())
            result = _shown([*observed, *_listed(event.extended_content)])
        case _Rejection():
            result = f"Action rejected: {event.rejection_reason or ''}"
        case _AgentError(tool_call_id=str()):
            result = event.error or ""
        case _:
            return None
    return tool_result(result, getattr(event, "tool_call_id", None))


def _said(
    role: str, content: Sequence[_Text], calls: Sequence[_Call] | None, logged: _Message | _Action
) -> Message:
    item = logged.responses_reasoning_item
    reasoning = "\n".join(item.content or item.summary or []) if item is not None else ""
    thoughts = (logged.reasoning_content, all_text(logged.thinking_blocks), reasoning)
    named = [tool_call(c.id, c.name, c.arguments or "{}") for c in calls or ()]
    fields = {"reasoning_content": next(filter(None, thoughts), None), "tool_calls": named or None}
    return {"role": role, "content": _shown(content), **known(fields)}


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


def _shown(content: Iterable[_Text]) -> str | list[Message]:
    parts: list[Part] = []
    for block in content:
        urls = block.image_urls or ()
        parts += [Part(type="image_url", image_url={"url": url}) for url in urls]
        if block.text and block.type != "image" and not urls:
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
    read=read,
    is_record=like(
        {"kind": {*_RECORDS, *_RUN.split()}, "id": object, "timestamp": object, "source": object}
    ),
    files="events/*.json",
).adapter("conversations of OpenHands' SDK (v1): events as JSONL, or a directory; text only")


_LLM_LEAVES = {
    "settings of the request": "kwargs context_window llm_path include store reasoning",
    "facts about the call": "cost latency_sec usage_summary usage error fncall_prompt "
    "args log_completions",
    "repeats the response": "raw_response",
}


class _Sampling(msgspec.Struct, gc=False):
    temperature: Any = None
    top_p: Any = None


class _Logged(msgspec.Struct, gc=False):
    messages: Any = None
    tools: Any = None
    input: Any = None
    instructions: Any = None
    response: Any = None
    timestamp: Any = None
    kwargs: _Sampling | None = None


_LOGGED = msgspec.json.Decoder(_Logged)


def _call_of(call: _Logged, place: Place) -> Run:
    labels = {"time": str(_number(call.timestamp) or 0.0)}
    folder = str(Path(place.where).parent)
    return Run(instance_id=folder, repetition_id=0, places=[place], labels=labels)


def _by_folder(items: Iterator[Found]) -> Iterator[Found]:
    """Join the calls of each directory, in the order of their times."""
    calls: list[Run] = []
    for item in items:
        if isinstance(item, Run):
            calls.append(item)
        else:
            yield item
    calls.sort(key=lambda call: natural_key(call.places[0].where))
    calls.sort(key=lambda call: (natural_key(call.instance_id), float(call.labels["time"])))
    for folder, group in groupby(calls, key=lambda call: call.instance_id):
        places = [call.places[0] for call in group]
        yield Run(instance_id=folder, repetition_id=0, places=places, labels={"directory": folder})


def _read_calls(_: _Logged, run: Run, __: Options) -> Trajectory:
    calls: list[Call] = []
    for place in run.places:
        where = place.where
        logged = decode_document(_LOGGED, read_record(place), where)
        prompt = prompt_of(msgspec.structs.asdict(logged), where)
        if prompt is None:
            hint = "see docs/formats/openhands_llm.md for the fields of the format"
            raise InputError("record_type", where, "the log has no prompt", "messages", hint)
        answers = answers_of(logged.response, f"{where}, response") if logged.response else []
        sampling = logged.kwargs or _Sampling()
        calls += [
            Call(
                where=where,
                prompt=prompt.messages,
                reply=answer,
                answer=raw_of(logged.response),
                tools=prompt.tools,
                temperature=_number(sampling.temperature),
                top_p=_number(sampling.top_p),
            )
            for answer in answers[:1]
        ]
    return Trajectory(steps=steps_of(calls, run.places[0].where))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_ANSWERED = {"response": object, "timestamp": object, "latency_sec": object}
LLM = Records(
    records={"": _Logged},
    leaves=_LLM_LEAVES,
    run=_call_of,
    read=_read_calls,
    is_record=like({**_ANSWERED, "messages": list}, {**_ANSWERED, "messages": None, "input": list}),
    is_whole=lambda _: True,
    groups="inferred: the calls in one directory are one run, and a separate instance",
    finish=_by_folder,
).adapter("logs of model calls by OpenHands, one JSON document each")
