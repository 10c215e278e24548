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

from rollout_io.formats.dialects import anthropic, gemini
from rollout_io.formats.dialects.parts import (
    as_json,
    as_text,
    call_block,
    is_of_vercel,
    langchain_block,
    media_block,
    parsed,
    result_block,
    vercel_block,
    word,
)
from rollout_io.formats.parsing.content import Message, bad_message, known, raw_of
from rollout_io.formats.parsing.messages import read_messages, with_marks

Fields = Mapping[str, Any]

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


def messages(given: Iterable[Any], where: str) -> list[Message]:
    """Convert messages of any shape, as decoded JSON, to OpenAI's format.

    A list among them is a batch of messages, and a string is a user's text.

    Example:
        >>> call = {
        ...     "type": "ai",
        ...     "content": "",
        ...     "tool_calls": [{"name": "ls", "args": {}, "id": "c"}],
        ... }
        >>> messages([call], "a.jsonl:1")[0]["tool_calls"]
        [{'id': 'c', 'type': 'function', 'function': {'name': 'ls', 'arguments': '{}'}}]
    """
    given = list(given)
    found: list[Message] = []
    instructions: str | None = None
    for i, each in enumerate(given):
        place = f"{where}[{i}]"
        if isinstance(each, Mapping) and each.get("kind") == "request":
            stated = each.get("instructions")
            if instructions is not None and stated not in {None, instructions}:
                raise bad_message(place, "the instructions differ from those of an earlier request")
            if stated and instructions is None:
                instructions = str(stated)
        if isinstance(each, list):
            found += messages(each, place)
        else:
            said = _one(each, place, found)
            found += with_marks(said, each, place) if isinstance(each, Mapping) else said
    if instructions is not None:
        found.insert(0, {"role": "system", "content": instructions})
    return found


def _is_of_gemini(given: Any) -> bool:
    parts = given.get("parts") if isinstance(given, Mapping) and "kind" not in given else None
    parts = [parts] if isinstance(parts, Mapping | str) else parts
    return isinstance(parts, list) and not any(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts
    )


def _one(given: Any, where: str, before: Sequence[Message]) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, Mapping):
        raise bad_message(where, f"a message is {type(given).__name__}", "an object or a string")
    given = _without_wrapper(given)
    if word(given.get("kind")) in {"request", "response"} and "parts" in given:
        return _of_pydantic_ai(given, where)
    if word(given.get("type")) in _AUTOGEN or (
        given.get("type") == "SystemMessage" and "id" not in given
    ):
        return _of_autogen(given, where)
    if word(given.get("type")) in LANGCHAIN and "role" not in given:
        return _of_langchain(given, LANGCHAIN[given["type"]], where)
    if "from" in given and "value" in given:
        return _of_sharegpt(given, where)
    if _is_of_gemini(given):
        return gemini.messages([gemini.camel(given)], where, before)
    if isinstance(given.get("parts"), list):
        blocks = [_semantic_block(part) for part in given["parts"]]
        return _of_blocks(str(given.get("role") or "user"), blocks, where)
    if "blocks" in given:
        return _of_llama_index(given, where)
    if isinstance(given.get("message"), Mapping | list) and "role" not in given:
        return messages([given["message"]], f"{where}, message")
    return _of_chat(given, where)


def _without_wrapper(given: Fields) -> Fields:
    """Return the fields of a message that LangChain or an API put into another object."""
    if "lc" in given and isinstance(given.get("kwargs"), Mapping):
        path = given.get("id") or [""]
        return {"type": path[-1]} | dict(given["kwargs"])
    data = given.get("data")
    if isinstance(data, Mapping) and word(given.get("type")) in LANGCHAIN:
        return dict(data) | {"type": given["type"]}
    return given


def _of_chat(given: Fields, where: str) -> list[Message]:
    fields = dict(given)
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


def _of_langchain(given: Fields, role: str, where: str) -> list[Message]:
    calls = [*(given.get("tool_calls") or ()), *(given.get("invalid_tool_calls") or ())]
    content = given.get("content")
    if calls and isinstance(content, list):
        content = [
            p for p in content if not (isinstance(p, Mapping) and word(p.get("type")) in _CALLS)
        ]
    if isinstance(content, list):
        content = [langchain_block(part) for part in content]
    more = given.get("additional_kwargs") or {}
    fields = {
        "role": role,
        "content": content,
        "reasoning_content": more.get("reasoning_content"),
        "tool_calls": calls or more.get("tool_calls"),
        "tool_call_id": given.get("tool_call_id"),
        "name": given.get("name"),
    }
    return _of_chat(known(fields), where)


_CALLS = frozenset({"tool_use", "tool_call", "function_call", "input_json_delta"})


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[Message]:
    role = {"tool": "user", "model": "assistant"}.get(role, role)
    return anthropic.messages([{"role": role, "content": blocks}], where)


def _semantic_block(part: Any) -> Fields | str:
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


def _of_pydantic_ai(given: Fields, where: str) -> list[Message]:
    if given["kind"] == "response":
        blocks = [_pydantic_block(part, where) for part in given["parts"]]
        return _of_blocks("assistant", blocks, where)
    found: list[Message] = []
    for part in given["parts"]:
        kind, content = word(part.get("part_kind")), part.get("content")
        if kind == "system-prompt":
            found.append({"role": "system", "content": as_text(content)})
        elif kind == "user-prompt":
            listed = content if isinstance(content, list) else [content]
            found += _of_blocks("user", [_user_block(each) for each in listed], where)
        elif kind in {"tool-return", "retry-prompt"} and part.get("tool_name"):
            found += _of_blocks("user", [result_block(part.get("tool_call_id"), content)], where)
        elif kind == "retry-prompt":
            found.append({"role": "user", "content": as_text(content)})
        else:
            raise bad_message(where, f"a part of the kind {kind!r}", "a part of a request")
    return found


def _pydantic_block(part: Fields, where: str) -> Fields:
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


def _user_block(each: Any) -> Fields | str:
    if not isinstance(each, Mapping):
        return as_text(each)
    kind = str(each.get("kind"))
    if kind == "binary":
        mime = str(each.get("media_type", ""))
        kind = "image" if mime.startswith("image/") else "document"
        return media_block(kind, each.get("data"), None, mime)
    if kind.endswith("-url"):
        return media_block(kind.removesuffix("-url"), None, each.get("url"), None)
    return each


def _of_autogen(given: Fields, where: str) -> list[Message]:
    kind, content = given["type"], given.get("content")
    if kind == "FunctionExecutionResultMessage":
        results = [result_block(each.get("call_id"), each.get("content")) for each in content or ()]
        return _of_blocks("user", results, where)
    role = {"SystemMessage": "system", "UserMessage": "user"}.get(kind, "assistant")
    blocks: list[Any] = (
        [{"type": "thinking", "thinking": given["thought"]}] if given.get("thought") else []
    )
    for each in content if isinstance(content, list) else [content]:
        if isinstance(each, Mapping) and "arguments" in each:
            blocks.append(call_block(each.get("id"), each.get("name"), each["arguments"]))
        else:
            blocks.append(each if isinstance(each, Mapping) else as_text(each))
    return _of_blocks(role, blocks, where)


def _of_llama_index(given: Fields, where: str) -> list[Message]:
    more, role = given.get("additional_kwargs") or {}, str(given.get("role"))
    blocks = [_llama_block(block, where) for block in given["blocks"]]
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


def _llama_block(block: Fields, where: str) -> Fields:
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


def _of_sharegpt(given: Fields, where: str) -> list[Message]:
    sender, value = str(given["from"]), given["value"]
    role = _SHAREGPT.get(sender, sender)
    if sender == "function_call":
        call = parsed(value)
        calls = call if isinstance(call, list) else [call]
        if all(isinstance(each, Mapping) and "name" in each for each in calls):
            return read_messages([raw_of({"role": role, "tool_calls": calls})], where)
    return read_messages([raw_of({"role": role, "content": as_text(value)})], where)
