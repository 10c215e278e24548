"""Tool calls in the Hermes style, as Qwen and SmolLM2 write them into their text."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def assistant_message(text: str) -> dict[str, Any]:
    r"""The OpenAI-style assistant message of a response's text.

    Text before the first tool call is the content, null if there is none. Should one of the calls be
    no JSON object with a name, all of the text is content.

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
    if not isinstance(call.get("name"), str):
        return None
    return {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
