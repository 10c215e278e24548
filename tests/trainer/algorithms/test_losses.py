"""Policy losses against the literal formula, token by token in float64, and SkyRL's own functions."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.helpers.losses_helpers import (
    REFERENCE,
    SETTINGS,
    policy_loss,
    reference_targets,
    targets,
    tensor,
)
from trainer.algorithms.losses import (
    Targets,
    clip_cov_selection,
    covariances,
    dppo,
    kl_cov_selection,
    row_sums,
)
from trainer.config.functions import POLICY_LOSS, bind
from trainer.config.sections import LossConfig


def clip(x, low, high):
    return x.clamp(low, high) if isinstance(x, Tensor) else min(max(x, low), high)


def literal(name, t, x, c):
    """Loss of target t as papers write it: stop-gradients are Python floats."""
    logp, a = x.logprobs[t], float(x.advantages[t])
    now, old, roll = (
        float(v[t]) for v in (x.logprobs.detach(), x.old_logprobs, x.rollout_logprobs)
    )
    ratio = (logp - old).exp()
    low, high = 1 - c.eps_clip_low, 1 + c.eps_clip_high
    ppo = -torch.minimum(ratio * a, clip(ratio, low, high) * a)
    p, q = math.exp(now), math.exp(roll)
    match name:
        case "regular":
            return ppo
        case "dual_clip":
            return torch.minimum(ppo, tensor(-c.clip_ratio_c * a)[0]) if a < 0 else ppo
        case "gspo":
            same = [i for i in range(len(x.row)) if x.row[i] == x.row[t]]
            mean = sum(float(x.logprobs[i].detach() - x.old_logprobs[i]) for i in same) / len(same)
            s = min(math.exp(mean), math.exp(10)) * (logp - now).exp()
            return -torch.minimum(s * a, clip(s, low, high) * a)
        case "cispo":
            anchor = roll if c.cispo_anchor == "rollout" else old
            bounds = 1 - c.cispo_eps_clip_low, 1 + c.cispo_eps_clip_high
            return -clip(math.exp(now - anchor), *bounds) * a * logp
        case "sapo":
            tau = c.sapo_tau_pos if a > 0 else c.sapo_tau_neg
            return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a
        case "rollout_is":
            return -(p / q if low < p / q < high else 0.0) * a * logp
        case "dppo":
            others = math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            kl = q * (roll - now) + (1 - q) * others
            size = abs(p - q) if c.dppo_type == "binary_tv" else kl
            up = a > 0 and p > q and size > c.dppo_delta_high
            down = a < 0 and p < q and size > c.dppo_delta_low
            return (logp - roll).exp() * (0.0 if up or down else -a)
        case "clip_cov":
            return ppo * (0.0 if x.selected[t] else 1.0)
        case "kl_cov":
            return -ratio * a + (c.ppo_kl_coef * (logp - old).abs() if x.selected[t] else 0.0)
        case "importance_sampling":
            return -ratio * a
        case _:
            return -logp


LOSSES = [
    ("regular", {}),
    ("dual_clip", {}),
    ("gspo", {}),
    ("cispo", {}),
    ("cispo", {"cispo_anchor": "rollout"}),
    ("sapo", {}),
    ("rollout_is", {}),
    ("dppo", {}),
    ("dppo", {"dppo_type": "binary_kl", "dppo_delta_low": 0.05, "dppo_delta_high": 0.03}),
    ("clip_cov", {}),
    ("kl_cov", {"ppo_kl_coef": 0.7}),
    ("importance_sampling", {}),
    ("cross_entropy", {}),
]


@pytest.mark.parametrize(("name", "settings"), LOSSES)
@settings(deadline=None)
@given(x=targets())
def test_loss_and_gradient_are_those_of_the_literal_formula(name, settings, x):
    c = LossConfig(policy_loss_type=name, **SETTINGS | settings)
    losses = policy_loss(x, bind(POLICY_LOSS, c)).losses
    expected = torch.stack([literal(name, t, x, c) for t in range(len(x.logprobs))])
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    found, wanted = (
        torch.autograd.grad(v.sum(), x.logprobs, allow_unused=True)[0] for v in (losses, expected)
    )
    near_a_kink = _near_a_kink(x, c)
    torch.testing.assert_close(found[~near_a_kink], wanted[~near_a_kink], rtol=1e-9, atol=1e-12)


def _near_a_kink(x, c):
    """Where two one-sided gradients differ, either is right."""
    mean = row_sums(x.logprobs - x.old_logprobs, x.row) / row_sums(
        torch.ones_like(x.logprobs), x.row
    ).clamp(min=1)
    ratios = (x.logprobs - x.old_logprobs).exp(), mean[x.row].exp()
    kinks = (1 - c.eps_clip_low, 1 + c.eps_clip_high, c.clip_ratio_c, 1.0)
    return torch.stack([(r - k).abs() < 1e-9 for r in ratios for k in kinks]).any(0)


@pytest.mark.parametrize("name", REFERENCE["losses"])
def test_loss_gradient_and_clip_ratio_are_those_of_the_reference(name):
    wanted, x, mask = REFERENCE["losses"][name], *reference_targets(name)
    c = LossConfig(policy_loss_type=name.split()[0], **SETTINGS | wanted["settings"])
    found = policy_loss(x, bind(POLICY_LOSS, c))
    assert found.losses.sum().item() == pytest.approx(wanted["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(found.losses.sum(), x.logprobs)
    expected = torch.tensor(wanted["gradient"], dtype=torch.float64)
    assert expected[~mask].abs().sum() == 0
    torch.testing.assert_close(gradient, expected[mask], rtol=1e-6, atol=1e-9)
    if name in ("dual_clip", "importance_sampling"):  # the reference does not count its own cap
        return
    assert float(found.clipped.double().mean()) == pytest.approx(wanted["metrics"]["clip_ratio"])


@pytest.mark.parametrize("change", [0.25, -0.25])
def test_dppo_masks_no_target_at_its_bound_or_without_an_advantage(change):
    now, roll = tensor(0.5 + change).log(), tensor(0.5).log()
    size = float((now.exp() - roll.exp()).abs())

    def is_masked(advantage, delta):
        deltas = {"dppo_delta_low": delta, "dppo_delta_high": delta}
        return bool(dppo(now, roll, tensor(advantage), dppo_type="binary_tv", **deltas).clipped)

    assert is_masked(change, size / 2)
    assert not is_masked(change, size)
    assert not is_masked(0.0, size / 2)


@pytest.mark.parametrize("name", ["regular", "dual_clip", "clip_cov"])
@settings(deadline=None)
@given(x=targets())
def test_clipped_targets_are_exactly_those_without_gradient(name, x):
    c = LossConfig(policy_loss_type=name, **SETTINGS)
    losses, clipped, _ = policy_loss(x, bind(POLICY_LOSS, c))
    (gradient,) = torch.autograd.grad(losses.sum(), x.logprobs)
    moving, kink = x.advantages.abs() > 1e-6, _near_a_kink(x, c)
    if name == "clip_cov":
        assert not gradient[clipped].any()
    else:
        assert ((gradient == 0) == clipped)[moving & ~kink].all()


@pytest.mark.parametrize(("name", "settings"), LOSSES)
def test_impossible_tokens_give_finite_losses_and_no_targets_none(name, settings):
    c = LossConfig(policy_loss_type=name, **SETTINGS | settings)
    for values in (tensor(0.0, -1e4), tensor()):
        n = len(values)
        x = Targets(
            logprobs=values.clone().requires_grad_(),
            old_logprobs=values.flip(0),
            rollout_logprobs=values.flip(0),
            advantages=-torch.ones(n, dtype=torch.float64),
            row=torch.zeros(n, dtype=torch.int64),
            selected=torch.zeros(n, dtype=torch.bool),
        )
        losses, clipped, _ = policy_loss(x, bind(POLICY_LOSS, c))
        assert losses.isfinite().all()
        assert losses.shape == clipped.shape == (n,)


def test_covariances_are_products_of_what_is_left_of_the_means():
    found = covariances(tensor(1.0, -1.0, 3.0), tensor(-1.0, -2.0, -3.0))
    assert found.tolist() == [0.0, 0.0, -2.0]
    assert covariances(tensor(5.0), tensor(-1.0)).tolist() == [0.0]


def test_clip_cov_draws_its_share_of_the_candidates_alone():
    covariance = torch.linspace(0, 6, 600, dtype=torch.float64)
    clipped = torch.arange(600) % 2 == 0
    torch.manual_seed(0)
    drawn = clip_cov_selection(covariance, clipped, ratio=0.05, low=1.0, high=5.0)
    assert drawn.sum() == 30
    assert ((covariance > 1) & (covariance < 5) & ~clipped)[drawn].all()
    again = clip_cov_selection(covariance, clipped, ratio=0.05, low=1.0, high=5.0)
    assert (again != drawn).any()
    assert clip_cov_selection(covariance, clipped, ratio=0.0, low=1.0, high=5.0).sum() == 1
    assert clip_cov_selection(covariance, clipped, ratio=1.0, low=7.0, high=8.0).sum() == 0


def test_kl_cov_takes_the_greatest_and_of_equals_the_first():
    covariance = tensor(0.0, 2.0, 1.0, 2.0, 2.0)
    chosen = kl_cov_selection(covariance, fraction=0.5)
    assert chosen.tolist() == [False, True, False, True, False]
    assert kl_cov_selection(tensor(1.0, 1.0), fraction=0.0).tolist() == [True, False]
    # From 17 elements on, sorts that are not stable change the order of equal ones.
    equal = kl_cov_selection(torch.ones(64), fraction=0.25)
    assert equal.tolist() == [True] * 16 + [False] * 48
    assert kl_cov_selection(tensor(), fraction=0.5).tolist() == []
