"""Parameters without a gradient are frozen, so that several processes train; experts are not."""

import pytest
import torch

from tests.helpers.architectures import tiny_model
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import tiny_policy
from trainer.models.critic import Critic
from trainer.models.lora import add_adapter
from trainer.models.policy import freeze_unused, load_policy
from trainer.models.self_check import probe

UNUSED = {
    "gemma3": "vision_tower",
    "ernie4_5_moe": "e_score_correction_bias",
    "afmoe": "expert_bias",
}


def without_gradient(policy):
    """The trained parameters that a backward pass leaves out."""
    policy.zero_grad()
    forest = probe(policy.model)
    found, _ = policy(forest, torch.ones(forest.num_targets))
    found.sum().backward()
    return [n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None]


@pytest.fixture(scope="module", params=UNUSED)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(request.param).save_pretrained(folder)
    return request.param, str(folder)


@pytest.mark.slow
def test_what_text_does_not_reach_is_frozen_and_gets_no_adapter(loaded):
    kind, path = loaded
    policy = load_policy(path, logprob_chunk_tokens=64)
    frozen = {n for n, p in policy.named_parameters() if not p.requires_grad}
    assert frozen
    assert any(UNUSED[kind] in name for name in frozen)
    assert not without_gradient(policy)
    critic = Critic(load_policy(path, logprob_chunk_tokens=64).model)
    trained = {n for n, p in critic.named_parameters() if p.requires_grad}
    assert not trained & frozen
    if kind == "afmoe":  # peft adapts none of its layers
        return
    config = train_config(dataset="d", model=path, out="o", lora_rank=2)
    add_adapter(policy, config.model)
    adapters = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert adapters
    assert not any("vision" in name for name in adapters)
    assert not without_gradient(policy)


@pytest.mark.slow
def test_adapters_named_by_a_suffix_leave_a_vision_tower_out(tmp_path):
    tiny_model("gemma3").save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), logprob_chunk_tokens=64)
    config = train_config(
        dataset="d", model=str(tmp_path), out="o", lora_rank=2, lora_target_modules=("q_proj",)
    )
    add_adapter(policy, config.model)
    adapters = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert adapters
    assert not any("vision" in name for name in adapters)


def test_all_parameters_of_a_text_model_are_trained():
    policy = tiny_policy()
    freeze_unused(policy)
    assert all(parameter.requires_grad for parameter in policy.parameters())
