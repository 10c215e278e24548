"""Parse tool calls in the Hermes format, which Qwen and SmolLM2 use."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def assistant_message(text: str) -> dict[str, Any]:
    r"""Parse a response's text into an OpenAI-style assistant message.

    Text before the first tool call becomes the content (null if empty). If any call is not a JSON
    object with a name and an object of arguments, the entire text becomes the content.

    Example:
        >>> text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        >>> message = assistant_message(text)
        >>> message["content"], message["tool_calls"][0]["function"]
        ('Let me see.', {'name': 'add', 'arguments': '{"a": 2}'})
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [_function(found) for found in _CALL.findall(text)]
    if calls and all(call is not None for call in calls):
        message["content"] = text.partition("<tool_call>")[0].strip() or None
        message["tool_calls"] = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}
            for call in calls
        ]
    return message


def _function(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments)}
