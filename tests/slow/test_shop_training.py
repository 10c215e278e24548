"""Every estimator, and LoRA, learn on a real model and real logs: three updates of two groups."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import pipelines
import rollout_io
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from trainer.training import train

pytestmark = [pytest.mark.model, pytest.mark.nightly]

GROUPS = ("shop-5", "shop-10")
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"estimator": "grpo"},
    "rloo": {"estimator": "rloo"},
    "maxrl": {"estimator": "maxrl"},
    "reinforce++": {"estimator": "reinforce++"},
    "gae and critic": {"estimator": "gae"},
    "lora": {"lora_rank": 8, "learning_rate": 2e-4},
}


@pytest.fixture(scope="module")
def dataset(shop_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("two_groups") / "ds")
    rows = rollout_io.scan(str(shop_dataset)).filter(pl.col("instance_id").is_in(GROUPS))
    returns = pipelines.trajectory_returns(rows)
    outcomes = returns.select("trajectory_id", reward=pl.col("return")).collect()
    placed = pipelines.place_outcomes(rows, outcomes)
    table = placed.collect().to_arrow()
    with rollout_io.RolloutWriter(
        path, metadata=rollout_io.read_metadata(str(shop_dataset))
    ) as writer:
        writer.write(table)
    return path


@pytest.fixture(scope="module")
def compare_policies() -> Any:
    path = ROOT / "examples" / "compare_policies.py"
    spec = importlib.util.spec_from_file_location("compare_policies", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RUNS)
def test_three_updates_have_finite_metrics_and_rewarded_trajectories_gain(
    name: str, dataset: str, smollm2_dir: Path, compare_policies: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"learning_rate": 5e-6} | RUNS[name]
    config = train_config(
        dataset=dataset,
        model=str(smollm2_dir),
        out=str(tmp_path / "run"),
        groups_per_batch=2,
        groups_per_mini_batch=2,
        num_epochs=3,
        tokens_per_micro_batch=1024,
        **settings,
    )
    result = train(config)
    assert result.num_updates == 3
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
    rows = pipelines.merge(rollout_io.scan(dataset))
    gains = compare_policies.compare(rows, str(smollm2_dir), result.checkpoint, list(GROUPS))
    assert set(gains["instance_id"]) == set(GROUPS)
    assert (gains["relative_gain"] > 0).all(), gains
