import asyncio
import re
import time
import urllib.request

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.generation import Sampling
from pipelines.generation.engines.http_pool import Limits
from pipelines.generation.engines.vllm import VllmEngine
from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import forests_of, make_batch
from trainer.models.policy import load_policy

pytestmark = pytest.mark.vllm

QUESTIONS = [f"What is {a} + {b}? Explain it to a child." for a in range(2, 8) for b in range(3, 8)]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SHOWN = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def policy(smollm2_dir):
    return load_policy(str(smollm2_dir), logprob_chunk_tokens=256)


def user(text):
    return {"role": "user", "content": text}


def prompt_ids(tokenizer, questions):
    texts = [tokenizer.render([user(q)], generation_prompt=True) for q in questions]
    return tokenizer.encode(texts, questions)


def with_engine(server, use, **settings):
    async def run():
        async with VllmEngine(server.url, **settings) as engine:
            return await use(engine)

    return asyncio.run(run())


def sample_all(server, prompts, sampling):
    async def use(engine):
        calls = [engine.sample(p, sampling, session=str(i)) for i, p in enumerate(prompts)]
        return engine.logprobs_mode, await asyncio.gather(*calls)

    return with_engine(server, use)


def differences(policy, sampled, temperature=1.0):
    """The policy's log-probabilities minus the engine's, of all sampled tokens."""
    rows = [(s.prompt_token_ids, s.response_ids, [True] * len(s.response_ids)) for s in sampled]
    batch = make_batch(rows, temperatures=[temperature] * len(rows))
    ours = np.zeros(len(batch.trains), np.float32)
    with torch.no_grad():
        for forest in forests_of(batch, 1024):
            slots = forest.target_slot
            ours[slots.numpy()] = policy(forest, batch.temperature[slots])[0].numpy()
    return ours - np.concatenate([s.rollout_logprobs for s in sampled])


def assert_says_what_the_policy_says(found):
    assert len(found) > 200
    assert np.abs(found).max() < 1e-3


def test_tokens_go_in_and_come_out_exactly(vllm_server, tokenizer):
    prompts = prompt_ids(tokenizer, QUESTIONS[:4])
    _, sampled = sample_all(vllm_server, prompts, Sampling(max_tokens=7))
    assert [s.prompt_token_ids for s in sampled] == prompts
    for s in sampled:
        assert len(s.response_ids) == len(s.rollout_logprobs) == 7
        assert s.stop_reason == "length"
        assert tokenizer.decode(s.response_ids).startswith(s.text[:5])


def test_random_tokens_with_fragments_of_characters_are_read(vllm_server, tokenizer):
    prompts = prompt_ids(tokenizer, QUESTIONS[:4])
    fragments = [i for i in range(len(tokenizer.backend)) if "\ufffd" in tokenizer.decode([i])]
    sampling = Sampling(
        max_tokens=20, temperature=2.0, extra={"allowed_token_ids": fragments[:100]}
    )
    _, sampled = sample_all(vllm_server, prompts, sampling)
    assert all(len(s.response_ids) == len(s.rollout_logprobs) for s in sampled)
    assert {token for s in sampled for token in s.response_ids} <= {*fragments[:100]}


def test_log_probabilities_are_the_policys(vllm_server, tokenizer, policy):
    prompts = prompt_ids(tokenizer, QUESTIONS[:10])
    mode, sampled = sample_all(vllm_server, prompts, Sampling(max_tokens=40))
    assert mode == "raw"
    assert_says_what_the_policy_says(differences(policy, sampled))


@pytest.mark.nightly  # in software on most CPUs, and ten times slower
def test_an_engine_in_bfloat16_says_nearly_what_the_policy_says(start_vllm, tokenizer, policy):
    with start_vllm("--dtype", "bfloat16") as server:
        _, sampled = sample_all(server, prompt_ids(tokenizer, QUESTIONS), Sampling(max_tokens=50))
    found = differences(policy, sampled)
    assert len(found) > 1000
    assert 0.001 < np.abs(found).mean() < 0.05
    # The samples are random: -0.002 (their KL) with a spread of 0.002.
    assert abs(found.mean()) < 0.01


def test_raw_ones_at_another_temperature_are_those_of_temperature_1(vllm_server, tokenizer, policy):
    prompts = prompt_ids(tokenizer, QUESTIONS[:4])
    _, sampled = sample_all(vllm_server, prompts, Sampling(max_tokens=30, temperature=0.7))
    assert np.abs(differences(policy, sampled)).max() < 1e-3
    assert np.abs(differences(policy, sampled, 0.7)).mean() > 0.05


def test_chat_sees_the_templates_ids_and_answers(vllm_server, tokenizer):
    async def use(engine):
        greedy = Sampling(temperature=0, max_tokens=20)
        return await engine.chat([user("What is the capital of France?")], greedy)

    sampled = with_engine(vllm_server, use)
    (expected,) = prompt_ids(tokenizer, ["What is the capital of France?"])
    assert sampled.prompt_token_ids == expected
    text = tokenizer.decode(sampled.response_ids)
    assert sampled.message == {"role": "assistant", "content": text.removesuffix("<|im_end|>")}
    assert sampled.stop_reason == ("stop" if text.endswith("<|im_end|>") else "length")


def test_tool_calls_come_parsed_and_as_tokens(vllm_server, tokenizer):
    system = {"role": "system", "content": f"You call get_weather by answering {SHOWN}"}
    shown = [user("Weather in Rome?"), {"role": "assistant", "content": SHOWN}]

    async def use(engine):
        greedy = Sampling(temperature=0, max_tokens=40)
        messages = [system, *shown, user("Weather in Oslo?")]
        return await engine.chat(messages, greedy, tools=[TOOL])

    sampled = with_engine(vllm_server, use)
    (call,) = sampled.message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert sampled.stop_reason == "tool_calls"
    assert "<tool_call>" in tokenizer.decode(sampled.response_ids)


def test_a_stop_string_ends_the_text_and_its_token_ends_the_ids(vllm_server, tokenizer):
    (prompt,) = prompt_ids(tokenizer, ["What is the capital of France?"])
    _, (whole,) = sample_all(vllm_server, [prompt], Sampling(temperature=0, max_tokens=20))
    stop = whole.text[5:12]  # what a model says first may depend on the kernels of the machine
    sampling = Sampling(temperature=0, max_tokens=20, stop=(stop, "never met"))
    _, (sampled,) = sample_all(vllm_server, [prompt], sampling)
    num_tokens = len(sampled.response_ids)
    assert sampled.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert sampled.response_ids == whole.response_ids[:num_tokens]
    assert stop in tokenizer.decode(sampled.response_ids)
    assert stop not in tokenizer.decode(sampled.response_ids[:-1])
    assert sampled.stop_reason == "stop"


def test_a_response_ends_where_the_context_does(vllm_server):
    _, (sampled,) = sample_all(vllm_server, [[5] * 2045], Sampling(max_tokens=20))
    assert (len(sampled.response_ids), sampled.stop_reason) == (3, "length")
    for size in (2048, 2049, 5000):
        with pytest.raises(RolloutError) as error:
            sample_all(vllm_server, [[5] * size], Sampling(max_tokens=20))
        assert error.value.rule == "context_length"


def test_many_calls_at_once_are_each_answered_with_their_own(vllm_server, tokenizer):
    prompts = prompt_ids(tokenizer, QUESTIONS)
    _, sampled = sample_all(vllm_server, prompts, Sampling(max_tokens=3))
    assert [s.prompt_token_ids for s in sampled] == prompts


def gauge(server, name):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return float(re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])


def num_running(server):
    return gauge(server, "num_requests_running")


def until(holds, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cancelled_call_is_aborted_in_the_engine(vllm_server):
    async def use(engine):
        endless = Sampling(max_tokens=1900, extra={"ignore_eos": True})
        before = gauge(vllm_server, "generation_tokens_total")
        call = asyncio.create_task(engine.sample([1, 2, 3], endless))
        await asyncio.to_thread(until, lambda: num_running(vllm_server) == 1)
        call.cancel()
        await asyncio.to_thread(until, lambda: num_running(vllm_server) == 0)
        assert gauge(vllm_server, "generation_tokens_total") - before < 1900

    with_engine(vllm_server, use)


def test_a_call_that_the_engine_aborts_is_sampled_again_whole(vllm_server):
    async def use(engine):
        long = Sampling(max_tokens=150, extra={"ignore_eos": True})
        call = asyncio.create_task(engine.sample([1, 2, 3], long))
        await asyncio.to_thread(until, lambda: num_running(vllm_server) == 1)
        await engine.servers.call_each("/abort_requests", {})
        await asyncio.to_thread(until, lambda: num_running(vllm_server) == 0)
        return await call

    sampled = with_engine(vllm_server, use)
    assert (len(sampled.response_ids), sampled.stop_reason) == (150, "length")


def test_new_weights_speak_at_once(vllm_server, tokenizer, policy, smollm2_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight *= 0.7
        model.model.layers[20].mlp.down_proj.weight *= 0.3
        model.lm_head.weight *= 1 + 0.1 * torch.randn_like(model.lm_head.weight)  # tied
    model.save_pretrained(tmp_path)
    changed = load_policy(str(tmp_path), logprob_chunk_tokens=256)
    prompts = prompt_ids(tokenizer, QUESTIONS[:10])

    async def use(engine):
        before = await engine.sample(prompts[0], Sampling(max_tokens=2))
        await engine.load_weights(str(tmp_path), policy_version=1)
        calls = [engine.sample(p, Sampling(max_tokens=40)) for p in prompts]
        sampled = await asyncio.gather(*calls)
        await engine.load_weights(str(smollm2_dir), policy_version=2)
        return before, sampled

    before, sampled = with_engine(vllm_server, use)
    assert before.policy_version == 0
    assert {s.policy_version for s in sampled} == {1}
    found = differences(changed, sampled)
    assert_says_what_the_policy_says(found)
    assert np.abs(differences(policy, sampled)).mean() > 0.05


def test_processed_ones_are_the_policys_at_any_temperature(
    template_server, tokenizer, small_smollm2
):
    policy = load_policy(str(small_smollm2), logprob_chunk_tokens=256)
    prompts = prompt_ids(tokenizer, QUESTIONS[:10])
    sampling = Sampling(max_tokens=40, temperature=0.7)
    mode, sampled = sample_all(template_server, prompts, sampling)
    assert mode == "processed"
    assert_says_what_the_policy_says(differences(policy, sampled, 0.7))


@pytest.mark.nightly  # tests/vllm/test_rl.py kills a server on every change
def test_a_kill_loses_no_call(mortal_server, tokenizer):
    prompts = prompt_ids(tokenizer, QUESTIONS)

    async def use(engine):
        long = Sampling(max_tokens=100, extra={"ignore_eos": True})
        calls = asyncio.gather(*(engine.sample(p, long) for p in prompts[:8]))
        await asyncio.to_thread(until, lambda: num_running(mortal_server) > 0)
        await asyncio.to_thread(mortal_server.stop, kill=True)
        await asyncio.to_thread(mortal_server.start)
        return await calls

    limits = Limits(max_attempts=100, max_backoff_s=2)
    again = with_engine(mortal_server, use, limits=limits)
    assert [s.prompt_token_ids for s in again] == prompts[:8]
    assert [len(s.response_ids) for s in again] == [100] * 8
