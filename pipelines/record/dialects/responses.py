"""OpenAI's Responses API: `POST /v1/responses` and `/v1/responses/input_tokens`.

    {"model": "m", "instructions": "...", "input": [...], "tools": [...]}
    {"object": "response", "status": "completed", "output": [{"type": "reasoning", ...},
        {"type": "message", ...}, {"type": "function_call", "call_id": "c", ...}]}

    event: response.created            then response.in_progress
    event: response.output_item.added  for each item, then its parts, deltas and their ends,
                                       then response.output_item.done
    event: response.completed          or response.incomplete

Responses are not stored: a request has the whole conversation in its input. Reasoning is the item's
summary if the request asks for summaries, because clients send that back; else it is its content.
Reasoning that only the API can read, and fields for its cache and its store, have no effect;
`max_tool_calls` limits calls of tools that the API runs, of which there are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

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
    decoded,
    engine_messages,
    inexpressible,
    one_system,
    sse,
)
from rollout_io.formats.base import noted
from rollout_io.formats.dialects import responses
from rollout_io.formats.dialects.responses import ENCRYPTED_THOUGHTS
from rollout_io.formats.parsing.content import known
from schemas.errors import InputError

_CLIENTS_TOOLS = frozenset({"function", "custom", "namespace"})
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset(
    {
        *(_LOGPROBS, "reasoning.encrypted_content"),
        # Of tools that the API runs, which are rejected, and of the input, which is not returned.
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
        "message.input_image.image_url",
    }
)
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
_FORMAT = ("name", "description", "schema", "strict")

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("reasoning", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "user"),
)
_USUAL: Fields = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct):
    """The fields of a request that have an effect."""

    model: str
    input: str | list[msgspec.Raw] = []
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: str | None = None


class _Tool(NamedTuple):
    """A tool as its client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


def request_to_chat(request: ResponsesRequest, path: str) -> Fields:
    """Translate a request to a chat completion.

    Raises:
        InputError: `dialect`: the request needs a stored response, a tool of the API, or a part that
            engines cannot read; any error of the converters.
    """
    for name in _STATEFUL:
        if getattr(request, name):
            raise inexpressible(path, f"`{name}`, which refers to what the API stores,")
    if request.truncation not in (None, "disabled"):
        raise inexpressible(path, f"`truncation` {request.truncation!r}")
    for name in request.include or ():
        if name not in _INCLUDED:
            raise inexpressible(path, f"`include` with {name!r}")
    items: list[Any] = (
        [{"role": "user", "content": request.input}]
        if isinstance(request.input, str)
        else request.input
    )
    messages = responses.messages(items, f"{path}, input")
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    chat: Fields = {
        "model": request.model,
        "messages": engine_messages(one_system(messages), path),
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _format(request.text.format if request.text else None),
        **_tools(request, path),
    }
    if _LOGPROBS in (request.include or ()):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return known(chat)


def _format(form: Mapping[str, Any] | None) -> Fields | None:
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {name: form[name] for name in _FORMAT if name in form}
    return {"type": "json_schema", "json_schema": schema}


def _tools(request: ResponsesRequest, path: str) -> Fields:
    for tool in request.tools or ():
        if str(tool.get("type")) not in _CLIENTS_TOOLS:
            what = f"the tool {tool.get('type')!r}, which is defined by the API,"
            raise inexpressible(path, what)
    tools = responses.tools(request.tools)
    if tools is None:
        return {}
    chat_fields: Fields = {"tools": tools, "parallel_tool_calls": request.parallel_tool_calls}
    choice = request.tool_choice
    if isinstance(choice, Mapping):
        if str(choice.get("type")) not in {"function", "custom"}:
            raise inexpressible(path, f"tool_choice {choice.get('type')!r}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return chat_fields | {"tool_choice": choice}


def _named_tools(tools: list[dict[str, Any]] | None) -> dict[str, _Tool]:
    """Return the tools by the names under which the model knows them."""
    by_name: dict[str, _Tool] = {}
    for tool in tools or ():
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else [tool]:
            namespace = tool.get("name") if isinstance(inner, list) else None
            for named in responses.tools([tool | {"tools": [one]} if inner else one]) or ():
                is_custom = one.get("type") == "custom"
                name = str(one.get("name"))
                by_name[named["function"]["name"]] = _Tool(name, namespace, is_custom)
    return by_name


class ResponsesShape(msgspec.Struct):
    """The fields of a request that most clients send."""

    model: str
    input: list[PlainMessage]
    stream: bool = False


_DECODER = msgspec.json.Decoder(ResponsesRequest)
_FIELDS = msgspec.json.Decoder(dict[str, Any])


class _Answer:
    """The response to one request, some of whose `fields` it repeats."""

    def __init__(self, request: ResponsesRequest, fields: Fields) -> None:
        self._model, self._fields = request.model, fields
        self._tools = _named_tools(request.tools)
        self.has_summaries = bool(request.reasoning and request.reasoning.summary)
        self.blocks = Blocks()

    def response(self, status: str, *, is_done: bool) -> Fields:
        blocks = self.blocks
        reason = _INCOMPLETE.get(blocks.finish_reason or "")
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": blocks.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if is_done and reason else None,
            "model": self._model,
            "output": [self.item(i) for i in range(len(blocks.all))] if is_done else [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if is_done else None,
            **{name: self._fields.get(name, _USUAL.get(name)) for name in _ECHOED},
        }

    @property
    def status(self) -> str:
        is_cut = (self.blocks.finish_reason or "") in _INCOMPLETE
        return "incomplete" if is_cut else "completed"

    @property
    def _name(self) -> str:
        return self.blocks.id.removeprefix("chatcmpl-")

    def _usage(self) -> Fields:
        usage = self.blocks.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached},
            "output_tokens": usage.num_sampled,
            "output_tokens_details": {"reasoning_tokens": usage.num_thought},
            "total_tokens": usage.prompt_tokens + usage.num_sampled,
        }

    def item(self, at: int, *, is_new: bool = False) -> Fields:
        """Return an item of the output; a new one has no text."""
        block = self.blocks.all[at]
        is_cut = self.status != "completed" and at == len(self.blocks.all) - 1
        status = "in_progress" if is_new else "incomplete" if is_cut else "completed"
        name = f"{self._name}_{at}"
        if block.kind == "thought":
            parts = [] if is_new else [self.part(block)]
            if self.has_summaries:
                texts: Fields = {"summary": parts}
            else:
                texts = {"summary": [], "content": parts}
            return {"id": f"rs_{name}", "type": "reasoning", "status": status, **texts}
        if block.kind == "text":
            content = [] if is_new else [self.part(block)]
            content_fields = {"role": "assistant", "content": content}
            return {"id": f"msg_{name}", "type": "message", "status": status, **content_fields}
        tool = self.tool(block)
        about = known({"call_id": block.id, "name": tool.name, "namespace": tool.namespace})
        text = "" if is_new else self.input(block)
        if tool.is_custom:
            kind: Fields = {"id": f"ctc_{name}", "type": "custom_tool_call", "input": text}
        else:
            kind = {"id": f"fc_{name}", "type": "function_call", "arguments": text}
        return {**kind, "status": status, **about}

    def tool(self, block: Block) -> _Tool:
        return self._tools.get(block.name) or _Tool(block.name, None, is_custom=False)

    def input(self, block: Block) -> str:
        """Return the arguments of a call; of a custom tool, the text that it gets."""
        if not self.tool(block).is_custom:
            return block.text or "{}"
        try:
            text = _FIELDS.decode(block.text)["input"]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError):
            return block.text
        return text if isinstance(text, str) else block.text

    def part(self, block: Block, *, is_new: bool = False) -> Fields:
        """Return the part of an item that has its text."""
        text = "" if is_new else block.text
        if block.kind == "thought":
            kind = "summary_text" if self.has_summaries else "reasoning_text"
            return {"type": kind, "text": text}
        logprobs = [] if is_new else block.logprobs
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Names(NamedTuple):
    """Names in the events of a block.

    Attributes:
        text: Events of its text.
        field: Field of the whole text.
        part: Events of the part that has the text; None if there is none.
        number: Field with the index of the part.
        has_logprobs: True if the events of the text have its log-probabilities.
        is_streamed: False if the text is sent whole.
    """

    text: str
    field: str
    part: str | None = None
    number: str | None = None
    has_logprobs: bool = False
    is_streamed: bool = True


_CONTENT = ("response.content_part", "content_index")
_OUTPUT = _Names("response.output_text", "text", *_CONTENT, has_logprobs=True)
_REASONING = _Names("response.reasoning_text", "text", *_CONTENT)
_SUMMARY = _Names(
    *("response.reasoning_summary_text", "text"),
    *("response.reasoning_summary_part", "summary_index"),
)
_FUNCTION = _Names("response.function_call_arguments", "arguments")
_CUSTOM = _Names("response.custom_tool_call_input", "input", is_streamed=False)


class _StreamTranslator(Stream):
    """Translates the chunks of a chat completion to events."""

    def __init__(self, answer: _Answer) -> None:
        self._answer, self._number = answer, -1

    def take(self, chat: Chat) -> bytes:
        is_first = self._number < 0
        steps = list(self._answer.blocks.take(chat))
        head = b""
        if is_first:
            for name in ("created", "in_progress"):
                response = self._answer.response("in_progress", is_done=False)
                head += self._event(f"response.{name}", response=response)
        return head + b"".join(map(self._step, steps))

    def end(self) -> bytes:
        status = self._answer.status
        return self._event(
            f"response.{status}", response=self._answer.response(status, is_done=True)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _step(self, step: Step) -> bytes:
        answer, block = self._answer, step.block
        item = answer.item(step.at, is_new=step.said != "end")
        place = {"item_id": item["id"], "output_index": step.at}
        names = self._names(block)
        index = {} if names.number is None else {names.number: 0}
        if step.said == "begin":
            events = self._event("response.output_item.added", output_index=step.at, item=item)
            if names.part is not None:
                part = answer.part(block, is_new=True)
                events += self._event(f"{names.part}.added", **place, **index, part=part)
            return events
        if step.said == "more":
            if not names.is_streamed:
                return b""
            return self._delta(step.text, names, place | index, step.logprobs)
        text = block.text if block.kind != "call" else answer.input(block)
        events = b"" if names.is_streamed else self._delta(text, names, place | index)
        fields: Fields = {names.field: text}
        if names.has_logprobs:
            fields["logprobs"] = block.logprobs
        if names.field == "arguments":
            fields["name"] = item["name"]
        events += self._event(f"{names.text}.done", **place, **index, **fields)
        if names.part is not None:
            events += self._event(f"{names.part}.done", **place, **index, part=answer.part(block))
        return events + self._event("response.output_item.done", output_index=step.at, item=item)

    def _delta(
        self, text: str, names: _Names, place: Fields, logprobs: Sequence[Fields] = ()
    ) -> bytes:
        more: Fields = {"logprobs": logprobs} if names.has_logprobs else {}
        return self._event(f"{names.text}.delta", **place, delta=text, **more)

    def _names(self, block: Block) -> _Names:
        if block.kind == "text":
            return _OUTPUT
        if block.kind == "thought":
            return _SUMMARY if self._answer.has_summaries else _REASONING
        return _CUSTOM if self._answer.tool(block).is_custom else _FUNCTION


class ResponsesCall(DialectCall):
    """A call to `POST /v1/responses` or `/v1/responses/input_tokens`."""

    def __init__(self, body: bytes, path: str, query: Mapping[str, str]) -> None:  # noqa: ARG002
        request = decoded(_DECODER, body, path)
        if not request.input:
            raise InputError("record_type", path, "no `input`", "a text, or at least one item")
        self._asked, self._fields = request, decoded(_FIELDS, body, path)
        self.model, self.is_stream = request.model, bool(request.stream)
        with noted() as notes:
            self.chat: Fields = request_to_chat(request, path)
        self.num_hidden_thoughts = notes[ENCRYPTED_THOUGHTS]
        key = request.prompt_cache_key or ""  # other clients share one key among conversations
        self.session = key if _UUID.fullmatch(key) else None

    def answer(self, chat: Chat) -> Fields:
        """See `DialectCall.answer`."""
        answer = _Answer(self._asked, self._fields)
        for _ in answer.blocks.take(chat):
            pass
        return answer.response(answer.status, is_done=True)

    def stream(self) -> Stream:
        """See `DialectCall.stream`."""
        return _StreamTranslator(_Answer(self._asked, self._fields))

    @staticmethod
    def count(num_tokens: int) -> Fields:
        """See `DialectCall.count`."""
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @staticmethod
    def error(status: int, message: str) -> Fields:
        """See `DialectCall.error`."""
        usual = "server_error" if status >= 500 else "invalid_request_error"
        kind = _ERRORS.get(status, usual)
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def error_event(self, status: int, message: str) -> bytes:
        """See `DialectCall.error_event`."""
        code = self.error(status, message)["error"]["type"]
        error = {"type": "error", "code": code, "message": message, "param": None}
        return sse(error | {"sequence_number": 0}, "error")
