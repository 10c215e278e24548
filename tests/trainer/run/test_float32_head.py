"""A head in float32 beside layers in bfloat16, and what a run says of auxiliary losses and momentum."""

import logging

import pytest
import torch

import trainer
from tests.helpers.architectures import tiny_model
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    forests_of,
    group_rows,
    make_batch,
    save_tiny_model,
    tiny_llama,
    write_dataset,
)
from trainer.models.policy import Policy, use_float32_head
from trainer.run.open_run import load_models
from trainer.run.warnings import warnings_about

ROWS = [([3, 1, 4], [1, 5, 9, 2, 6, 5], [True] * 6), ([2, 7], [1, 8, 2], [True] * 3)]


def head_error(*, float32_head):
    """Largest difference of the logits from those of a float64 head; the gradient reaches the head."""
    model = tiny_llama(hidden_size=32, initializer_range=0.3)
    policy = Policy(model, logprob_chunk_tokens=64)
    if float32_head:
        use_float32_head(model)
    head = model.get_output_embeddings()
    seen = []
    head.register_forward_hook(lambda _, given, logits: seen.extend([given[0], logits.clone()]))
    (forest,) = forests_of(make_batch(ROWS))
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = policy(forest, torch.ones(forest.num_targets))
    found.sum().backward()
    assert head.weight.grad.abs().sum() > 0
    hidden, logits = (tensor.detach().double() for tensor in seen)
    return float((logits - hidden @ head.weight.detach().double().T).abs().max())


def test_a_head_in_float32_does_not_round_the_logits_to_bfloat16():
    assert head_error(float32_head=True) < 1e-4
    assert head_error(float32_head=False) > 1e-3


def test_a_run_uses_the_head_for_policy_and_reference(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    settings = {"dataset": "d", "model": model, "out": "o", "kl_loss_coef": 0.1}
    trained, reference, _ = load_models(train_config(**settings, float32_head=True), None)
    assert reference is not None
    for policy in (trained, reference):
        head = policy.model.get_output_embeddings()
        with torch.autocast("cpu", torch.bfloat16):
            assert head(torch.zeros(1, head.in_features)).dtype == torch.float32


@pytest.mark.slow
def test_auxiliary_losses_that_a_configuration_asks_for_are_said_to_be_ignored(tmp_path, caplog):
    model = tiny_model("qwen3_moe")
    model.config.output_router_logits = True
    model.save_pretrained(tmp_path / "model")
    rows = group_rows(1, (1.0, 0.0), temperature=1.0, top_p=1.0, top_k=0)
    dataset = write_dataset(tmp_path / "ds", rows)
    with caplog.at_level(logging.WARNING):
        config = train_config(
            dataset=dataset, model=str(tmp_path / "model"), out=str(tmp_path / "run")
        )
        trainer.train(config)
    assert "ignores auxiliary losses of routers" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({"num_trained_groups": 0, "grad_norm": 0.0}, ["zero_gradient"]),
        ({"num_trained_groups": 1, "grad_norm": 0.0}, ["momentum"]),
        ({"num_trained_groups": 1, "grad_norm": 0.1}, []),
    ],
)
def test_an_update_without_a_gradient_warns_that_momentum_moves_the_weights(metrics, names):
    config = train_config(dataset="d", model="m", out="o")
    found = warnings_about({"num_trained_tokens": 9, **metrics}, config)
    assert list(found) == names
    assert all("AdamW still moves the weights" in text for text in found.values())
