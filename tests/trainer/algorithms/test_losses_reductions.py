"""Reductions and KL estimates against arithmetic by hand, and SkyRL's own functions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.losses_helpers import REFERENCE, reference_targets, tensor
from trainer.algorithms.kl import adapted_kl_coef, kl_estimates, rewards_less_kl
from trainer.algorithms.reductions import Units, reduction_weights
from trainer.config.functions import LOSS_REDUCTION, bind
from trainer.config.sections import LossConfig

REDUCTIONS = (
    "token_mean",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "trajectory_mean",
    "token_mean_legacy",
)


def weights(reduction, row, trajectory_of, group_of):
    """Weights of targets in these rows; a row's trajectory, a trajectory's group. Micro-batches are
    of two rows."""
    rows = np.array(row, dtype=np.int64)
    trajectory = np.array(trajectory_of)[rows]
    units = Units(
        row=rows,
        num_rows=len(trajectory_of),
        trajectory=trajectory,
        num_trajectories=len(group_of),
        group=np.array(group_of)[trajectory],
        num_groups=max(group_of) + 1,
        micro_batch=rows // 2,
        num_micro_batches=(len(trajectory_of) + 1) // 2,
    )
    return reduction_weights(
        units, bind(LOSS_REDUCTION, LossConfig(reduction=reduction, max_seq_len=100))
    )


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 6] * 6),
        ("sequence_mean", [1 / 4 / 2, 1 / 4 / 2, 1 / 4, 1 / 4 / 3, 1 / 4 / 3, 1 / 4 / 3]),
        ("seq_mean_token_sum_norm", [1 / 400] * 6),
        ("prompt_mean", [1 / 2 / 3] * 3 + [1 / 2 / 3] * 3),
        ("trajectory_mean", [1 / 3 / 3] * 3 + [1 / 3 / 3] * 3),
        ("token_mean_legacy", [1 / 2 / 3] * 3 + [1 / 2 / 3] * 3),
    ],
)
def test_weights_of_four_rows_of_three_trajectories(reduction, expected):
    # rows 0 and 1 are trajectory 0 of group 0; row 2 is 1_0; row 3, nothing of which trains, is 1_1
    found = weights(reduction, [0, 0, 1, 2, 2, 2], [0, 0, 1, 2], [0, 1, 1])
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_targets_have_no_weights(reduction):
    assert weights(reduction, [], [0], [0]).shape == (0,)


@pytest.mark.parametrize("reduction", ["token_mean", "prompt_mean", "trajectory_mean"])
@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_splitting_trajectories_into_rows_changes_no_weight(reduction, row):
    trajectory_of, group_of = [0, 0, 1, 1, 1, 2], [0, 0, 1]
    merged = [trajectory_of[r] for r in row]
    expected = weights(reduction, merged, [0, 1, 2], group_of)
    assert weights(reduction, row, trajectory_of, group_of) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["sequence_mean", "seq_mean_token_sum_norm"])
def test_splitting_trajectories_into_rows_changes_weights_of_row_means(reduction):
    split = weights(reduction, [0, 0, 1], [0, 0], [0])
    assert split != pytest.approx(weights(reduction, [0, 0, 0], [0], [0]))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_means_weigh_one_in_all_where_everything_trains(reduction, extra):
    found = weights(reduction, [*range(6), *extra], [0, 0, 1, 1, 1, 2], [0, 0, 1])
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("reduction", REFERENCE["reductions"])
def test_weights_are_those_of_the_reference(reduction):
    mask = torch.tensor(REFERENCE["inputs"]["mask"]).bool()
    mask[1] = False
    row = mask.nonzero()[:, 0].tolist()
    found = weights(reduction, row, [0, 1, 2, 3], [0, 0, 1, 1])
    expected = torch.tensor(REFERENCE["reductions"][reduction])[mask]
    assert found == pytest.approx(expected.numpy(), rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_estimates_are_those_of_the_reference(estimator):
    x, mask = reference_targets()
    found = kl_estimates(x.logprobs.detach(), x.rollout_logprobs, estimator)
    expected = torch.tensor(REFERENCE["kl"][estimator], dtype=torch.float64)[mask]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(st.floats(-5, -0.01), st.floats(-5, -0.01))
def test_kl_gradients_are_those_of_the_formulas(logprob, ref_logprob):
    d = logprob - ref_logprob
    slopes = {
        "k1": 1.0,
        "abs": math.copysign(1.0, d) if d else 0.0,
        "k2": d,
        "k3": 1 - math.exp(-d),
    }
    for name, slope in slopes.items():
        now = tensor(logprob).requires_grad_()
        value = kl_estimates(now, tensor(ref_logprob), name)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(value.sum(), now)
        beyond = name == "k3" and math.exp(-d) + d - 1 > 10
        assert gradient.item() == pytest.approx(0.0 if beyond else slope, abs=1e-12)


def test_k3_and_k1_have_the_divergence_as_their_mean():
    policy, reference = tensor(0.2, 0.5, 0.3).log(), tensor(0.4, 0.4, 0.2).log()
    divergence = float((policy.exp() * (policy - reference)).sum())
    for name in ("k1", "k3"):
        estimates = kl_estimates(policy, reference, name)  # type: ignore[arg-type]
        assert float((policy.exp() * estimates).sum()) == pytest.approx(divergence, rel=1e-12)


def test_k3_is_bounded():
    assert kl_estimates(tensor(-50.0, 0.0), tensor(0.0, -50.0), "k3").tolist() == [10.0, 10.0]


def test_rewards_less_kl_ignores_a_negative_coefficient():
    assert rewards_less_kl(tensor(1.0, 0.0), tensor(2.0, -1.0), 0.5).tolist() == [0.0, 0.5]
    assert rewards_less_kl(tensor(1.0), tensor(2.0), -1.0).tolist() == [1.0]


def test_adapted_kl_coef_follows_the_target_by_at_most_a_fifth():
    settings = {"target": 3.0, "num_sequences": 50, "horizon": 100}
    assert adapted_kl_coef(0.1, kl=2.7, **settings) == pytest.approx(REFERENCE["adapted_kl_coef"])
    assert adapted_kl_coef(0.1, kl=3.0, **settings) == 0.1
    assert adapted_kl_coef(0.1, kl=99.0, **settings) == pytest.approx(0.11)
    assert adapted_kl_coef(0.1, kl=0.0, **settings) == pytest.approx(0.09)
