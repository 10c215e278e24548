"""Loops killed by signal 9 and resumed: nothing sampled is lost, and train replays the whole."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rollout_io
from rollout_io.retokenize.tokenizer import load_tokenizer
from tests.conftest import ROOT
from tests.helpers.rl_helpers import HERE, config_of, lines_of, save_model, weights_of
from trainer import rl

SERVER = """
import dataclasses, json, os, pkgutil, signal, sys, traceback
from pathlib import Path

import transformers.models.llama.modeling_llama

import trainer.engine.embedded, trainer.training, trainer.rl.loop, trainer.run.model_checks
from rollout_io.retokenize.tokenizer import load_tokenizer
from tests.helpers.configs import from_saved
from tests.helpers.rl_helpers import replay
from trainer import rl

tokenizer = load_tokenizer(sys.argv[1])
for module in (trainer.rl.loop, trainer.engine.embedded, trainer.run.model_checks):
    module.load_tokenizer = lambda *_, **__: tokenizer


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place, number, after):
    owner, name = place.rsplit(".", 1)
    owner, calls = pkgutil.resolve_name(owner), [0]
    inner = getattr(owner, name)

    def wrapped(*given, **named):
        calls[0] += 1
        if calls[0] == number and not after:
            die()
        found = inner(*given, **named)
        if calls[0] == number:
            die()
        return found

    setattr(owner, name, wrapped)


def kill_at_event(out, number):
    count = [0]

    def hook(event, arguments):
        if event in {"open", "os.rename", "os.mkdir", "os.rmdir"} and out in str(arguments[:1]):
            count[0] += 1
            if count[0] == number:
                die()

    sys.addaudithook(hook)
    return count


for line in sys.stdin:
    order = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            config, answer = from_saved(rl.RlConfig, order["config"]), {}
            if "place" in order:
                kill_at(order["place"], order["number"], order["after"])
            count = kill_at_event(config.run.out, order.get("event", -1))
            if "replay" in order:
                answer = dataclasses.asdict(replay(config, Path(order["replay"])))
            else:
                answer = dataclasses.asdict(rl.run(config, resume=True))
            os.write(writing, json.dumps(answer | {"events": count[0]}).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(reading) as pipe:
        said = pipe.read()
    print(json.dumps({"code": code} | json.loads(said or "{}")), flush=True)
"""


class Server:
    """Runs loops in forks of a process that has imported everything."""

    def __init__(self, tokenizer: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )

    def ask(self, config: rl.RlConfig, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order["config"] = dataclasses.asdict(config)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="module")
def server(smollm2_dir):
    made = Server(smollm2_dir)
    yield made
    made.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2_dir):
    return save_model(tmp_path_factory.mktemp("model"), load_tokenizer(smollm2_dir))


def finished_groups(config: rl.RlConfig) -> dict[str, bytes]:
    shards = Path(config.run.out).glob("rollouts/iteration_*/*.parquet")
    return {str(path.relative_to(config.run.out)): path.read_bytes() for path in shards}


def check_end(server: Server, config: rl.RlConfig, before: dict[str, bytes]) -> None:
    """The run ends; all that was there is still there; each group is there once; it replays."""
    done = server.ask(config)
    assert done["code"] == 0
    after = finished_groups(config)
    assert {name: after.get(name) for name in before} == before
    for number in range(config.num_iterations):
        rows = rollout_io.scan(f"{config.run.out}/rollouts/iteration_{number:05d}").collect()
        assert sorted(Counter(rows["instance_id"]).values()) == [3, 3]
        ages = number - rows["policy_version"]
        assert 0 <= ages.min() <= ages.max() <= config.loop.max_staleness
    names = rollout_io.scan(f"{config.run.out}/rollouts/*").select("trajectory_id").collect()
    assert names["trajectory_id"].is_unique().all()
    again = server.ask(config, replay=f"{config.run.out}-again")
    assert weights_of(again["checkpoint"]) == weights_of(done["checkpoint"])
    updates = [(line["iteration"], line["global_step"]) for line in lines_of(config.run.out)]
    assert updates == [(step // 2, step + 1) for step in range(2 * config.num_iterations)]


def check_kill(server: Server, config: rl.RlConfig, **order: Any) -> None:
    assert server.ask(config, **order)["code"] == -signal.SIGKILL
    check_end(server, config, finished_groups(config))


PLACES = {
    "sampling": ("trainer.rl.groups.Groups.add", 4, False),
    "sampled": ("trainer.rl.groups.Groups.add", 4, True),
    "update": ("trainer.update.set_rates", 4, False),
    "updated": ("trainer.rl.learning.Learning.update", 3, True),
    "checkpoint": ("trainer.training.save_checkpoint", 1, False),
    "checkpointed": ("trainer.rl.learning.Learning.save", 1, True),
    "writing": ("trainer.rl.learning.write_model", 2, True),
    "written": ("trainer.rl.learning.Learning.write_weights", 3, True),
    "synced": ("trainer.engine.embedded.TransformersEngine._load", 3, True),
    "evaluated": ("trainer.rl.loop.rollout_numbers", 3, False),
}
pytestmark = pytest.mark.slow

ALL = [pytest.param(name, s, marks=pytest.mark.nightly) for name in PLACES for s in (0, 1)]


def config_in(tmp_path: Path, model: str, max_staleness: int) -> rl.RlConfig:
    settings = {"max_staleness": max_staleness, "num_iterations": 4, "save_every_iterations": 2}
    if max_staleness:
        settings["generate"] = {"environment": f"{HERE}:Slow", "max_concurrency": 4}
    settings["evaluate"] = {"tasks": str(tmp_path / "tasks.jsonl"), "every_iterations": 2}
    return config_of(tmp_path, model, **settings)


@pytest.mark.parametrize(("place", "max_staleness"), [("written", 0), *ALL])
def test_a_loop_that_is_killed_and_resumed_has_lost_nothing(
    place, max_staleness, server, tmp_path, model
):
    where, number, after = PLACES[place]
    config = config_in(tmp_path, model, max_staleness)
    check_kill(server, config, place=where, number=number, after=after)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_a_loop_that_is_killed_three_times_anywhere_has_lost_nothing(seed, server, tmp_path, model):
    rng = random.Random(seed)
    (tmp_path / "whole").mkdir()
    whole = server.ask(config_in(tmp_path / "whole", model, seed % 3))
    config = config_in(tmp_path, model, seed % 3)
    codes = [server.ask(config, event=rng.randrange(1, whole["events"]))["code"] for _ in range(3)]
    assert -signal.SIGKILL in codes
    check_end(server, config, finished_groups(config))
