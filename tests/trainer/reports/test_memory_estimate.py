"""What a run says that it will hold, and that its settings reach what they are about."""

import dataclasses
import json
from pathlib import Path

import pytest

from rollout_io.cli.main import run as main
from schemas.errors import InputError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import VOCAB, group_rows, save_tiny_model, write_dataset
from trainer.cli.train import plan_text
from trainer.models.layers import plain_layers
from trainer.reports.dry_run import dry_run
from trainer.run.memory import _kept_by_a_forward, estimate_memory
from trainer.run.open_run import open_run


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    dataset = write_dataset(folder / "ds", group_rows(1, (0.0, 1.0)))
    return {"dataset": dataset, "model": save_tiny_model(folder / "m")}


def begun(paths, tmp_path, **settings):
    return open_run(train_config(**paths, out=str(tmp_path / "run"), **settings), resume=False)


def memory_of(paths, tmp_path, **settings):
    """The estimate for 100 tokens, and the weights of the model."""
    run = begun(paths, tmp_path, logprob_chunk_tokens=7, **settings)
    num_weights = sum(p.numel() for p in run.policy.parameters())
    return estimate_memory(run, 100), num_weights


def test_a_whole_policy_has_weights_gradients_two_moments_and_a_chunk_of_logits(paths, tmp_path):
    memory, num = memory_of(paths, tmp_path)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * num, 4 * num, 8 * num)
    assert (memory.reference, memory.logits) == (0, 4 * 7 * VOCAB)
    assert memory.total == 16 * num + memory.activations + memory.logits


def test_a_reference_and_a_critic_are_counted(paths, tmp_path):
    memory, num = memory_of(paths, tmp_path, kl_loss_coef=0.1, estimator="gae")
    head, embedding = 32 + 1, 32 * VOCAB  # of the value head; the critic's logits do not train
    assert memory.reference == 4 * num
    assert memory.weights == 4 * (2 * num + head)
    assert memory.gradients == 4 * (2 * num + head - embedding)
    assert memory.optimizer == 2 * memory.gradients


def test_adapters_alone_have_gradients_and_moments_and_are_no_second_model(paths, tmp_path):
    memory, num = memory_of(paths, tmp_path, lora_rank=2, kl_loss_coef=0.1)
    layer = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # q and o, k and v, the MLP
    assert memory.gradients == 4 * 2 * layer
    assert memory.optimizer == 2 * memory.gradients
    assert (memory.weights, memory.reference) == (4 * num, 0)


def test_activations_are_those_that_a_forward_of_as_many_tokens_keeps(paths, tmp_path):
    run = begun(paths, tmp_path)
    for num_tokens in (64, 120):
        kept = _kept_by_a_forward(run, num_tokens)
        assert estimate_memory(run, num_tokens).activations == pytest.approx(kept, rel=0.02)
    less = begun(paths, tmp_path, gradient_checkpointing=True)
    assert estimate_memory(less, 120).activations < 0.7 * estimate_memory(run, 120).activations


def test_settings_reach_the_optimizers_and_the_models(paths, tmp_path):
    numbers = {"betas": (0.5, 0.6), "weight_decay": 0.25}
    settings = {"estimator": "gae", "logprob_chunk_tokens": 7}
    run = begun(paths, tmp_path, **settings, **numbers)
    assert run.critic
    for optimizer in (run.optimizer, run.critic_optimizer):
        assert numbers.items() <= optimizer.param_groups[0].items()
    assert run.policy.logprob_chunk_tokens == 7


def test_a_dry_run_needs_no_directory_to_write_to(paths, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["train", paths["dataset"], "--model", paths["model"]]
    assert main([*command, "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["num_trajectories"] == 2
    assert not list(tmp_path.iterdir())
    assert main(command) == 2
    assert "missing option --out" in capfd.readouterr().err


def test_a_dry_run_says_where_memory_is_short(paths, tmp_path):
    plan = dry_run(train_config(**paths, out=str(tmp_path / "run")))
    assert plan.available_bytes is not None
    assert plan.memory.still_needed == plan.memory.total - plan.memory.weights
    assert "still to be allocated" not in plan_text(plan)
    short = dataclasses.replace(plan, available_bytes=plan.memory.still_needed - 1)
    assert "set a smaller tokens_per_micro_batch" in plan_text(short)


@pytest.mark.slow
def test_a_dry_run_of_a_model_without_weights_has_the_memory_of_the_model_with_weights(
    paths, tmp_path, capsys
):
    config = Path(paths["model"]) / "config.json"
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes/config.json").write_text(config.read_text())
    for settings in ({}, {"gradient_checkpointing": True}, {"lora_rank": 2}, {"kl_loss_coef": 0.1}):
        run = train_config(**paths, out=str(tmp_path / "run"), **settings)
        whole = dry_run(run).memory
        assert "has no weights" not in capsys.readouterr().err
        model = dataclasses.replace(run.model, path=str(tmp_path / "shapes"))
        shapes = dry_run(dataclasses.replace(run, model=model)).memory
        assert shapes == whole, settings
        assert "has no weights: memory follows from its config.json" in capsys.readouterr().err


def test_a_run_that_trains_needs_weights(paths, tmp_path):
    config = Path(paths["model"]) / "config.json"
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes/config.json").write_text(config.read_text())
    run = train_config(
        dataset=paths["dataset"], model=str(tmp_path / "shapes"), out=str(tmp_path / "run")
    )
    with pytest.raises(InputError, match=r"\[model_load\]"):
        open_run(run)


def test_recomputed_layers_keep_their_inputs_and_the_activations_of_one_layer(paths, tmp_path):
    run = begun(paths, tmp_path, gradient_checkpointing=True)
    layers, hidden = 2, 32  # of the tiny model
    with plain_layers():
        layer = _kept_by_a_forward(run, 96) / layers
    kept = _kept_by_a_forward(run, 96)
    assert estimate_memory(run, 96).activations == pytest.approx(kept + layer, rel=0.02)
    assert kept >= 96 * layers * hidden * 4
