"""Outputs of ours in SkyRL's own trainer: `make test-skyrl`."""

import pytest

from rollout_io import convert
from tests.conftest import EXAMPLES
from tests.helpers.peer_environment import report_of


@pytest.mark.nightly
@pytest.mark.parametrize("name", [".venv-skyrl", ".venv-skyrl-0.4"])
def test_skyrl_checks_merges_and_trains_outputs_of_ours_unchanged(tmp_path, smollm2_dir, name):
    del smollm2_dir
    shop = str(tmp_path / "shop")
    rewards = str(EXAMPLES / "shop.rewards.jsonl")
    convert([EXAMPLES / "shop.calls.jsonl"], shop, format="calls", rewards=rewards)
    found = report_of(name, "test-skyrl", "-m", "tests.helpers.skyrl_peer", shop)
    assert len(found) == 10
    assert {name: error for name, error in found.items() if error} == {}
