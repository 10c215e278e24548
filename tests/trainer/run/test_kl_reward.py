"""KL divergence in the reward: by hand, over layouts, in whole runs."""

import dataclasses

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import pipelines
import rollout_io
import trainer
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    load_batch,
    metrics_of,
    save_tiny_model,
    write_dataset,
)
from trainer.algorithms.advantages import grpo
from trainer.algorithms.kl import adapted_kl_coef
from trainer.batches.plan import make_plan
from trainer.config.sections import BatchConfig
from trainer.run.batch_advantages import next_kl_coef, subtract_kl

REWARDS = (1.0, 0.0, 0.5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rows = group_rows(2, REWARDS)
    rows[0]["loss_mask"] = [True, False, False, False]
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", rows)


def charged(dataset, layout, **settings):
    """A batch whose trajectory number n drifted by n / 10 nats at every token."""
    config = train_config(dataset=dataset, model="m", out="o", kl_reward_coef=0.5, **settings)
    rollouts = rollout_io.scan(dataset)
    plan = make_plan(pipelines.trajectory_returns(rollouts, "last").collect(), config)
    batch = load_batch(rollouts, plan, plan.batches[0], BatchConfig(sequence_layout=layout))
    drift = np.repeat(batch.trajectory / 10, batch.responses.lengths)
    ref = torch.where(torch.from_numpy(batch.trains), torch.tensor(-2.0), torch.nan)
    old = ref + torch.from_numpy(drift).float()
    batch = dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)
    charged_batch, metrics = subtract_kl(
        Accelerator(), batch, plan, plan.batches[0], config, coef=0.5
    )
    return batch, charged_batch, metrics


@pytest.mark.parametrize("layout", ["step", "merge"])
def test_returns_are_less_by_the_divergence_of_their_trained_tokens(layout, dataset):
    batch, found, metrics = charged(dataset, layout, kl_estimator_type="k1")
    num_tokens = np.array([5, 8, 8, 8, 8, 8])
    returns = np.tile(REWARDS, 2) - 0.5 * num_tokens * np.arange(6) / 10
    expected = grpo(returns, np.array([0, 0, 0, 1, 1, 1]))
    of_token = np.repeat(batch.trajectory, batch.responses.lengths)
    assert found.advantages.numpy() == pytest.approx(expected[of_token], rel=1e-5)
    drifts = np.repeat(np.arange(6) / 10, num_tokens)
    assert metrics["loss/avg_kl"] == pytest.approx(drifts.mean(), rel=1e-6)
    assert metrics["loss/avg_kl_max"] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("layout", ["step", "merge"])
def test_token_by_token_each_reward_is_less_by_its_own(layout, dataset):
    settings = {"kl_estimator_type": "k2", "estimator": "reinforce++"}
    batch, found, _ = charged(dataset, layout, **settings)
    drift = np.repeat(np.arange(6) / 10, [5, 8, 8, 8, 8, 8])
    before, after = batch.chains.rewards, found.chains.rewards
    assert after == pytest.approx(before - 0.5 * drift**2 / 2, abs=1e-6)
    assert (found.advantages == batch.advantages).all()


def test_the_coefficient_is_fixed_or_follows_the_target(dataset):
    batch, _, metrics = charged(dataset, "merge")
    fixed = train_config(dataset="d", model="m", out="o", kl_reward_coef=0.5)
    assert next_kl_coef(0.5, metrics, batch, fixed.loss) == 0.5
    adaptive = train_config(
        dataset="d", model="m", out="o", kl_reward_coef=0.5, kl_ctrl_type="adaptive", kl_horizon=10
    )
    expected = 0.5 * (1 + max(metrics["loss/avg_kl"] / 0.1 - 1, -0.2) * 6 / 10)
    assert next_kl_coef(0.5, metrics, batch, adaptive.loss) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce++", "gae"])
def test_runs_end_to_end_and_adapts_its_coefficient(estimator, dataset, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    settings = {
        "estimator": estimator,
        "kl_reward_coef": 0.1,
        "kl_ctrl_type": "adaptive",
        "kl_horizon": 10,
        "reference_model": save_tiny_model(tmp_path / "reference", seed=3),
        "groups_per_batch": 1,
        "groups_per_mini_batch": 1,
    }
    out = tmp_path / "run"
    trainer.train(train_config(dataset=dataset, model=model, out=str(out), **settings))
    first, second = metrics_of(out)
    assert first["skipped"] == second["skipped"] == 0
    assert first["loss/kl_reward_coef"] == 0.1
    expected = adapted_kl_coef(
        0.1, kl=first["loss/avg_kl"], target=0.1, num_sequences=3, horizon=10
    )
    assert second["loss/kl_reward_coef"] == pytest.approx(expected)
    assert "policy_kl" not in first
