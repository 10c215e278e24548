"""LoRA: which weights train, their gradient, what a checkpoint holds, and `--resume`."""

import math
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.routing_helpers import tiny_moe
from tests.helpers.trainer_helpers import (
    forests_of,
    group_rows,
    lines_of,
    make_batch,
    plain_logprobs,
    relative_difference,
    run_of,
    save_tiny_model,
    tiny_llama,
    tiny_policy,
    write_dataset,
)
from tests.trainer.models.test_attention import tiny
from trainer.loss import policy_logprobs
from trainer.models.layers import recompute_layers
from trainer.models.lora import WithoutAdapter, add_adapter, checkpoint_weights, save_model
from trainer.models.policy import Policy, save_weights

ROWS = [
    ([3, 1, 4], [1, 5, 9, 2], [True, True, False, True]),
    ([2, 7], [1, 8, 2], [True] * 3),
    ([6], [6, 2, 6], [True] * 3),
]
PLAIN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def config_of(**settings):
    return train_config(dataset="d", model="m", out="o", **({"lora_rank": 4} | settings))


def adapted_policy(*, checkpointed=False, chunk=1024, **settings):
    """A tiny policy whose adapters say something."""
    policy = tiny_policy(chunk=chunk)
    add_adapter(policy, config_of(**settings).model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    if checkpointed:
        recompute_layers(policy.model)
    return policy


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    rows = group_rows(2, (1.0, 0.0, 0.5))
    dataset = write_dataset(folder / "ds", rows)
    return {"dataset": dataset, "model": save_tiny_model(folder / "model")}


def run(paths, out, *, resume=False, **settings):
    """Four updates, all of one batch."""
    defaults = {"learning_rate": 1e-2, "groups_per_batch": 2, "groups_per_mini_batch": 1}
    given = {"epochs_per_batch": 2, "save_every_updates": 1, "lora_rank": 4, "kl_loss_coef": 0.1}
    config = train_config(**(paths | defaults | given | settings), out=str(out))
    return trainer.train(config, resume=resume)


@pytest.fixture(scope="module")
def whole(paths, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run(paths, out)
    return out


def files_of(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@PLAIN_PEFT
@pytest.mark.parametrize(("checkpointed", "chunk"), [(False, 1024), (True, 1024), (True, 2)])
def test_the_gradient_of_the_adapters_is_that_of_plain_peft(*, checkpointed, chunk):
    policy, batch = adapted_policy(checkpointed=checkpointed, chunk=chunk), make_batch(ROWS)
    weights = torch.linspace(-1, 1, len(batch.trains)) * torch.from_numpy(batch.trains)
    for forest in forests_of(batch, budget=9):
        logprobs, _ = policy(forest, torch.ones(forest.num_targets))
        (logprobs * weights[forest.target_slot]).sum().backward()
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    plain = peft.get_peft_model(tiny_llama(), settings)
    plain.get_base_model().load_state_dict(policy.model.state_dict())
    (plain_logprobs(plain.eval(), ROWS) * weights).sum().backward()
    found = dict(policy.model.named_parameters())
    wanted = {n: p for n, p in plain.get_base_model().named_parameters() if p.grad is not None}
    assert len(wanted) == 2 * 7 * 2
    assert {n for n, p in found.items() if p.grad is not None} == wanted.keys()
    for name, parameter in wanted.items():
        assert relative_difference(found[name].grad, parameter.grad) < 1e-5


@PLAIN_PEFT
def test_saving_merges_the_adapters_and_leaves_the_policy_as_it_is(tmp_path):
    policy, batch = adapted_policy(), make_batch(ROWS)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    save_model(policy.model, tmp_path, policy.model.state_dict())
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())
    wanted = policy_logprobs(run_of(policy), batch, forests_of(batch))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    adapted = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    with torch.no_grad():
        own = plain_logprobs(tiny_llama(), ROWS)
        for model in (merged, adapted.eval()):
            found = plain_logprobs(model, ROWS)
            assert float((found - wanted)[batch.trains].abs().max()) < 1e-5
            assert float((found - own)[batch.trains].abs().max()) > 0.1


def test_with_its_adapters_off_a_policy_says_what_its_model_does_and_then_its_own_again():
    policy, batch = adapted_policy(), make_batch(ROWS)
    learner, forests, at = run_of(policy), forests_of(batch), batch.trains
    before = policy_logprobs(learner, batch, forests)[at]
    off = policy_logprobs(learner, batch, forests, WithoutAdapter(policy))[at]
    assert torch.equal(off, policy_logprobs(learner, batch, forests, tiny_policy())[at])
    assert torch.equal(before, policy_logprobs(learner, batch, forests)[at])
    assert not torch.equal(before, off)
    assert not list(WithoutAdapter(policy).parameters())
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained == [name for name, _ in policy.named_parameters() if ".lora_" in name]


@pytest.mark.slow
def test_a_run_changes_its_adapters_alone(paths, whole):
    lines = lines_of(whole)
    assert len(lines) == 4
    numbers = [value for line in lines for value in line.values()]
    assert all(math.isfinite(value) for value in numbers)
    assert lines[0]["policy_kl"] == 0
    assert lines[3]["policy_kl"] > 0
    checkpoint = whole / "checkpoints" / "global_step_4"
    start, end = (load_file(Path(p) / "model.safetensors") for p in (paths["model"], checkpoint))
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if "_proj." in name}
    assert start.keys() == end.keys()
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    state = load_file(checkpoint / "state" / "optimizer.safetensors")
    assert len([name for name in state if name.endswith(".exp_avg")]) == len(adapter) == 28
    assert len(state) == 3 * 28


def test_the_reference_is_the_model_the_run_began_with(paths, whole, tmp_path):
    run(paths, tmp_path, reference_model=paths["model"])
    assert lines_of(tmp_path) == lines_of(whole)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_that_is_resumed_is_bit_for_bit_one_that_was_not(step, paths, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text(f"global_step_{step}\n")
    run(paths, tmp_path / "run", resume=True)
    assert lines_of(tmp_path / "run") == lines_of(whole)
    assert files_of(tmp_path / "run" / "checkpoints") == files_of(whole / "checkpoints")


@pytest.mark.slow
def test_the_critic_of_gae_trains_whole(paths, tmp_path):
    run(paths, tmp_path, estimator="gae", critic_learning_rate=1e-2)
    checkpoint = tmp_path / "checkpoints" / "global_step_4"
    start, end = (
        load_file(Path(path) / "model.safetensors")
        for path in (paths["model"], checkpoint / "critic")
    )
    same = {name for name in start if torch.equal(start[name], end[name])}
    assert same == {"lm_head.weight"}
    assert not (checkpoint / "critic" / "adapter").exists()


def test_only_the_layers_that_are_named_have_adapters(paths, tmp_path):
    run(paths, tmp_path, lora_target_modules=("q_proj", "layers.1.mlp.up_proj"), max_updates=1)
    adapter = tmp_path / "checkpoints" / "global_step_1" / "adapter"
    assert {name[17:] for name in load_file(adapter / "adapter_model.safetensors")} == {
        f"model.layers.{layer}.lora_{part}.weight"
        for layer in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
        for part in "AB"
    }


@pytest.mark.parametrize(
    ("targets", "got"),
    [
        (("nothing",), "peft cannot add adapters: Target modules {'nothing'} not found"),
        (("lm_head",), "lm_head is the head, but adapters need linear layers"),
        (
            ("embed_tokens",),
            "model.embed_tokens has type Embedding, but adapters need linear layers",
        ),
        (("q_proj", "norm"), "peft cannot add adapters: Target module LlamaRMSNorm"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(targets, got):
    with pytest.raises(RolloutError, match=rf"m: {got}.*\[lora_target_modules\]"):
        adapted_policy(lora_target_modules=targets)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_a_mixture_of_experts_has_adapters_in_its_attention_by_default(kind, tmp_path):
    policy = Policy(tiny(kind, **MIXTURE), logprob_chunk_tokens=8)
    add_adapter(policy, config_of().model)
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in trained} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_model(policy.model, tmp_path, policy.model.state_dict())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    found, wanted = (plain_logprobs(model, ROWS) for model in (merged, policy.model))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def check_named_as_saved(model, path, state):
    """What an engine gets in memory has the names and values of a saved model, and tied weights too."""
    save = save_model if hasattr(model, "peft_config") else save_weights
    save(model, path, state)
    in_memory, saved = dict(checkpoint_weights(model)), load_file(path / "model.safetensors")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert in_memory.keys() == saved.keys() | tied
    assert all(torch.equal(in_memory[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_given_to_an_engine_one_by_one_as_they_are_saved(family, tmp_path):
    model = tiny_moe(family)
    check_named_as_saved(model, tmp_path / "model", model.state_dict())
    assert any(".experts.0." in name for name, _ in checkpoint_weights(model))


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_merged_for_an_engine_as_they_are_saved(tmp_path, *, tied):
    policy = tiny_policy(tie_word_embeddings=tied)
    add_adapter(policy, config_of().model)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    check_named_as_saved(policy.model, tmp_path / "model", policy.model.state_dict())


@pytest.mark.parametrize("targets", [("experts",), ("gate",), ("gate_proj",)])
def test_experts_and_routers_are_refused_with_a_hint_that_works(targets):
    policy = Policy(tiny("qwen3_moe", **MIXTURE), logprob_chunk_tokens=8)
    with pytest.raises(RolloutError, match=r"m: .*adapters.*\[lora_target_modules\]") as error:
        add_adapter(policy, config_of(lora_target_modules=targets).model)
    names = "k_proj, o_proj, q_proj, v_proj"
    assert error.value.hint == f"leave lora_target_modules out to add adapters to {names}"


def test_a_model_without_linear_layers_is_refused_with_a_hint_that_works():
    policy = Policy(tiny("gpt2"), logprob_chunk_tokens=8)
    with pytest.raises(RolloutError, match=r"m: .*adapters.*\[lora_target_modules\]") as error:
        add_adapter(policy, config_of().model)
    assert error.value.hint == "leave lora_rank out to train all weights"


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_target_modules": ()}, "model.lora_target_modules and model.lora_rank"),
        (
            {"lora_target_modules": ("q_proj",), "lora_rank": None},
            r"lora_target_\w+ and model.lora_rank",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(settings, keys):
    with pytest.raises(RolloutError, match=rf"{keys}: found.*\[config_value\]"):
        config_of(**settings)


@pytest.mark.parametrize("damage", ["no file", "not safetensors", "another rank"])
def test_a_damaged_adapter_is_refused(damage, paths, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run/checkpoints/global_step_4/adapter/adapter_model.safetensors"
    file.write_bytes(b"")
    if damage == "no file":
        file.unlink()
    if damage == "another rank":
        run(paths, tmp_path / "other", lora_rank=2, max_updates=1)
        shutil.copy(tmp_path / "other/checkpoints/global_step_1/adapter" / file.name, file)
    with pytest.raises(RolloutError, match=rf"{file}.*\[checkpoint_state\]"):
        run(paths, tmp_path / "run", resume=True, num_epochs=2)


def test_a_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RolloutError, match="extra_installed") as error:
        adapted_policy()
    assert error.value.hint == 'pip install "rollout-io[train]"'
