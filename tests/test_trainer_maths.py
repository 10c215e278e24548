"""Advantages and losses against arithmetic written out by hand, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import grpo
from trainer.losses import clipped_policy_loss, is_clipped, tis_weights, token_mean

CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 2, squares 4 + 0 + 4, sample variance 8 / 2 = 4, std 2
    advantages = grpo(np.array([0.0, 2.0, 4.0]), np.array([0, 0, 0]))
    assert advantages == pytest.approx([-2 / 2.000001, 0.0, 2 / 2.000001], rel=1e-12)


def test_grpo_of_the_documented_example_without_std() -> None:
    advantages = grpo(np.array([1.0, 0.0, 3.0]), np.array([0, 0, 1]), normalize_by_std=False)
    assert advantages.tolist() == [0.5, -0.5, 3.0]


def test_grpo_of_a_group_of_one_is_its_return() -> None:
    assert grpo(np.array([3.0]), np.array([0])) == pytest.approx([3.0 / 1.000001], rel=1e-12)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_grpo_of_equal_returns_is_exactly_zero(*, normalize_by_std: bool) -> None:
    advantages = grpo(np.full(3, 0.1), np.zeros(3, int), normalize_by_std=normalize_by_std)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=20))
def test_grpo_of_a_group_of_several_sums_to_zero_and_ignores_other_groups(
    trajectories: list[tuple[float, int]],
) -> None:
    returns = np.array([r for r, _ in trajectories])
    _, group = np.unique([g for _, g in trajectories], return_inverse=True)
    advantages = grpo(returns, group)
    for number in range(group.max() + 1):
        inside = group == number
        alone = grpo(returns[inside], np.zeros(inside.sum(), int))
        assert advantages[inside] == pytest.approx(alone)
        if inside.sum() > 1:
            assert advantages[inside].sum() == pytest.approx(0, abs=1e-9)


def test_clipped_policy_loss_of_every_branch() -> None:
    ratio = tensor(1.0, 1.5, 1.5, 0.5, 0.5, 1.25)
    advantages = tensor(2.0, 2.0, -2.0, 2.0, -2.0, 1.0)
    loss = clipped_policy_loss(ratio.log(), tensor(*[0.0] * 6), advantages, **CLIP)
    # -min(r A, clip(r, 0.8, 1.3) A)
    expected = tensor(-2.0, -2.6, 3.0, -1.0, 1.6, -1.25)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_no_gradient_flows_exactly_where_the_clipped_term_is_smaller() -> None:
    logprobs = tensor(1.0, 1.5, 1.5, 0.5, 0.5, 1.25).log().requires_grad_()
    old, advantages = tensor(*[0.0] * 6), tensor(2.0, 2.0, -2.0, 2.0, -2.0, 1.0)
    (gradient,) = torch.autograd.grad(
        clipped_policy_loss(logprobs, old, advantages, **CLIP).sum(), logprobs
    )
    assert is_clipped(logprobs, old, advantages, **CLIP).tolist() == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    # -A r where it flows
    torch.testing.assert_close(gradient, tensor(-2.0, 0.0, 3.0, -1.0, 0.0, -1.25))


def test_first_update_has_the_policy_gradient() -> None:
    logprobs = tensor(-0.5, -2.0).requires_grad_()
    loss = clipped_policy_loss(logprobs, logprobs.detach(), tensor(3.0, -1.0), **CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == [-3.0, 1.0]


def test_ratio_stays_finite_for_impossible_tokens() -> None:
    loss = clipped_policy_loss(tensor(0.0), tensor(-1e4), tensor(-1.0), **CLIP)
    assert loss.item() == pytest.approx(math.exp(20))


def test_tis_weights_are_ratios_to_the_sampler_capped_above_only() -> None:
    old, rollout = tensor(0.0, 1.0, -3.0, -50.0), tensor(0.0, 0.0, 0.0, 0.0)
    weights = tis_weights(old.requires_grad_(), rollout, 2.0)
    expected = tensor(1.0, 2.0, math.exp(-3), math.exp(-20))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
    assert not weights.requires_grad


def test_token_mean_of_micro_batches_adds_up_to_the_mean_over_the_mini_batch() -> None:
    parts = (
        token_mean(tensor(1.0, 2.0), 4) + token_mean(tensor(3.0), 4) + token_mean(tensor(6.0), 4)
    )
    assert parts.item() == 3.0


def test_token_mean_of_nothing_is_zero() -> None:
    assert token_mean(tensor(), 0).item() == 0.0
