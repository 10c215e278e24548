"""Public harnesses, of which only the base URL changed, trained online on vLLM and without it."""

import os
import signal
import subprocess
import sys
import threading
import time

import polars as pl
import pytest

import rollout_io
from rollout_io.cli.main import run as command
from tests.conftest import ROOT
from tests.helpers.harness_helpers import HERE
from tests.helpers.rl_helpers import as_toml, config_of, lines_of, save_model
from tests.vllm.test_rl import check_the_engine_spoke_for_the_policy, server
from trainer import rl

pytestmark = pytest.mark.vllm

__all__ = ["server"]

CLIENTS, DATA = ROOT / ".venv-clients" / "bin", ROOT / "tests" / "data"
MINI = "agent:\n  step_limit: 2\nmodel:\n  model_kwargs:\n    max_tokens: 24\n"
NUM_STEPS = {"openai": 2, "mini": 2, "harbor": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    """A model of few weights, whose context has room for mini-swe-agent's instructions."""
    path = tmp_path_factory.mktemp("model")
    return save_model(path, tokenizer, max_position_embeddings=8192)


@pytest.fixture
def harness_of(tmp_path):
    def make(name):
        if name == "mini":
            if not (CLIENTS / "mini").exists():
                pytest.skip("no .venv-clients: run `make test-vllm`")
            (tmp_path / "mini.yaml").write_text(MINI)
            script = DATA / "mini_trial.sh"
            return f"bash {script} {CLIENTS} {{prompt}} {tmp_path}/mini.yaml"
        if name == "harbor":
            trial = f"{sys.executable} {DATA}/harbor_trial.py {{task_file}} {{base_url}} $0/trial"
            script = f"d=$(mktemp -d); {trial.replace('$0', '$d')} >&2; "
            script += "cat $d/trial/verifier/reward.txt; rm -r $d"
            return f"sh -c '{script}'"
        return f"{HERE}:two_turns"

    return make


@pytest.fixture
def loop_of(tmp_path, harness_of):
    """A loop over one group of two trajectories, with a learning rate that shows at once."""

    def make(harness, model, url=None, num_groups=1, **settings):
        engine = {} if url is None else {"engine": "vllm", "urls": [url]}
        generate = {"harness": harness_of(harness), "environment": None, "group_size": 2}
        generate |= {"max_response_tokens": 16, "seed": 0} | engine
        generate |= {"max_concurrency": 2}
        train = {"groups_per_batch": num_groups, "groups_per_mini_batch": num_groups}
        train["learning_rate"] = 1e-4
        return config_of(tmp_path, str(model), generate=generate, train=train, **settings)

    return make


def check_run(config, harness):
    rows = pl.from_arrow(rollout_io.read(f"{config.run.out}/rollouts/*"))
    size = config.generation.group_size
    assert "error" not in rows.columns, rows["error"].drop_nulls().to_list()[:1]
    assert rows["trajectory_id"].n_unique() == config.num_iterations * size
    assert len(rows) == config.num_iterations * size * NUM_STEPS[harness]
    assert rows["token_source"].unique().to_list() == ["engine"]
    assert rows["response_ids"].list.len().max() <= 16
    for number in range(config.num_iterations):
        part = pl.from_arrow(rollout_io.read(f"{config.run.out}/rollouts/iteration_{number:05d}"))
        ages = number - part["policy_version"]
        assert 0 <= ages.min() <= ages.max() <= config.loop.max_staleness
    assert [line["iteration"] for line in lines_of(config.run.out)] == list(
        range(config.num_iterations)
    )
    assert command(["validate", f"{config.run.out}/rollouts/*"]) == 0


def run_killed(config, tmp_path):
    """`rollouts rl`, killed in its second iteration."""
    toml, run = tmp_path / "rl.toml", tmp_path / "run"
    toml.write_text(as_toml(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout_io", "rl", str(toml), "--out", str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while process.poll() is None and not (run / "weights" / "version_1").exists():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return {path: path.read_bytes() for path in run.glob("rollouts/*/*.parquet")}


def check_killed_and_resumed(config, harness, tmp_path):
    before = run_killed(config, tmp_path)
    assert before
    assert rl.run(config, resume=True).num_iterations == config.num_iterations
    assert {path: path.read_bytes() for path in before} == before
    check_run(config, harness)


# On every change tests/pipelines/harness/test_loop.py trains and kills harnesses on the embedded engine,
# tests/vllm/test_record_docs.py records three on vLLM, and tests/vllm/test_rl.py kills loops on vLLM.
@pytest.mark.nightly
@pytest.mark.parametrize(("harness", "max_staleness"), [("mini", 0), ("harbor", 1), ("openai", 1)])
def test_a_harness_trains_on_the_embedded_engine_killed_and_resumed(
    harness, max_staleness, loop_of, tiny, tmp_path
):
    config = loop_of(harness, tiny, max_staleness=max_staleness)
    check_killed_and_resumed(config, harness, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("harness", "max_staleness"), [("openai", 1), ("mini", 1), ("harbor", 0)])
def test_a_harness_trains_on_vllm_killed_and_resumed(
    harness, max_staleness, loop_of, server, small_smollm2, tmp_path
):
    settings = {"max_staleness": max_staleness, "num_iterations": 2}
    config = loop_of(harness, small_smollm2, server.url, **settings)
    check_killed_and_resumed(config, harness, tmp_path)
    if not max_staleness:
        check_the_engine_spoke_for_the_policy(tmp_path / "run", small_smollm2)


@pytest.mark.nightly  # tests/vllm/test_rl.py kills a server on every change
def test_a_server_that_is_killed_comes_back_with_the_policys_weights(
    loop_of, server, small_smollm2, tmp_path
):
    run, results = tmp_path / "run", []
    config = loop_of("openai", small_smollm2, server.url, num_groups=2)
    work = threading.Thread(target=lambda: results.append(rl.run(config)))
    work.start()
    while work.is_alive() and not list(run.glob("rollouts/iteration_00001/*.parquet")):
        time.sleep(0.02)
    server.stop(kill=True)
    assert len(list(run.glob("rollouts/iteration_00001/*.parquet"))) == 1
    server.start()
    work.join(timeout=1200)
    assert results[0].num_iterations == 3
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
