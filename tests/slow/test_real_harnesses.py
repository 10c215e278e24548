"""Sessions that real harnesses write here: each answer follows exactly what the engine was sent."""

import json

import pytest

from rollout_io.conversion.text import Retokenizer, with_tokens
from rollout_io.formats.claude_code import ADAPTER as CLAUDE_CODE
from rollout_io.formats.codex_cli import ADAPTER as CODEX
from rollout_io.formats.codex_cli import EDITED
from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.gemini_cli import ADAPTER as GEMINI_CLI
from rollout_io.formats.gemini_cli import THOUGHTS, WRITTEN
from rollout_io.formats.opencode import ADAPTER as OPENCODE
from rollout_io.formats.pi import ADAPTER as PI
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
    has_answer = False
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [plain_block(block) for block in blocks]
        results = [each for each in said if each[0] == "result"]
        yield from (("tool", [each]) for each in results)
        rest = [each for each in said if each[0] != "result"]
        texts = [each[1] for each in rest if each[0] == "text"]
        if message["role"] == "assistant":
            has_answer = True
            yield "assistant", rest
        elif rest:
            # Chat templates reject system messages after an answer; ours are user messages there.
            role = "user" if has_answer else message["role"]
            yield role, [("text", "\n".join(texts))] if len(texts) == len(rest) else rest


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
        space = f"{item['namespace']}." if item.get("namespace") else ""
        return [("call", f"{space}{item['name']}", arguments)]
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
    num_agents = 1 + (scenario == "sub_agents")
    assert len(found) == 1
    assert len({step.agent for _, made in found for step in made.steps}) == num_agents
    assert all((made.unread, made.notes[EDITED]) == ({}, num_agents) for _, made in found)
    left_out = sum(made.notes.get(SUMMARIES, 0) for _, made in found)
    assert len(sent) - len(rows) == left_out == (scenario == "compacted")  # the summary


def plain_parts(content):
    """What the parts of a chat message say; texts that follow each other are one."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    made = []
    for part in parts:
        if part["type"] == "image_url":
            made.append(("image", part["image_url"]["url"].partition("base64,")[2]))
        elif part["type"] == "image":
            made.append(("image", part["source"]["data"]))
        else:
            made.append(("text", part["text"]))
    return made


def merged(parts):
    """The parts, with texts that follow each other joined by a newline."""
    made = []
    for kind, said in parts:
        if kind == "text" and made and made[-1][0] == "text":
            made[-1] = ("text", f"{made[-1][1]}\n{said}")
        else:
            made.append((kind, said))
    return [each for each in made if each[1]]


def plain_chat(messages):
    """(role, what it says) of each chat message but the system's."""
    made = []
    for message in messages:
        role = message["role"]
        if role in {"system", "developer"}:
            continue
        said = plain_parts(message.get("content"))
        if role == "assistant":
            thought = message.get("reasoning_content")
            said = [("thought", thought or ""), *said]
            for call in message.get("tool_calls") or ():
                arguments = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
                said.append(("call", f"{call['function']['name']} {arguments}"))
        made.append((role, said))
    return [(role, merged(said)) for role, said in made]


def plain_contents(contents):
    """(role, what it says) of Gemini's contents; results of tools are messages of their own."""
    made = []
    for content in contents:
        role = {"model": "assistant"}.get(content["role"], "user")
        for part in content["parts"]:
            kind = role
            if "functionResponse" in part:
                kind, said = "tool", ("text", part["functionResponse"]["response"]["output"])
            elif "functionCall" in part:
                call = part["functionCall"]
                said = ("call", f"{call['name']} {json.dumps(call['args'], sort_keys=True)}")
            elif "inlineData" in part:
                said = ("image", part["inlineData"]["data"])
            else:
                said = ("thought" if part.get("thought") else "text", part["text"])
            is_new = not made or made[-1][0] != kind or kind == "tool" or made[-1][2] is not content
            if is_new and not (kind == "user" and made and made[-1][0] == "user"):
                made.append((kind, [], content))
            made[-1][1].append(said)
    return [(kind, merged(said)) for kind, said, _ in made]


def without_thoughts(messages):
    return [(role, [each for each in said if each[0] != "thought"]) for role, said in messages]


def joined_users(messages):
    """Messages of the user that follow each other as one, as Gemini's API has them."""
    made = []
    for role, said in messages:
        if role == "user" and made and made[-1][0] == "user":
            made[-1] = (role, merged([*made[-1][1], *said]))
        else:
            made.append((role, said))
    return made


def check_tokens(found, requests, plain, smollm2_dir):
    """The texts of the last request of each row are in its tokens, in order."""
    retokenizer = Retokenizer(directory=str(smollm2_dir), chat_template="chatml_tools_thinking")
    tokenizer = retokenizer.tokenizer
    for _, made in found:
        steps = with_tokens(made, retokenizer, tokenizer, None)
        assert len(steps) == len(made.steps)
        for logged, step in zip(made.steps, steps, strict=True):
            text = tokenizer.decode([*step.prompt_token_ids, *step.response_ids])
            answers = [m["content"] for m in logged.messages if is_answer(m)]
            at = 0
            for _, said in plain(requests[answers[-1]]):
                for kind, each in said:
                    for line in each.split("\n") if kind == "text" else ():
                        at = text.index(line.strip(), at) + len(line.strip())
            assert text.index(answers[-1], at)


@pytest.mark.parametrize(
    ("harness", "scenario"),
    [(h, s) for h in ("opencode", "pi", "gemini_cli") for s in SCENARIOS[h]],
)
def test_prompts_of_other_harnesses_are_the_requests_without_system_prompt_and_tools(
    harness, scenario, tmp_path, smollm2_dir
):
    engine = make(harness, scenario, tmp_path)
    adapter, logs = {
        "opencode": (OPENCODE, [tmp_path / ".local/share/opencode/opencode.db"]),
        "pi": (PI, sorted((tmp_path / ".pi/agent/sessions").rglob("*.jsonl"))),
        "gemini_cli": (GEMINI_CLI, sorted((tmp_path / ".gemini/tmp").rglob("*.jsonl"))),
    }[harness]
    found, rejected = read_all(adapter, *logs)
    assert rejected == []
    sent = {exchange.text: exchange.request for exchange in engine.exchanges}
    rows = {message["content"]: (prompt, tools) for prompt, tools, message in answered(found)}
    is_gemini = harness == "gemini_cli"

    def plain(request):
        return plain_contents(request["contents"]) if is_gemini else plain_chat(request["messages"])

    unsent = set()
    for text, (prompt, tools) in rows.items():
        got, expected = plain_chat(prompt), plain(sent[text])
        if is_gemini:
            thoughts = {each for _, said in expected for each in said if each[0] == "thought"}
            own = {each for _, said in got for each in said if each[0] == "thought"}
            assert thoughts <= own
            unsent |= own - thoughts
            got, expected = map(without_thoughts, (joined_users(got), expected))
        assert got == expected, text
        assert tools is None  # the log has none
    notes = [made.notes for _, made in found]
    assert all(made.unread == {} for _, made in found)
    assert sum(each.get(THOUGHTS, 0) for each in notes) == len(unsent)
    left_out = [sent[text] for text in sent.keys() - rows.keys()]
    assert all(not request.get("tools") for request in left_out), "summaries and titles alone"
    is_compacted = scenario == "compacted"
    assert (sum(each.get(SUMMARIES, 0) for each in notes) > 0) == is_compacted
    assert sum(each.get(WRITTEN, 0) for each in notes) == (is_gemini and is_compacted)
    agents = {step.agent for _, made in found for step in made.steps}
    assert len(agents) == 1 + (scenario == "sub_agents")
    check_tokens(found, sent, plain, smollm2_dir)
