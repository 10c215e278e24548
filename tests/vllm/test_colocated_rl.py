"""The loop with vLLM in the trainer's process; runs in the environment of vLLM, which has our package too."""

import json

import pytest

pytest.importorskip("vllm")

from examples.addition import main as write_tasks
from rollout_io.cli.main import run as rollouts
from tests.vllm.test_colocated import ARGUMENTS
from tests.vllm.test_rl import check_the_engine_spoke_for_the_policy, rows_of, updates_of
from trainer import rl

# vLLM's own modules warn of what torch will drop.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def rl_overrides(model, tmp_path, **settings):
    write_tasks(tmp_path / "tasks")
    usual = {
        "model.path": model,
        "loop.tasks": tmp_path / "tasks/train.jsonl",
        "run.out": tmp_path / "run",
        "loop.num_iterations": 2,
        "loop.on_mismatch": "stop",
        "generate.environment": "tests.vllm.test_rl:Wordy",
        "generate.engine": "vllm",
        "generate.engine_args": json.dumps(ARGUMENTS).replace(":", " =").replace('"', ""),
        "generate.group_size": 2,
        "generate.max_input_tokens": 100,
        "generate.max_response_tokens": 20,
        "batch.groups_per_batch": 4,
        "batch.groups_per_mini_batch": 4,
        "optimizer.learning_rate": 1e-4,
    }
    return [f"{name}={value}" for name, value in (usual | settings).items()]


@pytest.mark.parametrize("settings", [{}, {"model.lora_rank": 4, "optimizer.learning_rate": 2e-3}])
def test_each_update_of_the_loop_is_on_what_the_new_weights_said(settings, small_smollm2, tmp_path):
    config = rl.load_rl_config(None, rl_overrides(small_smollm2, tmp_path, **settings))
    result = rl.run(config)
    assert (result.num_iterations, result.num_updates) == (2, 2)
    run = tmp_path / "run"
    longer = rl.load_rl_config(
        None, rl_overrides(small_smollm2, tmp_path, **settings | {"loop.num_iterations": 3})
    )
    assert rl.run(longer, resume=True).num_updates == 3
    assert rows_of(run)["policy_version"].to_list() == [0] * 8 + [1] * 8 + [2] * 8
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
    assert [line["num_audited_rows"] for line in updates_of(run)] == [4] * 3
    assert [line["num_mismatched_rows"] for line in updates_of(run)] == [0] * 3
    for dataset in sorted((run / "rollouts").iterdir()):
        assert rollouts(["validate", str(dataset)]) == 0
    assert not (run / "weights").exists()
