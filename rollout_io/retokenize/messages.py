"""Conversion of logged chat messages to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import InputError

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def normalize(message: object, where: str) -> dict[str, Any]:
    """Return a copy of a message in the form that chat templates expect.

    - `content`: None or absent becomes ""; text parts are joined by newlines, as vLLM does for
      templates that expect strings.
    - `tool_calls`: arguments in a JSON string (OpenAI's format) become an object, as Transformers
      requires and vLLM does; missing arguments become {}.
    - Reasoning under any common name (`reasoning_content`, `reasoning`, `thinking`) becomes
      `reasoning_content`.

    Raises:
        InputError: `message`: the message is not an object with a role, its content is not text
            (the error identifies an image part), or a tool call is invalid; `tool_arguments`: the
            arguments are not a JSON object.

    Example:
        >>> call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
        >>> normalize({"role": "assistant", "content": None, "tool_calls": [call]}, "message 0")
        {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1}}}]}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        finding = f"a value of type {type(message).__name__} without a role"
        raise _bad(where, finding, "an object with a role")
    result = {k: v for k, v in message.items() if v is not None and k not in REASONING_FIELDS}
    result["content"] = _text(message.get("content"), where)
    reasoning = next((v for k in REASONING_FIELDS if (v := message.get(k)) is not None), None)
    if text := _text(reasoning, where):
        result["reasoning_content"] = text
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], where)
    return result


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part(part, where) for part in content)
    raise _bad(where, f"content of type {type(content).__name__}", "text, or a list of text parts")


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in TEXT_PARTS and isinstance(text, str):
        return text
    raise _bad(where, f"a content part of type {kind!r}", "text")


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise _bad(where, f"tool_calls of type {type(calls).__name__}", "a list of objects")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a tool call whose name and arguments are in `function`, or in the call itself."""
    nested = call.get("function")
    function = nested if isinstance(nested, Mapping) else call
    if not isinstance(function.get("name"), str):
        raise _bad(where, "a tool call without a name", "a function with a name")
    named = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return named if function is call else {**call, "function": named}


def _arguments(arguments: object, where: str) -> object:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, Mapping):
        hint = "if the call could not be parsed, move it to the message's content as text"
        finding = f"arguments of type {type(arguments).__name__}"
        if isinstance(arguments, str):
            finding = f"arguments {arguments!r:.80}"
        raise InputError("tool_arguments", where, finding, "a JSON object", hint)
    return parsed


def _bad(where: str, got: str, expected: str) -> InputError:
    return InputError("message", where, got, expected)
