"""The check of a model at load finds what it is there to find."""

from dataclasses import replace

import pytest
import torch
from transformers import AttentionMaskInterface

from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import forests_of, make_batch, plain_logprobs, tiny_llama
from tests.trainer.models.test_attention import rows_of, tiny
from trainer.batches.forest import ChainLayout
from trainer.models.attention import CHAIN_ATTENTION, mask_of_layers
from trainer.models.policy import Policy
from trainer.models.self_check import check_policy

WINDOWED = {
    "mistral": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "phimoe": {"sliding_window": 4096, "num_local_experts": 4},
    "gemma3_text": {"sliding_window": 4096, "head_dim": 8},
}


def checked(policy):
    """What the check says, with trees; empty if all is right."""
    try:
        check_policy(policy, "tiny", trees=True)
    except RolloutError as error:
        return str(error)
    return ""


@pytest.fixture
def mistake(monkeypatch):
    """Makes the masks of layers wrong."""

    def make(wrong):
        masks = AttentionMaskInterface()._global_mapping
        monkeypatch.setitem(masks, CHAIN_ATTENTION, lambda **given: wrong(mask_of_layers(**given)))

    return make


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("change", [1, -1, 4096])
def test_a_window_that_is_not_the_models_is_found_though_rows_are_short(kind, change, mistake):
    policy = Policy(tiny(kind, **WINDOWED[kind]), logprob_chunk_tokens=8)
    assert not checked(policy)
    mistake(lambda mask: replace(mask, window=mask.window and mask.window + change))
    assert "log-probabilities of a single row differ" in checked(policy)
    assert policy.model.config.sliding_window == 4096
    assert policy.model.config._attn_implementation == CHAIN_ATTENTION


def test_a_window_where_the_model_has_none_is_found(mistake):
    policy = Policy(tiny_llama(), logprob_chunk_tokens=8)
    mistake(lambda mask: replace(mask, window=9))
    assert "log-probabilities of a single row differ" in checked(policy)


def test_rows_that_see_those_packed_before_them_are_found(mistake):
    policy = Policy(tiny_llama(), logprob_chunk_tokens=8)
    mistake(lambda mask: replace(mask, chains=ChainLayout(lengths=[sum(mask.chains.lengths)])))
    assert "log-probabilities of packed rows differ" in checked(policy)


def test_a_forward_that_depends_on_the_longest_row_beside_is_found():
    policy = Policy(tiny_llama(), logprob_chunk_tokens=8)
    rotary = policy.model.model.rotary_emb
    usual = rotary.forward
    rotary.forward = lambda x, position_ids: usual(
        x, position_ids * (1 + position_ids.amax() // 100)
    )
    assert "log-probabilities of rows packed with a long row differ" in checked(policy)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def rotary_model(kind, rope):
    special = {
        "phimoe": {"num_local_experts": 4},
        "phi3": {"original_max_position_embeddings": 32},
    }.get(kind, {})
    return tiny(kind, max_position_embeddings=128, rope_parameters=dict(rope), **special)


def beside(model, tokens, position):
    """Log-probabilities of a row, by the model itself, in a batch where a row has `position`."""
    n = len(tokens)
    ids = torch.tensor([tokens, tokens])
    positions = torch.stack([torch.arange(n), torch.arange(position - n + 1, position + 1)])
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize(
    ("kind", "rope", "position"),
    [
        ("llama", LONGROPE, 127),
        ("phi3", LONGROPE, 127),
        ("phimoe", LONGROPE, 127),
        ("llama", LONGROPE | {"original_max_position_embeddings": 128}, 127),
        ("llama", DYNAMIC, 4 * 128 - 1),  # vLLM's: max_position_embeddings * factor positions
    ],
)
@torch.no_grad()
def test_frequencies_are_those_of_the_longest_row_whatever_is_packed(kind, rope, position):
    model, plain = (rotary_model(kind, rope) for _ in range(2))
    plain.set_attn_implementation("eager")
    policy = Policy(model, logprob_chunk_tokens=8)
    assert not checked(policy)
    short, long = rows_of(9, 100)
    expected = beside(plain, [*short[0], *short[1]], position)[1:]
    for rows in ([short], [short, long], [long, short]):
        batch = make_batch(rows)
        (forest,) = forests_of(batch)
        found = policy(forest, torch.ones(forest.num_targets))[0]
        at = 0 if rows[0] is short else 98
        torch.testing.assert_close(found[at : at + 7], expected, rtol=1e-4, atol=1e-5)
    alone = plain_logprobs(rotary_model(kind, rope), [short])
    differs = float((alone - expected).abs().max()) > 0.1
    assert differs == (rope.get("original_max_position_embeddings") != 128)
