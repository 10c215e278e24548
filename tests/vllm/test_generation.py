import asyncio
import json
import threading
import time
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
import torch

import rollout_io
from pipelines.drift_diagnosis import diagnose_dataset
from pipelines.generation.config import GenerateConfig
from pipelines.generation.run import generate
from pipelines.merging.merge import merge_table
from rollout_io.cli.main import run
from rollout_io.retokenize.tokenizer import load_tokenizer
from tests.helpers.generation_helpers import EOS, HERE
from tests.helpers.trainer_helpers import forests_of, make_batch
from trainer.engine import open_engine
from trainer.models.policy import load_policy

pytestmark = pytest.mark.vllm


def write_tasks(path, num_tasks=4):
    records = [
        {
            "prompt": [
                {"role": "user", "content": f"What is {a} + {a + 2}? End with #### ANSWER."}
            ],
            "reward_spec": {"ground_truth": str(2 * a + 2)},
        }
        for a in range(num_tasks)
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


@pytest.fixture
def made(small_server, small_smollm2, tmp_path):
    """Generates on the real server; the dataset's path."""

    def make(**settings):
        config = GenerateConfig(
            tasks=write_tasks(tmp_path / "tasks.jsonl"),
            model=str(small_smollm2),
            out=str(tmp_path / "ds"),
            engine="vllm",
            urls=(small_server.url,),
            group_size=2,
            max_response_tokens=48,
            policy_version=7,
            **({"environment": "gsm8k_multi_turn", "max_turns": 3} | settings),
        )
        result = asyncio.run(generate(config, open_engine))
        assert (result.num_trajectories, result.num_failed) == (8, 0)
        assert run(["validate", config.out]) == 0
        assert set(rollout_io.read(config.out)["policy_version"].to_pylist()) == {7}
        return config.out

    return make


def pairs_of(path):
    rows = pl.from_arrow(rollout_io.read(path)).partition_by("trajectory_id")
    return [pair for part in rows for pair in pairwise(part.rows(named=True))]


def differences(rows, small_smollm2):
    plain = [(r["prompt_token_ids"], r["response_ids"], r["loss_mask"]) for r in rows]
    batch = make_batch(plain)
    policy = load_policy(str(small_smollm2), logprob_chunk_tokens=256)
    ours = np.zeros(len(batch.trains), np.float32)
    with torch.no_grad():
        for forest in forests_of(batch, 1024):
            slots = forest.target_slot
            ours[slots.numpy()] = policy(forest, batch.temperature[slots])[0].numpy()
    trains = np.concatenate([r["loss_mask"] for r in rows])
    return (ours - np.concatenate([r["rollout_logprobs"] for r in rows]))[trains]


def test_append_on_a_real_server_is_one_sequence_a_trajectory_of_the_policys_own(
    made, small_smollm2
):
    path = made()
    tokenizer = load_tokenizer(small_smollm2)
    for before, after in pairs_of(path):
        said = before["prompt_token_ids"] + before["response_ids"]
        said += [EOS] * (said[-1] != EOS)
        assert after["prompt_token_ids"][: len(said)] == said
        asked = json.loads(after["messages"])[-1]["content"]
        text = f"\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(after["prompt_token_ids"][len(said) :]) == text
    merged = pl.from_arrow(merge_table(rollout_io.read(path))).rows(named=True)
    assert len(merged) == 8
    found = differences(merged, small_smollm2)
    assert np.abs(found).mean() < 0.05
    assert abs(found.mean()) < 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"history": "one_message"},
        pytest.param(
            {"history": "retokenize", "chat_template": "qwen3_without_thinking"},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"stop": (".", "=")}, marks=pytest.mark.nightly),
    ],
)
def test_the_other_paths_on_a_real_server_are_one_sequence_a_trajectory_too(made, settings):
    assert merge_table(rollout_io.read(made(**settings))).num_rows == 8


def breaks_of(path):
    pairs = pairs_of(path)
    so_far = [a["prompt_token_ids"] + a["response_ids"] for a, _ in pairs]
    return sum(
        b["prompt_token_ids"][: len(s)] != s for s, (_, b) in zip(so_far, pairs, strict=True)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"history": "step_wise"},
        pytest.param(
            {"environment": None, "agent": f"{HERE}:curious", "max_turns": 1},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_drift_finds_every_break_of_a_real_conversation(made, settings):
    path = made(**settings)
    found = sum(len(part.breaks) for part in diagnose_dataset(path))
    assert found == breaks_of(path)
    if "agent" not in settings:  # whose calls differ in temperature, and are not joined
        assert merge_table(rollout_io.read(path)).num_rows == 8 + found


@pytest.mark.nightly  # tests/vllm/test_rl.py kills a server on every change
def test_a_server_killed_in_the_middle_and_started_again_costs_no_trajectory(
    mortal_server, smollm2_dir, tmp_path
):
    config = GenerateConfig(
        tasks=write_tasks(tmp_path / "tasks.jsonl", num_tasks=12),
        model=str(smollm2_dir),
        out=str(tmp_path / "ds"),
        engine="vllm",
        urls=(mortal_server.url,),
        environment="gsm8k_multi_turn",
        history="step_wise",
        max_turns=3,
        max_concurrency=6,
        groups_per_shard=1,
    )
    results = []
    work = threading.Thread(
        target=lambda: results.append(asyncio.run(generate(config, open_engine)))
    )
    work.start()
    while work.is_alive() and not list((tmp_path / "ds").glob("*.parquet")):
        time.sleep(0.05)
    mortal_server.stop(kill=True)
    finished_before = len(list((tmp_path / "ds").glob("*.parquet")))
    mortal_server.start()
    work.join(timeout=1200)
    assert 1 <= finished_before < 12
    assert (results[0].num_trajectories, results[0].num_failed) == (12, 0)
    firsts = pl.from_arrow(rollout_io.read(config.out)).filter(pl.col("step_index") == 0)
    assert sorted(firsts["trajectory_id"]) == sorted(f"{i}_0" for i in range(12))
    assert run(["validate", config.out]) == 0
