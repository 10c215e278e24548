"""What a request says, and what a prompt of ours says, in one plain form: [role, [said, ...]] a message.

Something said is ["text", text], ["thought", text], ["image", base64], ["call", name, arguments] or
["result", id, [said, ...]]. Arguments are JSON with sorted keys. System messages after the first
message of another role are the user's, as the recorder has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Said = list[Any]
Message = list[Any]
BILLING = "x-anthropic-billing-header"


def sent(request: dict[str, Any]) -> list[Message]:
    """The messages of a request of any of the four APIs."""
    if "contents" in request:
        made = _gemini(request)
    elif "input" in request:
        made = _responses(request)
    elif "system" in request or "metadata" in request:
        made = list(_anthropic(request))
    else:
        made = _chat(request["messages"])
    return normal(made)


def prompt_of(messages: Iterable[dict[str, Any]]) -> list[Message]:
    """Our messages before an answer."""
    return normal(_chat(messages))


def answer_of(message: dict[str, Any]) -> list[Said]:
    """What an answer of ours says."""
    ((_, said),) = _chat([message])
    return list(said)


def normal(messages: Iterable[Message]) -> list[Message]:
    """Messages without empty texts and lines, and with consecutive ones of the user joined."""
    made: list[Message] = []
    is_after = False
    for role, said in messages:
        is_after |= role != "system"
        of = "user" if role == "system" and is_after else role
        if made and made[-1][0] == of and of in {"user", "system"}:
            made[-1][1] = _joined([*made[-1][1], *said])
        elif (parts := _joined(said)) or of == "tool":
            made.append([of, parts])
    return _pictures_last(made)


def _joined(said: Iterable[Said]) -> list[Said]:
    made: list[Said] = []
    for each in said:
        if each[0] != "text":
            made.append(each)
        elif text := "\n".join(line for line in each[1].split("\n") if line.strip()):
            if made and made[-1][0] == "text":
                made[-1] = ["text", f"{made[-1][1]}\n{text}"]
            else:
                made.append(["text", text])
    return made


def _pictures_last(messages: Sequence[Message]) -> list[Message]:
    """Pictures of consecutive results follow the last of these, where chat completions has them."""
    made: list[Message] = []
    pictures: list[Said] = []
    for role, said in [*messages, ["end", []]]:
        if role == "tool":
            ((_, of, parts),) = said
            pictures += [each for each in parts if each[0] == "image"]
            rest = [each for each in parts if each[0] != "image"]
            made.append([role, [["result", of, rest]]])
            continue
        if pictures:
            made.append(["pictures", pictures])
            pictures = []
        made.append([role, said])
    return made[:-1]


def _arguments(value: Any) -> str:
    try:
        return _json(json.loads(value) if isinstance(value, str) else value)
    except ValueError:
        return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _picture(url: str) -> Said:
    return ["image", url.partition("base64,")[2] or url]


def _result(of: str | None, said: Iterable[Said]) -> Message:
    return ["tool", [["result", of, _joined(said)]]]


def _chat(messages: Iterable[dict[str, Any]]) -> list[Message]:
    made: list[Message] = []
    for message in messages:
        role = {"developer": "system"}.get(message["role"], message["role"])
        content = message.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [_chat_part(part) for part in parts]
        if role == "tool":
            made.append(_result(message.get("tool_call_id"), said))
            continue
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            said.insert(0, ["thought", thought])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            said.append(["call", function["name"], _arguments(function["arguments"])])
        made.append([role, said])
    return made


def _chat_part(part: dict[str, Any]) -> Said:
    if part["type"] == "image_url":
        return _picture(part["image_url"]["url"])
    if part["type"] == "image":
        return ["image", part["source"]["data"]]
    return ["text", part["text"]]


def _anthropic(request: dict[str, Any]) -> Iterable[Message]:
    system = request.get("system") or []
    blocks = [{"text": system}] if isinstance(system, str) else system
    texts = [each["text"] for each in blocks if not each["text"].startswith(BILLING)]
    if texts:
        yield ["system", [["text", "\n".join(texts)]]]
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [_block(block) for block in blocks]
        for each in said:
            if each[0] == "result":
                yield ["tool", [each]]
        if rest := [each for each in said if each[0] != "result"]:
            yield [message["role"], rest]


def _block(block: dict[str, Any]) -> Said:
    kind = block["type"]
    if kind == "tool_use":
        return ["call", block["name"], _json(block["input"])]
    if kind == "tool_result":
        content = block.get("content") or ""
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return ["result", block["tool_use_id"], _joined(map(_block, inner))]
    if kind == "image":
        return ["image", block["source"]["data"]]
    if kind == "tool_reference":
        return ["text", f"Loaded tool: {block['tool_name']}"]
    return ["thought", block["thinking"]] if kind == "thinking" else ["text", block["text"]]


def _responses(request: dict[str, Any]) -> list[Message]:
    instructions = request.get("instructions")
    made: list[Message] = [["system", [["text", instructions]]]] if instructions else []
    for item in request["input"]:
        kind, role = item["type"], item.get("role", "assistant")
        if kind.endswith("_output"):
            output = item.get("output") or ""
            parts = [{"text": output}] if isinstance(output, str) else output
            made.append(_result(item.get("call_id"), map(_input_part, parts)))
            continue
        if kind == "reasoning":
            said = [["thought", "\n".join(each["text"] for each in item["summary"])]]
        elif kind in {"function_call", "custom_tool_call"}:
            space = f"{item['namespace']}." if item.get("namespace") else ""
            said = [
                ["call", space + item["name"], _arguments(item.get("arguments", item.get("input")))]
            ]
        else:
            said = [_input_part(part) for part in item.get("content") or ()]
        role = {"developer": "system"}.get(role, role)
        if role == "assistant" and kind != "reasoning" and made and made[-1][0] == "assistant":
            made[-1][1] += said
        else:
            made.append([role, said])
    return made


def _input_part(part: dict[str, Any]) -> Said:
    return _picture(part["image_url"]) if "image_url" in part else ["text", part.get("text") or ""]


def _gemini(request: dict[str, Any]) -> list[Message]:
    texts = [part["text"] for part in (request.get("systemInstruction") or {}).get("parts", ())]
    made: list[Message] = [["system", [["text", "\n".join(texts)]]]] if texts else []
    for content in request["contents"]:
        role = {"model": "assistant"}.get(content.get("role"), "user")
        said: list[Said] = []
        for part in content["parts"]:
            if answered := part.get("functionResponse"):
                response = answered["response"]
                output = response.get("output", response.get("error"))
                text = output if isinstance(output, str) else _json(response)
                made.append(_result(None, [["text", text]]))
            elif call := part.get("functionCall"):
                said.append(["call", call["name"], _json(call["args"])])
            elif picture := part.get("inlineData"):
                said.append(["image", picture["data"]])
            else:
                said.append(["thought" if part.get("thought") else "text", part["text"]])
        if said:
            made.append([role, said])
    return made
