"""Sessions that real harnesses write here: each answer follows exactly what the engine was sent."""

import json

import pytest

from rollout_io.formats.claude_code import ADAPTER as CLAUDE_CODE
from rollout_io.formats.codex_cli import ADAPTER as CODEX
from rollout_io.formats.codex_cli import EDITED, SUMMARIES
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all
from tests.real_harnesses.__main__ import SCENARIOS, make
from tests.real_harnesses.harnesses import PROGRAMS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not PROGRAMS.exists(), reason=f"no {PROGRAMS}: run `make .venv-harnesses/.ready`"
    ),
]


def plain_tools(tools):
    """(name, description, parameters) of each tool of a request of Anthropic's or OpenAI's API."""
    found = []
    for tool in tools or ():
        inner = tool.get("function", tool)
        schema = inner.get("parameters") or inner.get("input_schema")
        found.append((inner.get("name", tool.get("type")), inner.get("description"), schema))
    return found


def plain_block(block):
    """What a block of Anthropic's API says: a mark for its kind, and its text."""
    kind = block["type"]
    if kind == "tool_use":
        return ("call", block["name"], json.dumps(block["input"], sort_keys=True))
    if kind == "tool_result":
        content = block.get("content") or ""
        parts = [("text", content)] if isinstance(content, str) else map(plain_block, content)
        return ("result", block["tool_use_id"], tuple(parts))
    if kind == "image":
        return ("image", block["source"]["data"])
    return ("thought" if kind == "thinking" else "text", block.get("text") or block.get("thinking"))


def plain_message(message):
    """(kind, ...) of everything that one of our messages says, in the order in which it is said."""
    content = message["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = [
        ("image", p["source"]["data"]) if p["type"] == "image" else ("text", p["text"])
        for p in parts
    ]
    if message["role"] == "tool":
        return [("result", message["tool_call_id"], tuple(shown))]
    thought = message.get("reasoning_content")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = [
        ("call", c["name"], json.dumps(json.loads(c["arguments"]), sort_keys=True)) for c in calls
    ]
    return [*([("thought", thought)] if thought else []), *shown, *called]


def plain_request(request):
    """(role, what it says) of each message of a request of Anthropic's API."""
    system = [block["text"] for block in request["system"]]
    system = [text for text in system if not text.startswith("x-anthropic-billing-header")]
    yield "system", [("text", "\n".join(system))]
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [plain_block(block) for block in blocks]
        results = [each for each in said if each[0] == "result"]
        yield from (("tool", [each]) for each in results)
        rest = [each for each in said if each[0] != "result"]
        texts = [each[1] for each in rest if each[0] == "text"]
        if message["role"] == "assistant":
            yield "assistant", rest
        elif rest and all(each[0] == "text" for each in rest):
            yield message["role"], [("text", "\n".join(texts))]
        elif rest:
            yield message["role"], rest


def answered(found):
    """(prompt, tools, answer) of each answer of all rows that is trained on."""
    for _, trajectory in found:
        for step in trajectory.steps:
            for i, message in enumerate(step.messages):
                if i >= step.num_given and is_answer(message):
                    yield step.messages[:i], step.tools, message


@pytest.mark.parametrize("scenario", SCENARIOS["claude_code"])
def test_prompts_of_claude_code_are_the_requests_message_for_message(scenario, tmp_path):
    engine = make("claude_code", scenario, tmp_path)
    logs = sorted((tmp_path / ".claude" / "projects").rglob("*.jsonl"))
    found, rejected = read_all(CLAUDE_CODE, *logs)
    assert rejected == []
    sent = {exchange.text: exchange for exchange in engine.exchanges}
    rows = {message["content"]: (prompt, tools) for prompt, tools, message in answered(found)}
    for text, (prompt, tools) in rows.items():
        exchange = sent[text]
        expected = [*plain_request(exchange.request)]
        got = [(message["role"], plain_message(message)) for message in prompt]
        assert got == expected
        assert plain_tools(tools) == plain_tools(exchange.request["tools"])
    assert rows.keys() <= sent.keys()
    (values,) = {made.user_values["prompts"] for _, made in found}
    assert values == ("requests and messages" if scenario == "sub_agents" else "requests")
    assert all(made.unread == {} for _, made in found)
    for text in sent.keys() - rows.keys():  # the summary is a message, no answer
        assert "<summary>" in json.dumps(sent[text].request["messages"][-1])
    assert sum(len(made.steps) for _, made in found) >= len(found)


def plain_item(item):
    """What an item of the Responses API says; of a picture, its data."""
    kind = item["type"]
    if kind == "reasoning":
        return [("thought", "\n".join(part["text"] for part in item["summary"]))]
    if kind == "function_call":
        arguments = json.dumps(json.loads(item["arguments"]), sort_keys=True)
        return [("call", item["name"], arguments)]
    if kind == "function_call_output":
        return [("result", item["call_id"], (("text", item["output"]),))]
    pictures = [part for part in item["content"] if part["type"] == "input_image"]
    if not pictures:
        return [("text", "\n".join(part["text"] for part in item["content"]))]
    return [
        ("image", part["image_url"].partition("base64,")[2])
        if part["type"] == "input_image"
        else ("text", part["text"])
        for part in item["content"]
    ]


def plain_input(items):
    """(role, what it says) of each message; the engine begins each answer with a thought."""
    made = []
    for item in items:
        role = item.get("role", "assistant")
        if item["type"] == "function_call_output":
            made.append(("tool", plain_item(item)))
        elif role != "assistant":
            is_answered = any(role == "assistant" for role, _ in made)
            role = {"developer": "user" if is_answered else "system"}.get(role, role)
            made.append((role, plain_item(item)))
        elif item["type"] == "reasoning":
            made.append(("assistant", plain_item(item)))
        else:
            made[-1][1].extend(plain_item(item))
    return made


@pytest.mark.parametrize("scenario", SCENARIOS["codex"])
def test_prompts_of_codex_are_the_requests_message_for_message(scenario, tmp_path):
    engine = make("codex", scenario, tmp_path)
    logs = sorted((tmp_path / ".codex" / "sessions").rglob("*.jsonl"))
    found, rejected = read_all(CODEX, *logs)
    assert rejected == []
    sent = {exchange.text: exchange for exchange in engine.exchanges}
    rows = {message["content"]: prompt for prompt, _, message in answered(found)}
    for text, prompt in rows.items():
        (_, ((_, instructions),)), *got = [(m["role"], plain_message(m)) for m in prompt]
        (_, ((_, asked),)), *expected = plain_input(sent[text].request["input"])
        assert got == expected
        lines = iter(instructions.split("\n"))  # sections about tools that are off are not sent
        assert all(line in lines for line in asked.split("\n"))
    assert all((made.unread, made.notes[EDITED]) == ({}, 1) for _, made in found)
    left_out = sum(made.notes.get(SUMMARIES, 0) for _, made in found)
    assert len(sent) - len(rows) == left_out == (scenario == "compacted")  # the summary
