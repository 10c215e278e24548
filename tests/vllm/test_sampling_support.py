"""The sets that a real vLLM sampled from: at equal weights, the ratio to the trainer's policy is 1."""

import asyncio
import json

import pytest

import trainer
from pipelines.generation import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from tests.helpers.configs import train_config
from tests.helpers.recorder_helpers import recording
from tests.helpers.recorder_helpers import rows as rows_of
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


def recorded_rows(url, sampling, sampled, out):
    """The same calls, as a harness makes them through a recorder."""
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    own = {"model": "smollm2"} | {name: getattr(sampling, name) for name in names}

    async def ask():
        async with recording(out, url, logprobs_mode="processed") as client:
            chats = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
            texts = [{"prompt": row["prompt_token_ids"]} for row in sampled[len(chats) :]]
            for number, body in enumerate([*chats, *texts]):
                path = "chat/completions" if "messages" in body else "completions"
                body |= own | {"stream": number % 2 == 1}
                answer = await client.post(f"/s/q/0/v1/{path}", json=body)
                assert answer.status_code == 200, answer.text
                assert "token_id:" not in answer.text
            await client.post("/s/q/0/end", json={"reward": 1.0})

    asyncio.run(ask())
    return rows_of(out, "response_ids", "rollout_logprobs", "sampling_support")


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 2e-3), ("bfloat16", 0.1)])
def test_the_ratio_is_1_within_the_engines_noise(start_vllm, smollm2_dir, tmp_path, dtype, noise):
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, max_tokens=24, seed=1)
    arguments = ["--logprobs-mode", "processed_logprobs", "--dtype", dtype]
    with start_vllm(*arguments) as server:
        rows = sampled_rows(server.url, sampling)
        is_exact = dtype == "float32"  # else the ids depend on the batch
        recorded = recorded_rows(server.url, sampling, rows, tmp_path / "rec") if is_exact else rows
    sizes = [len(ids) for row in rows for ids in row["sampling_support"]]
    assert 1 <= min(sizes) <= max(sizes) <= 20
    assert max(sizes) > 1
    for row, again in zip(rows, recorded, strict=True):
        assert again["response_ids"] == row["response_ids"]
        assert list(map(sorted, again["sampling_support"])) == list(
            map(sorted, row["sampling_support"])
        )
        assert again["rollout_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=noise)
    dataset, out = write_dataset(tmp_path / "ds", rows), tmp_path / "run"
    trainer.train(train_config(dataset=dataset, model=str(smollm2_dir), out=str(out)))
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rollout_logprobs_abs_diff_mean"] < noise / 2
    assert abs(line["is_ratio_mean"] - 1) < noise
