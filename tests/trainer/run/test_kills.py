"""Runs killed by signal 9 and resumed: the metrics are those of a run that nobody stopped."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.helpers.trainer_helpers import (
    group_rows,
    lines_of,
    save_tiny_model,
    step,
    write_dataset,
)

# test_processes.py resumes a killed run faster, test_checkpoints.py one that stopped.
pytestmark = pytest.mark.slow

SERVER = """
import json, os, signal, sys, time, traceback

import transformers.models.llama.modeling_llama

import trainer
import trainer.training
from tests.helpers.configs import train_config

out, num_events, last_event = "", 0, 0
events = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def count(event, arguments):
    global num_events
    inside = event == "os.remove" or str(arguments[:1]).startswith(f"('{out}")
    if event in events and inside:
        num_events += 1
        if num_events == last_event:
            os.kill(os.getpid(), signal.SIGKILL)


def train(order):
    global events, out, last_event
    events = set(order.get("events", events))
    out, last_event = order["config"]["out"], order.get("last_event", 0)
    sys.addaudithook(count)
    trainer.train(train_config(**order["config"]), resume=True)
    return num_events


for line in sys.stdin:
    order, start = json.loads(line), time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, str(train(order)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    if "seconds" in order:
        time.sleep(order["seconds"])
        os.kill(child, signal.SIGKILL)
    found = os.read(reading, 99)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seconds = time.monotonic() - start
    answer = {"events": int(found or 0), "code": code, "seconds": seconds}
    print(json.dumps(answer), flush=True)
"""
GAE = {
    "estimator": "gae",
    "critic_learning_rate": 1e-3,
    "kl_reward_coef": 0.1,
    "kl_ctrl_type": "adaptive",
    "kl_target": 0.01,
    "kl_horizon": 20,
}
GRPO = {"kl_loss_coef": 0.1, "entropy_loss_coef": 0.01}
LORA = GRPO | {"lora_rank": 4, "learning_rate_schedule": "cosine", "warmup_updates": 2}
COMMON = {
    "groups_per_batch": 2,
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 2,
    "learning_rate": 1e-3,
    "num_epochs": 2,
    "save_every_updates": 3,
    "keep_checkpoints": 2,
    "partial_groups": "train",
    "tokens_per_micro_batch": 64,
}


class Server:
    """A process that has imported the trainer and forks itself for every run."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def train(self, config, **kill):
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"config": config, **kill}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def server():
    server = Server()
    with server.process:
        yield server


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Four groups, in one of which all trajectories failed."""
    folder = tmp_path_factory.mktemp("start")
    rows = group_rows(3, (1.0, 0.0, 0.5))
    rows.append(step("g1x", 0, 0, [1], [2], error="timeout", is_last_step=True))
    model = save_tiny_model(folder / "model")
    return {"dataset": write_dataset(folder / "ds", rows), "model": model}


@pytest.fixture(scope="module")
def gae(server, paths, tmp_path_factory):
    config = {**paths, **COMMON, **GAE, "out": str(tmp_path_factory.mktemp("gae") / "run")}
    return config, server.train(config)


@pytest.fixture(scope="module")
def grpo(server, paths, tmp_path_factory):
    config = {**paths, **COMMON, **GRPO, "out": str(tmp_path_factory.mktemp("grpo") / "run")}
    return config, server.train(config)


@pytest.fixture(scope="module")
def lora(server, paths, tmp_path_factory):
    config = {**paths, **COMMON, **LORA, "out": str(tmp_path_factory.mktemp("lora") / "run")}
    return config, server.train(config)


def check_checkpoints_are_whole(out):
    whole = set()
    for path in (out / "checkpoints").glob("global_step_*"):
        assert load_file(path / "model.safetensors")
        assert load_file(path / "state" / "optimizer.safetensors")
        assert f'"global_step": {path.name[12:]},' in (path / "state" / "run.json").read_text()
        json.loads((path / "state" / "rng.json").read_text())
        whole.add(path.name)
    pointer = out / "checkpoints" / "latest"
    assert not pointer.exists() or pointer.read_text().strip() in whole


def files_in(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def check_kills(server, undisturbed, out, *, num_kills, seed):
    """Kill a run at random points, let the next one end: it must be the one that nobody stopped."""
    (config, whole), rng = undisturbed, random.Random(seed)
    codes = []
    for number in range(num_kills):
        kill = {"last_event": rng.randint(1, whole["events"] - 1)}
        if number % 2:
            kill = {"seconds": rng.uniform(0.1, 0.9) * whole["seconds"]}
        codes.append(server.train(config | {"out": str(out)}, **kill)["code"])
        check_checkpoints_are_whole(out)
    assert -signal.SIGKILL in codes
    assert set(codes) <= {0, -signal.SIGKILL}
    assert server.train(config | {"out": str(out)})["code"] == 0
    assert lines_of(out) == lines_of(Path(config["out"]))
    for folder in ("checkpoints", "tokens"):
        found, wanted = (files_in(path / folder) for path in (out, Path(config["out"])))
        assert found.keys() == wanted.keys()
        assert [name for name in found if found[name] != wanted[name]] == []


def test_a_run_that_nobody_stops_has_all_that_a_kill_could_spoil(gae):
    config, whole = gae
    out = Path(config["out"])
    lines = lines_of(out)
    assert sum(line["skipped"] for line in lines) == 4
    assert lines[-1]["global_step"] == 12
    assert len({line["loss/kl_reward_coef"] for line in lines}) == 4
    assert len({line["critic/critic_loss"] for line in lines}) >= 12
    assert whole["events"] > 50
    assert len(list((out / "tokens").iterdir())) == 12
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["global_step_12", "global_step_9", "latest"]


def test_a_run_that_is_killed_three_times_ends_with_the_same_losses_and_weights(
    server, gae, tmp_path
):
    check_kills(server, gae, tmp_path / "run", num_kills=3, seed=0)


def test_a_run_that_is_killed_while_it_removes_a_checkpoint_leaves_whole_ones(
    server, gae, tmp_path
):
    config = gae[0] | {"out": str(tmp_path / "run")}
    for _ in range(2):
        answer = server.train(config, events=["os.remove"], last_event=3)
        assert answer["code"] == -signal.SIGKILL
        assert list((tmp_path / "run" / "checkpoints").glob(".global_step_*.removed"))
        check_checkpoints_are_whole(tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 105))
@pytest.mark.parametrize("name", ["gae", "grpo", "lora"])
def test_wherever_a_run_is_killed_it_ends_with_the_same_losses_and_weights(
    name, seed, server, tmp_path, request
):
    undisturbed = request.getfixturevalue(name)
    check_kills(server, undisturbed, tmp_path / "run", num_kills=2, seed=seed)
