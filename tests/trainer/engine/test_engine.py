import asyncio
import inspect
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from pipelines.generation import Sampling
from pipelines.generation.config import GenerateConfig
from rollout_io.retokenize.chat_template import KEEPS_ALL
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import MissingExtra, RolloutError
from tests.helpers.architectures import tiny_model
from tests.helpers.chat_helpers import CONVERSATIONS, prompt_ids
from tests.helpers.trainer_helpers import VOCAB, plain_logprobs, tiny_llama
from trainer.engine import open_engine
from trainer.engine.batching import Request, continue_batch, sample_tokens, sampled_distribution
from trainer.engine.embedded import TransformersEngine, assistant_message

P = torch.tensor([0.5, 0.3, 0.2])
PROMPTS = [[5, 9, 3], [7], [2, 2, 8, 11, 30, 4, 4], [17, 40, 21, 3, 9]]


def settings_of_a_row():
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0, 0.5, 1, 1.5]),
        top_k=st.sampled_from([None, 1, 3, 40]),
        top_p=st.sampled_from([1, 0.3, 0.9]),
        min_p=st.sampled_from([0, 0.2]),
    )


def test_vllm_in_this_process_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = GenerateConfig(tasks="t", model="m", out="o", engine="vllm", environment="gsm8k")
    with pytest.raises(MissingExtra) as error:
        open_engine(config)
    assert error.value.rule == "extra_installed"
    assert error.value.hint == 'pip install "rollout-io[vllm]"'


@pytest.fixture
def engine(tokenizer):
    return TransformersEngine(tiny_llama(vocab_size=49152), tokenizer, policy_version=3)


@pytest.fixture(scope="module")
def real_engine(smollm2_dir):
    return TransformersEngine.load(str(smollm2_dir))


def sample_all(engine, prompts, samplings):
    async def run():
        async with engine:
            calls = [engine.sample(p, s) for p, s in zip(prompts, samplings, strict=True)]
            return await asyncio.gather(*calls)

    return asyncio.run(run())


def differences(engine, sampled, temperatures):
    rows = [(s.prompt_token_ids, s.response_ids, [True]) for s in sampled]
    with torch.no_grad():
        expected = plain_logprobs(engine.model, rows, temperatures)
    got = torch.tensor([x for s in sampled for x in s.rollout_logprobs])
    return (got - expected).abs().max()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(top_k=2), [0.625, 0.375, 0.0]),
        (Sampling(top_p=0.49), [1.0, 0.0, 0.0]),
        (Sampling(top_p=0.51), [0.625, 0.375, 0.0]),
        (Sampling(min_p=0.5), [0.625, 0.375, 0.0]),
        (Sampling(temperature=0.5), [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        (Sampling(top_k=9), [0.5, 0.3, 0.2]),
        (Sampling(min_p=0.5, top_p=0.62), [1.0, 0.0, 0.0]),
    ],
)
def test_the_distribution_that_is_sampled(sampling, expected):
    got = sampled_distribution(P.log()[None], [sampling]).exp()
    torch.testing.assert_close(got, torch.tensor([expected]))


@given(st.lists(settings_of_a_row(), min_size=1, max_size=5), st.integers(0, 99))
def test_a_rows_token_and_logprob_do_not_depend_on_its_batch(settings, seed):
    logits = 3 * torch.randn(len(settings), 11, generator=torch.Generator().manual_seed(seed))

    def generators():
        return [torch.Generator().manual_seed(seed + n) for n in range(len(settings))]

    together = sample_tokens(logits, settings, generators())
    alone = [
        sample_tokens(logits[n, None], [one], [generator])
        for n, (one, generator) in enumerate(zip(settings, generators(), strict=True))
    ]
    assert together[0] == [tokens[0] for tokens, *_ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs, _ in alone], abs=1e-6)
    kept = sampled_distribution(logits, settings)
    assert kept[torch.arange(len(settings)), together[0]].isfinite().all()


def test_tokens_are_drawn_as_often_as_their_probability_says():
    sampling, generator = Sampling(temperature=0.5), torch.Generator().manual_seed(0)
    rows, settings, generators = P.log().expand(4000, -1), [sampling] * 4000, [generator] * 4000
    drawn, _, _ = sample_tokens(rows, settings, generators)
    got = torch.bincount(torch.tensor(drawn), minlength=3) / 4000
    expected = sampled_distribution(P.log()[None], [sampling])[0].exp()
    assert (got - expected).abs().max() < 0.03


def test_temperature_0_takes_the_most_likely_token():
    (token,), (logprob,), _ = sample_tokens(
        P.log()[None], [Sampling(temperature=0)], [torch.Generator()]
    )
    assert token == 0
    assert logprob == pytest.approx(-0.6931, abs=1e-4)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(RuntimeError, match="logits are not finite"):
        sample_tokens(torch.full((1, 3), torch.nan), [Sampling()], [torch.Generator()])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 1},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(RolloutError) as error:
        Sampling(**wrong)
    assert error.value.where == next(iter(wrong))


def test_log_probabilities_are_those_of_a_plain_forward_at_any_temperature(engine):
    temperatures = [1.0, 0.7, 1.3, 0.5]
    samplings = [Sampling(temperature=t, max_tokens=5 + i) for i, t in enumerate(temperatures)]
    sampled = sample_all(engine, PROMPTS, samplings)
    assert [s.prompt_token_ids for s in sampled] == PROMPTS
    assert [len(s.response_ids) for s in sampled] == [5, 6, 7, 8]
    assert {s.stop_reason for s in sampled} == {"length"}
    assert {s.policy_version for s in sampled} == {3}
    assert differences(engine, sampled, temperatures) < 2e-5


def test_truncated_sampling_gives_the_probabilities_among_what_was_kept(engine):
    (sampled,) = sample_all(engine, PROMPTS[:1], [Sampling(top_k=2, max_tokens=6)])
    rows = [(sampled.prompt_token_ids, sampled.response_ids, [True])]
    raw = plain_logprobs(engine.model, rows)
    got = torch.tensor(sampled.rollout_logprobs)
    assert (got > raw + 0.5).all()
    assert (got <= 0).all()


def test_a_call_with_a_seed_does_not_depend_on_its_batch(engine):
    sampling = Sampling(max_tokens=8, seed=11)
    (alone,) = sample_all(engine, PROMPTS[:1], [sampling])
    together = sample_all(engine, PROMPTS, [sampling, *[Sampling(max_tokens=3)] * 3])
    assert together[0].response_ids == alone.response_ids
    other = sample_all(engine, PROMPTS[:1], [replace(sampling, seed=12)])
    assert other[0].response_ids != alone.response_ids


def test_a_response_ends_with_the_end_of_sequence(engine):
    sampling = Sampling(max_tokens=8, seed=11)
    (free,) = sample_all(engine, PROMPTS[:1], [sampling])
    engine._ends = {free.response_ids[2]}
    (ended,) = sample_all(engine, PROMPTS[:1], [sampling])
    assert ended.response_ids == free.response_ids[:3]
    assert ended.stop_reason == "stop"


def test_a_response_ends_with_a_stop_string_across_tokens(engine, tokenizer):
    sampling = Sampling(max_tokens=8, seed=11)
    (free,) = sample_all(engine, PROMPTS[:1], [sampling])
    pieces = [tokenizer.decode([i]) for i in free.response_ids]
    stop = pieces[1][-1:] + pieces[2][:1]
    (ended,) = sample_all(engine, PROMPTS[:1], [replace(sampling, stop=(stop, "never met"))])
    assert ended.response_ids == free.response_ids[:3]
    assert ended.text.endswith(stop)
    assert ended.stop_reason == "stop"


def always(engine, ids):
    """Make the model emit the tokens in turn."""
    model = engine.model
    with torch.no_grad():
        embedding, head = torch.zeros(49152, 16), torch.zeros(49152, 16)
        for place, (before, after) in enumerate(pairwise([5, *ids])):
            embedding[before, place], head[after, place] = 1.0, 1000.0
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight.copy_(head)
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()


@pytest.mark.parametrize("stop", ["{}", "{}!", "x{}"])
def test_a_response_ends_with_a_stop_string_that_contains_a_special_token(tokenizer, stop):
    model = tiny_llama(vocab_size=49152, hidden_size=16, tie_word_embeddings=False)
    engine = TransformersEngine(model, tokenizer)
    special, (bang,), (letter,) = (
        6,
        tokenizer.encode(["!"], ["t"])[0],
        tokenizer.encode(["x"], ["t"])[0],
    )
    ids = [*range(200, 203), letter, special, bang, *range(203, 206)]
    always(engine, ids)
    name = tokenizer.special_tokens[special]
    sampling = Sampling(temperature=0, max_tokens=9, stop=(stop.format(name),))
    (ended,) = sample_all(engine, [[5]], [sampling])
    assert ended.stop_reason == "stop"
    assert ended.response_ids == ids[: 6 if "!" in stop else 5]
    assert ended.text.endswith(stop.format(name))
    (free,) = sample_all(engine, [[5]], [replace(sampling, stop=("never",))])
    assert name not in free.text
    engine._ends = {special}
    (eos,) = sample_all(engine, [[5]], [replace(sampling, stop=(name,))])
    assert name not in eos.text


@pytest.mark.slow
def test_a_model_with_a_nested_configuration_is_sampled_up_to_its_context(tokenizer):
    engine = TransformersEngine(tiny_model("gemma3"), tokenizer)
    engine._ends = set()
    assert engine.context_tokens == 64
    (sampled,) = sample_all(engine, [[5] * 60], [Sampling(max_tokens=9)])
    assert len(sampled.response_ids) == 4
    assert sampled.stop_reason == "length"
    with pytest.raises(RolloutError, match="fewer than 64"):
        sample_all(engine, [[5] * 64], [Sampling()])
    with pytest.raises(RolloutError, match=r"ids from 0 to \d+"):
        sample_all(engine, [[VOCAB + 500]], [Sampling()])


def test_more_calls_than_a_batch_holds_are_all_answered(engine):
    engine.max_batch_size = 3
    sampled = sample_all(engine, PROMPTS * 3, [Sampling(max_tokens=2)] * 12)
    assert [s.prompt_token_ids for s in sampled] == PROMPTS * 3


def test_a_cancelled_call_leaves_its_batch_and_the_others_go_on(engine):
    async def run():
        long = asyncio.create_task(engine.sample([5], Sampling(max_tokens=100)))
        short = asyncio.create_task(engine.sample([6], Sampling(max_tokens=4)))
        await short
        long.cancel()
        await engine.__aexit__()
        return long.cancelled(), (await engine.sample([7], Sampling(max_tokens=2))).response_ids

    cancelled, after = asyncio.run(run())
    assert cancelled
    assert len(after) == 2


def test_a_response_ends_where_the_context_does(engine):
    (sampled,) = sample_all(engine, [[1] * 125], [Sampling()])
    assert (len(sampled.response_ids), sampled.stop_reason) == (3, "length")
    with pytest.raises(RolloutError, match="128 tokens") as error:
        sample_all(engine, [[1] * 128], [Sampling()])
    assert error.value.rule == "context_length"


@pytest.mark.parametrize(
    ("prompt", "extra", "got"),
    [([], {}, "0 tokens"), ([49152], {}, "id 49152"), ([1], {"best_of": 2}, "best_of")],
)
def test_what_the_embedded_engine_cannot_do_is_refused(engine, prompt, extra, got):
    with pytest.raises(RolloutError, match=got) as error:
        sample_all(engine, [prompt], [Sampling(extra=extra)])
    assert error.value.rule == "engine_refused"


def test_new_weights_speak_and_are_named(engine, tmp_path):
    other = tiny_llama(seed=1, vocab_size=49152)
    other.save_pretrained(tmp_path)
    asyncio.run(engine.load_weights(str(tmp_path), policy_version=4))
    (sampled,) = sample_all(engine, PROMPTS[:1], [Sampling(max_tokens=6)])
    assert sampled.policy_version == 4
    engine.model = other
    assert differences(engine, [sampled], [1.0]) < 2e-5


async def test_all_tokens_of_a_call_under_way_are_of_the_weights_it_began_with(
    engine, tmp_path, monkeypatch
):
    tiny_llama(seed=1, vocab_size=49152).save_pretrained(tmp_path)
    old, begun, may_sample = tiny_llama(vocab_size=49152), threading.Event(), threading.Event()

    def held(*arguments, **settings):
        begun.set()
        assert may_sample.wait(30)
        return continue_batch(*arguments, **settings)

    monkeypatch.setattr("trainer.engine.embedded.continue_batch", held)
    async with engine:
        call = asyncio.create_task(engine.sample(PROMPTS[0], Sampling(max_tokens=9)))
        await asyncio.to_thread(begun.wait, 30)
        load = asyncio.create_task(engine.load_weights(str(tmp_path), policy_version=4))
        await asyncio.sleep(0)
        may_sample.set()
        sampled, _ = await call, await load
    assert (sampled.policy_version, engine.policy_version) == (3, 4)
    assert differences(engine, [sampled], [1.0]) > 2e-4
    engine.model = old
    assert differences(engine, [sampled], [1.0]) < 2e-5


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine, tmp_path):
    before = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    tiny_llama(seed=1, vocab_size=61).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match=r"shape \(61, 32\)"):
        asyncio.run(engine.load_weights(str(tmp_path), policy_version=4))
    assert engine.policy_version == 3
    torch.testing.assert_close(dict(engine.model.state_dict()), before)


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_answers_a_chat(real_engine):
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    async def run():
        async with real_engine as engine:
            return await engine.chat(messages, Sampling(temperature=0, max_tokens=20))

    sampled = asyncio.run(run())
    assert "Paris" in sampled.text
    assert sampled.message == {"role": "assistant", "content": sampled.text}
    assert sampled.stop_reason == "stop"
    assert real_engine.tokenizer.decode(sampled.response_ids).endswith("<|im_end|>")
    assert differences(real_engine, [sampled], [1.0]) < 1e-3


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_calls_a_tool(real_engine):
    shown = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    messages = [
        {"role": "system", "content": f"You call get_weather by answering {shown}"},
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": shown},
        {"role": "user", "content": "Weather in Oslo?"},
    ]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    greedy = Sampling(temperature=0, max_tokens=40)
    sampled = asyncio.run(real_engine.chat(messages, greedy, tools=[tool]))
    (call,) = sampled.message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert sampled.message["content"] is None
    assert sampled.stop_reason == "tool_calls"


@pytest.mark.slow
@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS.values(), ids=list(CONVERSATIONS))
def test_a_chat_is_rendered_as_vllm_renders_it(model, smollm2_dir, messages, tools):
    tokenizer = load_tokenizer(smollm2_dir, KEEPS_ALL)
    engine = TransformersEngine(model, tokenizer)
    sampling = Sampling(max_tokens=1)
    sampled = asyncio.run(engine.chat(messages, sampling, tools=tools))
    assert sampled.prompt_token_ids == prompt_ids(tokenizer, messages, tools)


def test_a_tool_call_whose_arguments_are_no_object_is_text():
    text = '<tool_call>{"name": "add", "arguments": [2]}</tool_call>'
    assert assistant_message(text) == {"role": "assistant", "content": text}


def test_tool_calls_in_text_become_a_message():
    text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    message = assistant_message(text)
    assert message["content"] == "Let me see."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize(
    "text", ["plain", "<tool_call>{no json}</tool_call>", '<tool_call>{"a": 1}</tool_call>']
)
def test_text_without_a_whole_tool_call_stays_text(text):
    assert assistant_message(text) == {"role": "assistant", "content": text}


def test_the_cache_is_passed_by_the_name_that_the_model_declares():
    installed = inspect.signature(LlamaForCausalLM.forward).parameters
    name = "cache" if "cache" in installed else "past_key_values"

    class Renamed(LlamaForCausalLM):
        """As in Transformers 5.24, which warns about `past_key_values`."""

        def forward(self, *, cache, **given):
            assert "past_key_values" not in given
            return super().forward(**{name: cache}, **given)

    class Earlier(LlamaForCausalLM):
        """As in the versions before."""

        def forward(self, *, past_key_values, **given):
            assert "cache" not in given
            return super().forward(**{name: past_key_values}, **given)

    responses = []
    for kind in (Renamed, Earlier):
        model = tiny_llama()
        model.__class__ = kind
        request = Request([1, 2], Sampling(), 3, torch.Generator().manual_seed(0), lambda: True)
        continue_batch(model, [request], ends=(), decode=str, finished=lambda _: None)
        responses.append(request.response)
    assert responses[0] == responses[1]
    assert len(responses[0]) == 3
