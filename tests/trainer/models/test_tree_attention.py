"""Attention over trees without a mask of tokens x tokens, on every kind of model."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from schemas.errors import RolloutError
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import (
    VOCAB,
    gradients,
    make_batch,
    plain_logprobs,
    relative_difference,
    save_tiny_model,
    tiny_policy,
)
from tests.helpers.tree_helpers import batch_of, families, mini_batch_of
from tests.trainer.models.test_attention import KINDS, tiny
from trainer.batches.forest import attention_mask
from trainer.models import tree_attention
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy, load_policy
from trainer.models.self_check import check_policy
from trainer.models.tree_attention import BLOCK, Piece, block_mask, padded_size, pieces

MORE_KINDS = {
    "gemma": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def forking_rows():
    """Prompts longer than the windows of the models, and forks before, in and after responses."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 60).tolist()
    first = tokens[:9]
    return [
        (first, tokens[9:15], [True] * 6),
        (first + tokens[9:12] + tokens[20:24], tokens[24:28], [True] * 4),
        (first + tokens[9:12] + tokens[20:22], tokens[30:33], [True] * 3),
        (first[:3], tokens[40:44], [True] * 4),
        (tokens[50:53], tokens[53:58], [True] * 5),
    ]


def only_forest(rows):
    batch = make_batch(rows, trajectories=[("a", "a_0")] * len(rows))
    (forest,) = mini_batch_of(batch).forests
    return forest


def tree_of(forest):
    return torch.stack([forest.position_ids, forest.subtree_end])[None, None]


@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [*((k, False) for k in [*KINDS, *MORE_KINDS]), ("llama", True), ("mistral", True)],
)
def test_a_tree_gives_what_an_eager_forward_of_each_row_gives(kind, *, recomputes):
    model, rows = tiny(kind, **MORE_KINDS.get(kind, {})), forking_rows()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    policy = Policy(model, logprob_chunk_tokens=8)
    if recomputes:
        recompute_layers(policy.model)
    forest = only_forest(rows)
    assert forest.num_tokens < sum(len(p) + len(r) - 1 for p, r, _ in rows) - 20
    by_slot = policy(forest, torch.ones(forest.num_targets))[0]
    found = torch.zeros(forest.num_targets).index_put((forest.target_slot,), by_slot)
    expected = plain_logprobs(plain, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_difference(gradients(policy), gradients(plain)) < 1e-4


def test_documented_pieces():
    assert pieces(torch.tensor([[[[0, 1, 1], [3, 2, 3]]]])) == [
        Piece(size=1, depth=0, above=None),
        Piece(size=1, depth=1, above=0),
        Piece(size=1, depth=1, above=0),
    ]


def dense(forest, window, reach=None):
    mask = attention_mask(forest.subtree_end, reach)
    depth = forest.position_ids
    return mask if window is None else mask & (depth[:, None] - depth < window)


def mutual(forest, seed):
    """Ends of ranges of 1 to 300 tokens that see each other, none of which has a fork inside."""
    rng, ends = np.random.default_rng(seed), list[int]()
    for piece in pieces(tree_of(forest)):
        end = len(ends) + piece.size
        while len(ends) < end:
            size = min(int(rng.choice([1, 2, 5, 300])), end - len(ends))
            ends += [len(ends) + size] * size
    return torch.tensor(ends)


def inputs_of(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, 4, num_tokens, 16), *[(1, 2, num_tokens, 16)] * 2]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@settings(max_examples=examples(30), deadline=None)
@given(
    families(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([1, 2, 1024]),
    st.sampled_from([None, 0, 1]),
)
def test_pieces_attend_as_a_dense_mask_says(family, window, queries, pictures):
    (forest,) = mini_batch_of(batch_of(family)).forests
    inputs, tree = inputs_of(forest.num_tokens), tree_of(forest)
    reach = None if pictures is None else mutual(forest, pictures)
    if reach is not None:
        tree = torch.cat([tree, reach[None, None, None]], 2)
    before, tree_attention.QUERIES = tree_attention.QUERIES, queries
    try:
        found = tree_attention.tree_attention(*inputs, tree, window, scaling=0.3)
    finally:
        tree_attention.QUERIES = before
    settings = {"scale": 0.3, "enable_gqa": True}
    mask = dense(forest, window, reach)
    expected = scaled_dot_product_attention(*inputs, attn_mask=mask, **settings).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    gradient, other = (torch.autograd.grad((o * weights).sum(), inputs) for o in (found, expected))
    torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def large_forest(seed):
    """Several blocks of FlexAttention's: a long way with forks anywhere, and a second tree."""
    rng = np.random.default_rng(seed)
    way = rng.integers(0, VOCAB, 400).tolist()
    rows = []
    for size in rng.integers(2, 200, 8).tolist():
        response = rng.integers(0, VOCAB, size).tolist()
        rows.append((way[: int(rng.integers(150, len(way)))], response, [True] * size))
    rows.append(([VOCAB - 1] * 150, [1, 2], [True, True]))
    return only_forest(rows)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40, 260])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shows_pictures", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_of_flex_attention_says_what_the_dense_mask_says(
    window, seed, *, shows_pictures
):
    forest = large_forest(seed)
    tree, reach = tree_of(forest), mutual(forest, seed) if shows_pictures else None
    if reach is not None:
        tree = torch.cat([tree, reach[None, None, None]], 2)
    mask = block_mask(tree, window)
    num_tokens = forest.num_tokens
    n = padded_size(num_tokens)
    assert n > 3 * BLOCK
    assert n % BLOCK == 0
    wanted = torch.eye(n, dtype=torch.bool)  # padding sees itself
    wanted[:num_tokens, :num_tokens] = dense(forest, window, reach)[0, 0]
    expected = create_block_mask(lambda _b, _h, q, k: wanted[q, k], None, None, n, n, device="cpu")
    if window is None:
        assert torch.equal(mask.to_dense() > 0, expected.to_dense() > 0)
        assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
        assert mask.full_kv_num_blocks.sum() > 0
    assert (mask.full_kv_num_blocks <= expected.full_kv_num_blocks).all()
    inputs = [tensor.detach() for tensor in inputs_of(n)]
    found = flex_attention(*inputs, block_mask=mask, scale=0.3, enable_gqa=True)
    other = scaled_dot_product_attention(*inputs, attn_mask=wanted, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)


def test_a_model_that_goes_by_other_positions_packs_chains_and_is_refused_trees(tmp_path):
    policy = tiny_policy()
    forward = policy.model.base_model.forward
    policy.model.base_model.forward = lambda position_ids, **given: forward(**given)  # noqa: ARG005
    check_policy(policy, "tiny")
    with pytest.raises(RolloutError) as error:
        check_policy(policy, "tiny", trees=True)
    assert "of a branching tree differ" in str(error.value)
    assert error.value.hint == "pass --set batch.sequence_layout=merge, which packs only chains"
    assert load_policy(save_tiny_model(tmp_path / "m"), logprob_chunk_tokens=8, trees=True)
