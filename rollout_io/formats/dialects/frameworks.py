"""Messages of agent frameworks, data sets and traces, in any of the shapes below.

    LangChain           {"type": "ai", "content": ..., "tool_calls": [{"name", "args", "id"}]}; its
                        fields may be under `data`, or under `kwargs` beside `lc`
    pydantic-ai         {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": ...}]}
    OpenTelemetry       {"role": "user", "parts": [{"type": "text", "content": ...}]}
    Gemini              {"role": "model", "parts": [{"text": ...}]}, in camel case or snake case
    LlamaIndex          {"role": "user", "blocks": [{"block_type": "text", "text": ...}]}
    AutoGen             {"type": "UserMessage", "content": ...}
    Vercel's AI SDK     {"role": "tool", "content": [{"type": "tool-result", "toolCallId": ...}]}
    ShareGPT            {"from": "human", "value": ...}
    choices of an API   {"index": 0, "message": {...}}
    everything else     messages and items that `parsing.messages` reads

Each shape is brought into the form of one of the large APIs, whose converter does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_io.formats.dialects import anthropic, gemini
from rollout_io.formats.parsing.content import Message, bad_message, canonical_json, known, raw_of
from rollout_io.formats.parsing.messages import MARKS, read_messages, with_marks
from rollout_io.formats.unread import account_by_text

LANGCHAIN = {
    "human": "user",
    "HumanMessage": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "system": "system",
    "SystemMessage": "system",
    "tool": "tool",
    "ToolMessage": "tool",
    "function": "tool",
    "FunctionMessage": "tool",
    "developer": "developer",
}
_AUTOGEN = frozenset({"UserMessage", "AssistantMessage", "FunctionExecutionResultMessage"})
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}

_APART = (
    *("type", "role", "kind", "part_kind", "block_type", "from", "source", "lc", "event.name"),
    *("instructions", "status", "is_error", "name", "tool_name", "toolName"),
    *("media_type", "mediaType", *MARKS),
    # Facts about a call, which its model did not see.
    *("id", "index", "state", "outcome", "finish_reason", "response_metadata", "artifact"),
    *("model", "model_id", "model_name", "provider_name", "gen_ai.system", "provider_details"),
    *("provider_response_id", "response_id", "providerOptions", "providerMetadata", "ts"),
    # Encrypted, for the API.
    *("signature", "thoughtSignature", "thought_signature", "protectedData", "encrypted_content"),
)
"""Keys of messages that are read apart from its text, or left out on purpose."""


def messages(history: Iterable[Any], where: str) -> list[Message]:
    """Convert messages of any shape, as decoded JSON, to OpenAI's format.

    A list among them is a batch of messages, and a string is a user's text.

    Example:
        >>> calls = [{"name": "ls", "args": {}, "id": "c"}]
        >>> history = [{"type": "ai", "content": "", "tool_calls": calls}]
        >>> messages(history, "a.jsonl:1")[0]["tool_calls"]
        [{'id': 'c', 'type': 'function', 'function': {'name': 'ls', 'arguments': '{}'}}]
    """
    history = list(history)
    converted: list[Message] = []
    instructions: str | None = None
    for i, logged in enumerate(history):
        place = f"{where}[{i}]"
        logged = _without_wrapper(logged) if isinstance(logged, Mapping) else logged
        if isinstance(logged, Mapping) and logged.get("kind") == "request":
            stated = logged.get("instructions")
            if instructions is not None and stated is not None and str(stated) != instructions:
                raise bad_message(place, "the instructions differ from those of an earlier request")
            if stated and instructions is None:
                instructions = str(stated)
        if isinstance(logged, list):
            converted += messages(logged, place)
        else:
            pieces = _one(logged, place, converted)
            if isinstance(logged, Mapping):
                account_by_text(logged, pieces, _APART, "message")
                pieces = with_marks(pieces, logged, place)
            converted += pieces
    if instructions is not None:
        converted.insert(0, {"role": "system", "content": instructions})
    return converted


def _is_of_gemini(message: Any) -> bool:
    parts = message.get("parts") if isinstance(message, Mapping) and "kind" not in message else None
    parts = [parts] if isinstance(parts, Mapping | str) else parts
    return isinstance(parts, list) and not any(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts
    )


def _one(message: Any, where: str, before: Sequence[Message]) -> list[Message]:
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if not isinstance(message, Mapping):
        raise bad_message(where, f"a message is {type(message).__name__}", "an object or a string")
    if word(message.get("kind")) in {"request", "response"} and "parts" in message:
        return _of_pydantic_ai(message, where)
    if word(message.get("type")) in _AUTOGEN or (
        message.get("type") == "SystemMessage" and "id" not in message
    ):
        return _of_autogen(message, where)
    if word(message.get("type")) in LANGCHAIN and "role" not in message:
        return _of_langchain(message, LANGCHAIN[message["type"]], where)
    if "from" in message and "value" in message:
        return _of_sharegpt(message, where)
    if _is_of_gemini(message):
        return gemini.messages([gemini.camel(message)], where, before)
    if isinstance(message.get("parts"), list):
        blocks = [_semantic_block(part) for part in message["parts"]]
        return _of_blocks(str(message.get("role") or "user"), blocks, where)
    if "blocks" in message:
        return _of_llama_index(message, where)
    if isinstance(message.get("message"), Mapping | list) and "role" not in message:
        return messages([message["message"]], f"{where}, message")
    return _of_chat(message, where)


def _without_wrapper(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a message that LangChain or an API put into another object."""
    if "lc" in message and isinstance(message.get("kwargs"), Mapping):
        path = message.get("id") or [""]
        return {"type": path[-1]} | dict(message["kwargs"])
    data = message.get("data")
    if isinstance(data, Mapping) and word(message.get("type")) in LANGCHAIN:
        return dict(data) | {"type": message["type"]}
    return message


def _of_chat(message: Mapping[str, Any], where: str) -> list[Message]:
    fields = dict(message)
    event = str(fields.get("event.name", ""))
    if "role" not in fields and event.startswith("gen_ai."):
        fields["role"] = event.removeprefix("gen_ai.").removesuffix(".message")
    more = fields.get("additional_kwargs")
    if isinstance(more, Mapping):
        fields = {n: more[n] for n in ("tool_calls", "tool_call_id") if n in more} | fields
    if fields.get("role") == "model":
        fields["role"] = "assistant"
    if fields.get("role") == "tool" and "tool_call_id" not in fields and "id" in fields:
        fields["tool_call_id"] = fields["id"]
    content = fields.get("content")
    if isinstance(content, list) and any(is_of_vercel(part) for part in content):
        role = fields.get("role")
        if not isinstance(role, str):
            raise bad_message(where, f"a role of type {type(role).__name__}", "the role's name")
        return _of_blocks(role, [vercel_block(p) for p in content], where)
    if isinstance(content, Mapping | int | float | bool):
        fields["content"] = as_json(content)
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_openai_call(call) for call in fields["tool_calls"]]
    if not isinstance(fields.get("name"), str):
        fields.pop("name", None)
    if not isinstance(fields.get("refusal"), str) or fields.get("content"):
        return read_messages([raw_of(fields)], where)
    return read_messages([raw_of(fields | {"content": fields["refusal"]})], where)


def _openai_call(call: Any) -> Any:
    """Return a call with its name and arguments where OpenAI's format has them."""
    if not isinstance(call, Mapping) or "function" in call or "args" not in call:
        return call
    function = {"name": call.get("name"), "arguments": as_json(call["args"])}
    return known({"id": call.get("id"), "type": "function", "function": function})


def _of_langchain(message: Mapping[str, Any], role: str, where: str) -> list[Message]:
    listed = [v for n in ("tool_calls", "invalid_tool_calls") if (v := message.get(n))]
    others = [calls for calls in listed if not isinstance(calls, list)]  # refused with the message
    calls = others[0] if others else [call for calls in listed for call in calls]
    content = message.get("content")
    if calls and isinstance(content, list):
        content = [
            p for p in content if not (isinstance(p, Mapping) and word(p.get("type")) in _CALLS)
        ]
    if isinstance(content, list):
        content = [langchain_block(part) for part in content]
    more = message.get("additional_kwargs")
    more = more if isinstance(more, Mapping) else {}
    fields = {
        "role": role,
        "content": content,
        "reasoning_content": more.get("reasoning_content"),
        "tool_calls": calls or more.get("tool_calls"),
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "is_error": True if message.get("status") == "error" else None,
    }
    return _of_chat(known(fields), where)


_CALLS = frozenset({"tool_use", "tool_call", "function_call", "input_json_delta"})


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[Message]:
    role = {"tool": "user", "model": "assistant"}.get(role, role)
    return anthropic.messages([{"role": role, "content": blocks}], where)


def _semantic_block(part: Any) -> Mapping[str, Any] | str:
    """Return a part of OpenTelemetry's GenAI conventions as a block of Anthropic's API."""
    if not isinstance(part, Mapping):
        return str(part)
    kind, content = word(part.get("type")), part.get("content", part.get("text"))
    if kind == "tool_call":
        return call_block(part.get("id"), part.get("name"), part.get("arguments"))
    if kind == "tool_call_response":
        result = part.get("response", part.get("result", content))
        return result_block(part.get("id"), result)
    if kind == "reasoning" or "Reasoning" in str(kind):
        text = content.get("text") if isinstance(content, Mapping) else content
        return {"type": "thinking", "thinking": str(text or "")}
    if kind in {"blob", "uri", "file"}:
        url = part.get("uri") or str(part.get("file_id"))
        media = str(part.get("modality") or "image")
        return media_block(media, part.get("content"), url, part.get("mime_type"))
    if kind == "text":
        return {"type": "text", "text": as_text(content)}
    return part


def _of_pydantic_ai(message: Mapping[str, Any], where: str) -> list[Message]:
    if message["kind"] == "response":
        blocks = [_pydantic_block(part, where) for part in message["parts"]]
        return _of_blocks("assistant", blocks, where)
    converted: list[Message] = []
    for part in message["parts"]:
        kind, content = word(part.get("part_kind")), part.get("content")
        if kind == "system-prompt":
            converted.append({"role": "system", "content": as_text(content)})
        elif kind == "user-prompt":
            listed = content if isinstance(content, list) else [content]
            converted += _of_blocks("user", [_user_block(one) for one in listed], where)
        elif kind in {"tool-return", "retry-prompt"} and part.get("tool_name"):
            converted += _of_blocks(
                "user", [result_block(part.get("tool_call_id"), content)], where
            )
        elif kind == "retry-prompt":
            converted.append({"role": "user", "content": as_text(content)})
        else:
            raise bad_message(where, f"a part of the kind {kind!r}", "a part of a request")
    return converted


def _pydantic_block(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    kind = word(part.get("part_kind"))
    if kind in {"text", "thinking"}:
        return {"type": kind, ("text" if kind == "text" else "thinking"): part.get("content") or ""}
    if kind in {"tool-call", "builtin-tool-call"}:
        arguments = parsed(part.get("args")) or {}
        block = call_block(part.get("tool_call_id"), part.get("tool_name"), arguments)
        return block if kind == "tool-call" else {**block, "type": "server_tool_use"}
    if kind == "builtin-tool-return":
        block = result_block(part.get("tool_call_id"), as_text(part.get("content")))
        return {**block, "type": "mcp_tool_result"}
    raise bad_message(where, f"a part of the kind {kind!r}", "a part of a response")


def _user_block(part: Any) -> Mapping[str, Any] | str:
    if not isinstance(part, Mapping):
        return as_text(part)
    kind = str(part.get("kind"))
    if kind == "binary":
        mime = str(part.get("media_type", ""))
        kind = "image" if mime.startswith("image/") else "document"
        return media_block(kind, part.get("data"), None, mime)
    if kind.endswith("-url"):
        return media_block(kind.removesuffix("-url"), None, part.get("url"), None)
    return part


def _of_autogen(message: Mapping[str, Any], where: str) -> list[Message]:
    kind, content = message["type"], message.get("content")
    if kind == "FunctionExecutionResultMessage":
        results = [result_block(part.get("call_id"), part.get("content")) for part in content or ()]
        return _of_blocks("user", results, where)
    role = {"SystemMessage": "system", "UserMessage": "user"}.get(kind, "assistant")
    blocks: list[Any] = (
        [{"type": "thinking", "thinking": message["thought"]}] if message.get("thought") else []
    )
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and "arguments" in part:
            blocks.append(call_block(part.get("id"), part.get("name"), part["arguments"]))
        else:
            blocks.append(part if isinstance(part, Mapping) else as_text(part))
    return _of_blocks(role, blocks, where)


def _of_llama_index(message: Mapping[str, Any], where: str) -> list[Message]:
    more, role = message.get("additional_kwargs") or {}, str(message.get("role"))
    blocks = [_llama_block(block, where) for block in message["blocks"]]
    calls = more.get("tool_calls")
    if calls or role == "tool":
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        fields = {
            "role": role,
            "content": "\n".join(texts),
            "tool_calls": calls,
            "tool_call_id": more.get("tool_call_id"),
        }
        return _of_chat(known(fields), where)
    return _of_blocks(role, blocks, where)


def _llama_block(block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    match word(block.get("block_type")):
        case "text":
            return {"type": "text", "text": block.get("text") or ""}
        case "thinking":
            return {"type": "thinking", "thinking": block.get("content") or ""}
        case "tool_call":
            arguments = block.get("tool_kwargs")
            return call_block(block.get("tool_call_id"), block.get("tool_name"), arguments)
        case "image":
            url = block.get("url") or block.get("path")
            return media_block("image", block.get("image"), url, block.get("image_mimetype"))
        case kind:
            expected = "text, image, thinking, tool_call"
            raise bad_message(where, f"a block of the type {kind!r}", expected)


def _of_sharegpt(message: Mapping[str, Any], where: str) -> list[Message]:
    sender, value = str(message["from"]), message["value"]
    role = _SHAREGPT.get(sender, sender)
    if sender == "function_call":
        call = parsed(value)
        calls = call if isinstance(call, list) else [call]
        if all(isinstance(one, Mapping) and "name" in one for one in calls):
            return read_messages([raw_of({"role": role, "tool_calls": calls})], where)
    return read_messages([raw_of({"role": role, "content": as_text(value)})], where)


def call_block(call_id: Any, name: Any, arguments: Any) -> Mapping[str, Any]:
    """Return a call as a block; arguments may be JSON text."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": parsed(arguments)}


def media_block(kind: str, data: Any, url: Any, mime: Any) -> Mapping[str, Any]:
    """Return a picture or a file as a block: its bytes in base64, or its URL."""
    source = {"type": "base64", "data": data} if data else {"type": "url", "url": url}
    return {"type": kind, "source": known(source | {"media_type": mime})}


def result_block(call_id: Any, result: Any) -> Mapping[str, Any]:
    """Return the result of a call as a block; a list of parts is its content, anything else is text."""
    is_parts = isinstance(result, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in result
    )
    content = result if is_parts and result else as_text(result)
    return known({"type": "tool_result", "tool_use_id": call_id, "content": content})


def word(value: Any) -> str:
    """Return a value that names a kind; damaged logs may have anything in its place."""
    return value if isinstance(value, str) else ""


def as_text(value: Any) -> str:
    """Return a text as it is, null as an empty text, and any other value as JSON."""
    return "" if value is None else as_json(value)


def as_json(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else canonical_json(msgspec.json.encode(value))


def parsed(value: Any) -> Any:
    """Return the value of JSON text; any other value, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return value


def langchain_block(part: Any) -> Any:
    """Return a picture or a file, whose bytes LangChain has beside its type, with a `source`."""
    if not isinstance(part, Mapping) or word(part.get("type")) not in {"image", "file", "audio"}:
        return part
    data, url = part.get("data", part.get("base64")), part.get("url")
    if not isinstance(data, str) and not isinstance(url, str):
        return part
    kind = "document" if part["type"] == "file" else part["type"]
    return media_block(kind, data, url, part.get("mime_type"))


def is_of_vercel(part: Any) -> bool:
    """True for a call, a result, a picture or a file of Vercel's AI SDK."""
    return isinstance(part, Mapping) and (
        word(part.get("type")) in {"tool-call", "tool-result"}
        or isinstance(_vercel_data(part), str)
    )


def _vercel_data(part: Mapping[str, Any]) -> Any:
    """Return the bytes in base64, or the URL, of a picture or a file."""
    return part.get({"image": "image", "file": "data"}.get(word(part.get("type")), ""))


def vercel_block(part: Any) -> Any:
    """Return a part of Vercel's AI SDK as a block; anything else as it is."""
    if not isinstance(part, Mapping):
        return part
    kind = word(part.get("type"))
    if kind == "tool-call":
        arguments = part.get("input", part.get("args"))
        return call_block(part.get("toolCallId"), part.get("toolName"), arguments)
    if kind == "tool-result":
        output = part.get("output", part.get("result"))
        if isinstance(output, Mapping) and {"type", "value"} <= output.keys():
            output = output["value"]
        return result_block(part.get("toolCallId"), output)
    if kind == "reasoning":
        return {"type": "thinking", "thinking": part.get("text")}
    data = _vercel_data(part)
    if isinstance(data, str):
        name = "url" if ":" in data[:16] else "data"
        block = {
            "type": kind,
            name: data,
            "mime_type": part.get("mediaType", part.get("mime_type")),
        }
        return {**part, **langchain_block(block)}
    return part
