"""Checks that a chat template renders every part of a message.

A part is dropped if the message renders to the same text without it. In addition, content and
reasoning must occur verbatim in the text, since a template may truncate them. A text search alone
is not enough: a tool's name or argument may occur in the content by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollout_io.retokenize.chat_template import KEEPS_ALL
from rollout_io.retokenize.fixed_base import BASE, fixed_base
from rollout_io.retokenize.tokenizer import ChatTokenizer, Tools
from schemas.errors import InputError, RolloutError

_THINK = re.compile(r"(</?think>)")
_IM_MARKS = ("<|im_start|>", "<|im_end|>")

Messages = Sequence[Mapping[str, Any]]


class _Part(NamedTuple):
    """A part of a message, with a name for errors, a text, and the message without the part.

    Attributes:
        text: None if it may be rendered in several ways, such as a tool's arguments.
    """

    name: str
    text: str | None
    without: dict[str, Any]


def refuse_dropped(
    messages: Messages, text: str, tokenizer: ChatTokenizer, tools: Tools | None, where: str
) -> None:
    """Check that the template drops no part of a message.

    Args:
        messages: Normalised messages, rendered together.
        text: Rendering of the messages after the fixed base.
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas.
        where: Name of the messages, for error messages.

    Raises:
        InputError: `text_kept`: the template drops a part of a message.
    """
    base = fixed_base(tokenizer, tools, where).text
    for i, message in enumerate(messages):
        for part in _parts(message):
            others = [*BASE, *messages[:i], part.without, *messages[i + 1 :]]
            is_found = part.text is None or part.text in text
            if not is_found or _renders_to(base + text, others, tokenizer, tools):
                raise dropped(part.name, tokenizer, where)


def refuse_dropped_texts(
    messages: Messages, text: str, tokenizer: ChatTokenizer, where: str
) -> None:
    """Check that a prompt's text contains the content of every message.

    Reasoning may be missing: some templates drop it from earlier answers, and the engine used the
    same template.

    Args:
        messages: Normalised messages.
        text: Rendering of the messages.
        tokenizer: From `load_tokenizer`.
        where: Name of the conversation, for error messages.

    Raises:
        InputError: `text_kept`: the content of a message is missing.
    """
    for i, message in enumerate(messages):
        content = _THINK.split(message["content"])[-1].strip()
        if content not in text:
            raise dropped(_named_text(message, content), tokenizer, f"{where}, message {i}")


def _renders_to(
    text: str, messages: Messages, tokenizer: ChatTokenizer, tools: Tools | None
) -> bool:
    try:
        return tokenizer.render(messages, tools) == text
    except RolloutError:
        return False


def dropped(part: str, tokenizer: ChatTokenizer, where: str) -> InputError:
    """Return the error for a chat template that drops a part of a message."""
    finding = f"the chat template drops {part}"
    hint = "use a different --chat-template, or put the text into the message's content"
    if is_chatml(tokenizer):
        hint = f"use --chat-template {KEEPS_ALL}, which keeps it"
    return InputError("text_kept", where, finding, "", hint)


def is_chatml(tokenizer: ChatTokenizer) -> bool:
    """True if each ChatML marker is a single token."""
    return all(len(ids) == 1 for ids in tokenizer.encode(_IM_MARKS, _IM_MARKS))


def _parts(message: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield each part of a message.

    Parts are its reasoning, the role of a tool message, each piece of its content (split at think
    tags), and the name and each argument of every tool call.
    """
    if reasoning := message.get("reasoning_content", "").strip():
        without = {k: v for k, v in message.items() if k != "reasoning_content"}
        yield _Part(f"the reasoning {_shown(reasoning)}", reasoning, without)
    if message["role"] == "tool":
        yield _Part("the role of a tool message", None, {**message, "role": "user"})
    pieces = _THINK.split(message["content"])
    for i, piece in enumerate(pieces):
        if (text := piece.strip()) and not i % 2:
            rest = "".join([*pieces[:i], *pieces[i + 1 :]])
            yield _Part(_named_text(message, text), text, {**message, "content": rest})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield from _parts_of_call(message, index, call)


def _parts_of_call(
    message: Mapping[str, Any], index: int, call: Mapping[str, Any]
) -> Iterator[_Part]:
    nested = isinstance(call.get("function"), Mapping)
    function = call["function"] if nested else call
    name, arguments = function["name"], function["arguments"]

    def with_call(**fields: Any) -> dict[str, Any]:
        changed = {**function, **fields}
        calls = [*message["tool_calls"]]
        calls[index] = {**call, "function": changed} if nested else changed
        return {**message, "tool_calls": calls}

    which = f"call {index + 1} of {len(message['tool_calls'])}"
    yield _Part(f"the name {name!r} of {which}", None, with_call(name=f"{name}_"))
    for key in arguments:
        rest = {k: v for k, v in arguments.items() if k != key}
        yield _Part(f"argument {key!r} of {name!r}, {which}", None, with_call(arguments=rest))


def _named_text(message: Mapping[str, Any], text: str) -> str:
    return f"the {message['role']} message's text {_shown(text)}"


def _shown(text: str) -> str:
    return f"{text!r:.60}"
