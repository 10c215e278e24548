"""LoRA on a real model and real logs: SmolLM2-135M-Instruct, calls made by vLLM."""

import json
import math
from pathlib import Path

import polars as pl
import pytest

import pipelines
import rollout_io
import trainer
from examples.compare_policies import compare

GROUPS = ["shop-4", "shop-5"]

pytestmark = [pytest.mark.model, pytest.mark.nightly]


def test_rewarded_trajectories_gain_on_the_others_within_three_updates(
    shop_dataset: Path, smollm2_dir: Path, tmp_path: Path
) -> None:
    pairs = pl.col("instance_id").is_in(GROUPS) & (pl.col("repetition_id") < 2)
    rollouts = rollout_io.scan(str(shop_dataset)).filter(pairs)
    returns = pipelines.trajectory_returns(rollouts).collect()
    deviation = returns.group_by("instance_id").agg(pl.col("return").std())["return"]
    assert (deviation > 0).all()
    with rollout_io.RolloutWriter(
        tmp_path / "ds", metadata=rollout_io.read_metadata(str(shop_dataset))
    ) as writer:
        writer.write(rollouts.collect().to_arrow())
    config = trainer.TrainConfig(
        dataset=str(tmp_path / "ds"),
        model=str(smollm2_dir),
        out=str(tmp_path / "run"),
        lora_rank=8,
        learning_rate=5e-4,
        tokens_per_micro_batch=1024,
        num_epochs=3,
    )
    result = trainer.train(config)
    assert result.num_updates == 3
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    changes = compare(rollouts, config.model, result.checkpoint, GROUPS)
    assert changes["instance_id"].to_list() == GROUPS
    assert (changes["relative_gain"] > 0).all(), changes
