"""OpenAI's Responses API: items of a conversation, instructions, tool definitions.

    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "..."}]}
    {"type": "reasoning", "summary": [...], "content": [...], "encrypted_content": "..."}
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
    {"type": "function_call_output", "call_id": "c1", "output": "..."}

Consecutive items of the model are one message: its reasoning, then its text, then its calls. An item
that comes too late in that order, such as reasoning after a call, begins another message. Tools that
the API runs itself (web search, code interpreter, MCP) are calls too; their results, if the item has
them, are messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.grammar import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Message,
    all_text,
    bad_message,
    extend,
    function_tool,
    is_shown,
    json_text,
    known,
    parts_in,
    raw_of,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import InputError

TEXTS = Contents(
    kind="type",
    default="text",
    reads={
        **dict.fromkeys(
            ("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"
        ),
        "refusal": "refusal",
        "input_image": "image_url file_id",
        "image_url": "image_url",
        "input_file": "file_id file_data file_url filename",
        "input_audio": "input_audio",
    },
    leaves={
        "citations, log-probabilities": "*/annotations */logprobs",
        "how an image is scaled": "*/detail",
        "encrypted": "encrypted_content",
    },
)
"""Parts of an item's content."""

OUTPUTS = frozenset(
    {
        *("function_call_output", "custom_tool_call_output", "tool_search_output"),
        *("local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
        *("computer_call_output", "program_output"),
    }
)
ITEMS = Contents(
    kind="type",
    default="message",
    reads={
        "message": "role content",
        "agent_message": "content author recipient",
        "reasoning": "content summary",
        "function_call": "name namespace arguments",
        "custom_tool_call": "name namespace input",
        "tool_search_call": "arguments",
        "local_shell_call": "action",
        "shell_call": "action",
        "apply_patch_call": "operation",
        "computer_call": "action actions",
        "web_search_call": "action",
        "file_search_call": "queries results",
        "code_interpreter_call": "code outputs",
        "mcp_call": "name arguments output error",
        "program": "code",
        "program_output": "result",
        "additional_tools": "role tools",
        "tool_search_output": "tools",
        **dict.fromkeys(sorted(OUTPUTS - {"tool_search_output", "program_output"}), "output"),
    },
    leaves={
        "names of items, calls and their states": "*/id */call_id */status */phase */execution "
        "code_interpreter_call/container_id mcp_call/server_label",
        "who called: the model's program or the model": "function_call/caller "
        "function_call_output/caller program/fingerprint",
        "encrypted; counted where the text is missing": "*/encrypted_content "
        "function_call/encrypted_function_args",
        "the engine's tokens, which replace the text where they are read": "*/prompt_token_ids "
        "*/generation_token_ids */generation_log_probs */routed_experts",
        "facts of the harness about an item": "*/metadata */internal_chat_message_metadata_passthrough "
        "*/created_by",
        "encrypted summaries: what follows them is refused": "compaction compaction_summary "
        "context_compaction",
        "for the harness or the API, not for the model": "ghost_snapshot configuration_update "
        "compaction_trigger mcp_list_tools mcp_approval_request mcp_approval_response",
    },
    inner={"message/content": TEXTS, "reasoning/content": TEXTS, "reasoning/summary": TEXTS},
)
"""Items of a request's input or of a response's output."""

PROGRAM_CALLS = "calls that a program of the model made: left out, as is what they returned to it"
WEB_SEARCHES = "web searches, whose results are not in the log"
ENCRYPTED_THOUGHTS = "reasoning items that are encrypted: their text is not in the log"
_ACTIONS = frozenset({"local_shell_call", "web_search_call", "shell_call", "computer_call"})
_COMPACTIONS = frozenset({"compaction", "compaction_summary", "context_compaction"})
_CONTROLS = frozenset({"ghost_snapshot", "configuration_update", "compaction_trigger"})
"""Items for the harness or the API, which the model does not see."""


class Item(msgspec.Struct, gc=False):
    """An item of any type."""

    contents: ClassVar[Contents] = ITEMS

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
    operation: msgspec.Raw = NO_JSON
    queries: msgspec.Raw = NO_JSON
    results: msgspec.Raw = NO_JSON
    code: str | None = None
    outputs: msgspec.Raw = NO_JSON
    error: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON
    result: msgspec.Raw = NO_JSON
    caller: dict[str, Any] | None = None
    tools: msgspec.Raw = NO_JSON
    encrypted_content: str | None = None
    encrypted_function_args: list[str] | None = None

    @property
    def is_of_environment(self) -> bool:
        """True if the model did not write the item, judged by its type."""
        return self.type in _COMPACTIONS or self.type.endswith(("_output", "_message"))


class _Result(msgspec.Struct, gc=False):
    content: Content = None


_ITEM_DECODER = msgspec.json.Decoder(Item)
_CONTENT_DECODER = msgspec.json.Decoder(Content)
_RESULT_DECODER = msgspec.json.Decoder(_Result)


def read_item(item: Item, where: str) -> Message | None:
    """Return the contribution of an item to a conversation; `extend` joins the assistant's pieces.

    Reasoning is taken from its text or, if there is none, from its summary. Return None for an item
    that the model does not see, and for reasoning without any text. Web searches and encrypted
    reasoning are noted.
    """
    if item.type in _CONTROLS:
        return None
    if item.caller is not None and item.caller.get("type") == "program":
        note(PROGRAM_CALLS)
        return None
    if item.type in _COMPACTIONS:
        if item.type == "context_compaction" and item.encrypted_content is None:
            return None
        raise _refused(where, "the summary of a compaction, which is encrypted")
    if item.type in OUTPUTS:
        is_search = item.type == "tool_search_output"
        output = item.result if item.type == "program_output" else item.output
        text = json_text(item.tools, where) if is_search else _output(output, where)
        return known({"role": "tool", "content": text, "tool_call_id": item.call_id})
    if item.type == "additional_tools":
        return {"role": item.role or "developer", "content": json_text(item.tools, where)}
    if item.type == "agent_message":
        parts = parts_in(item.content)
        if not all(map(is_shown, parts)):
            raise _refused(
                where, "a message of another agent with a part that is no text or picture"
            )
        return {"role": "user", "content": shown(parts)}
    if item.type == "message":
        if item.role is None:
            raise bad_message(where, "the message has no role")
        return {"role": item.role, "content": shown(parts_in(item.content))}
    piece: Message = {"role": "assistant", "content": ""}
    if item.type == "reasoning":
        if thought := all_text(item.content) or all_text(item.summary):
            return piece | {"reasoning_content": thought}
        note(ENCRYPTED_THOUGHTS, int(item.encrypted_content is not None))
        return None
    note(WEB_SEARCHES, int(item.type == "web_search_call"))
    return piece | {"tool_calls": [_call(item, where)]}


def results_in(item: Item, where: str) -> list[Message]:
    """Return the result that the item of a call has itself, if the API ran the tool."""
    output = {
        "mcp_call": item.output if bytes(item.output) != b"null" else item.error,
        "file_search_call": item.results,
        "code_interpreter_call": item.outputs,
    }.get(item.type, NO_JSON)
    if bytes(output) == b"null":
        return []
    call_id = item.call_id or item.id
    return [known({"role": "tool", "content": _output(output, where), "tool_call_id": call_id})]


def messages(items: Iterable[Any], where: str, before: Iterable[Message] = ()) -> list[Message]:
    """Convert items to messages, with the roles that chat templates know.

    Example:
        >>> messages([{"type": "function_call", "call_id": "c", "name": "ls"}], "a")[0][
        ...     "tool_calls"
        ... ]
        [{'id': 'c', 'type': 'function', 'function': {'name': 'ls', 'arguments': '{}'}}]
    """
    converted: list[Message] = []
    is_answered = any(message["role"] == "assistant" for message in before)
    is_open = False
    for i, logged in enumerate(items):
        place = f"{where}[{i}]"
        item = decode_line(_ITEM_DECODER, bytes(raw_of(logged)), place)
        piece = read_item(item, place)
        if piece is None:
            continue
        if piece["role"] != "assistant":
            converted.append(piece | {"role": chat_role(piece["role"], is_answered=is_answered)})
            is_open = False
            continue
        is_answered = True
        is_open = add_piece(converted, piece, is_open=is_open)
        results = results_in(item, place)
        converted += results
        is_open &= not results
    return converted


def add_piece(messages: list[Message], piece: Message, *, is_open: bool) -> bool:
    """Extend the last message by a piece of the same role, or append it; return True.

    The piece begins a new message if it does not fit behind what the last one has.
    """
    last: Message = messages[-1] if is_open and messages else {}
    is_late = _rank(piece) < _rank(last)
    if not is_open or is_late:
        messages.append({"role": piece["role"], "content": ""})
    extend(messages[-1], piece)
    return True


def _rank(message: Message) -> int:
    """Return the position of what a message has last, among reasoning, text and calls."""
    if message.get("tool_calls"):
        return 2
    return 1 if message.get("content") else 0


def chat_role(role: str, *, is_answered: bool) -> str:
    """Return the role for chat templates: `developer` is system, or user after the first answer."""
    if role in {"developer", "system"}:
        return "user" if is_answered else "system"
    return role


def tools(definitions: Any) -> list[Message] | None:
    """Return tool definitions in OpenAI's chat format; None if there are none.

    A namespace is its functions, with its name before theirs. A custom tool takes a text `input`. A
    tool of the API, which has a type but no name, is kept by its type.
    """
    listed = definitions if isinstance(definitions, list | tuple) else ()
    return [tool for definition in listed for tool in _tools(definition, "")] or None


def _tools(definition: Any, namespace: str) -> list[Message]:
    if not isinstance(definition, Mapping):
        return []
    if isinstance(definition.get("function"), Mapping):
        return [dict(definition)]
    name, description = definition.get("name"), definition.get("description")
    inner = definition.get("tools")
    if isinstance(inner, list):
        return [tool for nested in inner for tool in _tools(nested, str(name or ""))]
    if not isinstance(name, str):
        kind = definition.get("type")
        return [function_tool(kind)] if isinstance(kind, str) else []
    parameters = (
        definition.get("parameters")
        or definition.get("input_schema")
        or definition.get("inputSchema")
    )
    if definition.get("type") == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}}
        parameters |= known({"format": definition.get("format")})
    return [function_tool(_named(name, namespace), description, parameters)]


def _named(name: str, namespace: str | None) -> str:
    """Return the name of a function with its namespace, as the model calls it."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith(('_', '.')) else '.'}{name}"


def reply_of(items: Iterable[Item], where: str) -> Message:
    """Join the items of a response into one assistant message."""
    reply: Message = {"role": "assistant", "content": ""}
    for item in items:
        item.role = item.role or "assistant"
        piece = read_item(item, where)
        if piece is not None:
            extend(reply, piece)
    return reply


def _call(item: Item, where: str) -> Message:
    """Convert a function call, a custom tool call (text input) or a built-in tool call."""
    call_id, name = item.call_id or item.id, item.type.removesuffix("_call")
    if item.encrypted_function_args:
        raise _refused(where, "a function call with encrypted arguments")
    if item.type in {"function_call", "mcp_call", "custom_tool_call"} and item.name is not None:
        text = msgspec.json.encode({"input": item.input or ""}).decode()
        is_text = item.type == "custom_tool_call"
        arguments = text if is_text else json_text(item.arguments, where)
        return tool_call(call_id, _named(item.name, item.namespace), arguments)
    if item.type in {"code_interpreter_call", "program"}:
        return tool_call(call_id, name, msgspec.json.encode({"code": item.code or ""}).decode())
    if item.type == "file_search_call":
        return tool_call(call_id, name, f'{{"queries":{json_text(item.queries, where)}}}')
    values = {"tool_search_call": item.arguments, "apply_patch_call": item.operation}
    values |= dict.fromkeys(_ACTIONS, item.action)
    if item.type in values:
        return tool_call(call_id, name, json_text(values[item.type], where))
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
