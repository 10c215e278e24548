"""Optimizers, and the learning rate of each update."""

import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    lines_of,
    save_tiny_model,
    write_dataset,
)
from trainer.models.optimizer import make_optimizer, rate_factor


def config_of(**settings):
    return train_config(dataset="d", model="m", out="o", **settings)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Three groups, of which the second trains nothing, and a model with 8 kB matrices."""
    folder = tmp_path_factory.mktemp("start")
    rows = group_rows(3, (1.0, 0.0))
    for row in rows[4:8]:
        row["loss_mask"] = [False] * len(row["loss_mask"])
    model = save_tiny_model(folder / "model", hidden_size=64, intermediate_size=64)
    return {"dataset": write_dataset(folder / "ds", rows), "model": model}


def run(paths, out, *, resume=False, **settings):
    """A mini-batch of each of the three groups, twice."""
    defaults = {"groups_per_batch": 1, "groups_per_mini_batch": 1, "num_epochs": 2}
    given = defaults | {"learning_rate": 1e-3, "save_every_updates": 1} | settings
    return trainer.train(train_config(**paths, **given, out=str(out)), resume=resume)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 6, [1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        ("cosine", 9, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_schedules_are_those_computed_by_hand(schedule, warmup, expected):
    config = config_of(learning_rate_schedule=schedule, warmup_updates=warmup)
    found = [rate_factor(config.optimizer, 6, s) for s in range(6)]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmup_as_long_as_the_run_leaves_no_rate_undefined(schedule):
    config = config_of(learning_rate_schedule=schedule, warmup_updates=6)
    rates = [rate_factor(config.optimizer, 6, s) for s in range(7)]
    assert rates[5:] == [6 / 7, 1.0]  # the run asks once more after its last update


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_are_those_of_transformers_after_the_warmup(schedule):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=3, num_training_steps=20)
    config = config_of(learning_rate_schedule=schedule, warmup_updates=3)
    for step in range(20):
        if step >= 3:
            ours = rate_factor(config.optimizer, 20, step)
            assert math.isclose(ours, optimizer.param_groups[0]["lr"], rel_tol=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.slow
def test_a_run_steps_at_the_rates_of_the_schedule_which_skipped_mini_batches_do_not_move(
    paths, tmp_path
):
    run(paths, tmp_path, learning_rate_schedule="linear", warmup_updates=1, learning_rate=1.0)
    lines = lines_of(tmp_path)
    assert [line["skipped"] for line in lines] == [0, 1, 0, 0, 1, 0]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.6], rel=1e-12)


@pytest.mark.slow
def test_the_critic_steps_at_the_rates_of_the_schedule(paths, tmp_path):
    settings = {"estimator": "gae", "max_updates": 1}
    run(paths, tmp_path / "warm", critic_learning_rate=0.2, warmup_updates=1, **settings)
    run(paths, tmp_path / "half", critic_learning_rate=0.1, learning_rate=5e-4, **settings)
    for name in ("critic/model.safetensors", "critic/value_head.safetensors", "model.safetensors"):
        file = f"checkpoints/global_step_1/{name}"
        assert (tmp_path / "warm" / file).read_bytes() == (tmp_path / "half" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_run_that_is_resumed_has_the_rates_and_weights_of_one_that_was_not(
    optimizer, paths, tmp_path
):
    settings = {"learning_rate_schedule": "cosine", "algorithm": optimizer}
    run(paths, tmp_path, **settings)
    whole, weights = lines_of(tmp_path), tmp_path / "checkpoints/global_step_4/model.safetensors"
    expected = weights.read_bytes()
    for step in (1, 2):
        (tmp_path / "checkpoints" / "latest").write_text(f"global_step_{step}\n")
        run(paths, tmp_path, resume=True, **settings)
        assert lines_of(tmp_path) == whole
        assert weights.read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("longer", [{"max_updates": 5}, {"num_epochs": 3}])
def test_a_run_whose_rate_goes_down_towards_its_last_update_cannot_be_made_longer(
    longer, paths, tmp_path
):
    run(paths, tmp_path, learning_rate_schedule="linear", max_updates=2)
    changed = {"max_updates": 2} | longer
    with pytest.raises(RolloutError, match=rf"{next(iter(longer))}: found.*\[resume_config\]"):
        run(paths, tmp_path, resume=True, learning_rate_schedule="linear", **changed)


@pytest.mark.slow
def test_moments_of_8_bits_train_nearly_as_those_of_32(paths, tmp_path):
    start = load_file(f"{paths['model']}/model.safetensors")
    moved = {}
    for optimizer in ("adamw", "adamw_8bit"):
        run(paths, tmp_path / optimizer, algorithm=optimizer, weight_decay=0.0)
        checkpoint = tmp_path / optimizer / "checkpoints/global_step_4"
        weights = load_file(checkpoint / "model.safetensors")
        moved[optimizer] = torch.cat([(weights[k] - start[k]).flatten() for k in start])
    assert {t.dtype for t in load_file(checkpoint / "state/optimizer.safetensors").values()} == {
        torch.uint8,
        torch.float32,
        torch.int64,
    }
    assert not torch.equal(moved["adamw"], moved["adamw_8bit"])
    difference = (moved["adamw"] - moved["adamw_8bit"]).norm() / moved["adamw"].norm()
    assert difference < 0.2


def test_a_missing_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    config, device = config_of(algorithm="adamw_8bit"), torch.device("cpu")
    with pytest.raises(RolloutError, match="extra_installed") as error:
        make_optimizer(parameters, config.optimizer, learning_rate=1.0, device=device)
    assert error.value.hint == 'pip install "rollout-io[bnb]"'
