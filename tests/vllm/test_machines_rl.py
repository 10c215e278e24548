"""`rollouts rl` on four machines: two trainers, an engine, a harness; runs in the environment of vLLM."""

import sys

import pytest

pytest.importorskip("vllm")

from examples.addition import main as write_tasks
from tests.helpers import gloo_for_nccl
from tests.helpers.machines import laboratory
from tests.vllm.test_rl import check_the_engine_spoke_for_the_policy, rows_of, updates_of

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

SERVER = "http://10.77.0.3:8000"
HARNESS = "http://10.77.0.4:8100"


@pytest.fixture
def lab(tmp_path):
    with laboratory(tmp_path / "lab", 4) as opened:
        yield opened


def test_trainers_engine_and_harness_on_machines_of_their_own_with_weights_by_transfer(
    lab, small_smollm2, tmp_path
):
    write_tasks(tmp_path / "tasks")
    plugin = gloo_for_nccl.as_plugin(tmp_path / "plugin")
    usual = ["--model", str(small_smollm2), "--host", "0.0.0.0", "--port", "8000"]
    usual += ["--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
    usual += ["--weight-transfer-config", '{"backend": "nccl"}']
    environment = {
        "PYTHONPATH": plugin,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    server = ["-m", "vllm.entrypoints.openai.api_server", *usual]
    engine = lab.machines[2].start(sys.executable, *server, **environment)
    lab.machines[3].start(sys.executable, "-m", "tests.helpers.remote_harness", "8100")
    settings = {
        "model.path": small_smollm2,
        "loop.tasks": tmp_path / "tasks/train.jsonl",
        "loop.num_iterations": 2,
        "generate.harness": "tests.helpers.remote_harness:solve",
        "generate.host": lab.machines[0].address,
        "generate.engine": "vllm",
        "generate.urls": f'["{SERVER}"]',
        "generate.group_size": 2,
        "generate.max_input_tokens": 100,
        "generate.max_response_tokens": 20,
        "batch.groups_per_batch": 4,
        "batch.groups_per_mini_batch": 4,
        "optimizer.learning_rate": 1e-4,
    }
    (tmp_path / "empty.toml").touch()
    out = lab.private / "run"
    words = ["rl", str(tmp_path / "empty.toml"), f"--out={out}"]
    words += [f"--set={name}={value}" for name, value in settings.items()]
    for arguments in (words, ["rl", f"--resume={out}", "--set=loop.num_iterations=3"]):
        started = [
            lab.start(
                rank, *arguments, module="tests.helpers.gloo_for_nccl", REMOTE_HARNESS=HARNESS
            )
            for rank in (0, 1)
        ]
        for process in started:
            assert process.wait(600) == 0, process.output() + engine.output()[-3000:]
    assert "by transfer (nccl) to 1 server" in started[0].output()
    run = lab.machines[0].path(out)
    rows = rows_of(run)
    assert rows["policy_version"].to_list() == [0] * 8 + [1] * 8 + [2] * 8
    metrics = [(one["key"], one["value"]) for row in rows["metrics"].to_list() for one in row]
    assert set(metrics) == {("played_on", 3.0)}
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
    assert [line["num_mismatched_rows"] for line in updates_of(run)] == [0] * 3
    assert lab.files(1, "run") == []
