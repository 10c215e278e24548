"""The column `messages`: messages sent to the model and, in re-tokenized rows, the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

RETOKENIZED = "retokenized"
"""Value of `token_source` in rows whose ids were computed from text."""

SAID = ("content", "reasoning_content", "tool_calls")
"""Fields of an assistant message that contain model output."""


MEDIA = frozenset({"image", "document", "audio", "video"})
"""Types of parts of a message that are not text, each with its `blob` or its `source`."""


Picture = Callable[[Mapping[str, Any]], str]


def marked(message: Mapping[str, Any], picture: Picture | None = None) -> Mapping[str, Any]:
    """Return a message with a text such as `[image]` in place of each part that is not text.

    Args:
        message: The message.
        picture: Returns the text for an image; the content is then one text, as chat templates with
            a placeholder render it.

    Example:
        >>> marked({"role": "user", "content": [{"type": "image", "source": {"url": "a.png"}}]})
        {'role': 'user', 'content': [{'type': 'text', 'text': '[image]'}]}
    """
    if not media_in(message):
        return message
    parts = [
        {"type": "text", "text": _mark(part, picture)} if _is_media(part) else part
        for part in message["content"]
    ]
    if picture is not None and all(isinstance(part.get("text"), str) for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def media_in(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message that are not text."""
    content = message.get("content")
    return [part for part in content if _is_media(part)] if isinstance(content, list) else []


def _mark(part: Mapping[str, Any], picture: Picture | None) -> str:
    if picture is not None and part["type"] == "image":
        return picture(part)
    return f"[{part['type']}]"


def _is_media(part: Any) -> bool:
    is_known = isinstance(part, dict) and part.get("type") in MEDIA
    return is_known and not part.keys().isdisjoint({"source", "blob"})


def is_answer(message: Mapping[str, Any]) -> bool:
    """True if the message contains model output.

    An assistant message without text, reasoning or tool calls is not an answer: the call failed, or
    its output was not logged.
    """
    return message.get("role") == "assistant" and any(message.get(name) for name in SAID)


def sent_messages(row: Mapping[str, Any]) -> Any:
    """Return the messages that were sent to the model before the row's first answer.

    If the tokens come from an engine, these are all messages of the row. A re-tokenized row stores
    the conversation including its answers; its `segments` have one element per answer.

    Args:
        row: Columns `messages`, `token_source` and `segments`; each may be absent.

    Returns:
        The parsed messages, a string if the prompt was text without roles, or None if unknown.

    Raises:
        ValueError, RecursionError: `messages` is not JSON.

    Example:
        >>> chat = '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]'
        >>> sent_messages({"messages": chat, "token_source": "retokenized"})
        [{'role': 'user', 'content': '2+2?'}]
        >>> len(sent_messages({"messages": chat, "token_source": "engine"}))
        2
    """
    messages = json.loads(row.get("messages") or "null")
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if row.get("token_source") != RETOKENIZED or not is_chat or not messages:
        return messages
    if messages[-1].get("role") != "assistant":  # earlier versions stored no answers
        return messages
    segments = row.get("segments")
    num_answers = 1 if segments is None else len(segments)
    answers = [i for i, message in enumerate(messages[:-1]) if is_answer(message)]
    answers.append(len(messages) - 1)
    return messages[: answers[-num_answers]] if 0 < num_answers <= len(answers) else messages
