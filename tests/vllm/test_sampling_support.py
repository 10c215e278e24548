"""The sets that a real vLLM sampled from: at equal weights, the ratio to the trainer's policy is 1."""

import asyncio
import json

import pytest

import trainer
from pipelines.generation import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import step, write_dataset

pytestmark = pytest.mark.vllm
QUESTIONS = ("Tell me a story.", "What is 2 + 3?", "Name three colours.", "Why is the sky blue?")


def sampled_rows(url, sampling):
    async def ask():
        async with VllmEngine(url) as engine:
            assert engine.logprobs_mode == "processed"
            calls = [
                engine.chat([{"role": "user", "content": text}], sampling) for text in QUESTIONS
            ]
            chats = await asyncio.gather(*calls)
            texts = [engine.sample(one.prompt_token_ids, sampling) for one in chats]
            return [*chats, *await asyncio.gather(*texts)]

    return [
        step(
            f"g{number // 2}",
            number % 2,
            0,
            sampled.prompt_token_ids,
            sampled.response_ids,
            is_last_step=True,
            reward=float(number % 2),
            rollout_logprobs=sampled.rollout_logprobs,
            sampling_support=sampled.sampling_support,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        for number, sampled in enumerate(asyncio.run(ask()))
    ]


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 2e-3), ("bfloat16", 0.1)])
def test_the_ratio_is_1_within_the_engines_noise(start_vllm, smollm2_dir, tmp_path, dtype, noise):
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, max_tokens=24, seed=1)
    arguments = ["--logprobs-mode", "processed_logprobs", "--dtype", dtype]
    with start_vllm(*arguments) as server:
        rows = sampled_rows(server.url, sampling)
    sizes = [len(ids) for row in rows for ids in row["sampling_support"]]
    assert 1 <= min(sizes) <= max(sizes) <= 20
    assert max(sizes) > 1
    dataset, out = write_dataset(tmp_path / "ds", rows), tmp_path / "run"
    trainer.train(train_config(dataset=dataset, model=str(smollm2_dir), out=str(out)))
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rollout_logprobs_abs_diff_mean"] < noise / 2
    assert abs(line["is_ratio_mean"] - 1) < noise
