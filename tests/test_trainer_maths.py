"""Advantages and losses against arithmetic written out by hand, in float64."""

import math

import pytest
import torch

from trainer.losses import clipped_policy_loss, is_clipped, tis_weights, token_mean

CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
