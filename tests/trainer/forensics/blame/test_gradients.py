"""Gradients of rows: they sum to the update's, and the fast norms are the exact ones."""

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
from trainer.batches.data import Batch
from trainer.forensics.blame import gradients as found
from trainer.models.policy import Policy
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


def flat(learner: Run, direction: Any) -> torch.Tensor:
    names = [name for name, p in learner.policy.named_parameters() if p.requires_grad]
    return torch.cat([direction[name].flatten() for name in names])


def both(learner: Run, batch: Batch, budget: int = 4096, **given_: Any) -> tuple[Any, Any]:
    forests = forests_of(batch, budget)
    batch = dataclasses.replace(
        batch, old_logprobs=given_.get("old"), ref_logprobs=given_.get("ref")
    )
    return tuple(
        found.row_gradients(learner, batch, forests, exact=exact) for exact in (False, True)
    )


def own_gradient(learner: Run, batch: Batch, rows: found.RowGradients, row: Any) -> Any:
    return found.gradient_of(learner, batch, rows.targets, rows.coefficients, np.array([row]))


def test_the_literal_example() -> None:
    batch = make_batch([([1, 2], [3], [True]), ([4], [5, 6], [True, True])])
    learner = run_of(tiny_policy())
    rows = found.row_gradients(learner, batch, forests_of(batch))
    assert rows.rows.tolist() == [0, 1]
    one, other = (own_gradient(learner, batch, rows, row) for row in (0, 1))
    assert rows.norms == pytest.approx([found.norm(one), found.norm(other)], rel=1e-4)
    torch.testing.assert_close(
        flat(learner, rows.gradient), flat(learner, one) + flat(learner, other)
    )


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
    for exact in (False, True):
        torch.manual_seed(3)
        rows = found.row_gradients(learner, batch, forests, exact=exact)
        assert rows.is_fast is not exact
        assert relative_difference(flat(learner, rows.gradient), expected) < 1e-4


def models() -> dict[str, Policy]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    qwen: Any = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        initializer_range=0.2, pad_token_id=None, attention_bias=True,
    )  # fmt: skip
    made = Qwen3ForCausalLM._from_config(qwen, attn_implementation="sdpa")
    return {
        "tied": tiny_policy(chunk=7, tie_word_embeddings=True),
        "untied": tiny_policy(chunk=3, tie_word_embeddings=False),
        "biases_and_head_norms": Policy(made, logprob_chunk_tokens=1024),
    }


@pytest.mark.parametrize("name", ["tied", "untied", "biases_and_head_norms"])
@pytest.mark.parametrize("budget", [20, 4096])
def test_fast_norms_are_the_exact_ones(name: str, budget: int) -> None:
    learner = run_of(models()[name], corrects=True)
    batch = some_batch([*some_rows(), ([1] * 4, [2] * 20, [True] * 20)])
    fast, exact = both(learner, batch, budget, old=old_logprobs(batch))
    assert fast.is_fast
    np.testing.assert_allclose(fast.norms, exact.norms, rtol=1e-4)


@settings(max_examples=examples(10), deadline=None)
@given(row_lists(), st.integers(0, 2**31), st.integers(1, 30))
def test_norms_and_inner_products_of_ragged_rows(rows: list[Row], seed: int, budget: int) -> None:
    learner = run_of(tiny_policy(chunk=4, tie_word_embeddings=True), corrects=True)
    batch = some_batch(rows, seed)
    fast, exact = both(learner, batch, budget, old=old_logprobs(batch, seed))
    np.testing.assert_allclose(fast.norms, exact.norms, rtol=1e-4, atol=1e-7)
    forests = forests_of(batch, budget)
    total = fast.gradient
    products = found.inner_products(learner, batch, forests, fast.coefficients, total)
    row = batch.responses.row_of(np.arange(len(batch.trains)))
    sums = np.bincount(row, products.numpy(), len(rows))
    scale = found.norm(total) ** 2
    for number in fast.rows:
        own = own_gradient(learner, batch, fast, number)
        assert sums[number] == pytest.approx(found.inner(own, total), abs=1e-4 * scale)
    assert products.sum() == pytest.approx(scale, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cohere2", "gemma2", "gpt2", "olmo2", "phi3", "qwen3_moe"])
def test_norms_and_inner_products_of_other_architectures(kind: str, tmp_path: Path) -> None:
    """Layers that the fast way does not support are computed row by row."""
    seen = verdict(kind, tmp_path)
    assert seen is not None
    if seen.policy is None:
        pytest.skip(seen.text)
    learner = run_of(seen.policy)
    batch = some_batch(some_rows(num=3))
    fast, exact = both(learner, batch)
    np.testing.assert_allclose(fast.norms, exact.norms, rtol=1e-4)
    products = found.inner_products(
        learner, batch, forests_of(batch), fast.coefficients, exact.gradient
    )
    assert float(products.sum()) == pytest.approx(found.norm(exact.gradient) ** 2, rel=1e-3)


def test_a_layer_called_twice_is_computed_row_by_row() -> None:
    policy = tiny_policy()
    policy.model.model.layers[1].mlp = policy.model.model.layers[0].mlp
    batch = some_batch(some_rows())
    fast, exact = both(run_of(policy), batch)
    assert not fast.is_fast
    np.testing.assert_allclose(fast.norms, exact.norms, rtol=1e-6)


def test_recomputed_layers_change_nothing() -> None:
    batch = some_batch(some_rows())
    policy = tiny_policy()
    plain, _ = both(run_of(policy), batch, 20)
    policy.checkpoint_layers()
    recomputed, _ = both(run_of(policy), batch, 20)
    assert recomputed.is_fast
    np.testing.assert_allclose(recomputed.norms, plain.norms, rtol=1e-5)
