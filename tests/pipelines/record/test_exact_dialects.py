"""Conversations with tools continue token by token, whatever a harness sends back of an answer."""

import asyncio
import json

import pytest

from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import recording, rows
from tests.helpers.token_engine import DERENDER, TokenEngine

SCRIPT = (
    '<think>Two calls.</think>I will.<tool_call>{"name":"ls", "arguments":{"n":1.0,  "p":"/a"}}'
    '</tool_call><tool_call>{"name":"ls","arguments":{"p":"/b"}}</tool_call>',
    '<think>One more.</think>\n<tool_call>{"name": "ls", "arguments": {"n": [1,  2]}}</tool_call>',
    "<think>Done.</think>It is there. \n",
    "Bye.",
)
SCHEMA = {"type": "object", "properties": {}}


class Chat:
    """What a harness of each API keeps of answers: no thoughts, and arguments in its own spelling."""

    path = "v1/chat/completions"

    def __init__(self):
        self.turns = [{"role": "user", "content": "Look."}]

    def body(self, stream):
        function = {"name": "ls", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        return {"model": "fake", "messages": self.turns, "tools": tools, "stream": stream}

    def path_of(self, stream):  # noqa: ARG002
        return self.path

    def whole(self, text, stream):
        """The message of an answer."""
        if not stream:
            return json.loads(text)["choices"][0]["message"]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        content = "".join(delta.get("content") or "" for delta in deltas)
        return {"content": content, "tool_calls": calls}

    def take(self, text, stream):
        """Keep an answer with the results of its calls; how many it has."""
        message = self.whole(text, stream)
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": call["function"]
                | {"arguments": rewritten(json.loads(call["function"]["arguments"]))},
            }
            for call in message.get("tool_calls") or ()
        ]
        content = (message.get("content") or "").strip() or None
        self.turns.append(
            {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        )
        for call in calls:
            self.turns.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
        if not calls:
            self.turns.append({"role": "user", "content": "Thanks."})
        return len(calls)


class Messages(Chat):
    path = "v1/messages"

    def body(self, stream):
        tools = [{"name": "ls", "input_schema": SCHEMA}]
        asked = {"model": "fake", "messages": self.turns, "tools": tools, "stream": stream}
        return asked | {"max_tokens": 64}

    def whole(self, text, stream):
        if not stream:
            return json.loads(text)["content"]
        blocks = {}
        for line in text.splitlines():
            made = json.loads(line[6:]) if line.startswith("data: ") else {}
            if made.get("type") == "content_block_start":
                blocks[made["index"]] = made["content_block"] | {"json": ""}
            if made.get("type") == "content_block_delta":
                block, delta = blocks[made["index"]], made["delta"]
                block["text"] = block.get("text", "") + delta.get("text", "")
                block["json"] += delta.get("partial_json", "")
        for block in blocks.values():
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        return list(blocks.values())

    def take(self, text, stream):
        blocks = [block for block in self.whole(text, stream) if block["type"] != "thinking"]
        said = [
            {"type": "text", "text": block["text"].strip()}
            for block in blocks
            if block["type"] == "text" and block["text"].strip()
        ]
        calls = [
            {"type": "tool_use", "id": b["id"], "name": b["name"], "input": sorted_of(b["input"])}
            for b in blocks
            if b["type"] == "tool_use"
        ]
        self.turns.append({"role": "assistant", "content": said + calls})
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "seen"} for call in calls
        ]
        self.turns.append({"role": "user", "content": results or "Thanks."})
        return len(calls)


class Responses(Chat):
    path = "v1/responses"

    def body(self, stream):
        tools = [{"type": "function", "name": "ls", "parameters": SCHEMA}]
        return {"model": "fake", "input": self.turns, "tools": tools, "stream": stream}

    def take(self, text, stream):
        lines = [line for line in text.splitlines() if line.startswith("data: ")]
        made = json.loads(lines[-1][6:])["response"] if stream else json.loads(text)
        items = [item for item in made["output"] if item["type"] != "reasoning"]
        calls = [item for item in items if item["type"] == "function_call"]
        for call in calls:
            call["arguments"] = rewritten(json.loads(call["arguments"]))
        self.turns += items
        self.turns += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
            for call in calls
        ]
        if not calls:
            self.turns.append({"role": "user", "content": "Thanks."})
        return len(calls)


class Gemini(Chat):
    def __init__(self):
        self.turns = [{"role": "user", "parts": [{"text": "Look."}]}]

    def path_of(self, stream):
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"v1beta/models/fake:{method}"

    def body(self, stream):  # noqa: ARG002
        tools = [{"functionDeclarations": [{"name": "ls", "parametersJsonSchema": SCHEMA}]}]
        return {"contents": self.turns, "tools": tools}

    def take(self, text, stream):
        if stream:
            answers = [json.loads(t[6:]) for t in text.splitlines() if t.startswith("data: ")]
        else:
            answers = [json.loads(text)]
        parts = [p for answer in answers for p in answer["candidates"][0]["content"]["parts"]]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        for call in calls:
            call["args"] = sorted_of(call["args"])
        self.turns.append({"role": "model", "parts": [p for p in parts if p != {"text": ""}]})
        results = [
            {"functionResponse": {"id": c["id"], "name": "ls", "response": {"output": "seen"}}}
            for c in calls
        ]
        self.turns.append({"role": "user", "parts": results or [{"text": "Thanks."}]})
        return len(calls)


def sorted_of(arguments):
    """Arguments as another JSON library may give them: sorted, and 1.0 as 1."""
    plain = {n: int(v) if isinstance(v, float) else v for n, v in arguments.items()}
    return dict(sorted(plain.items(), reverse=True))


def rewritten(arguments):
    return json.dumps(sorted_of(arguments), indent=1)


def conversation(out, tokenizer, model, harness, *, stream, parses=True, exact=True):
    """Four turns; the engine, how many calls each answer had, and what the metrics say."""
    app = TokenEngine(tokenizer, SCRIPT, parses=parses)

    async def main(url):
        given = {"exact_prefix": str(model)} if exact else {}
        async with recording(out, url, **given) as client:
            found = []
            for _ in SCRIPT:
                path = f"/s/a/0/{harness.path_of(stream)}"
                answer = await client.post(path, json=harness.body(stream))
                assert answer.status_code == 200, answer.text
                found.append(harness.take(answer.text, stream))
            metrics = (await client.get("/metrics")).text
            await client.post("/s/a/0/end", json={"reward": 1.0})
            return found, metrics

    with running(app) as url:
        return app, *asyncio.run(main(url))


def num_breaks(found):
    """Steps whose prompt does not begin with the tokens of the step before."""
    ends = [row["prompt_token_ids"] + row["response_ids"] for row in found]
    starts = [row["prompt_token_ids"] for row in found]
    return sum(start[: len(end)] != end for start, end in zip(starts[1:], ends[:-1], strict=True))


COLUMNS = ("prompt_token_ids", "response_ids", "rollout_logprobs", "response_text", "token_source")
COLUMNS += ("stop_reason",)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", [Chat, Messages, Responses, Gemini])
def test_what_harnesses_rewrite_and_leave_out_does_not_change_a_token(
    tmp_path, tokenizer, smollm2_dir, harness, stream
):
    app, calls, _ = conversation(tmp_path / "ds", tokenizer, smollm2_dir, harness(), stream=stream)
    assert calls == [2, 1, 0, 0]
    found = rows(tmp_path / "ds", *COLUMNS)
    assert num_breaks(found) == 0
    for row, text in zip(found, SCRIPT, strict=True):
        assert tokenizer.decode(row["response_ids"][:-1]) == text
        assert row["response_ids"][-1] == tokenizer.eos_token_id
        assert row["rollout_logprobs"] == [-0.5] * len(row["response_ids"])
        assert row["token_source"] == "engine"
    assert [row["stop_reason"] for row in found] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert "Two calls." in found[0]["response_text"]
    assert "/b" in found[0]["response_text"]
    assert "One more." in found[1]["response_text"]
    assert app.paths.count("/v1/completions") == app.paths.count(DERENDER) - 1 == 3


def test_without_exact_prefixes_what_was_rewritten_is_recorded_as_drift(
    tmp_path, tokenizer, smollm2_dir
):
    out = tmp_path / "ds"
    conversation(out, tokenizer, smollm2_dir, Messages(), stream=False, exact=False)
    assert num_breaks(rows(out, *COLUMNS)) == 3


def test_an_engine_without_a_parser_of_ids_gets_the_chat_and_the_metrics_say_why(
    tmp_path, tokenizer, smollm2_dir
):
    app, _, metrics = conversation(
        tmp_path / "ds", tokenizer, smollm2_dir, Messages(), stream=False, parses=False
    )
    assert app.paths == ["/v1/chat/completions", DERENDER, *["/v1/chat/completions"] * 3]
    assert 'rollouts_record_exact_prefix_total{sent="field"} 3.0' in metrics
