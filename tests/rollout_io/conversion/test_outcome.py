"""The return that a dataset means, in all that reads it."""

import json

import pytest

import rollout_io
import trainer
from rollout_io.cli.main import run
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.helpers.configs import train_config
from tests.helpers.rl_helpers import HERE, config_of, save_model
from tests.helpers.trainer_helpers import save_tiny_model, step, write_dataset
from trainer import rl


def turns(first, last, repetition):
    """A trajectory whose turns earn `first` and `last`."""
    begins = step("a", repetition, 0, [1, 2], [3, 4], reward=first)
    ends = step("a", repetition, 1, [1, 2, 3, 4, 5], [6, 7], reward=last)
    return [begins, ends | {"is_last_step": True}]


def write(path, outcome):
    return write_dataset(path, [*turns(0.5, 0.5, 0), *turns(0.5, 0.0, 1)], outcome=outcome)


def stats(path, capsys, *options):
    assert run(["stats", path, "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_statistics_filters_export_and_training_take_the_return_that_the_dataset_means(
    tmp_path, capsys
):
    path = write(tmp_path / "ds", "sum")
    assert rollout_io.read_metadata(path).outcome == "sum"
    found = stats(path, capsys)
    assert found["reward_mean"] == found["metrics"]["trajectory"]["avg_score"]["value"] == 0.75
    assert stats(path, capsys, "--outcome", "last")["reward_mean"] == 0.25
    assert run(["filter", path, "--min-reward", "0.4", "--out", f"{path}2"]) == 0
    assert stats(f"{path}2", capsys)["num_trajectories"] == 2
    assert rollout_io.read_metadata(f"{path}2").outcome == "sum"
    assert run(["export", path, "--format", "skyrl", "--out", str(tmp_path / "out.json")]) == 0
    exported = json.loads((tmp_path / "out.json").read_text())
    assert exported["rewards"] == [0.0, 1.0, 0.0, 0.5]
    config = train_config(
        dataset=path, model=save_tiny_model(tmp_path / "model"), out=str(tmp_path / "run")
    )
    assert trainer.train(config).metrics["return_mean"] == 0.75
    assert json.loads((tmp_path / "run/config.json").read_text())["data"]["outcome"] == "sum"


def test_datasets_that_mean_other_returns_are_mixed_only_when_told(tmp_path, capsys):
    paths = [write(tmp_path / "sum", "sum"), write(tmp_path / "unknown", None)]
    mix = ["filter", paths[0], "--mix", paths[1], "--prefix-names", "--out", str(tmp_path / "out")]
    assert run(mix) == 1
    assert "--outcome sum" in capsys.readouterr().err
    assert run([*mix, "--outcome", "sum"]) == 0
    assert rollout_io.read_metadata(tmp_path / "out").outcome == "sum"


def test_metadata_with_another_return_are_refused():
    pairs = {b"rollout_io.outcome": b'"best"'}
    with pytest.raises(RolloutError, match="last or sum"):
        DatasetMetadata.decode(pairs)


@pytest.mark.slow
def test_the_loop_and_the_statistics_of_its_rollouts_agree_on_rewards_per_turn(
    tmp_path, capsys, tokenizer
):
    model = save_model(tmp_path / "model", tokenizer)
    generate = {"environment": f"{HERE}:TwoTurns", "max_turns": 2}
    config = config_of(tmp_path, model, generate=generate, num_iterations=1)
    result = rl.run(config)
    path = str(tmp_path / "run/rollouts/*")
    summed = stats(path, capsys)["reward_mean"]
    assert result.return_mean == pytest.approx(summed)
    assert stats(path, capsys, "--outcome", "last")["reward_mean"] < summed
