"""Micro-batches dealt to processes, and what a process forwards that has none."""

from typing import Any

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
from trainer.batches.forest import pack, spread
from trainer.config.functions import POLICY_LOSS
from trainer.distributed.balance import FILLER, balance, cost
from trainer.loss import policy_logprobs
from trainer.models.critic import Critic

COSTS = st.lists(st.floats(1, 1e6), max_size=40)
ROWS = [([1, 2, 3], [4, 5], [True, True]), ([7] * 9, [8, 9, 10], [True, False, True])]
SAMPLED = [[-2.0, -3.0], [-1.0, -2.0, -4.0]]


def test_the_costliest_go_to_the_processes_with_the_least_to_do() -> None:
    assert balance([1.0, 7.0, 3.0, 6.0, 2.0], 2).tolist() == [[0, -1], [1, 3], [4, 2]]


@given(COSTS, st.integers(1, 8))
def test_every_micro_batch_is_dealt_once_and_all_processes_have_as_many_rounds(
    costs: list[float], num_ranks: int
) -> None:
    rounds = balance(costs, num_ranks)
    assert rounds.shape == (-(-len(costs) // num_ranks), num_ranks)
    assert sorted(rounds[rounds >= 0].tolist()) == list(range(len(costs)))


@given(COSTS, st.integers(1, 8))
def test_a_round_holds_neighbours_in_cost_and_totals_differ_by_one_micro_batch_at_most(
    costs: list[float], num_ranks: int
) -> None:
    rounds = balance(costs, num_ranks)
    dealt = np.where(rounds < 0, 0.0, np.array([*costs, 0.0])[rounds])
    by_cost = dealt[np.argsort(-dealt.sum(axis=1), kind="stable")]
    assert (by_cost[1:].max(axis=1) <= by_cost[:-1].min(axis=1)).all()
    assert np.ptp(dealt.sum(axis=0)) <= max(costs, default=0.0) * (1 + 1e-9)


@given(COSTS)
def test_one_process_has_all_of_them_in_their_order(costs: list[float]) -> None:
    assert balance(costs, 1)[:, 0].tolist() == list(range(len(costs)))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 8), st.integers(50, 120))
def test_bins_are_split_until_every_process_has_as_many_and_keep_the_budget(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    tokens = np.array(lengths, dtype=np.int64)
    packed = pack(tokens, budget)
    bins = spread(packed, tokens, num_ranks)
    assert all(tokens[rows].sum() <= budget for rows in bins)
    assert sorted(row for rows in bins for row in rows) == np.flatnonzero(tokens).tolist()
    assert len(bins) % num_ranks == 0 or all(len(rows) == 1 for rows in bins)
    assert len(packed) <= len(bins) < len(packed) + num_ranks
    if num_ranks == 1:
        assert [rows.tolist() for rows in bins] == [rows.tolist() for rows in packed]


def test_a_deep_token_costs_more_than_a_shallow_one() -> None:
    deep, shallow = ([1] * 40, [2], [True]), ([1] * 20, [2], [True])
    one, two = (forests_of(make_batch(rows))[0] for rows in ([deep], [shallow, shallow]))
    assert one.num_tokens == two.num_tokens == 40
    assert cost(one) == 40 + 780 / 16384 > cost(two)


LOSSES: list[dict[str, Any]] = [
    {"policy_loss_type": name, "tis_ratio_type": None} for name in POLICY_LOSS.built_in
]
LOSSES += [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "entropy_loss_coef": 0.1},
    {"sequence_mask_metric": "product", "outlier_token_is_threshold_high": 100.0},
    {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 10.0},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: "-".join(map(str, s.values())))
def test_a_filler_changes_no_number_of_an_update(settings: dict[str, Any]) -> None:
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


def test_a_filler_gives_every_parameter_a_gradient_of_zero() -> None:
    policy, critic = tiny_policy(tie_word_embeddings=False), Critic(tiny_llama())
    logprobs, entropy = policy(FILLER, torch.ones(0))
    critic(FILLER).sum().backward()
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    trained = [*policy.parameters(), *critic.trained_parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in trained)
