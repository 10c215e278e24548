"""Real harnesses and the clients of three APIs, recorded with a real server.

The model is too small to call tools or to end its answers: frequent tokens end them, and what is shown
is the path.
"""

import asyncio
import json

import anthropic
import openai
import pytest
from google import genai
from google.genai import types

from rollout_io.cli.main import run
from tests.helpers.agent_guide import (
    HAS_AGENTS,
    check_recorded,
    check_same_weights,
    check_trained,
    follow_with,
)
from tests.helpers.recorder_helpers import recorder_process, recording, rows
from tests.pipelines.record.test_exact_dialects import (
    Chat,
    Gemini,
    Messages,
    Responses,
    num_breaks,
)
from tests.real_harnesses.__main__ import ASK
from tests.real_harnesses.harnesses import Endpoint, Home

pytestmark = pytest.mark.vllm

NAMES = ("smollm2", "claude-x", "gpt-x", "gemini-x", "m")
COLUMNS = ("trajectory_id", "prompt_token_ids", "response_ids", "rollout_logprobs", "token_source")
COLUMNS += ("response_text", "stop_reason", "messages", "temperature")
MOST_TOKENS = 256
SENDS_NO_SESSION = {"gemini_cli"}
ASKED = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def harness_server(start_vllm, brief_smollm2):
    """A real server whose context holds the prompts of harnesses, and whose answers are short."""
    arguments = ["--served-model-name", *NAMES, "--max-model-len", "8192"]
    arguments += ["--override-generation-config", json.dumps({"max_new_tokens": MOST_TOKENS})]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    arguments += ["--enable-scale-out"]
    with start_vllm(*arguments, model=brief_smollm2) as server:
        yield server


def check(found, tokenizer):
    """The ids, log-probabilities and text of each row agree, and its prompt has its messages."""
    for row in found:
        assert row["token_source"] == "engine"
        assert 0 < len(row["response_ids"]) == len(row["rollout_logprobs"]) <= MOST_TOKENS
        assert max(row["rollout_logprobs"]) <= 0
        ids = row["response_ids"][: -1 if row["stop_reason"] == "stop" else None]
        assert tokenizer.backend.decode(ids).strip() == row["response_text"].strip()
        prompt = tokenizer.backend.decode(row["prompt_token_ids"])
        for message in json.loads(row["messages"]):
            parts = message["content"]
            texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
            assert all(text in prompt for text in texts)


@pytest.mark.nightly
@HAS_AGENTS
@pytest.mark.parametrize("harness", ASK)
def test_a_real_harness_ends_and_each_call_is_a_row_of_one_session(
    harness, harness_server, tokenizer, tmp_path
):
    arguments = ("--upstream", harness_server.url, "--end-open", "--sampling-defaults", "neutral")
    with recorder_process(tmp_path / "ds", *arguments) as (_, url):
        named = "/s/task/0" if harness in SENDS_NO_SESSION else ""
        ASK[harness](Home(tmp_path / "home", Endpoint(url + named)), "Say hello.")
    assert run(["validate", str(tmp_path / "ds")]) == 0
    found = rows(tmp_path / "ds", *COLUMNS)
    check(found, tokenizer)
    assert len({row["trajectory_id"] for row in found}) == 1
    assert any("Say hello." in row["messages"] for row in found)


@pytest.mark.nightly
@HAS_AGENTS
def test_two_attempts_of_each_agent_of_the_guide_become_an_update(
    harness_server, brief_smollm2, tmp_path
):
    follow_with(harness_server.url, tmp_path, brief_smollm2, num_blocks=3)
    check_recorded(tmp_path)
    check_same_weights([check_trained(tmp_path)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", [Chat, Messages, Responses, Gemini])
def test_conversations_with_tools_continue_token_by_token(
    harness, stream, harness_server, small_smollm2, tmp_path
):
    async def main():
        given = {"exact_prefix": str(small_smollm2)}
        async with recording(tmp_path / "ds", harness_server.url, **given) as client:
            own = harness()
            for _ in range(3):
                path = own.path_of(stream).replace("fake", "smollm2")
                body = own.body(stream) | {"model": "smollm2"}
                answer = await client.post(f"/s/task/0/{path}", json=body)
                assert answer.status_code == 200, answer.text
                own.take(answer.text, stream)
            await client.post("/s/task/0/end", json={"reward": 1.0})
            return (await client.get("/metrics")).text

    metrics = asyncio.run(main())
    assert 'rollouts_record_exact_prefix_total{sent="tokens"} 2.0' in metrics
    found = rows(tmp_path / "ds", *COLUMNS)
    assert len(found) == 3
    assert num_breaks(found) == 0


def test_a_call_that_was_sampled_after_ids_is_parsed_by_the_server(
    harness_server, small_smollm2, tmp_path
):
    mark = r'<tool_call>\n\{"name": "ls", "arguments": \{"p":"[a-z]{3}"\}\}\n</tool_call>'

    async def main():
        given = {"exact_prefix": str(small_smollm2)}
        async with recording(tmp_path / "ds", harness_server.url, **given) as client:
            own = Chat()
            found = []
            for turn in range(3):
                forced = {"structured_outputs": {"regex": mark}} if turn else {}
                body = own.body(turn == 2) | {"model": "smollm2", "max_tokens": 64} | forced
                answer = await client.post("/s/task/0/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                found.append(own.take(answer.text, turn == 2))
            await client.post("/s/task/0/end", json={"reward": 1.0})
            return found

    assert asyncio.run(main()) == [0, 1, 1]
    found = rows(tmp_path / "ds", *COLUMNS)
    assert num_breaks(found) == 0
    assert [row["stop_reason"] for row in found] == ["stop", "tool_calls", "tool_calls"]


async def with_openai(root, stream):
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="none") as api:
        asked = {"model": "smollm2", "input": ASKED}
        if not stream:
            return (await api.responses.create(**asked)).output_text
        events = [event async for event in await api.responses.create(**asked, stream=True)]
        assert events[-1].response.usage.output_tokens > 0
        return "".join(e.delta for e in events if e.type == "response.output_text.delta")


async def with_anthropic(root, stream):
    async with anthropic.AsyncAnthropic(base_url=root, api_key="none") as api:
        asked = {"model": "smollm2", "messages": ASKED, "max_tokens": 32}
        counted = await api.messages.count_tokens(model="smollm2", messages=ASKED)
        if stream:
            async with api.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await api.messages.create(**asked)
        assert message.usage.input_tokens == counted.input_tokens
        assert message.stop_reason in {"end_turn", "max_tokens"}
        return message.content[0].text


async def with_google(root, stream):
    options = types.HttpOptions(base_url=root)
    async with genai.Client(api_key="none", http_options=options).aio as api:
        asked = {"model": "smollm2", "contents": "Say hello."}
        counted = await api.models.count_tokens(**asked)
        if stream:
            answers = [a async for a in await api.models.generate_content_stream(**asked)]
        else:
            answers = [await api.models.generate_content(**asked)]
        assert answers[-1].usage_metadata.prompt_token_count == counted.total_tokens
        assert answers[-1].candidates[0].finish_reason in {"STOP", "MAX_TOKENS"}
        return "".join(answer.text or "" for answer in answers)


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("use", [with_openai, with_anthropic, with_google])
def test_what_a_client_gets_of_a_real_server_is_the_row(
    use, stream, harness_server, tokenizer, tmp_path
):
    async def main():
        async with recording(tmp_path / "ds", harness_server.url) as client:
            text = await use(f"{client.root}/s/task/0", stream)
            await client.post("/s/task/0/end", json={"reward": 1.0})
            return text

    text = asyncio.run(main())
    (row,) = found = rows(tmp_path / "ds", *COLUMNS)
    check(found, tokenizer)
    assert row["response_text"].strip() == text.strip()
    assert json.loads(row["messages"]) == ASKED
