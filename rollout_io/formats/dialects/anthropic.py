"""Anthropic's Messages API: messages of content blocks, system prompts, tool definitions.

    {"role": "assistant", "content": [{"type": "thinking", "thinking": "..."},
        {"type": "text", "text": "..."}, {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}]}
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "..."}]}

Results of tools become messages of their own. A chat message has its thoughts first, then its text,
then its calls: an answer whose blocks are in another order becomes several messages. Tools that the
API runs itself (`server_tool_use`) are calls too, and their results are messages between the parts
of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_io.formats.grammar import SELF, Contents
from rollout_io.formats.parsing.content import (
    THOUGHTS,
    Content,
    Message,
    Part,
    Parts,
    canonical_json,
    function_tool,
    json_text,
    known,
    parts_in,
    raw_of,
    shown,
    tool_call,
    tool_result,
)
from rollout_io.formats.parsing.jsonl import decode_line

BLOCKS = Contents(
    kind="type",
    default="text",
    reads={
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "thinking": "thinking",
        "reasoning": "reasoning text",
        "redacted_thinking": "",
        "tool_use": "id name input",
        "server_tool_use": "id name input",
        "mcp_tool_use": "id name input",
        "tool_result": "tool_use_id content is_error",
        "tool_reference": "tool_name",
        "image": "source",
        "image_url": "image_url",
        "document": "source title",
        "search_result": "title source content",
        "container_upload": "file_id",
        **dict.fromkeys(
            (
                "web_search_tool_result",
                "web_fetch_tool_result",
                "code_execution_tool_result",
                "bash_code_execution_tool_result",
                "text_editor_code_execution_tool_result",
                "tool_search_tool_result",
                "mcp_tool_result",
            ),
            "tool_use_id content",
        ),
    },
    leaves={
        "for the API's cache": "*/cache_control",
        "citations repeat passages of documents": "text/citations document/citations "
        "search_result/citations",
        "encrypted, for the API": "thinking/signature redacted_thinking/data",
        "facts about a call": "tool_use/caller server_tool_use/caller tool_result/caller "
        "mcp_tool_use/server_name",
        "marks where another model continued": "fallback",
    },
    inner={"tool_result/content": SELF},
)
"""Blocks of a message's content."""

MESSAGE = Contents(
    reads={"": "role content"},
    leaves={
        "facts about the call": "id type model stop_reason stop_sequence usage container "
        "context_management stop_details diagnostics"
    },
    inner={"content": BLOCKS},
)
"""A message, as sent or received."""

_SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
CALLS = _SERVER_CALLS | {"tool_use"}
_RESULT = "_tool_result"
_ENCRYPTED = frozenset({"encrypted_content", "encrypted_stdout", "encrypted_index"})
_RANKS = dict.fromkeys(CALLS, 2) | dict.fromkeys(THOUGHTS, 0)
_CONTENT_DECODER = msgspec.json.Decoder(Content)
_ANY_DECODER = msgspec.json.Decoder()


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Content = None


class _Tool(msgspec.Struct, gc=False):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


_MESSAGE_DECODER = msgspec.json.Decoder(_Message)
_TOOL_DECODER = msgspec.json.Decoder(_Tool)


def messages(logged: Iterable[Any], where: str) -> list[Message]:
    """Convert messages; a message with results of tools becomes several.

    Example:
        >>> call = {"type": "tool_use", "id": "t", "name": "ls", "input": {}}
        >>> messages([{"role": "assistant", "content": [call]}], "a.jsonl:1")[0]["tool_calls"]
        [{'id': 't', 'type': 'function', 'function': {'name': 'ls', 'arguments': '{}'}}]
    """
    converted: list[Message] = []
    for i, raw in enumerate(logged):
        message = decode_line(_MESSAGE_DECODER, bytes(raw_of(raw)), f"{where}[{i}]")
        converted += messages_of(message.role, message.content, f"{where}[{i}]")
    return converted


def messages_of(role: str, content: Parts, where: str) -> list[Message]:
    """Convert content to messages: results first, then the rest, in one message if its order allows."""
    parts = [part for part in parts_in(content) if part.type != "fallback"]
    results = [
        tool_result(shown(parts_of_result(p, where)), p.tool_use_id, is_error=p.is_error)
        for p in parts
        if p.type == "tool_result"
    ]
    rest = [part for part in parts if part.type != "tool_result"]
    if results and not any(part.type not in THOUGHTS or part.said for part in rest):
        return results
    if role != "assistant":
        return [*results, _message(role, rest, where)]
    pieces: list[Message] = []
    for run in _runs(rest):
        if run[:1] and run[0].type.endswith(_RESULT):
            pieces.append(_server_result(run[0]))
        else:
            pieces.append(_message(role, run, where))
    return [*results, *pieces]


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Cut parts into runs that one message can express; the result of a server's tool is alone."""
    runs: list[list[Part]] = [[]]
    rank = 0
    for part in parts:
        is_result = part.type.endswith(_RESULT)
        is_empty = part.type in THOUGHTS and not part.said
        before, rank = rank, rank if is_empty else _RANKS.get(part.type, 1)
        after_result = runs[-1][-1:] and runs[-1][-1].type.endswith(_RESULT)
        if runs[-1] and (rank < before or is_result or after_result):
            runs.append([])
        runs[-1].append(part)
    return runs


def _message(role: str, parts: Sequence[Part], where: str) -> Message:
    calls = [
        tool_call(part.id, part.name or "", json_text(part.input, where))
        for part in parts
        if _is_call(part)
    ]
    thoughts = [part.said for part in parts if part.type in THOUGHTS and part.said]
    rest = [part for part in parts if part.type not in THOUGHTS and not _is_call(part)]
    message = {
        "role": role,
        "content": shown(rest),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }
    return known(message)


def _is_call(part: Part) -> bool:
    return part.type in CALLS and bool(part.name) and bytes(part.input) != b"null"


def parts_of_result(part: Part, where: str) -> list[Part]:
    """Return the parts of a tool result."""
    return parts_in(decode_line(_CONTENT_DECODER, bytes(part.content), where))


def is_server_result(part: Part) -> bool:
    """True if a part is the result of a tool that the API ran."""
    return part.type.endswith(_RESULT)


def _server_result(part: Part) -> Message:
    """Return the result of a tool that the API ran, as text if it is text and as JSON otherwise."""
    try:
        text: Any = shown(parts_in(_CONTENT_DECODER.decode(part.content)))
        is_text = isinstance(text, str)
    except (msgspec.MsgspecError, ValueError):
        is_text = False
    if not is_text:
        value = _without_encrypted(_ANY_DECODER.decode(part.content))
        text = canonical_json(msgspec.json.encode(value))
    return tool_result(text, part.tool_use_id)


def _without_encrypted(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_encrypted(inner) for inner in value]
    if isinstance(value, dict):
        readable = {k: v for k, v in value.items() if k not in _ENCRYPTED}
        return {k: _without_encrypted(v) for k, v in readable.items()}
    return value


def system_prompt(system: Any, where: str) -> str:
    """Return the text of a request's `system`: a string, or text blocks."""
    parts = parts_in(decode_line(_CONTENT_DECODER, bytes(raw_of(system)), where))
    return "\n".join(part.text or "" for part in parts)


def tools(definitions: Any) -> list[Message] | None:
    """Return tool definitions in OpenAI's format; None if there are none.

    Tools of the API, which have a type and no schema, are kept by their name.
    """
    converted = (
        [_tool(definition) for definition in definitions]
        if isinstance(definitions, Sequence | list)
        else []
    )
    return [tool for tool in converted if tool is not None] or None


def _tool(definition: Any) -> Message | None:
    if isinstance(definition, Mapping) and "function" in definition:
        return dict(definition)
    try:
        tool = _TOOL_DECODER.decode(raw_of(definition))
    except (msgspec.MsgspecError, ValueError):
        return None
    return function_tool(tool.name, tool.description, tool.input_schema)
