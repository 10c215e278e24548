"""Conversion of items of OpenAI's Responses API to pieces of chat messages."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Message,
    all_text,
    bad_message,
    extend,
    json_text,
    known,
    parts_in,
    shown,
    tool_call,
)

OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ACTIONS = frozenset({"local_shell_call", "web_search_call"})
_UNREADABLE = frozenset({"compaction", "compaction_summary", "ghost_snapshot", "other"})


class Item(msgspec.Struct, gc=False):
    """An item of any type."""

    type: str = "message"
    role: str | None = None
    content: Content = None
    summary: Content = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON
    input: str | None = None
    action: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON


class _Result(msgspec.Struct, gc=False):
    content: Content = None


_CONTENT_DECODER = msgspec.json.Decoder(Content)
_RESULT_DECODER = msgspec.json.Decoder(_Result)


def read_item(item: Item, where: str) -> Message | None:
    """Return the contribution of an item to a conversation; `extend` joins the assistant's pieces.

    Reasoning is taken from its text or, if there is none, from its summary. Return None for an item
    that only the API can read.

    Raises:
        InputError: `message`: the item has an unknown type, or is a message without a role.
    """
    if item.type in _UNREADABLE:
        return None
    if item.type in OUTPUTS:
        text = _output(item.output, where)
        return known({"role": "tool", "content": text, "tool_call_id": item.call_id})
    if item.type == "message":
        if item.role is None:
            raise bad_message(where, "the message has no role")
        return {"role": item.role, "content": shown(parts_in(item.content))}
    piece: Message = {"role": "assistant", "content": ""}
    if item.type == "reasoning":
        thought = all_text(item.content) or all_text(item.summary)
        return piece | ({"reasoning_content": thought} if thought else {})
    return piece | {"tool_calls": [_call(item, where)]}


def reply_of(items: Iterable[Item], where: str) -> Message:
    """Join the items of a response into one assistant message.

    Raises:
        InputError: `message`: see `read_item`.
    """
    reply: Message = {"role": "assistant", "content": ""}
    for item in items:
        item.role = item.role or "assistant"
        piece = read_item(item, where)
        if piece is not None:
            extend(reply, piece)
    return reply


def _call(item: Item, where: str) -> Message:
    """Convert a function call, a custom tool call (text input) or a built-in tool call."""
    call_id = item.call_id or item.id
    if item.type == "function_call" and item.name is not None:
        return tool_call(call_id, item.name, json_text(item.arguments, where))
    if item.type == "custom_tool_call" and item.name is not None:
        arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        return tool_call(call_id, item.name, arguments)
    if item.type in _ACTIONS:
        return tool_call(call_id, item.type.removesuffix("_call"), json_text(item.action, where))
    got, expected = f"an item of type {item.type!r}", "a message, reasoning or a tool call"
    raise bad_message(where, got, expected)


def _output(raw: msgspec.Raw, where: str) -> str | list[Message]:
    """Convert a tool result: text, parts, an object with `content`, or any other JSON."""
    try:
        return shown(parts_in(_CONTENT_DECODER.decode(raw)))
    except (msgspec.MsgspecError, ValueError):
        pass
    try:
        return shown(parts_in(_RESULT_DECODER.decode(raw).content))
    except (msgspec.MsgspecError, ValueError):
        return json_text(raw, where)
