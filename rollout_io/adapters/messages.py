"""Logged chat messages, in OpenAI's form.

A harness logs messages under the names of some API. `read_message` knows those in use:

    content            a text, or parts of type text, input_text, output_text
    reasoning          `reasoning_content`, `reasoning`, `thinking`, `thinking_blocks`, or parts
                       of type thinking or reasoning
    tool calls         {"id", "function": {"name", "arguments"}}, or {"id", "function", "arguments"}
    results of tools   `tool_call_id`, or `tool_call_ids` with one id
    Responses objects  `output` of items (message, reasoning, function_call); and the items
                       function_call_output, alone
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollout_io.adapters.completions import NO_JSON
from rollout_io.adapters.jsonl import decode_line

Message = dict[str, Any]

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_THOUGHTS = frozenset({"thinking", "reasoning"})


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    reasoning: str | None = None


_Content = str | list[str | _Part] | None


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


class _ToolCall(msgspec.Struct, gc=False):
    function: str | _Function
    id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Chat(msgspec.Struct, gc=False):
    role: str
    content: _Content = None
    reasoning_content: str | None = None
    reasoning: _Content = None
    thinking: _Content = None
    thinking_blocks: list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    tool_call_ids: list[str] | None = None
    name: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    content: _Content = None
    summary: _Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Items(msgspec.Struct, gc=False):
    output: list[_Item]


class _ToolOutput(msgspec.Struct, gc=False):
    output: _Content = None
    call_id: str | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str | None = None
    object: str | None = None


_KIND_DECODER = msgspec.json.Decoder(_Kind)
_CHAT_DECODER = msgspec.json.Decoder(_Chat)
_ITEMS_DECODER = msgspec.json.Decoder(_Items)
_OUTPUT_DECODER = msgspec.json.Decoder(_ToolOutput)
_TEXT_DECODER = msgspec.json.Decoder(str)


def read_messages(raws: Iterable[msgspec.Raw], where: str) -> list[Message]:
    """Logged messages in OpenAI's form; `where` is the place of the list."""
    return [read_message(raw, f"{where}[{i}]") for i, raw in enumerate(raws)]


def read_message(raw: msgspec.Raw, where: str) -> Message:
    """A logged message in OpenAI's form, with the fields that the log has.

    Raises:
        RolloutError: `record_type`: a field is missing or of another type.
    """
    content = bytes(raw)
    kind = decode_line(_KIND_DECODER, content, where)
    if kind.object == "response":
        return _of_items(decode_line(_ITEMS_DECODER, content, where).output, where)
    if kind.type == "function_call_output":
        result = decode_line(_OUTPUT_DECODER, content, where)
        text = _split(result.output)[0]
        return _known({"role": "tool", "content": text or "", "tool_call_id": result.call_id})
    return _of_chat(decode_line(_CHAT_DECODER, content, where), where)


def _of_chat(chat: _Chat, where: str) -> Message:
    text, thought = _split(chat.content)
    said = (chat.reasoning_content, _joined(chat.reasoning), _joined(chat.thinking))
    blocks = _joined(list(chat.thinking_blocks) if chat.thinking_blocks else None)
    calls = [_tool_call(call, where) for call in chat.tool_calls or ()]
    ids = chat.tool_call_ids or []
    return _known(
        {
            "role": chat.role,
            "content": text or "",
            "reasoning_content": next((t for t in (*said, blocks, thought) if t), None),
            "tool_calls": calls or None,
            "tool_call_id": chat.tool_call_id or (ids[0] if ids else None),
            "name": chat.name,
        }
    )


def _of_items(items: Sequence[_Item], where: str) -> Message:
    """The assistant message that the items of a Responses object are together."""
    texts = [_joined(item.content) for item in items if item.type == "message"]
    thoughts = [_joined(i.content) or _joined(i.summary) for i in items if i.type == "reasoning"]
    calls = [
        _tool_call(_ToolCall(_Function(item.name, item.arguments), item.call_id), where)
        for item in items
        if item.type == "function_call" and item.name is not None
    ]
    return _known(
        {
            "role": "assistant",
            "content": "\n".join(text for text in texts if text),
            "reasoning_content": "\n".join(text for text in thoughts if text) or None,
            "tool_calls": calls or None,
        }
    )


def _known(fields: Message) -> Message:
    return {name: value for name, value in fields.items() if value is not None}


def _split(content: _Content) -> tuple[str | list[Message] | None, str | None]:
    """The text of a content, and the reasoning among its parts.

    Where a part is neither (an image), all parts are kept with their types: who renders them
    refuses it by its name.
    """
    if content is None or isinstance(content, str):
        return content, None
    parts = [_Part(text=part) if isinstance(part, str) else part for part in content]
    thought = "\n".join(_text(part) for part in parts if part.type in _THOUGHTS)
    rest = [part for part in parts if part.type not in _THOUGHTS]
    if all(part.type in _TEXTS for part in rest):
        return "\n".join(_text(part) for part in rest), thought
    return [_known({"type": part.type, "text": part.text}) for part in rest], thought


def _text(part: _Part) -> str:
    return part.text or part.thinking or part.reasoning or ""


def _joined(content: _Content) -> str | None:
    """All text of a content, reasoning or not."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else _text(part) for part in content)


def _tool_call(call: _ToolCall, where: str) -> Message:
    function = call.function
    if isinstance(function, str):
        function = _Function(function, call.arguments)
    text = bytes(function.arguments)
    if text.startswith(b'"'):
        arguments = decode_line(_TEXT_DECODER, text, where)
    else:
        arguments = "{}" if text == b"null" else text.decode()
    found = {"name": function.name, "arguments": arguments}
    return _known({"id": call.id, "type": "function", "function": found})
