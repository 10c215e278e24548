"""The embedded engine as an OpenAI-compatible server, by the real `openai` client."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.generation.engines.base import Sampling
from pipelines.generation.engines.completions import read_sampled
from pipelines.harness.engine_api import EngineApp, read_request
from pipelines.record.serving import answering_at
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import ASK, chatty_model
from tests.helpers.harness_helpers import Scripted
from tests.helpers.recorder_helpers import asked_raw, chunks_of, request_of
from trainer.engine.embedded import TransformersEngine

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
EXACT = {"return_token_ids": True, "logprobs": True}


@pytest.fixture(scope="module")
def engine(tokenizer):
    return TransformersEngine(chatty_model(), tokenizer, policy_version=7)


@asynccontextmanager
async def served(engine, tokenizer):
    app = EngineApp(engine, tokenizer, "smollm2")
    async with answering_at(app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        client.root = url
        yield client


def answered(engine, tokenizer, use):
    """What a function of an `openai` client gives."""

    async def main():
        async with (
            served(engine, tokenizer) as client,
            openai.AsyncOpenAI(base_url=f"{client.root}/v1", api_key="none", max_retries=0) as api,
        ):
            return await use(api, client)

    return asyncio.run(main())


def test_an_answer_is_what_the_engine_samples_with_its_exact_tokens(engine, tokenizer):
    body = {"messages": ASK, "max_tokens": 8, "seed": 3, "temperature": 0.7, **EXACT}

    async def use(_, client):
        sampling = Sampling(max_tokens=8, seed=3, temperature=0.7)
        return await client.post("/v1/chat/completions", json=body), await engine.chat(
            ASK, sampling
        )

    answer, direct = answered(engine, tokenizer, use)
    assert answer.headers["x-rollouts-policy-version"] == "7"
    found = read_sampled(answer.content, "answer", policy_version=7)
    assert found.response_ids == direct.response_ids
    assert found.prompt_token_ids == direct.prompt_token_ids
    assert np.allclose(found.rollout_logprobs, direct.rollout_logprobs)
    assert (found.text, found.stop_reason) == (direct.text, direct.stop_reason)


def test_a_stream_joins_to_the_whole_answer_and_counts_its_tokens(engine, tokenizer):
    body = {"messages": ASK, "max_tokens": 8, "seed": 3, "n": 2, **EXACT}

    async def use(api, client):
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        parts = chunks_of((await client.post("/v1/chat/completions", json=body | streamed)).text)
        texts = {0: "", 1: ""}
        asked = {"model": "any", "messages": ASK, "max_tokens": 8, "seed": 3, "n": 2}
        async for part in await api.chat.completions.create(**asked, stream=True):
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
        return whole, parts, texts

    whole, parts, texts = answered(engine, tokenizer, use)
    assert parts[-1] == "[DONE]"
    assert parts[-2]["usage"] == whole["usage"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        own = [c for p in parts[:-2] for c in p["choices"] if c["index"] == choice["index"]]
        assert own[0]["token_ids"] == choice["token_ids"]
        assert own[0]["logprobs"] == choice["logprobs"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert texts[choice["index"]] == choice["message"]["content"]
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]


def test_a_tool_is_called_and_its_result_answered(tokenizer):
    text = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'

    async def use(api, _):
        asked = {"model": "any", "messages": ASK, "tools": [TOOL], "tool_choice": "auto"}
        answer = await api.chat.completions.create(**asked)
        message = answer.choices[0].message
        again = [*ASK, message.model_dump(exclude_none=True)]
        again.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"})
        async with api.chat.completions.stream(**asked | {"messages": again}) as stream:
            final = await stream.get_final_completion()
        return answer, final

    engine = Scripted(tokenizer, text)
    for answer in answered(engine, tokenizer, use):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        called = choice.message.tool_calls[0].function
        assert (called.name, json.loads(called.arguments)) == ("add", {"a": 2})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
    ],
)
def test_an_effort_is_a_variable_of_the_chat_template(
    fields, expected, engine, tokenizer, monkeypatch
):
    found, chat = [], engine.chat

    async def spied(*given, **settings):
        found.append(settings["chat_template_kwargs"])
        return await chat(*given, **settings)

    async def use(_, client):
        body = {"messages": ASK, "max_tokens": 2} | fields
        return (await client.post("/v1/chat/completions", json=body)).status_code

    monkeypatch.setattr(engine, "chat", spied)
    assert answered(engine, tokenizer, use) == 200
    assert found == [expected]


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_after_it(tokenizer):
    engine = Scripted(tokenizer, "one END")

    async def use(api, _):
        asked = {"model": "any", "messages": ASK, "stop": "END"}
        kept = {"extra_body": {"include_stop_str_in_output": True}}
        return [await api.chat.completions.create(**asked, **more) for more in ({}, kept)]

    cut, kept = answered(engine, tokenizer, use)
    assert [a.choices[0].message.content for a in (cut, kept)] == ["one ", "one END"]
    assert [sampling.stop for _, sampling in engine.asked] == [("END",)] * 2


def test_a_text_is_continued_as_text_or_ids(tokenizer):
    engine = Scripted(tokenizer, " two")

    async def use(api, _):
        asked = {"model": "any", "max_tokens": 3}
        (ids,) = tokenizer.encode(["one"], ["text"])
        return [await api.completions.create(**asked, prompt=p) for p in ("one", ids)], ids

    answers, ids = answered(engine, tokenizer, use)
    assert [answer.choices[0].text for answer in answers] == [" two"] * 2
    assert [asked for asked, _ in engine.asked] == [ids] * 2


@pytest.mark.parametrize(
    ("fields", "status", "got"),
    [
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"top_logprobs": 5}, 400, "top_logprobs"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"seed": 2**70}, 400, "seed"),
        ({"n": 1000}, 400, "128"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "context_length"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(fields, status, got, engine, tokenizer):
    async def use(_, client):
        return await client.post("/v1/chat/completions", json={"messages": ASK} | fields)

    answer = answered(engine, tokenizer, use)
    assert (answer.status_code, got in answer.json()["error"]["message"]) == (status, True)


def test_what_changes_nothing_is_taken():
    neutral = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "presence_penalty": 0,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "top_k": -1,
        "tool_choice": "auto",
        "logit_bias": None,
        "frequency_penalty": 0.0,
        "min_p": 0,
    }
    request, sampling = read_request(json.dumps({"messages": ASK} | neutral).encode(), "body")
    assert request.messages == ASK
    assert sampling == Sampling()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(["messages", "tools", "n", "stop", "seed", "stream_options", "tool_choice"])


@given(st.dictionaries(NAMES | st.text(max_size=5), VALUES))
def test_any_body_is_read_or_refused(fields):
    for body in (json.dumps(fields).encode(), repr(fields).encode("utf-8", "replace")):
        with suppress(RolloutError):
            read_request(body, "body")


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "/v1/models", "OWN", 200),
        ("GET", "/v1/models", "evil.example", 421),
        ("POST", "/v1/chat/completions", "evil.example", 421),
        ("GET", "/v1/chat/completions", "OWN", 405),
        ("POST", "/v1/embeddings", "OWN", 404),
    ],
)
def test_the_server_is_guarded_like_the_recorder(method, path, host, status, engine, tokenizer):
    async def use(_, client):
        own = client.root.removeprefix("http://")
        request = request_of(method, path, [("Host", host.replace("OWN", own))], b"{}")
        return await asked_raw(client.root, request)

    assert int(answered(engine, tokenizer, use).split()[1]) == status


def test_a_client_that_leaves_ends_its_call(tokenizer):
    left = []

    class Waiting(Scripted):
        async def sample(self, *_, **__):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                left.append(True)
                raise

    async def use(_, client):
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/v1/chat/completions", json={"messages": ASK}, timeout=0.3)
        for _ in range(200):
            if left:
                break
            await asyncio.sleep(0.02)

    answered(Waiting(tokenizer, ""), tokenizer, use)
    assert left == [True]
