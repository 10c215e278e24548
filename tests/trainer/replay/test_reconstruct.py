"""A run is brought to the state before any of its updates, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.replay.reconstruct import Reconstruction, reconstruct
from trainer.run.loop import count_update
from trainer.run.mini_batches import make_update

TIMES = {"seconds", "tokens_per_s"}
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "learning_rate_schedule": "cosine",
    "warmup_updates": 2,
    "groups_per_batch": 2,
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 2,
    "num_epochs": 2,
    "tokens_per_micro_batch": 32,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("start")
    dataset = write_dataset(folder / "ds", group_rows(3, (1.0, 0.0, 0.5)))
    return {"dataset": dataset, "model": save_tiny_model(folder / "model")}


def train(paths: dict[str, str], out: Path, *, resume: bool = False, **settings: Any) -> Path:
    """Train 12 updates, unless told otherwise."""
    given = paths | SETTINGS | settings
    trainer.train(trainer.TrainConfig(**given, out=str(out)), resume=resume)
    return out


def line_of(found: Reconstruction) -> dict[str, Any]:
    """Make the step, and return its line."""
    made = make_update(found.run, found.step, found.update)
    _, metrics = count_update(found.run, found.progress, made)
    return json.loads(json.dumps(metrics))


def recorded(found: Reconstruction) -> dict[str, Any]:
    return {name: value for name, value in found.line.items() if name not in TIMES}


def test_updates_are_made_again_from_the_checkpoint_before(paths, tmp_path):
    run = train(paths, tmp_path / "run", save_every_updates=5)
    for update in np.random.default_rng().choice(np.arange(1, 13), 5, replace=False).tolist():
        found = reconstruct(run, update)
        assert len(found.forwarded) == (update - 1) % 5
        assert line_of(found) == recorded(found)
        for one in found.forwarded:
            then = {name: value for name, value in one.recorded.items() if name not in TIMES}
            assert json.loads(json.dumps(one.metrics)) == then
    shutil.rmtree(run / "checkpoints")
    found = reconstruct(run, 8)
    assert len(found.forwarded) == 7
    assert line_of(found) == recorded(found)
