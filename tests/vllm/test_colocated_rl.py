"""The loop with vLLM in the trainer's process; runs in the environment of vLLM, which has our package too."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("vllm")

from examples.addition import main as write_tasks
from rollout_io.cli.main import run as rollouts
from tests.conftest import ROOT, saved_beside
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


@pytest.fixture
def even_model(smollm2_dir, tmp_path):
    """A narrow model whose heads two processes can share."""
    config = AutoConfig.from_pretrained(
        smollm2_dir,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    return saved_beside(smollm2_dir, AutoModelForCausalLM.from_config(config), tmp_path / "even")


def forget_killed_engines():
    """A killed CPU build of vLLM leaves memory under a name that the next one uses."""
    for file in Path("/dev/shm").glob("*-tp:0-*-cpushm_*"):
        file.unlink()


@pytest.mark.nightly  # two more processes import vLLM, twice
def test_two_processes_share_the_engine_and_go_on_after_one_was_killed(even_model, tmp_path):
    overrides = rl_overrides(
        even_model, tmp_path, **{"loop.num_iterations": 4, "optimizer.learning_rate": 1e-2}
    )
    forget_killed_engines()
    run, command = tmp_path / "run", [sys.executable, "-m", "rollout_io", "rl"]
    how = ["--num-processes", "2", "--json"]
    settings = [f"--set={one}" for one in overrides]
    (tmp_path / "empty.toml").touch()
    with subprocess.Popen(
        [*command, str(tmp_path / "empty.toml"), *settings, *how],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        while started.poll() is None and not list(run.glob("rollouts/iteration_00001/*.parquet")):
            time.sleep(0.02)
        assert started.poll() is None, started.communicate()[1]
        ranks = psutil.Process(started.pid).children()
        ranks[-1].kill()
        assert "[process_lost]" in started.communicate(timeout=120)[1]
    assert started.returncode == 1
    forget_killed_engines()
    done = subprocess.run(
        [*command, "--resume", str(run), *how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_iterations"] == 4
    rows = rows_of(run)
    assert rows["policy_version"].to_list() == [v for v in range(4) for _ in range(8)]
    assert "error" not in rows.columns or rows["error"].null_count() == len(rows)
    check_the_engine_spoke_for_the_policy(run, even_model)
