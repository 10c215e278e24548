"""Harnesses that know nothing but a base URL, trained online on the embedded engine."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import polars as pl
import pytest

import rollout_io
from pipelines.generation.config import GenerateConfig
from pipelines.generation.run import generate
from rollout_io.cli.main import run as command
from schemas.columns import metrics_dict
from tests.conftest import ROOT
from tests.helpers.harness_helpers import HERE
from tests.helpers.rl_helpers import (
    as_toml,
    config_of,
    lines_of,
    replay,
    rows_of,
    save_model,
    weights_of,
    write_tasks,
)
from trainer import rl
from trainer.engine.embedded import TransformersEngine
from trainer.models.policy import load_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    loading = ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks")
    for module in (*loading, "pipelines.generation.run"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


def harness_config(folder, model, harness, **settings):
    """One group of three trajectories an iteration."""
    generate = {"harness": harness, "environment": None} | settings.pop("generate", {})
    train = {"groups_per_batch": 1}
    return config_of(folder, model, generate=generate, train=train, num_tasks=2, **settings)


def rows_in(config):
    return pl.from_arrow(rollout_io.read(f"{config.run.out}/rollouts/*"))


def check_replay(config, result, tmp_path):
    assert weights_of(replay(config, tmp_path / "again").checkpoint) == weights_of(
        result.checkpoint
    )


@pytest.mark.slow
def test_an_openai_client_trains_online_each_iteration_on_its_own_weights(tmp_path, model):
    evaluate = {"tasks": str(tmp_path / "tasks.jsonl"), "every_iterations": 3}
    config = harness_config(tmp_path, model, f"{HERE}:two_turns", evaluate=evaluate)
    result = rl.run(config)
    assert result.num_iterations == 3
    for number in range(3):
        rows = rows_of(config, number)
        assert rows["trajectory_id"].n_unique() == 3
        assert rows["policy_version"].to_list() == [number] * 6
        assert rows["token_source"].unique().to_list() == ["engine"]
        assert rows["response_ids"].list.len().max() == 6
        assert "error" not in rows.columns
        assert rows.filter(~pl.col("is_last_step"))["reward"].to_list() == [0.0] * 3
    assert {line["rollout_logprobs_abs_diff_mean"] < 1e-4 for line in lines_of(config.run.out)} == {
        True
    }
    greedy = pl.from_arrow(rollout_io.read(f"{config.run.out}/evaluations/iteration_00003"))
    assert greedy["temperature"].unique().to_list() == [0.0]
    assert greedy["policy_version"].unique().to_list() == [3]
    assert command(["validate", f"{config.run.out}/rollouts/*"]) == 0
    check_replay(config, result, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("weight_sync", [pytest.param("wait", marks=pytest.mark.nightly), "now"])
def test_a_harness_that_blocks_and_streams_trains_ahead_of_the_trainer(
    tmp_path, model, weight_sync
):
    settings = {"max_staleness": 1, "num_iterations": 4, "generate": {"max_concurrency": 4}}
    config = harness_config(
        tmp_path, model, f"{HERE}:blocking", weight_sync=weight_sync, **settings
    )
    result = rl.run(config)
    ages = [set(k - rows_of(config, k)["policy_version"]) for k in range(4)]
    assert set.union(*ages) == {0, 1}
    check_replay(config, result, tmp_path)


def test_a_command_line_trains_online_and_its_secrets_are_written_nowhere(tmp_path, model):
    script = tmp_path / "solve.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "task = json.load(open(sys.argv[1]))\n"
        "body = {'messages': task['prompt'], 'model': 'gpt-5'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "request = urllib.request.Request(url,\n"
        "    json.dumps(body).encode(), {'Content-Type': 'application/json'})\n"
        "text = json.load(urllib.request.urlopen(request))['choices'][0]['message']['content']\n"
        "print('thinking')\n"
        "print(json.dumps({'reward': len(text) % 7 / 6, 'metrics': {'chars': len(text)}}))\n"
    )
    harness = f"{sys.executable} -S {script} {{task_file}} --api-key sk-secret-1"
    config = harness_config(tmp_path, model, harness, num_iterations=1)
    rl.run(config)
    rows = rows_in(config)
    assert "error" not in rows.columns
    assert {name for row in rows["metrics"].to_list() for name in metrics_dict(row)} == {"chars"}
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"sk-secret-1" in path.read_bytes()]
    rl.run(harness_config(tmp_path, model, harness, num_iterations=2), resume=True)


@pytest.mark.slow
def test_a_killed_loop_is_resumed_and_has_lost_nothing(tmp_path, model):
    """The harness's processes end with the loop."""
    marks = tmp_path / "marks"
    marks.mkdir()
    script = tmp_path / "solve.py"
    script.write_text(
        "import os, sys, time, urllib.request, json\n"
        f"open({str(marks)!r} + '/' + str(os.getpid()), 'w').close()\n"
        "body = {'messages': [{'role': 'user', 'content': sys.argv[2]}]}\n"
        "request = urllib.request.Request(sys.argv[1] + '/chat/completions',\n"
        "    json.dumps(body).encode(), {'Content-Type': 'application/json'})\n"
        "text = json.load(urllib.request.urlopen(request))['choices'][0]['message']['content']\n"
        "time.sleep(0.3)\n"
        "print(len(text) % 7 / 6)\n"
    )
    harness = f"{sys.executable} -S {script} {{base_url}} {{prompt}}"
    config = harness_config(tmp_path, model, harness, generate={"max_concurrency": 2})
    toml, run = tmp_path / "rl.toml", tmp_path / "run"
    toml.write_text("\n".join(line for line in as_toml(config).splitlines() if "null" not in line))
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout_io", "rl", str(toml), "--out", str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not list(run.glob("rollouts/iteration_00001/*.parquet")):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = {path: path.read_bytes() for path in run.glob("rollouts/*/*.parquet")}
    assert first
    time.sleep(0.5)
    assert not [pid for pid in marks.iterdir() if (ROOT / "/proc" / pid.name).exists()]
    result = rl.run(config, resume=True)
    assert result.num_iterations == 3
    assert {path: path.read_bytes() for path in first} == first
    assert rows_in(config)["trajectory_id"].is_unique().all()
    assert len(rows_in(config)) == 9
    check_replay(config, result, tmp_path)


def test_generate_runs_a_harness_and_goes_on_where_it_stopped(tmp_path, model, tokenizer):
    def config_for(num_tasks):
        return GenerateConfig(
            tasks=write_tasks(tmp_path / "t.jsonl", num_tasks),
            model=model,
            out=str(tmp_path / "ds"),
            harness=f"{HERE}:blocking",
            max_response_tokens=4,
        )

    def open_engine(_):
        policy = load_policy(model, logprob_chunk_tokens=1024).model
        return TransformersEngine(policy, tokenizer, policy_version=5)

    for num_tasks in (1, 3):
        result = asyncio.run(generate(config_for(num_tasks), open_engine))
        assert result.num_failed == 0
    assert (result.num_trajectories, result.num_held) == (2, 1)
    rows = rollout_io.read(tmp_path / "ds").to_pylist()
    assert [row["policy_version"] for row in rows] == [5] * 3
    assert rollout_io.read_metadata(tmp_path / "ds").outcome == "last"


def test_a_run_whose_harness_says_that_it_filled_the_context_is_masked(tmp_path, model, tokenizer):
    config = GenerateConfig(
        tasks=write_tasks(tmp_path / "t.jsonl", 1),
        model=model,
        out=str(tmp_path / "ds"),
        harness=f"{HERE}:out_of_context",
        max_response_tokens=4,
        mask_overlong=True,
    )

    def open_engine(_):
        engine = load_policy(model, logprob_chunk_tokens=1024).model
        return TransformersEngine(engine, tokenizer)

    asyncio.run(generate(config, open_engine))
    rows = rollout_io.read(config.out).to_pylist()
    assert [row["stop_reason"] for row in rows][-1] == "context_length"
    assert not any(trains for row in rows for trains in row["loss_mask"])
    assert rows[-1]["reward"] == 0.0


FAILING = {
    f"{HERE}:silent": "no_calls: .*made no calls",
    f"{HERE}:rejected": "no_calls: .*all calls of the harness failed; the last with .*`truncation`",
    f"{HERE}:raising": "harness_raised",
    "sh -c 'echo why >&2; exit 3'": "harness_exit: .*exit status 3: why",
    "sh -c 'echo 1.0'": "no_calls",
    "sh -c 'echo reward'": "harness_reward",
    "no-such-program {base_url}": "harness_start",
    "sleep 60": "harness_timeout",
    "sh -c 'sleep 60 & sleep 60; echo {reward_file}'": "harness_timeout",
    "true {reward_file}": "harness_reward: .*no such file",
}


@pytest.mark.parametrize("harness", FAILING)
def test_a_harness_that_fails_is_a_failed_trajectory(harness, tmp_path, model, tokenizer):
    config = GenerateConfig(
        tasks=write_tasks(tmp_path / "t.jsonl", 1),
        model=model,
        out=str(tmp_path / "ds"),
        harness=harness,
        max_response_tokens=4,
        agent_timeout_s=0.5 if FAILING[harness] == "harness_timeout" else 60.0,
    )

    def open_engine(_):
        engine = load_policy(model, logprob_chunk_tokens=1024).model
        return TransformersEngine(engine, tokenizer)

    result = asyncio.run(generate(config, open_engine))
    assert (result.num_trajectories, result.num_failed) == (1, 1)
    assert re.match(FAILING[harness], result.first_error)
    rows = rollout_io.read(config.out).to_pylist()
    assert command(["validate", config.out]) == 0
    num_calls = 2 if harness.endswith(":raising") else 0
    assert sum(len(row["response_ids"]) > 0 for row in rows) == num_calls
