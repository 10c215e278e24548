"""vLLM in the trainer's process; runs in the environment of vLLM, which has our package too."""

import asyncio
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Sampling
from schemas.errors import RolloutError
from tests.vllm.test_generation import differences
from trainer.engine import open_engine
from trainer.engine.embedded import TransformersEngine
from trainer.models.lora import checkpoint_weights

# vLLM's own modules warn of what torch will drop.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

ARGUMENTS = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
PROMPTS = [[1, 4093, 198, number] for number in range(100, 110)]


def config_of(model, tmp_path, **settings):
    usual = {"engine": "vllm", "engine_args": ARGUMENTS, "environment": "gsm8k"}
    paths = {"tasks": str(tmp_path / "tasks.jsonl"), "out": str(tmp_path / "ds")}
    return GenerateConfig(model=str(model), **paths, **usual | settings)


@pytest.fixture(scope="module")
def engine(small_smollm2, tmp_path_factory):
    """An engine in this process, for all tests that need no other."""
    opened = open_engine(config_of(small_smollm2, tmp_path_factory.mktemp("engine")))
    asyncio.run(opened.__aenter__())
    yield opened
    asyncio.run(opened.__aexit__())


def sample_all(engine, sampling, prompts=PROMPTS):
    async def ask():
        return await asyncio.gather(*(engine.sample(prompt, sampling) for prompt in prompts))

    return asyncio.run(ask())


def rows_from(sampled):
    fields = ("prompt_token_ids", "response_ids", "rollout_logprobs")
    return [
        {name: getattr(one, name) for name in fields}
        | {"loss_mask": [True] * len(one.response_ids)}
        for one in sampled
    ]


def test_greedy_answers_are_those_of_the_models_own_engine(engine, small_smollm2):
    greedy = Sampling(temperature=0, max_tokens=20, stop=("\n\n",))
    plain = TransformersEngine.load(str(small_smollm2))
    ours, theirs = sample_all(engine, greedy), sample_all(plain, greedy)
    for one, other in zip(ours, theirs, strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-3)
        for name in ("prompt_token_ids", "response_ids", "stop_reason", "text", "policy_version"):
            assert getattr(one, name) == getattr(other, name)


def test_a_chat_is_rendered_as_by_the_models_own_engine(engine, small_smollm2):
    messages, greedy = [{"role": "user", "content": "Hi!"}], Sampling(temperature=0, max_tokens=9)
    plain = TransformersEngine.load(str(small_smollm2))
    ours, theirs = (asyncio.run(one.chat(messages, greedy)) for one in (engine, plain))
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.message == theirs.message


def test_sampled_log_probabilities_are_the_policys(engine, small_smollm2):
    sampled = sample_all(engine, Sampling(max_tokens=40))
    assert len({tuple(one.response_ids) for one in sampled}) == len(PROMPTS)
    assert np.abs(differences(rows_from(sampled), small_smollm2)).max() < 1e-3


def test_repeated_calls_without_a_seed_differ_and_with_one_are_equal(engine):
    for seed, is_equal in ((None, False), (3, True)):
        first, again = (sample_all(engine, Sampling(max_tokens=20, seed=seed)) for _ in range(2))
        assert ([s.response_ids for s in first] == [s.response_ids for s in again]) == is_equal


def test_the_sets_of_truncated_sampling_are_recorded(engine):
    sampled = sample_all(engine, Sampling(temperature=0.8, top_k=5, max_tokens=20))
    for one in sampled:
        assert all(map(list.__contains__, one.sampling_support, one.response_ids))
    sizes = [len(ids) for one in sampled for ids in one.sampling_support]
    assert set(sizes) == {5}
    assert sample_all(engine, Sampling(max_tokens=2))[0].sampling_support is None


def test_weights_change_between_sleep_and_wake_and_no_random_numbers_do(engine, small_smollm2):
    model = AutoModelForCausalLM.from_pretrained(small_smollm2, dtype=torch.float32)
    old = [t.clone() for t in model.parameters()]
    engine.part.weights = lambda: checkpoint_weights(model)
    for parameter in model.parameters():
        parameter.data *= 1.1
    expected = random.Random(1)
    asyncio.run(engine.sleep())
    random.seed(1)
    before = torch.get_rng_state()
    for version, weights in ((1, None), (0, old)):
        if weights is not None:
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.data = value
        asyncio.run(engine.wake(version))
        assert random.random() == expected.random()
        sampled = sample_all(engine, Sampling(max_tokens=20))
        assert {one.policy_version for one in sampled} == {version}
        is_old = np.abs(differences(rows_from(sampled), small_smollm2)).max() < 1e-3
        assert is_old == (version == 0)
        asyncio.run(engine.sleep())
        assert torch.equal(torch.get_rng_state(), before)
    asyncio.run(engine.wake(0))


def test_a_cancelled_call_is_aborted_and_the_others_go_on(engine):
    async def use():
        endless = Sampling(max_tokens=500, extra={"ignore_eos": True})
        calls = [asyncio.create_task(engine.sample(prompt, endless)) for prompt in PROMPTS[:2]]
        short = await engine.sample(PROMPTS[2], Sampling(max_tokens=3))
        for call in calls:
            call.cancel()
        again = await engine.sample(PROMPTS[2], Sampling(max_tokens=3))
        assert await asyncio.gather(*calls, return_exceptions=True)
        return [len(one.response_ids) for one in (short, again)], [c.cancelled() for c in calls]

    assert asyncio.run(use()) == ([3, 3], [True, True])
    assert not engine.part._engine.has_unfinished_requests()


def test_a_failure_of_vllm_ends_the_run_and_so_do_processes_that_differ(engine, monkeypatch):
    def failing(*_):
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "together", failing)
        with pytest.raises(RolloutError, match="illegal memory access") as error:
            sample_all(engine, Sampling(max_tokens=4))
        assert error.value.rule == "engine_down"
        other = engine.part.digest + 1
        patched.setattr(engine, "together", lambda *_: engine.part.step([], [], other))
        with pytest.raises(RolloutError, match="other tokens than the main process") as error:
            sample_all(engine, Sampling(max_tokens=4))
        assert error.value.rule == "engine_answer"
    assert len(sample_all(engine, Sampling(max_tokens=4))) == len(PROMPTS)


def test_a_response_ends_where_the_context_does(engine):
    (sampled,) = sample_all(engine, Sampling(max_tokens=20), [[5] * 509])
    assert (len(sampled.response_ids), sampled.stop_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "extra", "rule", "words"),
    [
        ([5] * 512, {}, "context_length", "512 tokens"),
        ([], {}, "engine_refused", "0 tokens"),
        ([10**6], {}, "engine_refused", "1000000"),
        ([5], {"guided_json": {}}, "engine_refused", "guided_json"),
        ([5], {"logit_bias": {10**6: 1.0}}, "engine_refused", "1000000"),
        ([5], {"temperature": 1.0}, "sampling", "temperature"),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_the_engine_goes_on(
    engine, prompt, extra, rule, words
):
    with pytest.raises(RolloutError) as error:
        sample_all(engine, Sampling(max_tokens=4, extra=extra), [prompt])
    assert error.value.rule == rule
    assert words in str(error.value)
    assert len(sample_all(engine, Sampling(max_tokens=4))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "rule", "words"),
    [
        ({"max_modle_len": 5}, "config_key", "did you mean `max_model_len`?"),
        ({"tensor_parallel_size": 2}, "config_key", "--num-processes"),
        ({"data_parallel_size": 2}, "config_key", "share each layer"),
    ],
)
def test_an_argument_that_vllm_lacks_or_that_is_ours_is_refused(
    small_smollm2, tmp_path, arguments, rule, words
):
    with pytest.raises(RolloutError) as error:
        open_engine(config_of(small_smollm2, tmp_path, engine_args=arguments))
    assert error.value.rule == rule
    assert words in str(error.value.hint)


def test_a_start_that_vllm_refuses_is_a_sentence_with_its_reason(small_smollm2, tmp_path):
    async def enter():
        arguments = {"engine_args": ARGUMENTS | {"max_model_len": 10**9}}
        async with open_engine(config_of(small_smollm2, tmp_path, **arguments)):
            pytest.fail("started")

    with pytest.raises(RolloutError, match="max_model_len") as error:
        asyncio.run(enter())
    assert error.value.rule == "engine_start"
