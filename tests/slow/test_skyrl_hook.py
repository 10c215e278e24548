"""Rollouts of SkyRL's own generator and trainer are kept and train here: `make test-skyrl`."""

import json
import os
import subprocess

import pytest

import rollout_io
import trainer
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.configs import train_config

pytestmark = [pytest.mark.nightly, pytest.mark.model]


@pytest.fixture(scope="module", params=[".venv-skyrl", ".venv-skyrl-0.4"])
def step(request, small_smollm2, tmp_path_factory):
    """The folder and the report of a training step in SkyRL's environment."""
    python = ROOT / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {request.param}: run `make test-skyrl`")
    out = tmp_path_factory.mktemp("skyrl")
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", "tests.helpers.skyrl_hook", small_smollm2, str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["ds", "dumped"])
def test_the_rows_are_valid_and_audit_as_labelled(step, name, small_smollm2, capsys):
    dataset = str(step[0] / name)
    assert run(["validate", dataset]) == 0
    capsys.readouterr()
    assert run(["audit", dataset, "--weights", f"0={small_smollm2}", "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"].items()
    assert verdict[0] == "as_labelled"
    assert verdict[1]["rows"] == 6


def test_the_dumped_batch_has_the_rows_of_the_generator(step):
    names = "trajectory_id", "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs"
    recorded, dumped = (
        rollout_io.read(str(step[0] / name), [*names, "reward"]).to_pylist()
        for name in ("ds", "dumped")
    )
    assert recorded == dumped


@pytest.mark.parametrize("name", ["ds", "dumped"])
def test_training_on_the_rows_has_the_loss_of_skyrl(step, name, small_smollm2):
    out, theirs = step
    assert theirs["has_moved"]
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 2, "max_updates": 1}
    settings |= {"estimator": "grpo", "normalize_by_std": False, "reduction": "token_mean"}
    paths = {"dataset": str(out / name), "model": str(small_smollm2), "out": str(out / f"o-{name}")}
    ours = trainer.train(train_config(**paths, tis_ratio_type=None, **settings)).metrics
    assert abs(ours["loss"]) > 1e-3
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert ours["rollout_logprobs_abs_diff_mean"] < 1e-4
