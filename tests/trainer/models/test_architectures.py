"""Every causal LM that Transformers builds: trained right in each layout, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.architectures import KINDS, verdict, windows_seen
from trainer.config.train_config import TrainConfig
from trainer.models.lora import add_adapter
from trainer.models.policy import Policy
from trainer.models.self_check import check_policy
from trainer.run.settings import adapter_settings

FEW = {"cohere2", "exaone4", "gpt2", "jetmoe", "qwen3_moe", "phimoe, LongRoPE"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_an_architecture_is_right_in_each_layout_or_refused(kind: str, tmp_path: Path) -> None:
    found = verdict(kind, tmp_path)
    rows = (ROOT / "docs" / "models.md").read_text().splitlines()
    if found is None:
        assert not any(row.startswith(f"| {kind} |") for row in rows)
        pytest.skip("no model can be built from its default config")
    assert f"| {kind} | {found.text} |" in rows
    assert found.difference < 2e-5
    assert found.gradient < 1e-4
    if found.policy:
        config = TrainConfig(dataset="d", model="m", out="o", lora_rank=2)
        adapters = refusal(
            lambda policy: add_adapter(policy, adapter_settings(config)), found.policy
        )
        assert adapters in (None, "lora_target_modules")
        assert refusal(Policy.checkpoint_layers, found.policy) in (None, "gradient_checkpointing")
    if found.policy and found.windowed:
        with windows_seen(change=1), pytest.raises(RolloutError, match="model_layers"):
            check_policy(found.policy, kind)


def refusal(change: Callable[[Policy], None], policy: Policy) -> str | None:
    """The rule by which a policy refuses a change, if it does."""
    try:
        change(policy)
    except RolloutError as error:
        return error.rule
    return None
