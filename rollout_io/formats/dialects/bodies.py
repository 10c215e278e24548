"""Requests and responses of model calls as traces hold them: of any API, or of a framework.

    prompts   messages, {"messages": [...], "tools": [...]}, {"contents": ...}, {"input": ...}, text
    answers   {"choices": [...]}, {"candidates": [...]}, {"generations": [...]}, {"output": [...]}, a
              message, text

Each may be JSON as a string, or a string of such a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from rollout_io.formats.dialects import anthropic, frameworks, gemini, responses
from rollout_io.formats.parsing.content import Message, extend, raw_of, tool_call
from rollout_io.formats.parsing.messages import openai_tools

_MAX_QUOTES = 3


class Prompt(NamedTuple):
    """What a model saw; `is_plain` if it was logged as text, which became a user's message."""

    messages: list[Message]
    tools: list[Message] | None = None
    is_plain: bool = False


def value_of(logged: Any) -> Any:
    """Return the value of JSON text, even if it was quoted repeatedly; other text stays text."""
    for _ in range(_MAX_QUOTES):
        if not isinstance(logged, str) or not logged.lstrip().startswith(("{", "[", '"')):
            return logged
        try:
            logged = msgspec.json.decode(logged)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return logged
    return logged


def prompt_of(logged: Any, where: str) -> Prompt | None:
    """Return the prompt of a request; None if it has none."""
    value = value_of(logged)
    if isinstance(value, str):
        return Prompt([{"role": "user", "content": value}], is_plain=True) if value else None
    if isinstance(value, list):
        # Some tracers put tool definitions among the messages.
        definitions = [one["content"] for one in value if _is_definition(one)]
        listed = [one for one in value if not _is_definition(one)]
        messages = _messages(listed, where) if _are_messages(listed) else []
        return Prompt(messages, tools_of(definitions)) if messages else None
    if not isinstance(value, Mapping):
        return None
    return _of_request(value, where)


def _of_request(value: Mapping[str, Any], where: str) -> Prompt | None:
    tools = tools_of(value.get("tools"))
    config = value.get("config") or value.get("generationConfig")
    config = config if isinstance(config, Mapping) else {}
    if value.get("contents"):
        contents = value["contents"]
        contents = contents if isinstance(contents, list) else [contents]
        messages = frameworks.messages(contents, f"{where}, contents")
        holders = [value, config]
        tools = tools or next((t for h in holders if (t := tools_of(h.get("tools")))), None)
        names = ("system_instruction", "systemInstruction")
        system = next((h[n] for h in holders for n in names if h.get(n)), None)
        if system:
            messages.insert(0, {"role": "system", "content": gemini.system_prompt(system, where)})
        return Prompt(messages, tools)
    if isinstance(value.get("messages"), list | str):
        prompt = prompt_of(value["messages"], f"{where}, messages")
        if prompt is None:
            return None
        messages = _with_system(prompt.messages, value.get("system"), where)
        return Prompt(messages, tools or prompt.tools)
    if value.get("input") and ("model" in value or isinstance(value["input"], list)):
        content = value["input"]
        items = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = responses.messages(items, f"{where}, input")
        return Prompt(_with_system(messages, value.get("instructions"), where), tools)
    if isinstance(value.get("prompt"), str | list):
        prompt = prompt_of(value["prompt"], f"{where}, prompt")
        return prompt and Prompt(_with_system(prompt.messages, value.get("system"), where), tools)
    args = value.get("args")
    if isinstance(args, list) and args:
        return prompt_of(args[0], f"{where}, args")
    if _are_messages([value]):
        return Prompt(frameworks.messages([value], where), tools)
    return None


def _with_system(messages: list[Message], system: Any, where: str) -> list[Message]:
    if not system:
        return messages
    return [{"role": "system", "content": anthropic.system_prompt(system, where)}, *messages]


def answers_of(logged: Any, where: str) -> list[Message]:
    """Return the answer of each choice of a response; none if it has no answer."""
    value = value_of(logged)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if value else []
    if isinstance(value, list):
        is_choices = all(isinstance(v, Mapping) and "message" in v for v in value)
        if calls := _listed_calls(value):
            return [{"role": "assistant", "content": "", "tool_calls": calls}]
        if is_choices or (len(value) == 1 and isinstance(value[0], Mapping | list)):
            return [answer for choice in value for answer in answers_of(choice, where)]
        return joined(frameworks.messages(value, where)) if _are_messages(value) else []
    if not isinstance(value, Mapping):
        return []
    for name in ("choices", "candidates", "generations"):
        if isinstance(value.get(name), list):
            return [a for choice in value[name] for a in answers_of(choice, f"{where}, {name}")]
    if isinstance(value.get("output"), list):
        return joined(responses.messages(value["output"], f"{where}, output"))
    for name in ("message", "content"):
        if isinstance(value.get(name), Mapping):
            return answers_of(value[name], where)
    if isinstance(value.get("messages"), list):
        return answers_of(value["messages"], f"{where}, messages")
    fields = value if "role" in value or "type" in value else {"role": "assistant"} | dict(value)
    if _are_messages([fields]):
        more = fields.get("additional_kwargs") or {}
        contents = ("content", "parts", "blocks", "kwargs", "data")
        names = (*contents, "tool_calls", "thought", "reasoning_content", "reasoning")
        if any(fields.get(name) for name in names) or more.get("tool_calls"):
            return joined(_messages([fields], where))
    text = value.get("text")
    return [{"role": "assistant", "content": text}] if isinstance(text, str) and text else []


def _messages(values: list[Any], where: str) -> list[Message]:
    """Convert messages, of which some have calls as their content, or a tool's name as their role.

    Koog writes calls as the content of a message, LangGraph.js a result under the name of its tool.
    """
    messages = frameworks.messages([*map(with_calls, values)], where)
    names: dict[str, str | None] = {}
    for message in messages:
        if message["role"] in names:
            message["tool_call_id"] = names[message["role"]]
            message["role"] = "tool"
        for call in message.get("tool_calls", ()):
            names[call["function"]["name"]] = call.get("id")
    return messages


def with_calls(value: Any) -> Any:
    """Return a message whose content is nothing but calls as one that has these calls."""
    calls = _listed_calls(value_of(value.get("content"))) if isinstance(value, Mapping) else []
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else value


def _listed_calls(value: Any) -> list[Message]:
    """Return the calls in a list of nothing else, as OpenAI or the Vercel AI SDK has them."""
    listed = value if isinstance(value, list) else []
    calls = []
    for call in listed:
        fields = call if isinstance(call, Mapping) else {}
        function = fields.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            name, arguments, call_id = function["name"], function.get("arguments"), fields.get("id")
        elif isinstance(fields.get("toolName"), str) and "input" in fields:
            name, arguments = fields["toolName"], fields["input"]
            call_id = fields.get("toolCallId")
        else:
            return []
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        calls.append(tool_call(call_id if isinstance(call_id, str) else None, name, text))
    return calls


def joined(messages: list[Message]) -> list[Message]:
    """Return the one answer that consecutive messages of the model are."""
    answers = [message for message in messages if message["role"] == "assistant"]
    for message in answers[1:]:
        extend(answers[0], message)
    return answers[:1]


def _are_messages(values: list[Any]) -> bool:
    names = ("role", "parts", "blocks", "kwargs", "data", "message", "value", "event.name")
    kinds = ("content", "call_id", "summary")
    for value in values:
        if isinstance(value, str):
            continue
        if isinstance(value, list):
            if not _are_messages(value):
                return False
        elif not isinstance(value, Mapping) or not (
            any(name in value for name in names)
            or ("type" in value and any(kind in value for kind in kinds))
        ):
            return False
    return bool(values)


def _is_definition(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("role") != "tool" or value.get("tool_call_id"):
        return False
    content = value.get("content")
    return isinstance(content, Mapping) and "function" in content


def tools_of(logged: Any) -> list[Message] | None:
    """Return the tool definitions of any API in OpenAI's format; None if there are none."""
    value = value_of(logged)
    if isinstance(value, Mapping):  # Langfuse: definitions by name
        named = [(name, value_of(definition)) for name, definition in value.items()]
        value = [
            {"name": n} | (definition if isinstance(definition, dict) else {})
            for n, definition in named
        ]
    if not isinstance(value, list):
        return None
    converted: list[Message] = []
    for definition in map(value_of, value):
        if not isinstance(definition, Mapping):
            continue
        declared = definition.get("functionDeclarations", definition.get("function_declarations"))
        if isinstance(declared, list):
            converted += gemini.tools([definition]) or []
        elif "input_schema" in definition:
            converted += anthropic.tools([definition]) or []
        else:
            schema = definition.get("inputSchema")
            extra = {"parameters": schema} if schema and "parameters" not in definition else {}
            names = ("name", "description", "parameters", "strict", "function", "type")
            fields = {n: definition[n] for n in names if n in definition} | extra
            if not isinstance(fields.get("function"), Mapping):
                fields.pop("type", None)
                fields = {"type": "function", "function": fields}
            converted += openai_tools([fields]) or []
    return converted or None


def response_with_tokens(logged: Any) -> msgspec.Raw | None:
    """Return a response that may hold the engine's token ids, as JSON."""
    value = value_of(logged)
    return raw_of(value) if isinstance(value, Mapping) and "choices" in value else None
