"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

    {"model": "m", "max_tokens": 99, "system": ..., "messages": [...], "tools": [...]}
    {"type": "message", "role": "assistant", "content": [{"type": "thinking", ...},
        {"type": "text", "text": "..."}, {"type": "tool_use", ...}], "stop_reason": "tool_use"}

    event: message_start            one
    event: content_block_start      for each block, then its deltas, then content_block_stop
    event: message_delta            one, with the stop reason and the usage, then message_stop

Marks for the API's cache, edits of the context, and the budgets of thinking have no effect.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from pipelines.record.dialects.base import (
    Block,
    Blocks,
    Chat,
    Count,
    DialectCall,
    Fields,
    PlainMessage,
    Step,
    Stream,
    Temperature,
    TopP,
    Usage,
    arguments_of,
    decoded,
    engine_messages,
    inexpressible,
    one_system,
    sse,
)
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.parsing.content import NO_JSON, known
from schemas.errors import InputError

_STOPS = {"length": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_CHOICES: dict[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium"}
_BILLING = "x-anthropic-billing-header"  # for the API, which does not show it to the model
_EMPTY: dict[str, Fields] = {
    "thought": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "call": {"input": {}},
}
_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    format: _Format | None = None
    effort: str | None = None


class _Thinking(msgspec.Struct):
    type: str


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class MessagesRequest(msgspec.Struct):
    """The fields of a request that have an effect."""

    model: str
    messages: list[msgspec.Raw]
    max_tokens: Count | None = None
    system: msgspec.Raw = NO_JSON
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    mcp_servers: list[Any] | None = None
    metadata: _Metadata | None = None


class MessagesShape(msgspec.Struct):
    """The fields of a request that most clients send."""

    model: str
    max_tokens: int
    messages: list[PlainMessage]
    stream: bool = False


_DECODER = msgspec.json.Decoder(MessagesRequest)


def request_to_chat(request: MessagesRequest, path: str) -> Fields:
    """Translate a request to a chat completion.

    Raises:
        InputError: `dialect`: the request needs a tool of the API, or a part that engines cannot
            read; any error of the converters.
    """
    messages = anthropic.messages(request.messages, f"{path}, messages")
    system = _system(request.system, path)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    messages = engine_messages(one_system(messages), path)
    chat: Fields = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        **_tools(request, path),
        **_thinking(request),
    }
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return known(chat)


def _system(raw: msgspec.Raw, path: str) -> str:
    system = msgspec.json.decode(raw)
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    return anthropic.system_prompt(system, f"{path}, system") if system else ""


def _is_billing(block: Any) -> bool:
    return isinstance(block, Mapping) and str(block.get("text", "")).startswith(_BILLING)


def _tools(request: MessagesRequest, path: str) -> Fields:
    if request.mcp_servers:
        raise inexpressible(path, "`mcp_servers`, whose tools the API calls itself,")
    for tool in request.tools or ():
        if tool.get("type") not in (None, "custom"):
            raise inexpressible(path, f"the tool {tool['type']!r}, which is defined by the API,")
    tools = anthropic.tools(request.tools)
    if tools is None or len(tools) != len(request.tools or ()):
        if request.tools:
            raise InputError("record_type", path, "a tool without a name", "a name and a schema")
        return {}
    fields: Fields = {"tools": tools}
    choice = request.tool_choice
    if choice is not None and choice.type == "tool":
        if not choice.name:
            raise InputError("record_type", path, "tool_choice without a name", "a tool's name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        if choice.type not in _CHOICES:
            raise InputError("record_type", path, f"tool_choice {choice.type!r}", "auto or any")
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(request: MessagesRequest) -> Fields:
    fields: Fields = {}
    if request.thinking is not None and request.thinking.type == "disabled":
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    output = request.output_config or _Output()
    if output.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(output.effort, "high")
    form = output.format or request.output_format
    if form is not None and form.schema is not None:
        schema = {"name": "answer", "schema": form.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _block(block: Block) -> Fields:
    """Return a block of the answer; the signature makes clients send a thought back."""
    if block.kind == "thought":
        signature = hashlib.sha256(block.text.encode()).hexdigest()
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    call = {"id": block.id, "name": block.name, "input": arguments_of(block)}
    return {"type": "tool_use", **call}


def _stop(blocks: Blocks) -> Fields:
    reason = _STOPS.get(blocks.finish_reason or "")
    if reason is None and blocks.has_calls:
        reason = "tool_use"
    if reason is None and blocks.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": blocks.stop}
    return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def _usage(usage: Usage, num_sampled: int | None = None) -> Fields:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.num_cached, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_sampled if num_sampled is None else num_sampled,
    }


def _message(blocks: Blocks, model: str) -> Fields:
    name = blocks.id.removeprefix("chatcmpl-")
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}


class _StreamTranslator(Stream):
    """Translates the chunks of a chat completion to events."""

    def __init__(self, model: str) -> None:
        self._model, self._blocks, self._has_begun = model, Blocks(), False

    def take(self, chat: Chat) -> bytes:
        steps = list(self._blocks.take(chat))
        events = b"" if self._has_begun else self._begin()
        return events + b"".join(map(_events, steps))

    def _begin(self) -> bytes:
        self._has_begun = True
        empty: Fields = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"usage": _usage(self._blocks.usage, 0)}
        message = _message(self._blocks, self._model) | empty | usage
        start = {"type": "message_start", "message": message}
        return sse(start, "message_start") + sse({"type": "ping"}, "ping")

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": _stop(self._blocks)}
        delta["usage"] = _usage(self._blocks.usage)
        return sse(delta, "message_delta") + sse({"type": "message_stop"}, "message_stop")


def _events(step: Step) -> bytes:
    block = step.block
    if step.said == "begin":
        empty = _EMPTY[block.kind]
        return _event("content_block_start", step, content_block=_block(block) | empty)
    if step.said == "more":
        delta = {
            "thought": {"type": "thinking_delta", "thinking": step.text},
            "text": {"type": "text_delta", "text": step.text},
            "call": {"type": "input_json_delta", "partial_json": step.text},
        }[block.kind]
        return _event("content_block_delta", step, delta=delta)
    signed = b""
    if block.kind == "thought":
        delta = {"type": "signature_delta", "signature": _block(block)["signature"]}
        signed = _event("content_block_delta", step, delta=delta)
    return signed + _event("content_block_stop", step)


def _event(name: str, step: Step, **fields: Any) -> bytes:
    return sse({"type": name, "index": step.at, **fields}, name)


class MessagesCall(DialectCall):
    """A call to `POST /v1/messages` or `/v1/messages/count_tokens`."""

    def __init__(self, body: bytes, path: str, query: Mapping[str, str]) -> None:  # noqa: ARG002
        request = decoded(_DECODER, body, path)
        if not request.messages:
            raise InputError("record_type", path, "no messages", "at least one message")
        if request.max_tokens is None and not path.endswith("/count_tokens"):
            raise InputError("record_type", path, "no `max_tokens`", "`max_tokens`")
        self.model, self.is_stream = request.model, bool(request.stream)
        self.chat: dict[str, Any] = request_to_chat(request, path)
        self.session = _session_of((request.metadata or _Metadata()).user_id or "")

    def answer(self, chat: Chat) -> Fields:
        """See `DialectCall.answer`."""
        blocks = Blocks()
        for _ in blocks.take(chat):
            pass
        content = [_block(block) for block in blocks.all]
        end = _stop(blocks) | {"usage": _usage(blocks.usage)}
        return _message(blocks, self.model) | {"content": content} | end

    def stream(self) -> Stream:
        """See `DialectCall.stream`."""
        return _StreamTranslator(self.model)

    @staticmethod
    def count(num_tokens: int) -> Fields:
        """See `DialectCall.count`."""
        return {"input_tokens": num_tokens}

    @staticmethod
    def error(status: int, message: str) -> Fields:
        """See `DialectCall.error`."""
        usual = "api_error" if status >= 500 else _ERRORS[400]
        kind = _ERRORS.get(status, usual)
        return {"type": "error", "error": {"type": kind, "message": message}}


def _session_of(user_id: str) -> str | None:
    """Return the session in the user's id that Claude Code sends: in a text, or in an object."""
    match = _SESSION.search(user_id)
    if match is not None:
        return match[1]
    try:
        value = msgspec.json.decode(user_id)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    name = value.get("session_id") if isinstance(value, Mapping) else None
    return name if isinstance(name, str) and name else None
