"""A run is brought to the state before any of its updates, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_io.cli.main import run as command
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.configs import dotted
from tests.helpers.replay_helpers import SETTINGS, line_of, plain, train
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.forensics.blame import blame
from trainer.forensics.reconstruct import reconstruct
from trainer.forensics.replay import replay


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("start")
    rows = group_rows(3, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    return {"dataset": write_dataset(folder / "ds", rows), "model": save_tiny_model(folder / "m")}


@pytest.fixture(scope="module")
def run(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(paths, tmp_path_factory.mktemp("run") / "run", save_every_updates=5)


def some(num: int = 5) -> list[int]:
    """Updates drawn at random; a failure names the update."""
    found: list[int] = np.random.default_rng().choice(np.arange(1, 13), num, replace=False).tolist()
    return found


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.slow
def test_the_state_is_that_before_the_update_and_the_run_is_only_read(run):
    before = files_of(run)
    for update in some(3):
        found = reconstruct(run, update)
        assert len(found.forwarded) == (update - 1) % 5
        for one in found.forwarded:
            assert plain(one.metrics) == plain(one.recorded)
        assert found.progress.global_step == update - 1
        assert line_of(found) == plain(found.line), update
    assert files_of(run) == before


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 2},
    "critic": {"estimator": "gae", "critic_learning_rate": 1e-3},
    "kl_loss": {"kl_loss_coef": 0.1},
    "kl_reward": {"kl_reward_coef": 0.1, "kl_ctrl_type": "adaptive", "kl_horizon": 10},
    "lora_kl_tree": {"lora_rank": 2, "kl_loss_coef": 0.1, "sequence_layout": "tree"},
    "entropy_normalised": {"entropy_loss_coef": 0.01, "batch_normalize": True},
    "one_update_per_batch": {"groups_per_mini_batch": 2, "epochs_per_batch": 1, "num_epochs": 6},
}


ON_EVERY_CHANGE = {("critic", 5), ("lora_kl_tree", 5), ("one_update_per_batch", None)}
EVERY_KIND = [
    pytest.param(*one, marks=pytest.mark.slow if one in ON_EVERY_CHANGE else pytest.mark.nightly)
    for one in product(KINDS, (1, 5, None))
]


@pytest.mark.parametrize(("kind", "every"), EVERY_KIND)
def test_five_updates_of_each_kind_are_bit_for_bit_the_same(kind, every, paths, tmp_path):
    run = train(paths, tmp_path / "run", save_every_updates=every, **KINDS[kind])
    for update in [*some(4), 12]:
        found = replay(run, update)
        assert found.is_identical, (update, [one.sentence for one in found.differences])
        saved = (run / "checkpoints" / f"global_step_{update}").is_dir()
        assert saved == any("the weights of" in text for text in found.compared)


@pytest.mark.slow
def test_kl_and_a_critic_in_the_reward_are_restored_from_a_farther_checkpoint(paths, tmp_path):
    kinds = KINDS["critic"] | KINDS["kl_reward"]
    run = train(paths, tmp_path / "run", save_every_updates=9, num_epochs=1, **kinds)
    found = replay(run, 6)
    assert (found.num_forwarded, found.is_identical) == (5, True)
    assert "its critic" in found.compared
    assert found.replayed["loss/kl_reward_coef"] != 0.1
    assert found.replayed["critic/critic_loss"] > 0


@pytest.mark.slow
def test_updates_before_and_after_a_resumption_are_made_with_the_settings_of_then(paths, tmp_path):
    run = train(paths, tmp_path / "run", save_every_updates=2, max_updates=5, num_epochs=2,
                learning_rate_schedule="constant", warmup_updates=0)  # fmt: skip
    train(paths, run, resume=True, save_every_updates=4, tokens_per_micro_batch=64,
          learning_rate_schedule="constant", warmup_updates=0)  # fmt: skip
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in starts] == [0, 5]
    assert [line["tokens_per_micro_batch"] for line in starts] == [32, 64]
    for update in (4, 5, 6, 8, 12):
        found = replay(run, update)
        assert found.is_identical, (update, [one.sentence for one in found.differences])
    shutil.rmtree(run / "checkpoints" / "global_step_5")
    found = replay(run, 6)
    assert any("tokens_per_micro_batch was changed by --resume" in text for text in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("critic", "kl_reward"), pytest.param(("lora", "kl_loss"), marks=pytest.mark.nightly)],
    ids="_".join,
)
def test_updates_before_and_after_a_kill_are_bit_for_bit_the_same(kinds, paths, tmp_path):
    """The run is killed at a random one of 48 updates, and resumed from its latest checkpoint."""
    rng = np.random.default_rng()
    last = int(rng.integers(4, 31))
    own = {key: value for kind in kinds for key, value in KINDS[kind].items()}
    settings = SETTINGS | own | {"num_epochs": 8, "save_every_updates": 3}
    out = tmp_path / "run"
    line = ["train", paths["dataset"], "--model", paths["model"], "--out", str(out)]
    line += [f"--set={dotted(key)}={value}" for key, value in settings.items()]
    metrics, environment = out / "metrics.jsonl", os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "rollout_io", *line], env=environment)
    end = time.monotonic() + 300
    while num_lines(metrics) < last:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_made = num_lines(metrics)
    assert command(["train", "--resume", str(out)]) == 0
    lines = (out / "starts.jsonl").read_text().splitlines()
    starts = [json.loads(line)["global_step"] for line in lines]
    assert starts[0] == 0
    assert (num_made - 1) // 3 * 3 <= starts[1] <= num_made < 48
    assert num_lines(metrics) == 48
    drawn = rng.choice(np.arange(1, 49), 5, replace=False).tolist()
    for update in (*drawn, starts[1], starts[1] + 1, num_made, num_made + 1):
        found = replay(out, update)
        assert found.is_identical, (num_made, update, [one.sentence for one in found.differences])


def num_lines(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


@pytest.mark.slow
def test_the_threads_of_the_run_are_used(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (start,) = (json.loads(line) for line in (copy / "starts.jsonl").read_text().splitlines())
    before = torch.get_num_threads()
    assert start["num_threads"] == before
    (copy / "starts.jsonl").write_text(json.dumps(start | {"num_threads": before + 1}))
    try:
        reconstruct(copy, 6)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_mini_batch_that_was_skipped_is_skipped_again(paths, tmp_path):
    rows = group_rows(3, (1.0, 0.0, 0.5))
    for row in rows:
        if row["instance_id"] == "g0":
            row["loss_mask"] = [False] * len(row["loss_mask"])
    dataset = write_dataset(tmp_path / "ds", rows)
    run = train(paths | {"dataset": dataset}, tmp_path / "run", save_every_updates=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines[:4]] == [1, 0, 1, 0]
    for update in (1, 2, 4, 8):
        found = replay(run, update)
        assert found.is_identical, (update, [one.sentence for one in found.differences])
    assert replay(run, 2).num_forwarded == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": [7, 7, 7, 7]}, r"ds: its trajectories, returns or tokens have changed"),
        ({"reward": 0.25}, r"ds: its trajectories, returns or tokens have changed"),
    ],
)
@pytest.mark.parametrize("update", [2, 7])
def test_a_dataset_that_has_changed_is_refused(change, message, update, run, tmp_path):
    rows = group_rows(3, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    rows[-1] |= change
    other = write_dataset(tmp_path / "ds", rows)
    with pytest.raises(RolloutError, match=message) as error:
        reconstruct(run, update, places={"data.dataset": other})
    assert error.value.rule == "resume_dataset"
    assert "--set data.dataset=PATH" in str(error.value.hint)


@pytest.mark.parametrize("change", ["response_ids", "prompt_token_ids", "rollout_logprobs"])
def test_recorded_tokens_tell_a_change_where_no_checkpoint_does(change, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    rows = group_rows(3, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    rows[0][change] = rows[0][change][::-1]  # with the same sum
    rows[0]["rollout_logprobs"][0] -= 1 if change == "rollout_logprobs" else 0
    other = write_dataset(tmp_path / "ds", rows)
    for explain in (reconstruct, blame):
        with pytest.raises(RolloutError, match=r"recorded rows? differ, the first in .* g0_0"):
            explain(copy, 1, places={"data.dataset": other})


@pytest.mark.parametrize(
    ("damage", "update", "rule", "message"),
    [
        ({}, 13, "replay_update", r"found no update 13; expected an update from 1 to 12"),
        ({"metrics.jsonl": ""}, 1, "replay_update", "the run has not made an update yet"),
        ({"metrics.jsonl": "{}\n"}, 1, "metrics_file", r"metrics\.jsonl:1: found '{}'"),
        ({"config.json": "["}, 1, "resume_config", "cannot read the configuration"),
        ({"config.json": "{}"}, 1, "resume_config", "lacks data.dataset and model.path"),
        (
            {"config.json": '{"data": {"dataset": "ds"}, "model": {"path": "m"}, "optimiser": 1}'},
            1,
            "config_key",
            "unknown key `optimiser`",
        ),
        (
            {"checkpoints/global_step_5/state/run.json": "{}"},
            6,
            "checkpoint_state",
            "cannot read the state of the run",
        ),
        (
            {"checkpoints/global_step_5/model.safetensors": ""},
            6,
            "checkpoint_state",
            "global_step_5",
        ),
    ],
)
def test_what_cannot_be_made_again_is_refused(damage, update, rule, message, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for name, text in damage.items():
        (copy / name).write_text(text)
    with pytest.raises(RolloutError, match=message) as error:
        replay(copy, update)
    assert error.value.rule == rule


def test_a_directory_that_is_no_run_and_a_model_that_has_moved_are_refused(run, tmp_path):
    with pytest.raises(RolloutError, match=r"is not a run\. \[replay_run\]"):
        reconstruct(tmp_path, 1)
    places = {"model.path": str(tmp_path / "gone")}
    with pytest.raises(RolloutError, match=r"run's model.path, .*gone, does not exist") as error:
        reconstruct(run, 1, places=places)
    assert error.value.rule == "replay_place"
    assert "--set model.path=PATH" in str(error.value.hint)


def test_a_skip_that_the_run_did_not_have_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    lines[0] = (
        lines[0]
        .replace('"skipped": 0', '"skipped": 1')
        .replace('"global_step": 1', '"global_step": 0')
    )
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RolloutError, match=r"the run skipped the mini-batch after update 0, but"):
        reconstruct(copy, 3)


@pytest.mark.parametrize(("name", "content", "rule"), [
    ("config.json", b"{}", "resume_config"),
    ("metrics.jsonl", b"\xff\n", "metrics_file"),
])  # fmt: skip
def test_damaged_files_of_a_run_are_named(run, tmp_path, name, content, rule):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / name).write_bytes(content)
    with pytest.raises(RolloutError, match=rule):
        replay(copy, 3)
