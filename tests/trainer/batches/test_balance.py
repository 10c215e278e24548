"""Micro-batches dealt to processes, and what a process forwards that has none."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trainer_helpers import (
    forests_of,
    make_batch,
    run_of,
    tiny_llama,
    tiny_policy,
    update_with,
)
from trainer.batches.forest import FILLER
from trainer.config.functions import POLICY_LOSS
from trainer.distributed.balance import balance, cost
from trainer.loss import policy_logprobs
from trainer.models.critic import Critic

COSTS = st.lists(st.floats(1, 1e6), max_size=40)
ROWS = [([1, 2, 3], [4, 5], [True, True]), ([7] * 9, [8, 9, 10], [True, False, True])]
SAMPLED = [[-2.0, -3.0], [-1.0, -2.0, -4.0]]


def test_the_costliest_go_to_the_processes_with_the_least_to_do():
    assert balance(np.array([1.0, 7.0, 3.0, 6.0, 2.0]), np.arange(5), 2).tolist() == [0, 0, 1, 1, 0]


@given(COSTS, st.integers(1, 8), st.data())
def test_rows_of_a_unit_go_to_one_process_and_rows_of_a_unit_without_a_cost_to_none(
    costs, num_ranks, data
):
    size = len(costs)
    units = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), np.int64)
    free = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)
    cost_of = np.where(free, 0.0, costs)
    ranks = balance(cost_of, units, num_ranks)
    for unit in np.unique(units):
        (rank,) = set(ranks[units == unit].tolist())
        assert (rank == -1) == (cost_of[units == unit].sum() == 0)
        assert rank < num_ranks


@given(COSTS, st.integers(1, 8))
def test_totals_of_processes_differ_by_one_unit_at_most(costs, num_ranks):
    ranks = balance(np.array(costs), np.arange(len(costs)), num_ranks)
    totals = np.bincount(ranks, costs, num_ranks) if costs else np.zeros(num_ranks)
    assert np.ptp(totals) <= max(costs, default=0.0) * (1 + 1e-9)


def test_a_deep_token_costs_more_than_a_shallow_one():
    deep, shallow = cost(np.array([40, 20]))
    assert deep == 40 + 780 / 16384 > 2 * shallow


LOSSES = [{"policy_loss_type": name, "tis_ratio_type": None} for name in POLICY_LOSS.built_in]
LOSSES += [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "entropy_loss_coef": 0.1},
    {"sequence_mask_metric": "product", "outlier_token_is_threshold_high": 100.0},
    {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 10.0},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: "-".join(map(str, s.values())))
def test_a_filler_changes_no_number_of_an_update(settings):
    policy = tiny_policy(tie_word_embeddings=False)
    batch = make_batch(ROWS, advantages=[1.0, -2.0], rollout_logprobs=SAMPLED)
    forests = forests_of(batch, 12)
    old = policy_logprobs(run_of(policy), batch, forests) + 0.1
    found = []
    for more in ([], [FILLER]):
        torch.manual_seed(0)
        learner = run_of(policy, corrects=True, learning_rate=1e-30, **settings)
        metrics = update_with(learner, batch, [*forests, *more], old, old - 0.2)
        found.append(metrics)
    assert len(forests) == found[0].pop("num_micro_batches") == 2
    assert found[1].pop("num_micro_batches") == 3
    assert found[1].pop("num_forwarded_tokens") == found[0].pop("num_forwarded_tokens") + 1
    assert found[0] == found[1]


def test_a_filler_gives_every_parameter_a_gradient_of_zero():
    policy, critic = tiny_policy(tie_word_embeddings=False), Critic(tiny_llama())
    logprobs, entropy = policy(FILLER, torch.ones(0))
    critic(FILLER).sum().backward()
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    trained = [*policy.parameters(), *critic.trained_parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in trained)
