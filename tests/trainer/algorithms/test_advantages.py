"""Advantages against arithmetic written out by hand and the literal sums, in float64."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from trainer.algorithms.advantages import (
    batch_normalize,
    discounted_returns,
    gae,
    gdpo,
    grpo,
    maxrl,
    rloo,
    whiten,
)

CENTRED = partial(grpo, normalize_by_std=False)
OUTCOME = [grpo, CENTRED, rloo, maxrl]
GROUPS = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=20)
TOKENS = st.lists(
    st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 3)), min_size=0, max_size=20
)
FACTOR = st.floats(0, 1)


@pytest.mark.parametrize("returns", [[-1.0, 0.0], [1.0, -1.0], [1.0, -0.999999], [-3.0, -1.0]])
def test_maxrl_of_negative_returns_neither_turns_its_sign_nor_blows_up(returns):
    advantages = maxrl(np.array(returns), np.zeros(2, int))
    better = np.array(returns) > np.mean(returns)
    assert (advantages > 0).tolist() == better.tolist()
    assert np.abs(advantages).max() <= 3


@pytest.mark.parametrize("estimator", OUTCOME)
@pytest.mark.parametrize("value", [0.1, 0.0, -0.3])
def test_equal_returns_are_exactly_zero(estimator, value):
    assert estimator(np.full(3, value), np.zeros(3, int)).tolist() == [0.0] * 3


@given(GROUPS)
def test_outcome_estimators_are_the_formulas_one_trajectory_at_a_time(trajectories):
    returns = np.array([r for r, _ in trajectories])
    _, group = np.unique([g for _, g in trajectories], return_inverse=True)
    estimators = {"grpo": grpo, "centred": CENTRED, "rloo": rloo, "maxrl": maxrl}
    found = {name: estimator(returns, group) for name, estimator in estimators.items()}
    for i, (value, own) in enumerate(zip(returns, group, strict=True)):
        others = [r for j, r in enumerate(returns) if group[j] == own and j != i]
        everyone = [*others, value]
        size = sum(map(abs, everyone)) / len(everyone)
        mean = sum(everyone) / len(everyone)
        deviation = (sum((r - mean) ** 2 for r in everyone) / max(len(others), 1)) ** 0.5
        expected = {
            "grpo": (value - mean) / (deviation + 1e-6),
            "centred": value - mean,
            "rloo": value - sum(others) / len(others) if others else 0.0,
            "maxrl": (value - mean) / (size + 1e-6),
        }
        for name, advantage in expected.items():
            assert found[name][i] == pytest.approx(advantage, rel=1e-6, abs=1e-6), name


PAIRS_OF_REWARDS = st.lists(
    st.tuples(st.floats(-100, 100), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 3)),
    min_size=1,
    max_size=20,
)


@given(PAIRS_OF_REWARDS, st.tuples(st.floats(-2, 2), st.floats(-2, 2)))
def test_gdpo_is_the_sum_of_the_rewards_normalised_one_by_one(trajectories, weights):
    rewards = np.array([pair for *pair, _ in trajectories])
    _, group = np.unique([g for *_, g in trajectories], return_inverse=True)
    found = gdpo(rewards, group, reward_weights=dict(zip("ab", weights, strict=True)))
    for i, own in enumerate(group):
        total = 0.0
        for k, weight in enumerate(weights):
            values = [r[k] for r, g in zip(rewards.tolist(), group, strict=True) if g == own]
            if len(values) > 1 and max(values) > min(values):
                mean = sum(values) / len(values)
                variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
                total += weight * (rewards[i][k] - mean) / (variance**0.5 + 1e-6)
        assert found[i] == pytest.approx(total, rel=1e-6, abs=1e-9)


def in_trajectories(tokens):
    tokens = sorted(tokens, key=lambda token: token[2])
    rewards, values, trajectory = (np.array(v) for v in zip(*tokens, strict=True))
    return rewards, values, trajectory


@given(TOKENS.filter(bool), FACTOR, FACTOR)
def test_gae_is_the_double_sum_over_what_follows(tokens, gamma, lam):
    rewards, values, trajectory = in_trajectories(tokens)
    found = gae(rewards, values, trajectory, gamma=gamma, lam=lam)
    for t in range(len(rewards)):
        own = [k for k in range(t, len(rewards)) if trajectory[k] == trajectory[t]]
        total = 0.0
        for k in own:
            following = values[k + 1] if k + 1 in own else 0.0
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
        assert found[t] == pytest.approx(total, rel=1e-9, abs=1e-9)


@given(TOKENS.filter(bool), FACTOR)
def test_gae_with_lambda_one_plus_its_values_are_the_discounted_returns(tokens, gamma):
    rewards, values, trajectory = in_trajectories(tokens)
    found = gae(rewards, values, trajectory, gamma=gamma, lam=1.0) + values
    expected = discounted_returns(rewards, trajectory, gamma=gamma)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20).filter(lambda v: np.ptp(v) > 1e-3))
def test_whitened_values_have_mean_zero_and_variance_one(values):
    found = whiten(np.array(values))
    assert found.mean() == pytest.approx(0, abs=1e-9)
    assert found.var(ddof=1) == pytest.approx(1, rel=0.05)
    normalized = batch_normalize(np.array(values))
    assert normalized.mean() == pytest.approx(0, abs=1e-9)
    assert normalized.var() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("values", [[], [5.0], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize("brought", [whiten, batch_normalize])
def test_nothing_one_token_or_equal_ones_are_exactly_zero(brought, values):
    assert brought(np.array(values)).tolist() == [0.0] * len(values)


REFERENCE = json.loads((ROOT / "tests/data/reference_advantages.json").read_text())


def reference(name):
    return REFERENCE["outputs"][name]


def reference_returns():
    given = REFERENCE["inputs"]
    _, group = np.unique(given["groups"], return_inverse=True)
    return np.array(given["rewards"]).sum(1), group


@pytest.mark.parametrize("name", ["grpo", "grpo_without_std", "rloo", "maxrl"])
def test_outcome_estimators_are_the_references(name):
    estimators = {
        "grpo": grpo,
        "grpo_without_std": partial(grpo, normalize_by_std=False),
        "rloo": rloo,
        "maxrl": maxrl,
    }
    # The reference takes means and deviations in float32, and gives groups of one their return.
    returns, group = reference_returns()
    shared = np.bincount(group)[group] > 1
    found = estimators[name](returns, group)
    assert found[shared] == pytest.approx(np.array(reference(name))[shared], rel=2e-6)
    assert not found[~shared].any()


def reference_tokens():
    """Rewards, values and trajectories: each row a chain of its own."""
    rewards, values = (np.array(REFERENCE["inputs"][name]) for name in ("rewards", "values"))
    return rewards.ravel(), values.ravel(), np.repeat(np.arange(len(rewards)), rewards.shape[1])


def test_token_estimators_are_the_references_where_every_token_trains():
    rewards, values, trajectory = reference_tokens()
    gamma, lam = REFERENCE["inputs"]["gamma"], REFERENCE["inputs"]["lam"]
    advantages = gae(rewards, values, trajectory, gamma=gamma, lam=lam)
    discounted = discounted_returns(rewards, trajectory, gamma=gamma)
    found = {
        "gae": whiten(advantages),
        "gae_returns": advantages + values,
        "reinforce++": whiten(discounted),
        "reinforce++_returns": discounted,
        "batch_normalized": batch_normalize(values),
    }
    for name, value in found.items():
        assert value == pytest.approx(np.ravel(reference(name)), rel=1e-12), name
