"""The gradient of a mini-batch does not depend on how it was cut up, and is the right one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.padded import padded_step
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import (
    VOCAB,
    forests_of,
    gradient_of_update,
    gradients,
    make_batch,
    plain_logprobs,
    relative_difference,
    row_lists,
    run_of,
    tiny_policy,
    update_with,
)
from trainer.loss import policy_logprobs
from trainer.models.layers import recompute_layers


def random_values(rows, seed):
    rng = np.random.default_rng(seed)
    return {
        "advantages": rng.normal(size=len(rows)).tolist(),
        "temperatures": rng.uniform(0.5, 2.0, len(rows)).tolist(),
        "rollout_logprobs": [(-rng.exponential(2.0, len(r[1]))).tolist() for r in rows],
    }


def naive_loss(policy, rows, values, old):
    """The same loss by full logits, one row at a time, token by token."""
    logprobs = plain_logprobs(policy.model, rows, values["temperatures"])
    total, count, at = torch.zeros(()), 0, 0
    for r, (_, response, mask) in enumerate(rows):
        for t in range(len(response)):
            lp, advantage = logprobs[at + t], values["advantages"][r]
            before = float(lp.detach()) if old is None else float(old[at + t])
            if mask[t]:
                ratio = (lp - before).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                weight = min(math.exp(before - values["rollout_logprobs"][r][t]), 2.0)
                total, count = total - surrogate * weight, count + 1
        at += len(response)
    return total / count


@settings(max_examples=examples(15), deadline=None)
@given(row_lists(), st.integers(0, 2**31), st.sampled_from(["first", "later"]))
def test_gradient_is_that_of_the_naive_full_logits_loss(rows, seed, which):
    policy, values = tiny_policy(chunk=2), random_values(rows, seed)
    batch = make_batch(rows, **values)
    old = None
    if which == "later":
        generator = torch.Generator().manual_seed(seed)
        old = plain_logprobs(policy.model, rows, values["temperatures"]).detach()
        old = old + 0.3 * torch.randn(old.shape, generator=generator)
    found = gradient_of_update(policy, batch, budget=16, old=old, corrects=True)
    policy.zero_grad()
    naive_loss(policy, rows, values, old).backward()
    expected = gradients(policy)
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-4 * float(expected.norm()) + 1e-9
    )


def test_packing_order_and_recomputed_layers_change_nothing():
    rng = np.random.default_rng(3)
    rows = [
        (rng.integers(0, VOCAB, p).tolist(), rng.integers(0, VOCAB, r).tolist(), [True] * r)
        for p, r in rng.integers(1, 9, (6, 2))
    ]
    values = random_values(rows, 4)
    reference = gradient_of_update(tiny_policy(), make_batch(rows, **values), corrects=True)
    order = rng.permutation(6)
    shuffled = {name: [found[i] for i in order] for name, found in values.items()}
    policy, batch = tiny_policy(chunk=3), make_batch([rows[i] for i in order], **shuffled)
    recompute_layers(policy.model)
    found = gradient_of_update(policy, batch, budget=20, corrects=True)
    assert relative_difference(found, reference) < 1e-4


def test_gradient_is_that_of_a_loop_over_padded_rows():
    rng = np.random.default_rng(5)
    rows = [
        (rng.integers(0, VOCAB, p).tolist(), rng.integers(0, VOCAB, r).tolist(), [True] * r)
        for p, r in rng.integers(1, 9, (6, 2))
    ]
    batch, policy = make_batch(rows, advantages=rng.normal(size=6).tolist()), tiny_policy()
    found = gradient_of_update(policy, batch, budget=20)
    policy.model.set_attn_implementation("sdpa")
    policy.zero_grad()
    assert padded_step(policy.model, batch, budget=20) > sum(len(p) + len(r) for p, r, _ in rows)
    assert relative_difference(found, gradients(policy)) < 1e-4


def test_old_logprobs_of_the_unmoved_policy_are_its_own():
    rows = [([1, 2], [3, 4], [True, True]), ([5], [6, 7], [True, False])]
    policy, batch = tiny_policy(), make_batch(rows, temperatures=[0.7, None])
    forests = forests_of(batch)
    old = policy_logprobs(run_of(policy), batch, forests)
    expected = plain_logprobs(policy.model, rows, [0.7, 1.0]).detach()
    torch.testing.assert_close(old[:3], expected[:3], rtol=1e-4, atol=1e-5)
    assert old[3].isnan()
    assert not old.requires_grad
    with_pass = gradient_of_update(policy, batch, old=old)
    without = gradient_of_update(policy, batch)
    assert relative_difference(with_pass, without) < 1e-5


def test_metrics_are_means_over_trained_tokens():
    rows = [([1, 2], [3, 4], [True, False]), ([5], [6, 7], [True, True])]
    policy = tiny_policy()
    own = plain_logprobs(policy.model, rows).detach()
    rollout = (own - torch.tensor([math.log(4.0), 9.0, 0.0, -math.log(2.0)])).tolist()
    batch = make_batch(rows, advantages=[1.0, -1.0], rollout_logprobs=[rollout[:2], rollout[2:]])
    metrics = update_with(run_of(policy, corrects=True), batch, forests_of(batch, 2), None)
    assert metrics["num_trained_tokens"] == 3
    assert metrics["num_forwarded_tokens"] == 2 + 2
    assert metrics["is_ratio_mean"] == pytest.approx((4.0 + 1.0 + 0.5) / 3, rel=1e-4)
    assert metrics["tis_token_clip_high_ratio"] == pytest.approx(1 / 3)
    assert metrics["loss"] == pytest.approx((-2.0 + 1.0 + 0.5) / 3, rel=1e-4)
    assert metrics["clip_ratio"] == 0
    assert metrics["rollout_logprobs_abs_diff_mean"] == pytest.approx(math.log(8) / 3, rel=1e-4)
    assert metrics["rollout_logprobs_abs_diff_max"] == pytest.approx(math.log(4), rel=1e-4)


def test_clip_ratio_counts_targets_without_gradient():
    rows = [([1, 2], [3, 4], [True, True])]
    policy, batch = tiny_policy(), make_batch(rows)
    old = plain_logprobs(policy.model, rows).detach() - torch.tensor([0.5, 0.0])
    metrics = update_with(run_of(policy), batch, forests_of(batch), old)
    assert metrics["clip_ratio"] == 0.5


def test_gradient_that_is_not_finite_makes_no_step():
    rows = [([1, 2], [3, 4], [True, True])]
    policy = tiny_policy()
    before = [p.detach().clone() for p in policy.parameters()]
    batch = make_batch(rows, advantages=[math.inf])
    metrics = update_with(run_of(policy, learning_rate=1.0), batch, forests_of(batch), None)
    assert metrics["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_mini_batch_without_targets_makes_no_step():
    batch = make_batch([([1, 2], [3, 4], [False, False])])
    metrics = update_with(run_of(tiny_policy()), batch, forests_of(batch), None)
    assert (metrics["skipped"], metrics["loss"], metrics["num_trained_tokens"]) == (1, 0.0, 0)


def test_gradient_is_clipped_to_the_norm():
    batch = make_batch([([1, 2], [3, 4], [True, True])], advantages=[1e3])
    policy = tiny_policy()
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    learner = run_of(policy, max_grad_norm=0.5, learning_rate=1.0)
    metrics = update_with(learner, batch, forests_of(batch), None)
    after = torch.cat([p.detach().flatten() for p in policy.parameters()])
    assert metrics["grad_norm"] > 0.5
    assert float((before - after).norm()) == pytest.approx(0.5, rel=1e-3)
