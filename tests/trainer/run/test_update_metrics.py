"""What a run says about its sampler's log-probabilities, and why they are not its own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trainer_helpers import (
    VOCAB,
    forests_of,
    make_batch,
    plain_logprobs,
    run_of,
    tiny_policy,
)
from trainer.run.metrics import agreement
from trainer.run.warnings import LARGE_DIFFERENCE_NATS, sampler_mismatch

ROWS = [([i, i + 1], [(7 * i + 3 * j) % VOCAB for j in range(12)], [True] * 12) for i in range(4)]


def batch_of(rollout_logprobs, temperature=None):
    """The rows with a sampler's [T] log-probabilities."""
    sizes = [len(response) for _, response, _ in ROWS]
    parts = [part.tolist() for part in rollout_logprobs.split(sizes)]
    temperatures = [temperature] * len(ROWS)
    return make_batch(ROWS, rollout_logprobs=parts, temperatures=temperatures)


def cause_of(rollout_logprobs, temperature=None):
    """What is said of a sampler that gave these [T] log-probabilities."""
    batch = batch_of(rollout_logprobs, temperature)
    return sampler_mismatch(run_of(tiny_policy()), batch, forests_of(batch))


def own(temperature=1.0):
    return plain_logprobs(tiny_policy().model, ROWS, [temperature] * len(ROWS)).detach()


def moved(values, by):
    """Within each row of 12."""
    return values.view(len(ROWS), 12).roll(by, dims=1).flatten()


def test_metrics_of_literal_differences():
    found = agreement(torch.tensor([0.0, 0.0, -0.5, 0.1], dtype=torch.float64))
    assert found["rollout_logprobs_diff_mean"] == pytest.approx(-0.1)
    assert found["rollout_logprobs_abs_diff_mean"] == pytest.approx(0.15)
    assert found["rollout_logprobs_abs_diff_p50"] == pytest.approx(0.05)
    assert found["rollout_logprobs_abs_diff_max"] == pytest.approx(0.5)
    ratios = [1.0, 1.0, math.exp(-0.5), math.exp(0.1)]
    effective = sum(ratios) ** 2 / (4 * sum(r * r for r in ratios))
    assert found["is_effective_share"] == pytest.approx(effective)


def test_unknown_log_probabilities_and_no_tokens_give_no_metrics():
    assert agreement(torch.zeros(0)) == {}
    assert agreement(torch.tensor([0.1, math.nan])) == {}


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=50))
def test_effective_share_is_between_one_token_and_all(differences):
    found = agreement(torch.tensor(differences, dtype=torch.float64))
    assert 1 / len(differences) - 1e-9 <= found["is_effective_share"] <= 1 + 1e-9
    percentiles = [found[f"rollout_logprobs_abs_diff_p{p}"] for p in (50, 90, 99)]
    edges = [found[f"rollout_logprobs_abs_diff_{name}"] for name in ("min", "max")]
    assert np.all(np.diff([edges[0], *percentiles, edges[1]]) >= -1e-9)


@pytest.mark.parametrize(("by", "which"), [(1, "previous"), (-1, "next")])
def test_log_probabilities_of_neighbouring_tokens_are_recognised(by, which):
    assert f"shifted by one: each belongs to the {which} token" in (
        cause_of(moved(own(), by)) or ""
    )


@pytest.mark.parametrize(
    ("sampled", "recorded", "said"),
    [
        (0.5, None, "are at temperature 0.5, but the rows record 1"),
        (1.0, 0.5, "are at temperature 1, but the rows record 0.5"),
        (0.7, 1.5, "are at temperature 0.7, but the rows record 1.5"),
    ],
)
def test_another_temperature_is_recognised(sampled, recorded, said):
    assert said in (cause_of(own(sampled), recorded) or "")


def test_other_weights_are_what_is_left():
    other = plain_logprobs(tiny_policy(seed=1).model, ROWS).detach()
    assert "the weights differ from the sampler's" in (cause_of(other) or "")


def test_log_probabilities_of_the_policy_and_small_noise_are_no_mismatch():
    assert cause_of(own()) is None
    assert cause_of(own() + 0.2 * torch.tensor([1, -1]).repeat(24)) is None


def test_a_shift_that_changes_little_is_recognised_too():
    shifted = moved(own(8.0), 1)
    assert (own(8.0) - shifted).abs().mean() < LARGE_DIFFERENCE_NATS
    assert "each belongs to the previous token" in (cause_of(shifted, 8.0) or "")


def test_rows_without_log_probabilities_are_not_compared():
    batch = make_batch(ROWS)
    assert sampler_mismatch(run_of(tiny_policy()), batch, forests_of(batch)) is None


def test_the_comparison_draws_no_random_numbers():
    batch, run = batch_of(moved(own(), 1)), run_of(tiny_policy())
    state = torch.get_rng_state()
    assert sampler_mismatch(run, batch, forests_of(batch))
    assert torch.equal(torch.get_rng_state(), state)
