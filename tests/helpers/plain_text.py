"""Plain readers of the formats of text: what the decoded tokens of a row must be."""

import json
import math
from typing import Any

from tests.helpers.plain_values import (
    Expected,
    NotCompared,
    Spoken,
    document_at,
    number,
    record_at,
)

TEXT_TYPES = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}


def _said(content):
    """A content that is text, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    assert isinstance(content, list)
    texts = []
    for part in content:
        if isinstance(part, dict):
            if part.get("type", "text") not in TEXT_TYPES:
                raise NotCompared
            assert isinstance(part["text"], str)
            texts.append(part["text"])
        else:
            assert isinstance(part, str)
            texts.append(part)
    return "\n".join(texts)


def _thought(message):
    names = ("reasoning_content", "reasoning", "thinking")
    if message.get("thinking_blocks"):
        raise NotCompared
    return next((text for name in names if (text := _said(message.get(name)))), "")


def _call(call):
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function")
    if not isinstance(function, dict):
        function = {"name": function or call["name"], "arguments": call.get("arguments")}
    name, arguments = function["name"], function.get("arguments")
    assert isinstance(name, str)
    arguments = {} if arguments is None or arguments == "" else arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(arguments, dict)
    named = json.dumps(name, ensure_ascii=False)
    text = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {named}, "arguments": {text}}}\n</tool_call>'


def _answer(message):
    """What the chatml_tools_thinking template makes of an assistant's message."""
    thought, text = _thought(message), _said(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    thought = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return thought + "\n".join([*([text] if text else []), *calls])


def conversation(messages, outcome):
    """The text of messages up to the last answer, and the answers."""
    for message in messages:
        assert isinstance(message["role"], str)
    said = [_answer(m) if m["role"] == "assistant" else _said(m.get("content")) for m in messages]
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant" and said[i]]
    assert spoken
    text, before = "", None
    for message, own in list(zip(messages, said, strict=True))[: spoken[-1] + 1]:
        role = message["role"]
        assert role == "assistant" or not message.get("tool_calls")
        if before == "tool" and role != "tool":
            text += "<|im_end|>\n"
        if role == "tool":
            text += "<|im_start|>user" if before != "tool" else ""
            text += f"\n<tool_response>\n{own}\n</tool_response>"
        else:
            text += f"<|im_start|>{role}\n{own}<|im_end|>\n"
        before = role
    return Expected([Spoken(text, [f"{said[i]}<|im_end|>" for i in spoken])], outcome)


def _openai_messages(rows):
    record, _ = record_at(rows[0]["source"])
    record = {"messages": record} if isinstance(record, list) else record
    if record.get("tools"):
        raise NotCompared
    reward = record.get("score") if record.get("reward") is None else record["reward"]
    return conversation(record["messages"], number(reward))


def _hermes(rows):
    record, _ = record_at(rows[0]["source"])
    if not all(m.get("active", 1) for m in record["messages"]):
        raise NotCompared
    prompt = record.get("system_prompt")
    if not isinstance(prompt, str | None):
        raise NotCompared
    system = [{"role": "system", "content": prompt}] if prompt else []
    sent = [_sent_by_hermes(m) for m in record["messages"] if m.get("role") in HERMES_ROLES]
    sent = [m for m in sent if m["role"] != "assistant" or any(map(m.get, SAYS))]
    return conversation([*system, *sent], number(record.get("score")))


HERMES_ROLES = {"system", "user", "assistant", "tool", "function", "developer"}
SAYS = ("content", "tool_calls", "reasoning", "reasoning_content")


def _sent_by_hermes(message):
    """Text without the space around it, but for the model's."""
    content = message.get("content")
    is_text = isinstance(content, str) and message["role"] != "assistant"
    return message | {"content": content.strip()} if is_text else message


def _mini_swe_agent(rows):
    document = document_at(rows[0]["source"].rpartition(", messages[")[0])
    messages = document if isinstance(document, list) else document["messages"]
    return conversation([m for m in messages if m.get("role") != "exit"], None)


def texts_of(given, role):
    """Messages; plain text is one."""
    return [{"role": role, "content": given}] if isinstance(given, str) else given or []


def _prime_hosted(rows):
    source = rows[0]["source"]
    if ", samples[" in source:
        row = document_at(source.rpartition(", samples[")[0])["samples"][
            int(source.rpartition("[")[2][:-1])
        ]
    else:
        row, _ = record_at(source)
    messages = [*json.loads(row["prompt"]), *json.loads(row["completion"])]
    return conversation(messages, number(row.get("reward")))


def _verl(rows):
    row, _ = record_at(rows[0]["source"])
    return _completion(row["input"], row["output"], number(row["score"]))


def _skyrl_evals(rows):
    row, _ = record_at(rows[0]["source"])
    score = row.get("score")
    if isinstance(score, list):
        score = sum(map(number, score)) if score else None
    return _completion(row["input_prompt"], row["output_response"], number(score))


def _completion(prompt, response, outcome):
    assert isinstance(prompt, str)
    assert isinstance(response, str)
    return Expected([Spoken(prompt + response)], outcome)


def _trl(rows):
    import pyarrow.parquet as pq

    path, _, index = rows[0]["source"].rpartition(", row ")
    table = pq.read_table(path)
    row: dict[str, Any] = table.slice(int(index), 1).to_pylist()[0]
    rewards = [
        name
        for name in table.column_names
        if name not in {"step", "prompt", "completion", "advantage"}
    ]
    kinds = [n for n in rewards if str(table.schema.field(n).type) in {"double", "int64", "bool"}]
    outcome = row[kinds[0]] if len(kinds) == 1 else None
    outcome = None if outcome is None or math.isnan(outcome) else float(outcome)
    if isinstance(row["prompt"], str):
        return _completion(row["prompt"], row["completion"], outcome)
    messages = [
        {k: v for k, v in m.items() if v is not None} for m in row["prompt"] + row["completion"]
    ]
    return conversation(messages, outcome)


def responses_run(record):
    """A run of Responses items: the request's, and those of the response."""
    sent, response = record["responses_create_params"], record["response"]
    if sent.get("tools") or response.get("tools") or response.get("instructions"):
        raise NotCompared
    if record.get("mask_sample"):
        raise NotCompared
    messages = texts_of(sent.get("instructions") or [], "system")
    messages = [*messages, *_chat(texts_of(sent["input"], "user")), *_chat(response["output"])]
    return conversation(messages, number(record.get("reward")))


def _chat(items):
    """The messages of Responses items; consecutive ones of the model are one message."""
    messages = []
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else None
        if last and last["role"] == message["role"] == "assistant":
            for name in ("content", "reasoning_content"):
                last[name] = "\n".join(text for text in (last[name], message[name]) if text)
            last["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def _message(item):
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "content": _said(item["output"])}
    if kind == "message" and item["role"] != "assistant":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": item["content"]}
    assert kind in {"message", "reasoning", "function_call"}
    assert kind != "function_call" or item["arguments"] is not None
    said = _said(item["content"]) if kind == "message" else ""
    thought = _said(item.get("content")) or _said(item.get("summary"))
    return {
        "role": "assistant",
        "content": said,
        "reasoning_content": thought if kind == "reasoning" else "",
        "tool_calls": [item] if kind == "function_call" else [],
    }


READERS = {
    "mini_swe_agent": _mini_swe_agent,
    "hermes": _hermes,
    "openai_messages": _openai_messages,
    "prime_hosted": _prime_hosted,
    "skyrl_evals": _skyrl_evals,
    "trl": _trl,
    "verl": _verl,
}
