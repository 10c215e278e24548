"""Requests of OpenAI's Responses API as chat completions.

Reasoning that only the API can read, and fields for its cache and its store, have no effect;
`max_tool_calls` limits calls of tools that the API runs, of which there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from pipelines.record.dialects.base import (
    Count,
    Fields,
    Temperature,
    TopP,
    engine_messages,
    inexpressible,
    one_system,
)
from rollout_io.formats.dialects import responses
from rollout_io.formats.parsing.content import known

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


class Tool(NamedTuple):
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
        if tool.get("type") not in _CLIENTS_TOOLS:
            what = f"the tool {tool.get('type')!r}, which is defined by the API,"
            raise inexpressible(path, what)
    tools = responses.tools(request.tools)
    if tools is None:
        return {}
    chat_fields: Fields = {"tools": tools, "parallel_tool_calls": request.parallel_tool_calls}
    choice = request.tool_choice
    if isinstance(choice, Mapping):
        if choice.get("type") not in {"function", "custom"}:
            raise inexpressible(path, f"tool_choice {choice.get('type')!r}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return chat_fields | {"tool_choice": choice}


def named_tools(tools: list[dict[str, Any]] | None) -> dict[str, Tool]:
    """Return the tools by the names under which the model knows them."""
    by_name: dict[str, Tool] = {}
    for tool in tools or ():
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else [tool]:
            namespace = tool.get("name") if isinstance(inner, list) else None
            for named in responses.tools([tool | {"tools": [one]} if inner else one]) or ():
                is_custom = one.get("type") == "custom"
                name = str(one.get("name"))
                by_name[named["function"]["name"]] = Tool(name, namespace, is_custom)
    return by_name
