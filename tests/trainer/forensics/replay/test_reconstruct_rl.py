"""Updates of the loop are replayed bit for bit: moved, killed, with any kind of training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rollout_io import RolloutWriter, read_metadata, scan
from rollout_io.cli.main import run as command
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.rl_helpers import HERE, as_toml, config_of, rows_of, save_model
from trainer import rl
from trainer.forensics.reconstruct import reconstruct
from trainer.forensics.replay import replay

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 2},
    "critic": {"estimator": "gae", "critic_learning_rate": 1e-3},
    "kl_loss": {"kl_loss_coef": 0.1, "learning_rate_schedule": "linear"},
    "kl_reward": {"kl_reward_coef": 0.1, "kl_ctrl_type": "adaptive", "kl_horizon": 10},
    "tree_without_variance": {"sequence_layout": "tree", "drop_zero_variance_groups": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    """Loading SmolLM2's tokenizer takes longer than most of these runs."""
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


def check(run: Path | str, updates: list[int]) -> None:
    for update in updates:
        found = replay(run, update)
        assert found.is_identical, (update, [one.sentence for one in found.differences])
        assert found.iteration == (update - 1) // 4
        assert "the recorded tokens" in found.compared


def some(num: int = 5) -> list[int]:
    found: list[int] = np.random.default_rng().choice(np.arange(1, 13), num, replace=False).tolist()
    return found


@pytest.mark.slow
def test_updates_of_the_loop_are_made_again_where_the_run_was_moved_to(tmp_path, model):
    config = config_of(tmp_path, model, save_every_iterations=2, train={"epochs_per_batch": 2})
    rl.run(config)
    moved = Path(shutil.move(config.run.out, tmp_path / "moved"))
    Path(config.loop.tasks).unlink()
    check(moved, some(2))
    assert reconstruct(moved, 4).checkpoint is None
    assert reconstruct(moved, 12).checkpoint == moved / "checkpoints" / "global_step_8"
    last = replay(moved, 12)
    assert f"the weights of {moved}/checkpoints/global_step_12" in last.compared
    assert f"the weights of {moved}/weights/version_3" in last.compared
    assert {"wait_seconds", "staleness_mean"} <= set(replay(moved, 9).not_compared)
    after = replay(moved, 9, settings=["optimizer.learning_rate=0.5"]).changed
    assert after["learning_rate"] == 0.5


@pytest.mark.slow
def test_rollouts_that_have_changed_are_refused(tmp_path, model):
    config = config_of(tmp_path, model, num_iterations=2)
    rl.run(config)
    refused = r"iteration_00001: .*recorded rows? differ"
    (shard, *_) = sorted(Path(config.run.out, "rollouts/iteration_00001").glob("*.parquet"))
    names = rows_of(config, 1)["trajectory_id"].unique().to_list()
    copy = shutil.copytree(config.run.out, tmp_path / "copy")
    dataset = copy / "rollouts/iteration_00001"
    rows = scan(dataset).with_columns(reward=pl.col("reward") + 0.5).collect().to_arrow()
    metadata = read_metadata(dataset)
    shutil.rmtree(dataset)
    with RolloutWriter(dataset, metadata=metadata) as writer:
        writer.write(rows)
    with pytest.raises(RolloutError, match=refused):
        replay(copy, 3)
    shard.unlink()
    with pytest.raises(RolloutError, match=refused) as error:
        replay(config.run.out, 3)
    assert error.value.rule == "resume_dataset"
    assert any(name in str(error.value) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "lora",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind != "lora"),
    ],
)
def test_five_updates_of_each_kind_are_bit_for_bit_the_same(tmp_path, model, kind):
    train = {"epochs_per_batch": 2, "tokens_per_micro_batch": 64} | KINDS[kind]
    given = {"environment": f"{HERE}:TwoTurns"}
    config = config_of(
        tmp_path, model, train=train, generate=given, save_every_iterations=2, max_staleness=1
    )
    rl.run(config)
    check(config.run.out, [*some(), 12])


@pytest.mark.nightly  # on every change a run of `train` is killed, and its updates replayed
@pytest.mark.parametrize("kind", ["lora", "kl_reward"])
def test_updates_before_and_after_a_kill_are_made_again(tmp_path, model, kind):
    train = {"epochs_per_batch": 2} | KINDS[kind]
    config = config_of(tmp_path, model, train=train, save_every_iterations=1)
    toml, out = tmp_path / "rl.toml", Path(config.run.out)
    toml.write_text(as_toml(config))
    line = [sys.executable, "-m", "rollout_io", "rl", str(toml), "--out", str(out)]
    process = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    file, end = out / "metrics.jsonl", time.monotonic() + 300
    while not (file.is_file() and len(file.read_text().splitlines()) >= 5):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert command(["rl", "--resume", str(out)]) == 0
    starts = [json.loads(line) for line in (out / "starts.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in starts] in ([0, 4], [0, 8])
    check(out, [*some(), 1, 5])
