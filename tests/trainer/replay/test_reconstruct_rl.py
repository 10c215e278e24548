"""A run of the loop is brought to the state before any of its updates, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.rl_helpers import TIMES, config_of, save_model
from trainer import rl
from trainer.replay.reconstruct import reconstruct
from trainer.run.loop import count_update
from trainer.run.mini_batches import make_update

LOOP_ONLY = {
    *("iteration", "staleness_mean", "staleness_max", "staleness_histogram"),
    *("num_dropped_groups", "response_tokens_mean", "steps_mean", "wait_seconds", "sync_seconds"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    """Loading SmolLM2's tokenizer takes longer than most of these runs."""
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.same_tokenizer"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


def test_updates_of_the_loop_are_made_again_where_the_run_was_moved_to(tmp_path, model):
    config = config_of(tmp_path, model, save_every_iterations=2, train={"epochs_per_batch": 2})
    rl.run(config)
    moved = shutil.move(config.out, tmp_path / "moved")
    Path(config.tasks).unlink()
    for update in np.random.default_rng().choice(np.arange(1, 13), 5, replace=False).tolist():
        found = reconstruct(moved, update)
        assert (found.checkpoint is None) == (update <= 4)
        made = make_update(found.run, found.step, update)
        _, metrics = count_update(found.run, found.progress, made)
        recorded = {k: v for k, v in found.line.items() if k not in TIMES | LOOP_ONLY}
        assert json.loads(json.dumps(metrics)) == recorded
