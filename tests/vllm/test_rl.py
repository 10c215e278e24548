import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import rollout_io
from examples.addition import Addition
from examples.addition import main as write_tasks
from pipelines.generation.engines.vllm import VllmEngine
from tests.conftest import ROOT
from tests.helpers.configs import PLACES, dotted
from tests.vllm.test_generation import differences
from trainer import rl
from trainer.training import train

pytestmark = pytest.mark.vllm
EXAMPLE = str(ROOT / "examples/addition.toml")


class Wordy(Addition):
    """Rewards that hardly ever are all the same."""

    def step(self, action):
        return super().step(action) | {"reward": len(action) / 100}


@pytest.fixture
def overrides_of(small_smollm2, tmp_path):
    """Of loops over one-digit additions into tmp_path/run; a learning rate that shows at once."""
    write_tasks(tmp_path / "tasks")
    usual = {
        "model.path": small_smollm2,
        "loop.tasks": tmp_path / "tasks/train.jsonl",
        "run.out": tmp_path / "run",
        "loop.num_iterations": 2,
        "generate.environment": "tests.vllm.test_rl:Wordy",
        "generate.engine": "vllm",
        "generate.group_size": 2,
        "generate.seed": 0,
        "batch.groups_per_batch": 4,
        "batch.groups_per_mini_batch": 4,
        "optimizer.learning_rate": 1e-4,
        "evaluate.tasks": tmp_path / "tasks/held_out.jsonl",
        "evaluate.group_size": 1,
        "evaluate.every_iterations": 2,
    }

    def make(url, **settings):
        named = {
            dotted(name) if name in PLACES else name.replace("__", "."): value
            for name, value in settings.items()
        }
        given = usual | {"generate.urls": f'["{url}"]'} | named
        return [f"{key}={value}" for key, value in given.items()]

    return make


@pytest.fixture
def config_of(overrides_of):
    def make(url, **settings):
        return rl.load_rl_config(EXAMPLE, overrides_of(url, **settings))

    return make


@pytest.fixture
def server(small_server, small_smollm2):
    """The shared server of the small model, which runs with that model's own weights afterwards."""
    yield small_server
    if small_server.is_started:
        put_back(small_server, small_smollm2)
    else:
        small_server.start()


@pytest.fixture
def whole_server(vllm_server, smollm2_dir):
    """The shared server of the whole model, which has that model's own weights afterwards."""
    yield vllm_server
    put_back(vllm_server, smollm2_dir)


def put_back(server, model):
    async def load():
        async with VllmEngine(server.url) as engine:
            await engine.load_weights(str(model), policy_version=0)

    asyncio.run(load())


def updates_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def rows_of(run):
    return pl.from_arrow(rollout_io.read(f"{run}/rollouts/*"))


def check_the_engine_spoke_for_the_policy(run, model):
    """With all its layers, up to the engine's noise; not for the model it was started with."""
    lines, rows = updates_of(run), rows_of(run)
    for line in lines:
        assert line["rollout_logprobs_abs_diff_mean"] < 1e-4
    for line in lines[1:]:
        of_update = rows.filter(pl.col("policy_version") == line["iteration"])
        at_start = np.abs(differences(of_update.rows(named=True), model)).mean()
        assert at_start > 1e-3


def check_each_once(run, num_trajectories):
    ids = rows_of(run)["trajectory_id"].to_list()
    assert len(ids) == len(set(ids)) == num_trajectories


def trained_rows(run):
    """Count, for each update, the rows in its loss, with the version that sampled each."""
    version = {row["trajectory_id"]: row["policy_version"] for row in rows_of(run).to_dicts()}
    return {
        file.name: Counter((name, version[name]) for name in pl.read_parquet(file)["trajectory_id"])
        for file in sorted((run / "tokens").iterdir())
    }


def check_replay(config, run, tmp_path):
    """`rollouts train` on what is on disk comes to the same weights."""
    training = config.training
    own = dataclasses.replace(training.run, out=str(tmp_path / "again"))
    again = train(dataclasses.replace(training, run=own))
    (ours,) = run.glob(f"checkpoints/global_step_{again.num_updates}/model.safetensors")
    theirs = load_file(f"{again.checkpoint}/model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_file(ours).items())


WHOLE = ("whole_server", "smollm2_dir")


@pytest.mark.parametrize(
    ("server_of", "model", "settings"),
    [
        ("server", "small_smollm2", {}),
        pytest.param(*WHOLE, {}, marks=pytest.mark.nightly),
        pytest.param(
            *WHOLE,
            {"lora_rank": 4, "learning_rate": 2e-3},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_updates_of_the_loop_each_on_what_the_new_weights_said(
    server_of, model, settings, config_of, request, tmp_path
):
    server, model = request.getfixturevalue(server_of), request.getfixturevalue(model)
    config = config_of(server.url, model=model, **settings)
    result = rl.run(config)
    assert (result.num_iterations, result.num_updates) == (2, 2)
    rows, run = rows_of(tmp_path / "run"), tmp_path / "run"
    assert rows["policy_version"].to_list() == [0] * 8 + [1] * 8
    check_each_once(run, 16)
    check_the_engine_spoke_for_the_policy(run, model)
    before, after = (
        pl.from_arrow(rollout_io.read(str(run / f"evaluations/iteration_0000{i}"))) for i in (0, 2)
    )
    assert set(before["policy_version"]) == {0}
    assert set(after["policy_version"]) == {2}
    if not settings:
        check_replay(config, run, tmp_path)


@pytest.mark.nightly  # tests/trainer/rl/test_rl.py samples ahead on the embedded engine
def test_ahead_of_the_trainer_no_row_is_staler_than_allowed(config_of, server, tmp_path):
    settings = {"max_staleness": 2, "weight_sync": "now", "num_iterations": 4}
    rl.run(config_of(server.url, **settings, generate__max_concurrency=4))
    lines = updates_of(tmp_path / "run")
    assert max(line["staleness_max"] for line in lines) in {1, 2}
    check_each_once(tmp_path / "run", 4 * 8)


def test_a_server_killed_in_the_middle_comes_back_with_the_policys_weights(
    config_of, server, small_smollm2, tmp_path
):
    run, results = tmp_path / "run", []
    config = config_of(server.url, num_iterations=3, generate__max_concurrency=2)
    work = threading.Thread(target=lambda: results.append(rl.run(config)))
    work.start()
    while work.is_alive() and not list(run.glob("rollouts/iteration_00001/*.parquet")):
        time.sleep(0.02)
    server.stop(kill=True)
    assert len(list(run.glob("rollouts/iteration_00001/*.parquet"))) < 4
    server.start()
    work.join(timeout=1200)
    assert results[0].num_iterations == 3
    check_each_once(run, 3 * 8)
    check_the_engine_spoke_for_the_policy(run, small_smollm2)


@pytest.mark.nightly  # tests/slow/test_rl_kills.py kills it at this place without a server
def test_a_trainer_killed_between_update_and_sync_goes_on_where_it_was(
    config_of, overrides_of, server, small_smollm2, tmp_path
):
    run, config = tmp_path / "run", config_of(server.url)
    metrics = run / "metrics.jsonl"
    command = [sys.executable, "-m", "rollout_io", "rl", EXAMPLE]
    given = [f"--set={override}" for override in overrides_of(server.url)]
    trainer = subprocess.Popen([*command, *given], cwd=ROOT)
    while trainer.poll() is None and not (metrics.exists() and '"loss"' in metrics.read_text()):
        time.sleep(0.005)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert not (run / "weights/version_1").exists()
    first = rows_of(run)
    rl.run(config, resume=True)
    check_each_once(run, 16)
    assert rows_of(run).head(len(first)).equals(first)
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
    check_replay(config, run, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_a_run_with_random_kills_of_trainer_and_server_trains_on_the_same_rows(
    seed, overrides_of, server, small_smollm2, tmp_path
):
    """Kill trainer or server five times at random, the server at least twice, and restart it."""
    rng, usual = random.Random(seed), {"num_iterations": 4, "record_tokens": "all"}
    command = [sys.executable, "-m", "rollout_io", "rl"]

    def started(run):
        """Start or continue a run, which waits for its server."""
        given = overrides_of(server.url, **usual, out=run)
        how = ["--resume", str(run)] if (run / "config.json").exists() else [EXAMPLE]
        return subprocess.Popen([*command, *how, *(f"--set={one}" for one in given)], cwd=ROOT)

    def first_version(run):
        until = time.monotonic() + 600
        while not (run / "weights/version_1").exists() and time.monotonic() < until:
            time.sleep(0.05)
        return time.monotonic()

    whole, run = tmp_path / "whole", tmp_path / "run"
    trainer = started(whole)
    begun = first_version(whole)
    assert trainer.wait(1200) == 0
    rest_s = time.monotonic() - begun
    victims = ["server", "server", *rng.choices(["server", "trainer"], k=3)]
    rng.shuffle(victims)
    trainer, num_killed = started(run), Counter()
    for number, victim in enumerate(victims):
        if number == 0:
            first_version(run)
        time.sleep(rng.uniform(0.02, 0.2) * rest_s)
        assert trainer.poll() in {None, 0}
        num_killed[victim] += trainer.poll() is None
        if victim == "server":
            server.stop(kill=True)
            server.start()
        else:
            trainer.kill()
            trainer.wait()
            trainer = started(run)
    assert trainer.wait(1200) == 0
    assert num_killed["server"] >= 2
    assert trained_rows(run) == trained_rows(whole)
    check_each_once(run, 4 * 8)
    check_the_engine_spoke_for_the_policy(run, small_smollm2)
