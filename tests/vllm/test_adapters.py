import asyncio
import json
from collections import Counter

import numpy as np
import pytest
import torch

from pipelines.generation import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from tests.helpers.trainer_helpers import forests_of, make_batch
from tests.vllm.test_engine import QUESTIONS, prompt_ids
from tests.vllm.test_rl import (
    check_each_once,
    check_the_engine_spoke_for_the_policy,
    config_of,
    overrides_of,
    rows_of,
    updates_of,
)
from trainer import rl
from trainer.config.sections import ModelConfig
from trainer.models.lora import add_adapter, save_adapter
from trainer.models.policy import load_policy
from trainer.rl.weight_sync import WeightSwapEngine

pytestmark = pytest.mark.vllm
__all__ = ["config_of", "overrides_of"]


def adapted(small_smollm2, path=None):
    policy = load_policy(str(small_smollm2), logprob_chunk_tokens=256)
    settings = ModelConfig(
        lora_rank=4, lora_alpha=8, lora_target_modules=None, path=str(small_smollm2)
    )
    add_adapter(policy, settings, path)
    return policy


def logprobs_of(policy, sampled):
    rows = [(s.prompt_token_ids, s.response_ids, [True] * len(s.response_ids)) for s in sampled]
    batch = make_batch(rows, temperatures=[1.0] * len(rows))
    found = np.zeros(len(batch.trains), np.float32)
    with torch.no_grad():
        for forest in forests_of(batch, 1024):
            slots = forest.target_slot
            found[slots.numpy()] = policy(forest, batch.temperature[slots])[0].numpy()
    return found


@pytest.fixture(scope="module")
def adapters(small_smollm2, tmp_path_factory):
    """Four versions, each with other random matrices."""
    folder, policy = tmp_path_factory.mktemp("weights"), adapted(small_smollm2)
    for version in range(1, 5):
        random = torch.Generator().manual_seed(version)
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.02 * torch.randn(weight.shape, generator=random)
        save_adapter(policy.model, folder / f"version_{version}", policy.model.state_dict())
    return folder


def test_a_swap_under_load_serves_no_token_of_another_version(
    small_server, small_smollm2, adapters, tokenizer
):
    prompts = prompt_ids(tokenizer, QUESTIONS[:8])
    swapped, num_done = asyncio.Event(), Counter()

    async def ask(engine, prompt, number):
        found = []
        while not swapped.is_set():
            sampling = Sampling(max_tokens=8 + 4 * number, seed=len(found))
            found.append(await engine.sample(prompt, sampling, session=str(number)))
            num_done[found[-1].policy_version] += 1
        return found

    async def swap(engine):
        """Versions change while all are sampling."""
        for version in range(1, 5):
            path = str(adapters / f"version_{version}")
            await engine.load_weights(path, policy_version=version)
            async with asyncio.timeout(300):
                while num_done[version] < 4:
                    await asyncio.sleep(0.05)
        swapped.set()

    async def use():
        async with VllmEngine(small_server.url) as engine:
            gate = WeightSwapEngine(engine, waits=True)
            asked = [ask(gate, prompt, number) for number, prompt in enumerate(prompts)]
            *found, _ = await asyncio.gather(*asked, swap(gate))
            return [sampled for one in found for sampled in one]

    sampled = asyncio.run(use())
    by_version = {v: [s for s in sampled if s.policy_version == v] for v in range(5)}
    assert all(len(of) >= 4 for version, of in by_version.items() if version)
    for version, of in by_version.items():
        engine = np.concatenate([s.rollout_logprobs for s in of]) if of else np.zeros(0)
        names = {v: f"version_{v}" for v in {max(version, 1), max(version - 1, 1)}}
        for other, name in names.items():
            ours = logprobs_of(adapted(small_smollm2, adapters / name), of) if of else engine
            if other == version:
                assert np.abs(ours - engine).max() < 1e-3
            elif version:
                assert np.abs(ours - engine).mean() > 0.02


@pytest.mark.nightly  # the test above swaps adapters on every change
def test_the_loop_sends_adapters_which_sample_from_then_on(
    small_server, config_of, small_smollm2, tmp_path, capsys
):
    settings = {"lora_rank": 4, "learning_rate": 2e-3, "num_iterations": 3}
    result = rl.run(config_of(small_server.url, **settings))
    assert result.num_iterations == 3
    run = tmp_path / "run"
    assert rows_of(run)["policy_version"].to_list() == [0] * 8 + [1] * 8 + [2] * 8
    check_each_once(run, 24)
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
    versions = sorted((run / "weights").iterdir())
    assert [path.name for path in versions] == ["version_1", "version_2", "version_3"]
    for path in versions:
        assert sorted(file.name for file in path.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
    assert "whole models" not in capsys.readouterr().err


@pytest.mark.nightly
def test_a_run_after_another_starts_from_its_own_model(small_server, config_of, tmp_path):
    """A server may still have the adapters of the run before it."""
    settings = {"lora_rank": 4, "num_iterations": 1}
    rl.run(config_of(small_server.url, out=tmp_path / "second", **settings))
    (line,) = updates_of(tmp_path / "second")
    assert line["rollout_logprobs_abs_diff_mean"] < 1e-3
    assert json.loads((tmp_path / "second/config.json").read_text())["model"]["lora_rank"] == 4
