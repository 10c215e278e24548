"""Blame of updates of `rollouts rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.blame_helpers import check_blame
from tests.helpers.rl_helpers import HERE, config_of, save_model
from trainer import rl

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gspo_by_step": {"policy_loss_type": "gspo", "sequence_layout": "step"},
    "critic": {"estimator": "gae", "critic_learning_rate": 1e-3},
    "lora_kl": {"lora_rank": 2, "kl_loss_coef": 0.1, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "critic",
        pytest.param("gspo_by_step", marks=pytest.mark.nightly),
        pytest.param("plain", marks=pytest.mark.nightly),
        pytest.param("lora_kl", marks=pytest.mark.nightly),
    ],
)
def test_updates_of_the_loop_are_attributed_to_their_rows(
    tmp_path, model, tokenizer, monkeypatch, kind
):
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)
    train = {"epochs_per_batch": 2, "groups_per_mini_batch": 2} | KINDS[kind]
    generate = {"environment": f"{HERE}:TwoTurns"}
    config = config_of(tmp_path, model, num_iterations=2, train=train, generate=generate)
    rl.run(config)
    found = check_blame(Path(config.run.out), 2)
    assert len(found.groups) == 2
