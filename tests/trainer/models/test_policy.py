import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
)

from schemas.errors import InputError, RolloutError
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import (
    VOCAB,
    Layerless,
    forests_of,
    make_batch,
    plain_logprobs,
    row_lists,
    save_tiny_model,
    tiny_llama,
    tiny_policy,
)
from tests.trainer.models.test_attention import tiny
from trainer.models.critic import load_critic
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy, load_policy, row_limit
from trainer.models.self_check import check_policy

POLICY = tiny_policy()


def packed_logprobs(policy, rows, budget=4096, temperatures=None):
    batch = make_batch(rows, temperatures=temperatures)
    logprobs, entropy = torch.zeros(len(batch.trains)), torch.zeros(len(batch.trains))
    for forest in forests_of(batch, budget, targets=batch.trains | True):
        slot = forest.target_slot
        logprobs[slot], entropy[slot] = policy(forest, batch.temperature[slot])
    return logprobs, entropy


@settings(max_examples=examples(30), deadline=None)
@given(row_lists(), st.sampled_from([12, 24, 4096]))
@torch.no_grad()
def test_packed_rows_do_not_leak_into_each_other(rows, budget):
    found, _ = packed_logprobs(POLICY, rows, budget)
    torch.testing.assert_close(found, plain_logprobs(POLICY.model, rows), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_are_divided_by_each_rows_temperature():
    rows = [([1, 2], [3, 4], [True] * 2), ([5], [6], [True])]
    found, entropy = packed_logprobs(POLICY, rows, temperatures=[0.5, 2.0])
    expected = plain_logprobs(POLICY.model, rows, [0.5, 2.0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    logits = POLICY.model(input_ids=torch.tensor([[5]])).logits[0, -1] / 2.0
    expected_entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy[2], expected_entropy)


def test_logits_of_all_targets_never_exist_at_once():
    policy, largest = tiny_policy(chunk=2), []
    policy.model.lm_head.register_forward_hook(lambda _m, _i, out: largest.append(len(out)))
    rows = [([1, 2], [3, 4, 5, 6, 7], [True] * 5)]
    packed_logprobs(policy, rows)[0].sum().backward()
    assert max(largest) == 2
    assert sum(largest) == 2 * 5 - 1  # all but the last chunk are recomputed for the gradient


@pytest.mark.parametrize(
    ("kind", "dropouts", "inner"),
    [
        ("llama", {"attention_dropout": 0.5}, "self_attn"),
        ("opt", {"dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}, "fc1"),
        ("biogpt", {"hidden_dropout_prob": 0.5}, "fc1"),
        ("falcon", {"hidden_dropout": 0.5, "parallel_attn": False}, "self_attention"),
    ],
)
def test_recomputed_layers_run_twice_and_drop_nothing_out(kind, dropouts, inner):
    rows = [([1, 2], [3, 4, 5], [True] * 3)]
    plain, recomputing = (
        Policy(tiny(kind, num_key_value_heads=4, **dropouts), logprob_chunk_tokens=8)
        for _ in range(2)
    )
    recompute_layers(recomputing.model)
    calls = []
    for name, module in recomputing.named_modules():
        if name.endswith(f"0.{inner}"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    for policy in (plain, recomputing):
        packed_logprobs(policy, rows)[0].sum().backward()
    assert len(calls) == 2
    assert not any(module.training for module in recomputing.modules())
    for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_layers_that_cannot_be_recomputed_are_refused():
    policy = tiny_policy()
    policy.model = Layerless()
    with pytest.raises(RolloutError, match=r"cannot recompute.*\[gradient_checkpointing\]"):
        recompute_layers(policy.model)


def test_tied_embeddings_collect_both_gradients():
    policy = tiny_policy(tie_word_embeddings=True)
    rows = [([1, 2], [3, 4], [True] * 2)]
    packed_logprobs(policy, rows)[0].sum().backward()
    found = policy.model.get_input_embeddings().weight.grad.clone()
    policy.zero_grad()
    plain_logprobs(policy.model, rows).sum().backward()
    expected = policy.model.get_input_embeddings().weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3_text", "cohere", "granite"])
def test_heads_that_scale_or_cap_logits_are_reproduced(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {
        "gemma3_text": {"final_logit_softcapping": 2.0, "head_dim": 8},
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 4.0},
    }[kind]
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **special,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    check_policy(Policy(model, logprob_chunk_tokens=8), kind)


def test_a_head_that_is_not_reproduced_is_refused():
    model = tiny_llama()
    policy = Policy(model, logprob_chunk_tokens=8)
    policy.logit_scale = 2.0
    with pytest.raises(
        RolloutError, match=r"tiny: log-probabilities of a single row differ by.*\[model_layers\]"
    ):
        check_policy(policy, "tiny")


def test_recurrent_layers_are_refused(tmp_path):
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, use_mambapy=False
    )
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="model_"):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)


def test_layer_types_other_than_attention_are_named(tmp_path):
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4, hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="qwen3_next with linear_attention layers"):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)


@pytest.mark.parametrize(
    ("settings_", "limit", "reason"),
    [
        ({"sliding_window": 32}, 64, "max_position_embeddings"),
        ({"sliding_window": None}, 64, "max_position_embeddings"),
    ],
)
def test_row_limit_is_the_context(settings_, limit, reason):
    config = MistralConfig(**({"max_position_embeddings": 64} | settings_))
    found = row_limit(config)
    assert found.num_tokens == limit
    assert reason in found.reason


def test_rows_of_a_model_without_a_context_are_not_limited():
    assert row_limit(BloomConfig()).num_tokens == 2**31 - 1


def test_learned_positions_work_too():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    check_policy(Policy(GPT2LMHeadModel(config), logprob_chunk_tokens=4), "gpt2")


@pytest.mark.parametrize(
    ("path", "name"),
    [("acme/tiny-llama", "acme/tiny-llama"), ("/no/such/model", "ORG/NAME"), ("tiny", "ORG/NAME")],
)
def test_name_of_a_hub_model_hints_at_downloading_it(path, name):
    with pytest.raises(
        RolloutError, match=rf"{path}: .*does not exist.*\[model_directory\]"
    ) as error:
        load_policy(path, logprob_chunk_tokens=8)
    expected = f"download the model: `hf download {name} --local-dir DIR`, then pass DIR"
    assert error.value.hint == expected


def test_missing_weights_are_not_made_up(tmp_path):
    save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RolloutError, match=r"weights are missing: model\.norm\.weight"):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (
            {"num_hidden_layers": 3},
            r"weights are missing: model\.layers\.2\.input_layernorm\.weight and 8",
        ),
        ({"num_hidden_layers": 1}, r"weights are not in the model .*: model\.layers\.1\."),
        ({"intermediate_size": 40}, ".*RuntimeError|weights do not have the shape"),
    ],
)
def test_weights_that_the_configuration_does_not_describe_are_refused(change, got, tmp_path):
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RolloutError, match=rf".*: ({got}).*\[model_load\]"):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)


def test_code_of_a_model_directory_is_neither_run_nor_asked_for(tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "ran.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    named = {"AutoConfig": "ran.Config", "AutoModelForCausalLM": "ran.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": named}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    for load in (
        lambda: load_policy(str(model), logprob_chunk_tokens=8),
        lambda: load_critic(str(model)),
    ):
        with pytest.raises(InputError) as caught:
            load()
        assert caught.value.rule == "model_load"
        assert "ran.Config, ran.Model" in caught.value.got
    assert not (tmp_path / "ran").exists()
    assert "custom code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", [b"", b"no weights", b"\x80\x02(\x00\x00", b"PK\x03\x04" + b"a" * 99]
)
def test_damaged_pickles_are_a_clean_error(damage, tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(damage)
    with pytest.raises(RolloutError, match=r"cannot be loaded as a causal LM.*\[model_load\]"):
        load_policy(str(tmp_path), logprob_chunk_tokens=8)
