"""The critic's values, loss and updates, and the advantages a batch gets from them."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import (
    forests_of,
    make_batch,
    row_lists,
    run_of,
    save_tiny_model,
    tiny_llama,
    tiny_policy,
)
from trainer.algorithms.advantages import discounted_returns, gae, whiten
from trainer.algorithms.losses import clipped_value_loss
from trainer.loss import critic_values
from trainer.models.critic import Critic, load_critic
from trainer.run.batch_advantages import estimate_advantages
from trainer.update import update_critic

NUMBERS = st.lists(st.tuples(*[st.floats(-4, 4)] * 3), min_size=1, max_size=12)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def tiny_critic(seed=1):
    critic = Critic(tiny_llama())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        critic.value_head.weight.copy_(torch.randn(1, 32, generator=generator))
        critic.value_head.bias.fill_(0.3)
    return critic


def run_of_critic(critic, **settings_):
    return run_of(tiny_policy(), critic=critic, estimator="gae", **settings_)


def updated(run, batch, forests, old, targets):
    """An update of the critic whose old values and targets are these."""
    batch = dataclasses.replace(batch, values=old, value_targets=targets)
    return update_critic(run, batch, forests)


def plain_values(critic, rows):
    """[T] of all response tokens: one plain forward per row, the state before each token."""
    parts = []
    for prompt, response, _ in rows:
        ids = torch.tensor([prompt + response])
        output = critic.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        parts.append(critic.value_head(hidden[len(prompt) - 1 : -1])[:, 0])
    return torch.cat(parts)


@given(NUMBERS, st.floats(0.1, 2))
def test_value_loss_and_its_gradient_are_the_literal_formulas(numbers, clip):
    values, old, target = (tensor(*column) for column in zip(*numbers, strict=True))
    values.requires_grad_()
    found = clipped_value_loss(values, old, target, clip=clip)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    for i, (v, o, t) in enumerate(numbers):
        near = min(max(v, o - clip), o + clip)
        clipped, plain = (near - t) ** 2, (v - t) ** 2
        assert found[i].item() == pytest.approx(0.5 * max(clipped, plain), abs=1e-9)
        if abs(clipped - plain) > 1e-9:
            flows = plain > clipped or abs(v - o) <= clip
            assert gradient[i].item() == pytest.approx((v - t) * flows, abs=1e-9)


def test_value_loss_is_the_references():
    reference = json.loads((ROOT / "tests/data/reference_advantages.json").read_text())
    given_, found = reference["inputs"], reference["outputs"]
    old, moved, target = (
        torch.tensor(values, dtype=torch.float64)
        for values in (given_["values"], given_["moved_values"], found["gae_returns"])
    )
    clipped = clipped_value_loss(moved, old, target, clip=given_["value_clip"])
    plain = clipped_value_loss(moved, old, target, clip=None)
    assert clipped.mean().item() == pytest.approx(found["critic_loss"], rel=1e-12)
    assert plain.mean().item() == pytest.approx(found["critic_loss_unclipped"], rel=1e-12)
    fraction = (clipped > plain).double().mean().item()
    assert fraction == pytest.approx(found["values_clipfrac"], rel=1e-6)


@settings(max_examples=examples(15), deadline=None)
@given(row_lists(), st.sampled_from([16, 4096]))
def test_values_are_of_what_stands_before_each_token(rows, budget):
    critic, batch = tiny_critic(), make_batch(rows)
    values = critic_values(run_of_critic(critic), batch, forests_of(batch, budget))
    expected = plain_values(critic, rows).detach()
    at = torch.from_numpy(batch.trains)
    torch.testing.assert_close(values[at], expected[at], rtol=1e-4, atol=1e-4)
    assert values[~at].isnan().all()
    assert not values.requires_grad


@settings(max_examples=examples(15), deadline=None)
@given(row_lists(), st.integers(0, 2**31), st.sampled_from([12, 4096]))
def test_critics_gradient_is_that_of_the_mean_over_the_mini_batch(rows, seed, budget):
    critic, batch = tiny_critic(), make_batch(rows)
    expected = plain_values(critic, rows).detach()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, len(expected), generator=generator)
    old, targets = expected + 0.3 * noise[0], expected + noise[1]
    learner = run_of_critic(critic, max_grad_norm=1e9, critic_learning_rate=1e-30)
    kept = []
    learner.critic_optimizer.register_step_pre_hook(lambda *_: kept.append(all_gradients(critic)))
    metrics = updated(learner, batch, forests_of(batch, budget), old, targets)
    at = torch.from_numpy(batch.trains)
    values = plain_values(critic, rows)
    loss = clipped_value_loss(values, old, targets, clip=0.2)[at].mean()
    loss.backward()
    assert metrics["critic/critic_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    mean = expected[at].mean().item()
    assert metrics["critic/values_mean"] == pytest.approx(mean, rel=1e-3, abs=1e-4)
    gradient = all_gradients(critic)
    assert (kept[0] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-4


def all_gradients(critic):
    return torch.cat([p.grad.flatten() for p in critic.trained_parameters() if p.grad is not None])


def test_gradient_that_is_not_finite_moves_no_critic():
    batch, critic = make_batch([([1], [2, 3], [True, True])]), tiny_critic()
    before = [p.detach().clone() for p in critic.parameters()]
    old, targets = torch.zeros(2), torch.tensor([math.inf, 0.0])
    metrics = updated(run_of_critic(critic), batch, forests_of(batch), old, targets)
    assert not math.isfinite(metrics["critic/grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, critic.parameters(), strict=True))


def test_mini_batch_without_targets_moves_no_critic():
    batch = make_batch([([1], [2, 3], [False, False])])
    learner = run_of_critic(tiny_critic())
    metrics = updated(learner, batch, forests_of(batch), torch.zeros(2), torch.zeros(2))
    assert set(metrics.values()) == {0.0}


def test_a_fresh_critic_says_zero_and_a_saved_one_what_it_said(tmp_path):
    fresh = load_critic(save_tiny_model(tmp_path / "model"))
    rows = [([1, 2], [3, 4], [True, True])]
    batch = make_batch(rows)
    forests = forests_of(batch)
    assert critic_values(run_of_critic(fresh), batch, forests).tolist() == [0.0, 0.0]
    critic = tiny_critic()
    critic.save(tmp_path / "critic")
    again = load_critic(str(tmp_path / "critic"), gradient_checkpointing=True)
    expected = critic_values(run_of_critic(critic), batch, forests)
    torch.testing.assert_close(critic_values(run_of_critic(again), batch, forests), expected)


def test_gradient_checkpointing_recomputes_the_critics_layers(tmp_path):
    path, calls = save_tiny_model(tmp_path), list[bool]()
    critic = load_critic(path, gradient_checkpointing=True)
    torch.nn.init.ones_(critic.value_head.weight)
    layer = critic.model.model.layers[0].self_attn
    layer.register_forward_hook(lambda *_: calls.append(layer.training))
    (forest,) = forests_of(make_batch([([1, 2], [3, 4], [True, True])]))
    critic(forest).sum().backward()
    assert calls == [False, False]


def test_value_head_of_another_model_is_refused(tmp_path):
    path = save_tiny_model(tmp_path)
    from safetensors.torch import save_file

    save_file(
        {"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}, tmp_path / "value_head.safetensors"
    )
    with pytest.raises(
        RolloutError,
        match=r".*value_head\.safetensors: .*value head of this model: RuntimeError.*\[model_load\]",
    ):
        load_critic(path)


ROWS = [
    ([1], [2, 3, 4], [True, False, True]),
    ([1, 2, 3, 4, 5], [6], [True]),
    ([7], [8, 9], [True, True]),
]
OWNERS = [("g", "g_0"), ("g", "g_0"), ("g", "g_1")]


def config(**settings_):
    return train_config(dataset="d", model="m", out="o", **settings_)


def rewarded_batch():
    return make_batch(
        ROWS, trajectories=OWNERS, rewards=[1.0, 2.0, 4.0], advantages=[3.0, 3.0, 5.0]
    )


def test_gae_follows_the_steps_and_skips_what_does_not_train():
    values = torch.tensor([0.5, math.nan, 0.25, 1.0, -1.0, 2.0])
    settings_ = config(estimator="gae", gamma=0.5, gae_lambda=0.5)
    found = estimate_advantages(
        Accelerator(), dataclasses.replace(rewarded_batch(), values=values), settings_.advantage
    )
    chained = np.array([0.5, 0.25, 1.0, -1.0, 2.0])
    expected = gae(
        np.array([0.0, 1.0, 2.0, 0.0, 4.0]), chained, np.array([0, 0, 0, 1, 1]), gamma=0.5, lam=0.5
    )
    at = [0, 2, 3, 4, 5]
    assert found.advantages[at].tolist() == pytest.approx(whiten(expected), rel=1e-6)
    assert found.advantages[1] == 0.0
    assert found.value_targets is not None
    assert found.value_targets[at].tolist() == pytest.approx(expected + chained, rel=1e-6)
    assert found.value_targets[1].isnan()


def test_reinforce_plus_plus_whitens_the_returns_over_trained_tokens_alone():
    found = estimate_advantages(
        Accelerator(), rewarded_batch(), config(estimator="reinforce++", gamma=0.5).advantage
    )
    expected = discounted_returns(
        np.array([0.0, 1.0, 2.0, 0.0, 4.0]), np.array([0, 0, 0, 1, 1]), gamma=0.5
    )
    assert expected.tolist() == [1.0, 2.0, 2.0, 2.0, 4.0]
    assert found.raw_advantages[[0, 2, 3, 4, 5]].tolist() == pytest.approx(
        whiten(expected), rel=1e-6
    )
    assert found.value_targets is None


def test_outcome_advantages_reach_every_trained_token():
    found = estimate_advantages(Accelerator(), rewarded_batch(), config(estimator="rloo").advantage)
    assert found.advantages.tolist() == [3.0, 0.0, 3.0, 3.0, 5.0, 5.0]
    assert found.raw_advantages.tolist() == found.advantages.tolist()


def test_batch_normalization_counts_trained_tokens_alone():
    found = estimate_advantages(
        Accelerator(), rewarded_batch(), config(batch_normalize=True).advantage
    )
    # mean 19 / 5, variance 24 / 25 over the five trained tokens
    expected = [(a - 3.8) / math.sqrt(0.96) for a in (3.0, 3.0, 3.0, 5.0, 5.0)]
    assert found.advantages[[0, 2, 3, 4, 5]].tolist() == pytest.approx(expected, rel=1e-6)
    assert found.advantages[1] == 0.0
    assert found.raw_advantages.tolist() == [3.0, 0.0, 3.0, 3.0, 5.0, 5.0]
