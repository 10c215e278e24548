"""Gradients of rows: they sum to the update's, and inner products are theirs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.architectures import verdict
from tests.helpers.examples import examples
from tests.helpers.losses_helpers import EVERYTHING, named
from tests.helpers.trainer_helpers import (
    VOCAB,
    Row,
    forests_of,
    gradient_of_update,
    make_batch,
    relative_difference,
    row_lists,
    run_of,
    tiny_policy,
)
from trainer.batch import Batch
from trainer.forensics import row_gradients as found
from trainer.models.layers import compile_layers, recompute_layers
from trainer.run.run import Run


def some_rows(seed: int = 0, num: int = 6) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCAB, p).tolist(), rng.integers(0, VOCAB, r).tolist(), [True] * r)
        for p, r in rng.integers(1, 9, (num, 2))
    ]


def some_batch(rows: list[Row], seed: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    return make_batch(
        rows,
        advantages=rng.normal(size=len(rows)).tolist(),
        temperatures=rng.uniform(0.5, 2.0, len(rows)).tolist(),
        rollout_logprobs=[(-rng.exponential(2.0, len(r[1]))).tolist() for r in rows],
    )


def old_logprobs(batch: Batch, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = 0.15 * torch.randn(len(batch.trains), generator=generator)
    return (batch.rollout_logprobs + noise).clamp(max=0.0)


def flat(direction: Any) -> torch.Tensor:
    return torch.cat([part.flatten() for part in direction])


def rows_of(learner: Run, batch: Batch, budget: int = 4096, **outputs: Any) -> Any:
    batch = dataclasses.replace(
        batch, old_logprobs=outputs.get("old"), ref_logprobs=outputs.get("ref")
    )
    return found.linearize(learner, batch, forests_of(batch, budget))


def test_the_literal_example() -> None:
    batch = make_batch([([1, 2], [3], [True]), ([4], [5, 6], [True, True])])
    learner = run_of(tiny_policy())
    update = found.linearize(learner, batch, forests_of(batch))
    norms, total = update.gradients()
    assert update.rows.tolist() == [0, 1]
    one, other = (update.gradient(row) for row in (0, 1))
    assert norms == pytest.approx([found.norm(one), found.norm(other)], rel=1e-4)
    torch.testing.assert_close(flat(total), flat(one) + flat(other))


FEW = [EVERYTHING[i] for i in (0, 2, 9, 15, -1)]


@pytest.mark.parametrize(
    "settings_",
    [pytest.param(s, marks=[] if s in FEW else [pytest.mark.slow]) for s in EVERYTHING],
    ids=named,
)
def test_rows_sum_to_the_gradient_of_the_update_with_every_loss(settings_: dict[str, Any]) -> None:
    batch = some_batch(some_rows())
    policy = tiny_policy(chunk=5)
    policy.entropy_gradient = "entropy_loss_coef" in settings_
    old = old_logprobs(batch)
    ref = old_logprobs(batch, 7) if "kl_loss_coef" in settings_ else None
    corrects = settings_.get("tis_ratio_type", "auto") is not None or "mask" in str(settings_)
    torch.manual_seed(3)
    expected = gradient_of_update(
        policy, batch, budget=20, old=old, ref=ref, corrects=corrects, **settings_
    )
    learner = run_of(policy, corrects=corrects, **settings_)
    forests = forests_of(batch, 20)
    batch = dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)
    torch.manual_seed(3)
    _, total = found.linearize(learner, batch, forests).gradients()
    assert relative_difference(flat(total), expected) < 1e-4


@settings(max_examples=examples(10), deadline=None)
@given(row_lists(), st.integers(0, 2**31), st.integers(1, 30))
def test_norms_and_inner_products_of_ragged_rows(rows: list[Row], seed: int, budget: int) -> None:
    learner = run_of(tiny_policy(chunk=4, tie_word_embeddings=True), corrects=True)
    batch = some_batch(rows, seed)
    update = rows_of(learner, batch, budget, old=old_logprobs(batch, seed))
    _, total = update.gradients()
    products = update.products(total)
    row = batch.responses.row_of(np.arange(len(batch.trains)))
    sums = np.bincount(row, products, len(rows))
    scale = found.norm(total) ** 2
    for number in update.rows:
        own = flat(update.gradient(number)).double()
        assert sums[number] == pytest.approx(float(own @ flat(total).double()), abs=1e-4 * scale)
    assert products.sum() == pytest.approx(scale, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cohere2", "gemma2", "gpt2", "olmo2", "phi3", "qwen3_moe"])
def test_norms_and_inner_products_of_other_architectures(kind: str, tmp_path: Path) -> None:
    seen = verdict(kind, tmp_path)
    assert seen is not None
    if seen.policy is None:
        pytest.skip(seen.text)
    learner = run_of(seen.policy)
    batch = some_batch(some_rows(num=3))
    update = rows_of(learner, batch)
    _, total = update.gradients()
    assert update.products(total).sum() == pytest.approx(found.norm(total) ** 2, rel=1e-3)


def test_recomputed_layers_change_nothing() -> None:
    batch = some_batch(some_rows())
    policy = tiny_policy()
    plain, _ = rows_of(run_of(policy), batch, 20).gradients()
    recompute_layers(policy.model)
    recomputed, _ = rows_of(run_of(policy), batch, 20).gradients()
    np.testing.assert_allclose(recomputed, plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's
def test_compiled_layers_have_the_inner_products_of_others() -> None:
    batch = some_batch(some_rows())
    policy = tiny_policy()
    plain, _ = rows_of(run_of(policy), batch, 20).gradients()
    compile_layers(policy.model, recomputes=True)
    update = rows_of(run_of(policy), batch, 20)
    norms, total = update.gradients()
    np.testing.assert_allclose(norms, plain, rtol=1e-4)
    assert update.products(total).sum() == pytest.approx(found.norm(total) ** 2, rel=1e-3)
