"""Text completions as the chat completions that clients asked for (see `exact_prefix`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipelines.record.engine_requests import NULL, Asked, Fields, value_of
from pipelines.record.engine_responses import Answer

_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_OF_TEXT = frozenset({"text", "message", "prompt_token_ids", "prompt_logprobs"})


class ChatShown:
    """Converts the text completions of one call.

    Args:
        asked: The chat request.
    """

    def __init__(self, request: Asked) -> None:
        self._model, self._has_begun = request.model, False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Convert a complete response; its message is the text, unless the ids were parsed."""
        (choice,) = answer.choices
        message = choice.get("message")
        if message is None:
            message = {"role": "assistant", "content": choice["text"], **_MESSAGE}
        top = {"object": "chat.completion", "choices": [{"message": message, **_shown(choice)}]}
        return self._named(answer.fields) | top | {"prompt_token_ids": None}

    def chunk(self, answer: Answer) -> bytes:
        """Convert a chunk; the first one is preceded by a chunk with the role."""
        top = self._named(answer.fields) | {"object": "chat.completion.chunk"}
        choices = [
            {"delta": {"content": choice["text"]}, **_shown(choice)} for choice in answer.choices
        ]
        shown = msgspec.json.encode(top | {"choices": choices})
        if self._has_begun:
            return shown
        self._has_begun = True
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        head = {"choices": [first | {"logprobs": None}], "prompt_token_ids": None}
        top.pop("usage", None)
        return msgspec.json.encode(top | head) + b"\n\ndata: " + shown

    def _named(self, fields: Fields) -> dict[str, Any]:
        name = str(value_of(fields, "id")).replace("cmpl-", "chatcmpl-", 1)
        model = {} if self._model is None else {"model": self._model}
        return {**fields, "id": name, **model}


def _shown(choice: Fields) -> dict[str, Any]:
    others = {name: value for name, value in choice.items() if name not in _OF_TEXT}
    return others | {"logprobs": NULL, "token_ids": NULL}


def chunks_of(chat: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """Return a chat completion of `ChatShown.whole` as the events of a stream."""
    top = {k: v for k, v in chat.items() if k not in {"choices", "usage", "prompt_token_ids"}}
    top["object"] = "chat.completion.chunk"
    (choice,) = chat["choices"]
    message = msgspec.json.decode(choice["message"])
    calls = message.get("tool_calls") or ()
    delta = {name: value for name, value in message.items() if value not in (None, [])}
    if calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    head = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    end = {n: choice[n] for n in ("finish_reason", "stop_reason") if n in choice}
    chunks = [
        {**top, "choices": [head]},
        {**top, "choices": [{"index": 0, "delta": {}, "logprobs": None, **end}]},
    ]
    if with_usage:
        chunks.append({**top, "choices": [], "usage": chat.get("usage")})
    events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])
