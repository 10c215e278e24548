"""Rollouts of SkyRL's and verl's own classes are kept and train here: `make test-hooks`."""

import json

import pytest

import rollout_io
import trainer
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.peer_environment import report_of

pytestmark = [pytest.mark.nightly, pytest.mark.model]
PEERS = {
    ".venv-skyrl": "skyrl_hook.py",
    ".venv-skyrl-0.4": "skyrl_hook.py",
    ".venv-verl": "verl_hook.py",
}
DATASETS = {"skyrl_hook.py": ("ds", "dumped"), "verl_hook.py": ("ds",)}


@pytest.fixture(scope="module", params=PEERS)
def step(request, small_smollm2, tmp_path_factory):
    """The datasets and the report of a training step in the framework's environment."""
    script, out = PEERS[request.param], tmp_path_factory.mktemp("hook")
    helper = ROOT / "tests" / "helpers" / script
    report = report_of(request.param, "test-hooks", helper, small_smollm2, out)
    return [out / name for name in DATASETS[script]], report


def test_the_rows_are_valid_and_audit_as_labelled(step, small_smollm2, capsys):
    for dataset in step[0]:
        assert run(["validate", str(dataset)]) == 0
        capsys.readouterr()
        assert run(["audit", str(dataset), "--weights", f"0={small_smollm2}", "--json"]) == 0
        (verdict,) = json.loads(capsys.readouterr().out)["verdicts"].items()
        assert verdict[0] == "as_labelled"
        assert verdict[1]["rows"] == len(rollout_io.read(str(dataset), ["step_index"]))


def test_every_attempt_is_kept_in_the_group_of_its_task(step):
    for dataset in step[0]:
        rows = rollout_io.read(str(dataset)).to_pylist()
        groups = {row["instance_id"]: set() for row in rows}
        for row in rows:
            groups[row["instance_id"]].add(row["trajectory_id"])
            assert row["task_instance_id"] == row["instance_id"]
            assert row["temperature"] == pytest.approx(0.8)
        assert [len(attempts) for attempts in groups.values()] == [3, 3]


def test_a_dumped_batch_has_the_rows_of_the_generator(step):
    if len(step[0]) == 1:
        pytest.skip("this framework's dumps have no token ids")
    names = "trajectory_id", "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs"
    recorded, dumped = (
        rollout_io.read(str(path), [*names, "reward"]).to_pylist() for path in step[0]
    )
    assert recorded == dumped


def test_training_on_the_rows_has_the_loss_of_the_framework(step, small_smollm2):
    datasets, theirs = step
    assert theirs["has_moved"]
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 2, "max_updates": 1}
    settings |= {"estimator": "grpo", "normalize_by_std": False, "reduction": "token_mean"}
    settings |= {"sequence_layout": "step", "tis_ratio_type": None}
    for path in datasets:
        paths = {"dataset": str(path), "model": str(small_smollm2), "out": f"{path}-run"}
        ours = trainer.train(train_config(**paths, **settings)).metrics
        assert abs(ours["loss"]) > 1e-3
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["rollout_logprobs_abs_diff_mean"] < 1e-4
