import asyncio
import json
import os
import shutil

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.run import generate
from rollout_io.cli.main import run
from trainer.engine import open_engine

pytestmark = pytest.mark.vllm


@pytest.fixture
def weights(small_smollm2, tmp_path):
    """A folder with the model as version_0, and version_1, whose layers differ a little."""
    folder = tmp_path / "weights"
    folder.mkdir()
    shutil.copytree(small_smollm2, folder / "version_0", copy_function=os.symlink)
    shutil.copytree(small_smollm2, folder / "version_1")
    file = folder / "version_1" / "model.safetensors"
    tensors, random = load_file(file), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor += 0.02 * tensor.std() * torch.randn(tensor.shape, generator=random)
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture
def sample(small_server, small_smollm2, tmp_path):
    """Samples rows with some weights, labelled version 1; the server has its own again afterwards."""

    def load(path):
        async def use():
            async with VllmEngine(small_server.url) as engine:
                await engine.load_weights(str(path), policy_version=0)

        asyncio.run(use())

    def make(path, names):
        load(path)
        tasks = tmp_path / "tasks.jsonl"
        lines = [{"instance_id": n, "prompt": f"Tell me a story about {n}."} for n in names]
        tasks.write_text("\n".join(map(json.dumps, lines)))
        config = GenerateConfig(
            tasks=str(tasks),
            model=str(small_smollm2),
            out=str(tmp_path / "ds"),
            engine="vllm",
            urls=(small_server.url,),
            agent=f"{__name__}:answer",
            max_response_tokens=40,
            policy_version=1,
        )
        assert asyncio.run(generate(config, open_engine)).num_failed == 0
        return config.out

    yield make
    load(small_smollm2)


async def answer(client, task):
    await client.chat(task.prompt)
    return 0.0


def test_rows_of_a_server_that_kept_the_old_weights_are_named(sample, weights, tmp_path, capsys):
    fresh, stale = ["bees", "rain", "a lighthouse", "chess"], ["salt", "winter", "maps"]
    sample(weights / "version_1", fresh)
    path = sample(weights / "version_0", stale)
    verdicts = tmp_path / "verdicts.parquet"
    assert run(["audit", path, "--weights", str(weights), "--out", str(verdicts)]) == 1
    found = pl.read_parquet(verdicts).select("instance_id", "kind", "best_version")
    expected = [(name, "as_labelled", 1) for name in fresh]
    expected += [(name, "version", 0) for name in stale]
    assert sorted(found.rows()) == sorted(expected)
    assert "version 0" in capsys.readouterr().out
