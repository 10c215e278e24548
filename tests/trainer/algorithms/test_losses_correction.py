"""Importance weights and masks against arithmetic by hand, and SkyRL's own functions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.losses_helpers import REFERENCE, SETTINGS, policy_loss, reference_targets, tensor
from trainer.algorithms.correction import bounds, correct, row_ratios, token_weights
from trainer.config.functions import POLICY_LOSS, bind
from trainer.config.sections import LossConfig

ROW = torch.tensor([0, 0, 1, 1, 2])
RATIOS = (1.0, 4.0, 0.5, 0.5, 3.0)
"""Products 4, 0.25, 3; geometric means 2, 0.5, 3."""

MASKS = [
    {"outlier_token_is_threshold_high": 3.5},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0},
    {"token_mask_is_threshold_low": 0.4, "token_mask_is_threshold_high": 3.5},
    {"sequence_mask_metric": "product", "product_mask_low": 0.3, "product_mask_high": 3.5},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.4, "geo_mask_high": 2.5},
]

KEPT = [(0, 0, 1, 1, 1), (0, 0, 1, 1, 0), (1, 0, 1, 1, 1), (0, 0, 0, 0, 1), (1, 1, 1, 1, 0)]


def corrected(ratios, row, **settings):
    c = LossConfig(**{"tis_ratio_type": None} | settings)
    return correct(tensor(*ratios).log(), torch.zeros(len(ratios), dtype=torch.float64), row, c)


def test_token_weights_are_truncated_above_only():
    found = token_weights(tensor(0.0, 1.0, -3.0, -50.0), 2.0)
    expected = tensor(1.0, 2.0, math.exp(-3), math.exp(-20))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_token_weights_are_on_by_default():
    c = LossConfig()
    found = correct(tensor(*RATIOS).log(), torch.zeros(5, dtype=torch.float64), ROW, c)
    torch.testing.assert_close(found.weights, tensor(1.0, 2.0, 0.5, 0.5, 2.0))
    assert found.per_target["tis_token_clip_high_ratio"].double().mean().item() == 0.4


@pytest.mark.parametrize(("settings", "weights"), list(zip(MASKS, KEPT, strict=True)))
def test_masks_leave_out_whole_rows_or_single_tokens(settings, weights):
    assert corrected(RATIOS, ROW, **settings).weights.tolist() == list(weights)


def test_a_rows_weight_is_its_product_capped():
    found = corrected(RATIOS, ROW, tis_ratio_type="sequence", sequence_tis_ratio_clip_high=3.5)
    torch.testing.assert_close(found.weights, tensor(3.5, 3.5, 0.25, 0.25, 3.0))
    assert found.per_row["tis_seq_clip_high_ratio"].tolist() == [True, False, False]


def test_products_are_of_the_tokens_that_the_masks_before_kept():
    masks = {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 3.5}
    found = corrected(RATIOS, ROW, tis_ratio_type="sequence", **masks)
    torch.testing.assert_close(found.weights, tensor(1.0, 0.0, 0.25, 0.25, 3.0))


def test_a_row_that_keeps_nothing_has_ratio_one():
    nothing = torch.tensor([False, False])
    for metric in ("product", "geometric"):
        found = row_ratios(tensor(3.0, 1.0), nothing, torch.tensor([0, 0]), metric)  # type: ignore[arg-type]
        assert found.tolist() == [1.0]


def test_a_bound_itself_is_inside():
    assert bounds(tensor(0.5, 2.0, 0.4, 2.1), 0.5, 2.0).inside.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert bounds(tensor(0.1, 9.0), None, None).inside.all()


def test_no_gradient_flows_through_a_correction():
    old = tensor(-1.0, -2.0).requires_grad_()
    found = correct(old, tensor(-1.5, -1.0), torch.tensor([0, 0]), LossConfig())
    assert not found.weights.requires_grad


@pytest.mark.parametrize("name", REFERENCE["corrections"])
def test_correction_loss_gradient_and_metrics_are_those_of_the_reference(name):
    wanted, (x, mask) = REFERENCE["corrections"][name], reference_targets()
    c = LossConfig(**SETTINGS | wanted["settings"])
    found = correct(x.old_logprobs, x.rollout_logprobs, x.row, c)
    loss = (policy_loss(x, bind(POLICY_LOSS, c)).losses * found.weights).sum()
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, x.logprobs)
    expected = torch.tensor(wanted["gradient"], dtype=torch.float64)[mask]
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    metrics = {k: v.double().mean().item() for k, v in (found.per_target | found.per_row).items()}
    reference = {
        k: v for k, v in wanted["metrics"].items() if not k.startswith(("is_ratio", "clip"))
    }
    assert {k: v for k, v in metrics.items() if k != "is_ratio"} == pytest.approx(reference)
    assert metrics["is_ratio"] == pytest.approx(wanted["metrics"]["is_ratio_mean"])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 50), st.integers(0, 3)), min_size=1, max_size=12))
def test_rows_are_corrected_on_their_own(targets):
    ratios = tuple(ratio for ratio, _ in targets)
    _, row = torch.tensor([number for _, number in targets]).unique(return_inverse=True)
    settings = {"tis_ratio_type": "sequence"} | MASKS[0] | MASKS[2] | MASKS[4]
    together = corrected(ratios, row, **settings).weights
    for number in row.unique():
        inside = row == number
        few = tuple(r for r, i in zip(ratios, inside.tolist(), strict=True) if i)
        alone = corrected(few, torch.zeros(len(few), dtype=torch.int64), **settings).weights
        torch.testing.assert_close(together[inside], alone, rtol=1e-12, atol=0)
