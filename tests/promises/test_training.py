"""Training: the update depends on the data and the settings, and on nothing else.

The pages: docs/training.md, docs/tree.md.
"""

from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import pipelines
import rollout_io
import trainer
from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    rows = group_rows(4, (1.0, 0.0, 0.5))
    return {
        "data.dataset": write_dataset(folder / "ds", rows),
        "model.path": save_tiny_model(folder / "model"),
    }


def train(paths, out, *, resume=False, **settings):
    """Weights and result after training; `batch__x` stands for the key `batch.x`."""
    values = paths | {name.replace("__", "."): value for name, value in settings.items()}
    values = {"batch.groups_per_batch": 2, "batch.groups_per_mini_batch": 1} | values
    overrides = [f"{key}={value}" for key, value in {**values, "run.out": str(out)}.items()]
    result = trainer.train(trainer.load_config(None, overrides), resume=resume)
    return load_file(Path(result.checkpoint) / "model.safetensors"), result


def test_the_gradient_does_not_depend_on_the_layout_of_sequences(paths, tmp_path):
    layouts = [
        train(paths, tmp_path / layout, batch__sequence_layout=layout)[1].metrics
        for layout in ("step", "merge", "tree")
    ]
    check_gradients(layouts)


def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(paths, tmp_path):
    check_gradients(
        [
            train(paths, tmp_path / str(size), batch__tokens_per_micro_batch=size)[1].metrics
            for size in (32, 64, 4096)
        ]
    )


def check_gradients(runs):
    """The last of four updates, so the three before it were equal too."""
    assert runs[0]["grad_norm"] > 0
    for metrics in runs[1:]:
        assert metrics["grad_norm"] == pytest.approx(runs[0]["grad_norm"], rel=1e-4)


def test_a_resumed_run_has_the_weights_of_an_undisturbed_one_bit_for_bit(paths, tmp_path):
    whole, _ = train(paths, tmp_path / "whole", run__save_every_updates=1)
    train(paths, tmp_path / "halves", run__save_every_updates=1, batch__max_updates=2)
    rest, result = train(
        paths, tmp_path / "halves", resume=True, run__save_every_updates=1, batch__max_updates=4
    )
    assert result.num_updates == 4
    assert all(torch.equal(rest[name], weights) for name, weights in whole.items())


def test_the_same_run_twice_has_the_same_bits(paths, tmp_path):
    one, two = (train(paths, tmp_path / name)[0] for name in ("one", "two"))
    assert all(torch.equal(two[name], weights) for name, weights in one.items())


def test_the_number_of_updates_does_not_depend_on_the_number_of_turns(paths, tmp_path):
    short = pl.concat([rollout_io.scan(paths["data.dataset"])]).collect()
    one_turn = short.filter(pl.col("is_last_step")).with_columns(step_index=pl.lit(0, pl.Int32))
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(one_turn)
    runs = [paths, paths | {"data.dataset": str(tmp_path / "ds")}]
    counts = {train(each, tmp_path / str(i))[1].num_updates for i, each in enumerate(runs)}
    assert counts == {4}


def test_what_entered_the_loss_can_be_read_token_by_token(paths, tmp_path):
    train(paths, tmp_path / "run", run__record_tokens="all")
    records = pipelines.scan_token_records(tmp_path / "run").collect()
    rows = rollout_io.scan(paths["data.dataset"]).collect()
    joined = records.join(rows, on=["trajectory_id", "step_index"])
    assert joined.height == rows.height
    assert (joined["advantages"].list.len() == joined["response_ids"].list.len()).all()


def test_rows_that_cannot_train_as_configured_are_refused_before_anything_is_written(
    paths, tmp_path
):
    with pytest.raises(RolloutError) as caught:
        train(paths, tmp_path / "run", loss__policy_loss_type="distill")
    assert caught.value.rule == "teacher_logprobs"
    assert not [*tmp_path.glob("run/checkpoints/*")]


def test_an_unknown_key_is_refused_with_the_nearest_one(paths, tmp_path):
    with pytest.raises(RolloutError) as caught:
        train(paths, tmp_path / "run", loss__eps_clip_hihg=0.3)
    assert "eps_clip_high" in f"{caught.value} {caught.value.hint}"


def test_a_failed_trajectory_trains_nothing(paths, tmp_path):
    rows = rollout_io.read(paths["data.dataset"]).to_pylist()
    for row in rows:
        if row["trajectory_id"] == "g0_0":
            row |= {"error": "crashed", "reward": None}
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {"run__record_tokens": "all", "data__failed": "trajectory"}
    train(paths | {"data.dataset": dataset}, tmp_path / "run", **settings)
    tokens = pipelines.scan_token_records(tmp_path / "run").collect()
    assert "g0_0" not in tokens["trajectory_id"]
    assert "g0_1" in tokens["trajectory_id"]
