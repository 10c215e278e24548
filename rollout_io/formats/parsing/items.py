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
from rollout_io.formats.parsing.notes import note
from schemas.errors import InputError

OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})
WEB_SEARCHES = "web searches, whose results are not in the log"
ENCRYPTED_THOUGHTS = "reasoning items that are encrypted: their text is not in the log"
_ACTIONS = frozenset({"local_shell_call", "web_search_call"})
_COMPACTIONS = frozenset({"compaction", "compaction_summary", "context_compaction"})
_CONTROLS = frozenset({"ghost_snapshot", "configuration_update", "compaction_trigger"})
"""Items for the harness or the API, which the model does not see."""


class Item(msgspec.Struct, gc=False):
    """An item of any type."""

    type: str = "message"
    role: str | None = None
    content: Content = None
    summary: Content = None
    id: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON
    input: str | None = None
    action: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON
    tools: msgspec.Raw = NO_JSON
    encrypted_content: str | None = None
    encrypted_function_args: list[str] | None = None

    @property
    def is_of_environment(self) -> bool:
        """True if the model did not write the item, judged by its type."""
        return self.type in _COMPACTIONS or self.type.endswith(("_output", "_message"))


class _Result(msgspec.Struct, gc=False):
    content: Content = None


_CONTENT_DECODER = msgspec.json.Decoder(Content)
_RESULT_DECODER = msgspec.json.Decoder(_Result)


def read_item(item: Item, where: str) -> Message | None:
    """Return the contribution of an item to a conversation; `extend` joins the assistant's pieces.

    Reasoning is taken from its text or, if there is none, from its summary. Return None for an item
    that the model does not see. Web searches and encrypted reasoning are noted.

    Raises:
        InputError: `message`: the item has an unknown type, is encrypted, or is a message without a
            role.
    """
    if item.type in _CONTROLS:
        return None
    if item.type in _COMPACTIONS:
        if item.type == "context_compaction" and item.encrypted_content is None:
            return None
        raise _refused(where, "the summary of a compaction, which is encrypted")
    if item.type in OUTPUTS:
        is_search = item.type == "tool_search_output"
        text = json_text(item.tools, where) if is_search else _output(item.output, where)
        return known({"role": "tool", "content": text, "tool_call_id": item.call_id})
    if item.type == "additional_tools":
        return {"role": item.role or "developer", "content": json_text(item.tools, where)}
    if item.type == "agent_message":
        content = shown(parts_in(item.content))
        if not isinstance(content, str):
            raise _refused(where, "a message of another agent with a part that is not text")
        return {"role": "user", "content": content}
    if item.type == "message":
        if item.role is None:
            raise bad_message(where, "the message has no role")
        return {"role": item.role, "content": shown(parts_in(item.content))}
    piece: Message = {"role": "assistant", "content": ""}
    if item.type == "reasoning":
        thought = all_text(item.content) or all_text(item.summary)
        note(ENCRYPTED_THOUGHTS, int(not thought and item.encrypted_content is not None))
        return piece | ({"reasoning_content": thought} if thought else {})
    note(WEB_SEARCHES, int(item.type == "web_search_call"))
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
    call_id, name = item.call_id or item.id, item.name
    if item.encrypted_function_args:
        raise _refused(where, "a function call with encrypted arguments")
    if name is not None and item.namespace:
        name = f"{item.namespace}{'' if item.namespace.endswith(('_', '.')) else '.'}{name}"
    if item.type == "function_call" and name is not None:
        return tool_call(call_id, name, json_text(item.arguments, where))
    if item.type == "custom_tool_call" and name is not None:
        arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        return tool_call(call_id, name, arguments)
    if item.type == "tool_search_call":
        return tool_call(call_id, "tool_search", json_text(item.arguments, where))
    if item.type in _ACTIONS:
        return tool_call(call_id, item.type.removesuffix("_call"), json_text(item.action, where))
    raise _refused(where, f"an item of type {item.type!r}")


def _refused(where: str, got: str) -> InputError:
    expected = "a message, reasoning or a tool call"
    hint = "answers that depend on it cannot be used: the log does not contain what the model saw"
    return InputError("message", where, got, expected, hint)


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
