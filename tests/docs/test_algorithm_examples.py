"""The algorithms in examples/algorithms.py, in float64 against loops over their definitions."""

from itertools import combinations
from math import exp, prod, sqrt

import numpy as np
import pytest
import torch

from examples import algorithms as EXAMPLES
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from trainer.config.functions import KINDS, find

DRAW = np.random.default_rng(0)
ROW = np.array([0, 0, 0, 1, 1, 2])
OLD, NEW, ROLLOUT = (-DRAW.random(6) * 2 for _ in range(3))
A = np.array([0.7, 0.7, 0.7, -1.2, -1.2, 0.4])


def losses(function, **keys):
    """The losses, and their gradient."""
    new = torch.tensor(NEW, requires_grad=True)
    given = {"logprobs": new, "old_logprobs": torch.tensor(OLD), "advantages": torch.tensor(A)}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given |= {"row": torch.tensor(ROW), "rollout_logprobs": torch.tensor(ROLLOUT)}
    found = function(**{n: v for n, v in given.items() if n in names}, **keys)
    assert found.dtype == torch.float64
    found.sum().backward()
    return found.detach().numpy(), new.grad.numpy()


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    for clip in (0.05, 0.4):
        found, _ = losses(EXAMPLES.gmpo, gmpo_clip=clip)
        for r in range(3):
            at = np.flatnonzero(r == ROW)
            sign = np.sign(A[at[0]])
            ratios = [min(sign * (NEW[t] - OLD[t]), clip) * sign for t in at]
            mean = prod(map(exp, ratios)) ** (1 / len(at))
            assert found[at] == pytest.approx([-mean * A[at[0]]] * len(at))


def test_gpg_and_dro_are_their_equations():
    assert losses(EXAMPLES.gpg)[1] == pytest.approx(-A)
    found, gradient = losses(EXAMPLES.dro, beta=0.3)
    assert found == pytest.approx(
        [-(a * n - 0.15 * (n - o) ** 2) for a, n, o in zip(A, NEW, OLD, strict=True)]
    )
    assert gradient == pytest.approx(-A + 0.3 * (NEW - OLD))


def test_stale_failures_are_masked_and_nothing_else():
    keys = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
    far = float((ROLLOUT - NEW)[3:5].mean())
    whole = losses(EXAMPLES.off_policy_masked, max_kl=far + 0.01, **keys)[0]
    masked = losses(EXAMPLES.off_policy_masked, max_kl=far - 0.01, **keys)[0]
    assert (masked[3:5] == 0).all()
    assert (masked[[0, 1, 2, 5]] == whole[[0, 1, 2, 5]]).all()
    assert (whole[3:5] != 0).all()


def test_vespo_weighs_rows_by_their_whole_ratio():
    found, gradient = losses(EXAMPLES.vespo, powers=(1.5, 0.5), decays=(0.7, 2.5))
    for r in range(3):
        at = np.flatnonzero(r == ROW)
        ratio = prod(exp(NEW[t] - ROLLOUT[t]) for t in at)
        k, decay = (1.5, 0.7) if A[at[0]] >= 0 else (0.5, 2.5)
        weight = ratio**k * exp(decay * (1 - ratio))
        assert gradient[at] == pytest.approx(-weight * A[at])
        assert found[at] == pytest.approx(-weight * A[at] * NEW[at])


def test_pass_at_k_is_the_mean_over_all_sets_of_k():
    for seed, k in ((0, 2), (1, 3), (2, 4)):
        returns = (np.random.default_rng(seed).random(7) < 0.4).astype(float)
        sets = list(combinations(range(7), k))
        wins = [float(max(returns[list(s)])) for s in sets]
        mean = sum(wins) / len(wins)
        spread = sqrt(mean * (1 - mean))
        own = [np.mean([w for s, w in zip(sets, wins, strict=True) if i in s]) for i in range(7)]
        expected = [(value - mean) / spread if spread else 0.0 for value in own]
        found = EXAMPLES.pass_at_k(returns, np.zeros(7, int), k)
        assert found == pytest.approx(expected)
    assert (EXAMPLES.pass_at_k(np.ones(4), np.zeros(4, int), 2) == 0).all()
    assert (EXAMPLES.pass_at_k(np.ones(2), np.zeros(2, int), 4) == 0).all()


def test_opo_weighs_returns_by_length():
    trajectory = np.array([0, 0, 0, 1, 2, 2])
    group, rewards = np.array([0, 0, 0, 0, 1, 1]), np.array([0.0, 0.5, 0.5, 0.2, 1.0, 0.0])
    baseline = (3 * 1.0 + 1 * 0.2) / 4
    expected = [1 - baseline] * 3 + [0.2 - baseline] + [0.0] * 2
    assert EXAMPLES.opo(rewards, trajectory, group) == pytest.approx(expected)


def test_the_length_of_a_row_does_not_weigh_its_tokens():
    assert (EXAMPLES.length_weighted(ROW, 3) == 1 / 3).all()


def test_each_example_is_in_the_table_and_is_accepted():
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    section = page.partition("### Algorithms of other trainers")[2].partition("\n### ")[0]
    loss, estimator, reduction = KINDS
    kinds = dict.fromkeys(("gmpo", "gpg", "dro", "off_policy_masked", "vespo"), loss)
    kinds |= {"pass_at_k": estimator, "opo": estimator, "length_weighted": reduction}
    for name, kind in kinds.items():
        assert f"`{name}`" in section
        assert find(kind, f"examples.algorithms:{name}").is_own
    train_config(
        dataset="d",
        model="m",
        out="o",
        policy_loss_type="examples.algorithms:gmpo",
        estimator="examples.algorithms:pass_at_k",
        reduction="examples.algorithms:length_weighted",
        advantage_own={"k": 8},
    )
