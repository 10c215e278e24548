"""The chat of a NeMo Gym run, for runs without token ids.

The request (`responses_create_params`) contains the beginning of the chat, and the output of the
response contains the rest. Each item becomes a message or part of one:

    instructions          a system message
    metadata              `problem_statement` stands for an empty input
    message               a message with its role; `developer` becomes `system`
    reasoning             reasoning of an assistant message
    function_call         a tool call of an assistant message
    function_call_output  a tool message

Only token ids mark the end of a model call, so the calls are inferred: consecutive items of the
model are one call, which ends at the next item of the environment (the output of a function, or a
message that is not the assistant's), or before a message with another id than the call's message.
What the model saw between two such calls is not in the log, which is noted. A message whose text
begins with that of the message before it is a later state of that message and replaces it. The
items of a call become one assistant message, in the order reasoning, text, tool calls. It is also
inferred that each call saw all items before it. Items of the model in the request are part of the
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from rollout_io.formats.base import Conversation, note
from rollout_io.formats.parsing.bodies import SamplingFields, Share
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Message,
    bad_message,
    extend,
    json_text,
    known,
    parts_in,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.model_calls import ResponsesObject
from schemas.errors import InputError

_T = TypeVar("_T")
_ASSISTANT = "assistant"
UNSEEN = "answers that directly follow another answer: what the model saw in between is not logged"
CUMULATIVE = "messages that repeat the beginning of the next one: only the last of them is read"
WITHOUT_IDS = "messages without ids that are joined with the message before them"
UNLOGGED = "runs whose prompt is not logged: the problem statement of the task stands for it"
_HIDDEN = ("previous_response_id", "conversation", "prompt")


class Request(SamplingFields, gc=False):
    """The relevant fields of `responses_create_params`."""

    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = NO_JSON
    previous_response_id: msgspec.Raw = NO_JSON
    conversation: msgspec.Raw = NO_JSON
    prompt: msgspec.Raw = NO_JSON
    metadata: msgspec.Raw = NO_JSON
    temperature: Share | None = None
    top_p: Share | None = None


class _Metadata(msgspec.Struct, gc=False):
    problem_statement: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: Content = None
    summary: Content = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON
    output: Content = None


_METADATA_DECODER = msgspec.json.Decoder(_Metadata | None)
_ITEM_DECODER = msgspec.json.Decoder(_Item)
_INSTRUCTIONS_DECODER = msgspec.json.Decoder(str | list[msgspec.Raw] | None)
_TOOLS_DECODER = msgspec.json.Decoder(list[dict[str, Any]] | None)


def read_conversation(request: Request, response: ResponsesObject, where: str) -> Conversation:
    """Return the chat of a run.

    Instructions and tools are taken from the request or, if it has none, from the response.

    Raises:
        InputError: `message`: an item has an unknown type or lacks a field, reasoning is encrypted
            or differs from its summary, or the input of the request is incomplete; `tools`: a tool
            is not a function; `record_type`: a field has the wrong type.
    """
    sent, received = f"{where}, responses_create_params", f"{where}, response"
    for name in _HIDDEN:
        if bytes(getattr(request, name)) != b"null":
            finding = (
                f"the input is incomplete: the messages that `{name}` refers to are not in the log"
            )
            raise bad_message(f"{sent}.{name}", finding)
    chat = _Chat()
    if request.instructions:
        chat.add(request.instructions, "system", f"{sent}.instructions")
    else:
        place = f"{received}.instructions"
        repeated = decode_line(_INSTRUCTIONS_DECODER, bytes(response.instructions), place)
        chat.add(repeated or (), "system", place)
    if request.input or isinstance(request.input, str):
        chat.add(request.input, "user", f"{sent}.input")
    else:
        chat.add(_statement(request, response, sent), "user", f"{sent}.metadata")
    num_given = len(chat.messages)
    chat.add(response.output, _ASSISTANT, f"{received}.output")
    tools = _tools(request.tools, f"{sent}.tools")
    incomplete = response.incomplete_details
    return Conversation(
        source=where,
        messages=chat.messages,
        tools=tools or _tools(response.tools, f"{received}.tools"),
        num_given=num_given,
        stop_reason=None if incomplete is None else incomplete.reason,
    )


def _statement(request: Request, response: ResponsesObject, where: str) -> str | tuple[()]:
    """Return what stands for an empty input; nothing if the output begins with the prompt.

    Agents that run a harness of their own in a sandbox send no input, and log only the answers.
    """
    first = response.output[0] if response.output else NO_JSON
    if decode_line(_ITEM_DECODER, bytes(first), where).role in {"user", "system", "developer"}:
        return ()
    metadata = decode_line(_METADATA_DECODER, bytes(request.metadata), f"{where}.metadata")
    if metadata is None or not metadata.problem_statement:
        raise bad_message(f"{where}.input", "the request has no input")
    note(UNLOGGED)
    statement: str = metadata.problem_statement
    return statement


class _Chat:
    """Messages in order; further items of the model may extend the last message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._call: list[tuple[_Item, Message]] = []

    def add(self, items: str | Sequence[msgspec.Raw], role: str, where: str) -> None:
        """Add items, or a string as a single message; the first item always begins a new message."""
        if isinstance(items, str):
            self.messages.append({"role": role, "content": items})
            return
        for i, raw in enumerate(items):
            place = f"{where}[{i}]"
            item = decode_line(_ITEM_DECODER, bytes(raw), place)
            piece = _piece(item, place)
            if piece["role"] == _ASSISTANT:
                self._add(item, piece)
            else:
                self._end_call()
                self.messages.append(piece)
        self._end_call()

    def _add(self, item: _Item, piece: Message) -> None:
        """Add an item of the model to the current call, or begin another call with it."""
        spoken = [i for i, (other, _) in enumerate(self._call) if other.type == "message"]
        if item.type == "message" and spoken:
            last, before = self._call[spoken[-1]]
            is_same = last.id is not None and last.id == item.id
            if _extends(piece["content"], before["content"], is_same=is_same):
                note(CUMULATIVE)
                self._call[spoken[-1]] = (item, piece)
                return
            if last.id is None or item.id is None:
                note(WITHOUT_IDS)
            elif not is_same:
                self._split()
        self._call.append((item, piece))

    def _split(self) -> None:
        """End the current call before its last thoughts, which belong to the next message."""
        size = len(self._call)
        while self._call[size - 1][0].type == "reasoning":
            size -= 1
        thoughts = self._call[size:]
        del self._call[size:]
        self._end_call()
        self._call = thoughts
        note(UNSEEN)

    def _end_call(self) -> None:
        reply: Message = {"role": _ASSISTANT, "content": ""}
        calls: list[Message] = []
        for _, piece in self._call:
            calls += piece.pop("tool_calls", ())
            extend(reply, piece)
        if self._call:
            self.messages.append(reply | ({"tool_calls": calls} if calls else {}))
        self._call = []


def _extends(content: str | list[Message], before: str | list[Message], *, is_same: bool) -> bool:
    """True if a message is a later state of the message before it."""
    if not isinstance(content, str) or not isinstance(before, str) or not before:
        return False
    return content.startswith(before) and (is_same or len(content) > len(before))


def _piece(item: _Item, where: str) -> Message:
    """Return the message of a single item."""
    if item.type == "message":
        role = _present(item.role, "message", "role", where)
        text = shown(parts_in(_present(item.content, "message", "content", where)))
        return {"role": "system" if role == "developer" else role, "content": text}
    if item.type == "function_call_output":
        text = shown(parts_in(_present(item.output, "function call's output", "text", where)))
        return known({"role": "tool", "content": text, "tool_call_id": item.call_id})
    reply: Message = {"role": _ASSISTANT, "content": ""}
    if item.type == "reasoning":
        thought = _thought(item, where)
        return reply | ({"reasoning_content": thought} if thought else {})
    if item.type == "function_call":
        name = _present(item.name, "function call", "name", where)
        raw = _present(item.arguments, "function call", "arguments", where)
        call = tool_call(item.call_id, name, json_text(raw, f"{where}.arguments"))
        return reply | {"tool_calls": [call]}
    expected = "a message, reasoning, a function call or its output"
    raise bad_message(where, f"an item of type {item.type!r}", expected)


def _present(value: _T | None, item: str, field: str, where: str) -> _T:
    if value is None or value == NO_JSON:
        raise bad_message(where, f"the {item} has no {field}")
    return value


def _thought(item: _Item, where: str) -> str:
    text, summary = shown(parts_in(item.content)), shown(parts_in(item.summary))
    if not (isinstance(text, str) and isinstance(summary, str)):
        raise bad_message(where, "the reasoning has a part that is not text")
    if item.encrypted_content and not text:
        raise bad_message(where, "the reasoning is encrypted")
    if text and summary and text != summary:
        raise bad_message(where, "the reasoning has a text and a different summary")
    _present(item.summary if item.content is None else item.content, "reasoning", "text", where)
    return text or summary


def _tools(raw: msgspec.Raw, where: str) -> list[Message] | None:
    """Return function definitions in OpenAI's chat format; None if there are none."""
    tools = decode_line(_TOOLS_DECODER, bytes(raw), where) or ()
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(tools)] or None


def _tool(tool: dict[str, Any], where: str) -> Message:
    if isinstance(tool.get("function"), dict):
        return tool
    function = known({name: value for name, value in tool.items() if name != "type"})
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        finding = f"a tool of type {tool.get('type')!r}, named {tool.get('name')!r}"
        hint = "collect the run with functions only: chat templates render no other tools"
        raise InputError("tools", where, finding, "a function with a name", hint)
    return {"type": "function", "function": function}
