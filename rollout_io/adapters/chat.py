"""Chat messages, tools and numbers as harnesses save them, in the shapes that the conversion takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.adapters.jsonl import decode_line
from rollout_io.adapters.tokens import logprob_array
from schemas.errors import RolloutError

_CALL = msgspec.json.Decoder(dict[str, Any])
_LABEL = msgspec.json.Decoder(str)
_NUMBER = msgspec.json.Decoder(float | bool)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19
_TEXTS = ("reasoning_content", "reasoning", "content", "tool_calls")


def openai_messages(messages: Sequence[Any], where: str) -> list[dict[str, Any]]:
    r"""Messages in OpenAI's style.

    Tool calls that are JSON text are parsed, and those that name their function themselves get a
    `function`. Nulls are left out.

    Raises:
        RolloutError: message: not an object with a role; json_line: a tool call that is no JSON.

    Example:
        >>> call = '{"id": "c", "name": "add", "arguments": "{}"}'
        >>> openai_messages([{"role": "assistant", "tool_calls": [call]}], "a.jsonl:1")[0]
        {'role': 'assistant', 'tool_calls': [{'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{}'}}]}
    """
    return [_message(m, f"{where}, message {i}") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        got = f"a {type(message).__name__} without a role"
        raise RolloutError("message", where, got, "an object with a role")
    found = {name: value for name, value in message.items() if value is not None}
    calls = found.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            got = f"tool_calls of type {type(calls).__name__}"
            raise RolloutError("message", where, got, "a list")
        found["tool_calls"] = [
            _tool_call(c, f"{where}, tool call {i}") for i, c in enumerate(calls)
        ]
    return found


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = decode_line(_CALL, call.encode(errors="surrogatepass"), where)
    if not isinstance(call, Mapping):
        raise RolloutError("message", where, f"a {type(call).__name__}", "an object")
    if isinstance(call.get("function"), Mapping):
        return {"type": "function", **call}
    named = {name: call[name] for name in ("name", "arguments") if name in call}
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": named}


def openai_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI's style; None where there are none."""
    if not isinstance(tools, list):
        return None
    known = [tool for tool in tools if isinstance(tool, Mapping)]
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        for tool in known
    ] or None


def text_of(message: Any) -> str | None:
    """What a message says, for people to read: reasoning, content, tool calls."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping):
        return None
    parts = [message[name] for name in _TEXTS if message.get(name)]
    texts = [p if isinstance(p, str) else msgspec.json.encode(p).decode() for p in parts]
    return "\n".join(texts) if texts else None


def numbers(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """The fields that are numbers or truth values (as 0 and 1).

    Args:
        fields: Valid JSON, by name.
        where: Their place.

    Raises:
        RolloutError: record_type: a number that a 64-bit float does not hold.
    """
    found: dict[str, float] = {}
    for name, raw in fields.items():
        text = bytes(raw)
        if not text.startswith(_NO_NUMBERS):
            found[name] = float(decode_line(_NUMBER, text, f"{where}, {name}"))
    return found


def logprobs(values: Sequence[float], num_tokens: int, where: str) -> npt.NDArray[np.float32]:
    """As `tokens.logprob_array`; a number beyond 32 bits is refused there as infinite is."""
    with np.errstate(over="ignore"):
        return logprob_array(values, num_tokens, where)


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """A name that is text or a whole number; None for null, for empty text and for all else.

    Args:
        raw: Valid JSON.
        where: Its place.

    Raises:
        RolloutError: json_line: text that is no UTF-8.
    """
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_LABEL, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None
