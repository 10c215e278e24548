"""Packed chains attend as each would alone, whatever the model's attention is made of."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import (
    VOCAB,
    forests_of,
    gradients,
    make_batch,
    plain_logprobs,
    relative_difference,
    tiny_llama,
    tiny_policy,
)
from trainer.batches.forest import ChainLayout
from trainer.models.attention import (
    CHAIN_ATTENTION,
    FOREST,
    ForestMask,
    _causal,
    chain_attention,
    forest_mask,
)
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy, load_policy, row_limit

KINDS = {
    "llama": {},
    "llama, as many keys as queries": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "phimoe": {"sliding_window": 4, "num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
}


def tiny(kind, **special):
    """A model whose layers attend with a window, all of them or every other one, if it has any."""
    settings = KINDS.get(kind, {}) | special
    config = AutoConfig.for_model(
        kind.partition(",")[0], vocab_size=VOCAB, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4,
        **({"num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0} | settings),
    )  # fmt: skip
    if kind.startswith("gemma"):
        config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def rows_of(*lengths):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    return [(t[:2], t[2:], [True] * (len(t) - 2)) for t in tokens]


def packed(policy, rows):
    batch = make_batch(rows)
    (forest,) = forests_of(batch)
    return policy(forest, batch.temperature[forest.target_slot])[0]


@pytest.mark.parametrize(
    ("kind", "recomputes"), [*((kind, False) for kind in KINDS), ("llama", True), ("mistral", True)]
)
def test_packed_chains_are_those_of_an_eager_forward_each(kind, *, recomputes):
    model, rows = tiny(kind), rows_of(3, 13, 4, 9)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    policy = Policy(model, logprob_chunk_tokens=8)
    assert model.config._attn_implementation == CHAIN_ATTENTION
    if recomputes:
        recompute_layers(policy.model)
    found, expected = packed(policy, rows), plain_logprobs(plain, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_difference(gradients(policy), gradients(plain)) < 1e-4


def test_chains_make_no_mask_of_tokens_by_tokens_and_trees_do():
    policy = tiny_policy()
    (forest,) = forests_of(make_batch(rows_of(3, 13, 4)))
    with forest_mask(policy.model.config, forest) as mask:
        asked = FOREST.get()
    assert mask is FOREST.get() is None
    assert asked is not None
    assert asked.chains.lengths == [2, 12, 3]
    tree = torch.tensor([3, 2, 3])
    assert ChainLayout.of(tree).lengths is None
    assert ChainLayout.of(torch.tensor([4, 4, 3, 4])).lengths is None


@pytest.mark.parametrize("key_heads", [1, 4])
def test_a_chain_runs_the_kernel_of_linear_memory(key_heads):
    query = torch.randn(1, 4, 33, 8, requires_grad=True)
    key, value = torch.randn(2, 1, key_heads, 33, 8)
    output = _causal(query, key, value, 0.0, None, None)
    assert "FlashAttention" in output.grad_fn.name()


def test_a_plain_padded_forward_and_the_exported_model_stay_as_they_were(tmp_path):
    model = tiny("mistral")
    plain = copy.deepcopy(model)
    policy = Policy(model, logprob_chunk_tokens=8)
    ids = torch.arange(14).view(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    found, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (model, plain))
    torch.testing.assert_close(found[mask > 0], expected[mask > 0])
    policy.model.save_pretrained(tmp_path)
    assert CHAIN_ATTENTION not in (tmp_path / "config.json").read_text()


def test_a_window_does_not_limit_rows():
    config = tiny("mistral").config
    assert row_limit(config).num_tokens == config.max_position_embeddings > config.sliding_window


def test_a_mask_of_the_models_own_making_is_refused():
    model = tiny("llama")
    policy, (forest,) = Policy(model, logprob_chunk_tokens=8), forests_of(make_batch(rows_of(5)))
    attend = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda attention_mask, **given: attend(
        attention_mask=torch.zeros(attention_mask.tree.shape[-1]), **given
    )
    with pytest.raises(
        ValueError, match="the model builds its attention mask without Transformers"
    ):
        policy(forest, torch.ones(forest.num_targets))


def test_capped_attention_scores_are_refused(tmp_path):
    tree = torch.tensor([[[[0, 1], [2, 2]]]])
    query, mask = torch.ones(1, 1, 2, 8), ForestMask(ChainLayout.of(tree[0, 0, 1]), tree)
    with pytest.raises(ValueError, match="softcap"):
        chain_attention(torch.nn.Identity(), query, query, query, mask, softcap=50.0)
    gemma2 = AutoConfig.for_model("gemma2", hidden_size=32, num_hidden_layers=1, vocab_size=VOCAB)
    AutoModelForCausalLM.from_config(gemma2, attn_implementation="eager").save_pretrained(tmp_path)
    # Newer versions of Transformers refuse this attention themselves.
    refused = r"(cannot run gemma2 with|attention uses softcap).*\[model_layers\]"
    with pytest.raises(RolloutError, match=refused):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)


def test_models_that_run_another_attention_keep_it():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    Policy(model, logprob_chunk_tokens=8)
    assert model.config._attn_implementation == "eager"
