"""The layouts agree on a real model and real logs: SmolLM2-135M-Instruct, calls made by vLLM."""

import numpy as np
import polars as pl
import pytest
import torch

import pipelines
import rollout_io
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    forests_of,
    gradient_of_update,
    load_batch,
    plain_logprobs,
    relative_difference,
    run_of,
)
from trainer.batches.plan import make_plan
from trainer.config.sections import BatchConfig
from trainer.loss import policy_logprobs
from trainer.models.policy import load_policy

pytestmark = [pytest.mark.model, pytest.mark.slow]

GROUPS_OF_ALL_STYLES = ("shop-4", "shop-5", "shop-7", "shop-8")
GROUPS_OF_GRADIENT = ("shop-5", "shop-7")


@pytest.fixture(scope="module", params=[2, pytest.param(30, marks=pytest.mark.nightly)])
def policy(request, smollm2_dir):
    """With its first layers, or with all 30."""
    policy = load_policy(str(smollm2_dir), logprob_chunk_tokens=256)
    del policy.model.base_model.layers[request.param :]
    return policy


@pytest.fixture(scope="module")
def rollouts(shop_dataset):
    return rollout_io.scan(str(shop_dataset))


def planned(rollouts, outcome):
    config = train_config(dataset="d", model="m", out="o", failed="trajectory")
    return make_plan(pipelines.trajectory_returns(rollouts, outcome).collect(), config)


def steps_of(batch):
    for row in range(len(batch.names)):
        response = batch.responses.row(row).tolist()
        yield batch.prompts.row(row).tolist(), response, [True] * len(response)


@torch.no_grad()
def test_logprobs_of_both_layouts_are_those_of_one_plain_forward_per_step(policy, rollouts):
    styles = rollouts.filter(pl.col("instance_id").is_in(GROUPS_OF_ALL_STYLES)).select("style")
    assert set(styles.collect()["style"]) == {"append", "strip", "summary", "subagent"}
    plan = planned(rollouts, "last")
    steps, merged = (
        load_batch(rollouts, plan, GROUPS_OF_ALL_STYLES, BatchConfig(sequence_layout=layout))
        for layout in ("step", "merge")
    )
    assert steps.trains.all()
    assert len(merged.names) < len(steps.names)
    expected = plain_logprobs(policy.model, list(steps_of(steps)))
    per_step = expected.split(steps.responses.lengths.tolist())
    as_merged = torch.cat([per_step[row] for row in order_of_merged_steps(rollouts)])
    assert not torch.equal(as_merged, expected)
    for batch, wanted in ((steps, expected), (merged, as_merged)):
        found = policy_logprobs(run_of(policy), batch, forests_of(batch, 512))
        found = found[torch.from_numpy(batch.trains)]
        assert float((found - wanted).abs().max()) < 1e-4


def order_of_merged_steps(rollouts):
    """The steps as they lie in the merged rows, where sub-agents have rows of their own."""
    rows = rollouts.filter(pl.col("instance_id").is_in(GROUPS_OF_ALL_STYLES)).with_row_index()
    merged = pipelines.merge(rows).select("index", "segments").collect().to_dicts()
    return [s["index"] for row in merged for s in row["segments"] or [row]]


@pytest.mark.nightly  # on every change with tiny models: tests/trainer/run/test_update.py
def test_gradient_is_the_same_for_layouts_and_budgets_when_inner_steps_earn(policy, rollouts):
    earning = rollouts.with_columns(reward=pl.col("response_ids").list.len() / 100.0)
    plan = planned(earning, "sum")
    steps, merged = (
        load_batch(earning, plan, GROUPS_OF_GRADIENT, BatchConfig(sequence_layout=layout))
        for layout in ("step", "merge")
    )
    assert len(np.unique(steps.advantages)) == 8
    reference = gradient_of_update(policy, steps, budget=512, corrects=True)
    for budget in (512, 1024):
        found = gradient_of_update(policy, merged, budget=budget, corrects=True)
        assert relative_difference(found, reference) < 1e-4
