"""`rollouts replay`: what it prints, and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_io.cli.main import run as command
from tests.helpers.replay_helpers import train
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rows = group_rows(3, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    paths = {"dataset": write_dataset(folder / "ds", rows), "model": save_tiny_model(folder / "m")}
    return train(paths, folder / "run", save_every_updates=1, max_updates=3, lora_rank=2,
                 estimator="gae", critic_learning_rate=1e-3)  # fmt: skip


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def replayed(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = command(["replay", *arguments, "--update", "3", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_screen_says_what_was_compared_and_that_it_is_the_same(run, capsys):
    assert command(["replay", str(run), "--update", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"update     3 of {run}"
    assert lines[1] == f"from       {run}/checkpoints/global_step_2"
    assert f"the weights of {run}/checkpoints/global_step_3, its critic, its opt" in lines[2]
    assert lines[3:] == ["result     bit for bit the same"]


@pytest.mark.slow
def test_changes_are_printed_side_by_side(run, tmp_path, capsys):
    out = tmp_path / "model"
    given = ["--without", "g0_1", "--set", "optimizer.learning_rate=1e-5", "--out", str(out)]
    assert command(["replay", str(run), "--update", "3", *given]) == 0
    text = capsys.readouterr().out
    assert (
        "result     bit for bit the same\nchanged    optimizer.learning_rate=1e-5, without g0_1\n"
        in text
    )
    table = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert table["metric"] == ["recorded", "replayed", "changed", "difference"]
    assert table["num_trained_tokens"] == ["24", "24", "16", "-8"]
    assert table["num_trajectories"] == ["3", "3", "2", "-1"]
    assert "seconds" not in table
    assert table["model"] == [str(out)]
    assert (out / "adapter").is_dir()
    assert (out / "critic" / "value_head.safetensors").is_file()


def damage_metrics(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"] += 0.25
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def damage_tokens(copy: Path) -> None:
    file = copy / "tokens/global_step_3.parquet"
    frame = pl.read_parquet(file)
    values = frame["logprobs"].to_list()
    values[1][2] += 0.5
    frame.with_columns(pl.Series("logprobs", values, frame["logprobs"].dtype)).write_parquet(file)


def damage_tensor(name: str) -> Any:
    def damage(copy: Path) -> None:
        file = copy / "checkpoints/global_step_3" / name
        tensors = load_file(file)
        first = next(iter(tensors.values())).view(torch.int32)
        first.view(-1)[-1] += 1  # one unit in the last place
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def damage_progress(copy: Path) -> None:
    file = copy / "checkpoints/global_step_3/state/run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kl_coef": 0.5}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "part", "name", "largest"),
    [
        (damage_metrics, "metrics", "loss", 0.25),
        (damage_tokens, "tokens", "logprobs", 0.5),
        (damage_tensor("adapter/adapter_model.safetensors"), "weights", "lora_A", 0),
        (damage_tensor("critic/model.safetensors"), "weights", "", 0),
        (damage_tensor("critic/value_head.safetensors"), "weights", "value_head.", 0),
        (damage_tensor("state/optimizer.safetensors"), "optimizer", "lora_", 0),
        (damage_tensor("state/critic_optimizer.safetensors"), "optimizer", "", 0),
        (damage_progress, "progress", "kl_coef", None),
    ],
)
def test_the_first_difference_is_named_with_its_size(damage, part, name, largest, copy, capsys):
    damage(copy)
    code, found = replayed(capsys, str(copy))
    assert (code, found["identical"], len(found["differences"])) == (1, False, 1)
    (one,) = found["differences"]
    assert one["part"] == part
    assert name in one["name"]
    assert one["num_different"] == 1
    if largest:
        assert one["largest"] == pytest.approx(largest)
    assert command(["replay", str(copy), "--update", "3"]) == 1
    assert f"result     differs: {one['sentence']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("state/run.json", "checkpoint_state"),
        ("state/batch.safetensors", "checkpoint_state"),
        ("state/optimizer.safetensors", "checkpoint_state"),
        ("adapter/adapter_model.safetensors", "model_load"),
        ("critic/model.safetensors", "model_load"),
        ("critic/value_head.safetensors", "model_load"),
    ],
)
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_its_hint_works(name, rule, step, copy, capsys):
    check_damaged(name, "checkpoint_state" if step == 2 else rule, step, copy, capsys)


@pytest.mark.slow
def test_damaged_weights_of_the_checkpoint_before_are_named(copy, capsys):
    check_damaged("adapter/adapter_model.safetensors", "checkpoint_state", 2, copy, capsys)


def check_damaged(name, rule, step, copy, capsys):
    """Checkpoint 2 is the start of the replay of update 3; checkpoint 3 is compared with it."""
    damaged = copy / "checkpoints" / f"global_step_{step}"
    (damaged / name).write_bytes((damaged / name).read_bytes()[:9])
    assert command(["replay", str(copy), "--update", "3"]) == 1
    error = capsys.readouterr().err
    assert f"[{rule}]" in error
    then = f"starts from {copy}/checkpoints/global_step_1" if step == 2 else "does not compare"
    hint = f"Hint: restore {damaged} from a copy, or move it out of the run: replay then {then}"
    assert hint in error
    damaged.rename(copy.parent / "moved")
    code, found = replayed(capsys, str(copy))
    assert (code, found["num_forwarded"]) == (0, 3 - step if step == 2 else 0)


@pytest.mark.slow
def test_what_differs_about_the_machine_is_said_if_the_result_differs(copy, capsys):
    start = json.loads((copy / "starts.jsonl").read_text())
    (copy / "starts.jsonl").write_text(json.dumps(start | {"torch": "1.0", "num_processes": 2}))
    assert replayed(capsys, str(copy))[1]["notes"] == [
        "num_processes is 1, but was 2 in the run",
        f"torch is {torch.__version__}, but was 1.0 in the run",
    ]
    damage_metrics(copy)
    command(["replay", str(copy), "--update", "3"])
    assert "note: num_processes is 1, but was 2 in the run" in capsys.readouterr().err
    (copy / "starts.jsonl").unlink()
    (note,) = replayed(capsys, str(copy))[1]["notes"]
    assert note.startswith("the run did not record its number of threads")


def test_errors_are_sentences_with_hints(run, tmp_path, capsys):
    assert command(["replay", str(tmp_path), "--update", "1"]) == 1
    said = capsys.readouterr().err
    assert "has no config.json, so it is not a run. [replay_run]\nHint: name the dir" in said
    assert command(["replay", str(run)]) == 2
    assert "missing option --update. [usage]" in capsys.readouterr().err


@pytest.mark.nightly  # the tests above replay a tiny model
@pytest.mark.model
def test_an_update_of_the_real_model_is_made_again(smollm2_dir, shop_dataset, tmp_path, capsys):
    """SmolLM2-135M on real logs, in the layout that shares tokens, from the checkpoint before."""
    wins = ["--where", "instance_id IN ('shop-7', 'shop-5')", "--out", str(tmp_path / "ds")]
    assert command(["filter", str(shop_dataset), *wins]) == 0
    given = ["--model", str(smollm2_dir), "--out", str(tmp_path / "run"), "--lr", "1e-5"]
    sets = ("batch.groups_per_batch=1", "batch.groups_per_mini_batch=1", "run.save_every_updates=1",
            "batch.sequence_layout=tree", "batch.tokens_per_micro_batch=512")  # fmt: skip
    options = [f"--set={setting}" for setting in sets]
    assert command(["train", str(tmp_path / "ds"), *given, *options]) == 0
    capsys.readouterr()
    assert command(["replay", str(tmp_path / "run"), "--update", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    assert found["num_forwarded"] == 0
