"""Outputs of ours in SkyRL's own trainer: `make test-skyrl`."""

import json
import os
import subprocess

import pytest

from rollout_io import convert
from tests.conftest import EXAMPLES, ROOT


@pytest.mark.nightly
@pytest.mark.parametrize("name", [".venv-skyrl", ".venv-skyrl-0.4"])
def test_skyrl_checks_merges_and_trains_outputs_of_ours_unchanged(tmp_path, smollm2_dir, name):
    del smollm2_dir
    python = ROOT / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {name}: run `make test-skyrl`")
    shop = str(tmp_path / "shop")
    rewards = str(EXAMPLES / "shop.rewards.jsonl")
    convert([EXAMPLES / "shop.calls.jsonl"], shop, format="calls", rewards=rewards)
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", "tests.helpers.skyrl_peer", shop],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    assert {name: error for name, error in found.items() if error} == {}
