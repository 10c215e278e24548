"""Whole runs with `sequence_layout` tree, and real rollouts on a real model."""

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
import torch

import pipelines
import rollout_io
import trainer
from rollout_io.cli.main import run as main
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    load_batch,
    metrics_of,
    relative_difference,
    save_tiny_model,
    step,
    write_dataset,
)
from tests.helpers.tree_helpers import mini_batch_of, updated
from trainer.batches.plan import Plan, make_plan
from trainer.config.sections import BatchConfig
from trainer.models.policy import load_policy
from trainer.run.warnings import warnings_before

CUT = {"num_forwarded_tokens", "num_micro_batches", "seconds", "tokens_per_s", "repeated_share"}
RUNS = {
    "grpo": {"kl_loss_coef": 0.1, "reduction": "prompt_mean"},
    "gae": {
        "estimator": "gae",
        "critic_learning_rate": 3e-4,
        "kl_reward_coef": 0.1,
        "tree_scope": "trajectory",
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two groups: one prompt each, thinking that the next prompt leaves out, answers that recur."""
    folder, rng = tmp_path_factory.mktemp("tree"), np.random.default_rng(0)
    rows = []
    for group in range(2):
        start = rng.integers(0, 61, 6).tolist()
        for repetition, reward in enumerate((1.0, 0.0, 1.0)):
            prompt = start
            for turn in range(3):
                thinking, answer = rng.integers(0, 61, 3).tolist(), [turn, repetition % 2]
                ends = {"reward": reward * (turn == 2), "is_last_step": turn == 2}
                rows.append(
                    step(f"g{group}", repetition, turn, prompt, thinking + answer, **ends)
                    | {"rollout_logprobs": [-3.0] * 5}
                )
                prompt = [*prompt, *answer, *start[:2]]
    model = save_tiny_model(folder / "model")
    return {"dataset": write_dataset(folder / "ds", rows), "model": model}


def lines_of(paths, out, **settings):
    common = {
        "groups_per_mini_batch": 1, "epochs_per_batch": 2, "learning_rate": 3e-4,
        "tokens_per_micro_batch": 40,
    }  # fmt: skip
    trainer.train(train_config(**paths, **common | settings, out=str(out)))
    return metrics_of(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_trees_has_the_numbers_of_a_run_on_steps(name, paths, tmp_path):
    steps, trees = (
        lines_of(paths, tmp_path / layout, sequence_layout=layout, **RUNS[name])
        for layout in ("step", "tree")
    )
    assert len(steps) == len(trees) == 4
    for found, expected in zip(trees, steps, strict=True):
        assert found["num_forwarded_tokens"] < 0.7 * expected["num_forwarded_tokens"]
        assert (found["repeated_share"] > 0) == (name == "grpo")
        same, wanted = ({k: v for k, v in m.items() if k not in CUT} for m in (found, expected))
        assert same == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_plan_says_what_each_scope_forwards_and_repeats(paths, tmp_path, capfd):
    settings = [
        "batch.sequence_layout=tree",
        "batch.tokens_per_micro_batch=40",
        "batch.groups_per_mini_batch=1",
    ]
    command = ["train", paths["dataset"], "--model", paths["model"], "--out", str(tmp_path / "run")]
    command += [part for setting in settings for part in ("--set", setting)]
    assert main([*command, "--dry-run"]) == 0
    table = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert main([*command, "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert main(command) == 0
    lines = metrics_of(tmp_path / "run")
    found = plan["layouts"]["tree_per_group"]
    assert plan["trained_layout"] == "tree_per_group"
    assert found["num_tokens"] == sum(line["num_forwarded_tokens"] for line in lines)
    assert found["micro_batches"] == [line["num_micro_batches"] for line in lines]
    distinct = sum(line["num_forwarded_tokens"] / (1 + line["repeated_share"]) for line in lines)
    assert found["repeated_share"] == pytest.approx(found["num_tokens"] / distinct - 1)
    row = next(line for line in table if line[:2] == ["tree_per_group", "*"])
    assert row[3:6:2] == [f"{found['num_tokens']}", f"{found['repeated_share']:.1%}"]
    assert plan["layouts"]["merge"]["repeated_share"] is None


def test_what_counts_by_row_counts_steps_which_a_warning_says():
    rows = pl.DataFrame({"instance_id": "a", "trajectory_id": ["a_0", "a_0"], "trains": True})
    rows = rows.with_columns(num_forwarded_tokens=2)
    settings = {"sequence_layout": "tree", "reduction": "sequence_mean"}
    config = train_config(dataset="d", model="m", out="o", **settings)
    plan = Plan(trajectories=rows, batches=(), num_groups_without_variance=0)
    assert "trajectories (1) are split into rows (2)" in warnings_before(rows, plan, config)["rows"]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("num_layers", "num_trajectories"), [(4, 2), pytest.param(30, 4, marks=pytest.mark.nightly)]
)
def test_the_gradient_of_real_rollouts_on_a_real_model_is_that_of_steps(
    num_layers, num_trajectories, smollm2_dir, shop_dataset
):
    policy = load_policy(str(smollm2_dir), logprob_chunk_tokens=256, trees=True)
    del policy.model.base_model.layers[num_layers:]
    rollouts = rollout_io.scan(str(shop_dataset))
    rollouts = rollouts.filter(pl.col("repetition_id") < num_trajectories)
    config = train_config(dataset="d", model="m", out="o", failed="trajectory")
    plan = make_plan(pipelines.trajectory_returns(rollouts, "last").collect(), config)
    batch = load_batch(rollouts, plan, ["shop-5"], BatchConfig(sequence_layout="tree"))
    jitter = torch.linspace(-1, 1, len(batch.trains))
    batch = dataclasses.replace(batch, advantages=batch.advantages + jitter)
    found = {}
    for name, settings in {
        "step": {"sequence_layout": "step"},
        "whole": {},
        "cut": {"tokens_per_micro_batch": 360},
    }.items():
        forests = mini_batch_of(batch, **settings).forests
        found[name] = updated(policy, batch, forests, None, None, corrects=True)
    (wanted, gradient), *_ = found.values()
    expected = torch.cat([g.flatten() for g in gradient.values()])
    for name, (metrics, other) in found.items():
        assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-4), name
        flat = torch.cat([g.flatten() for g in other.values()])
        assert relative_difference(flat, expected) < 1e-4, name
    forwarded = {name: metrics["num_forwarded_tokens"] for name, (metrics, _) in found.items()}
    assert forwarded["whole"] < forwarded["cut"] < forwarded["step"]
