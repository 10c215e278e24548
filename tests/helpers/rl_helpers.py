"""A tiny policy, tasks and environments for the tests of the loop."""

import dataclasses
import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import rollout_io
import trainer
from tests.helpers import trainer_helpers
from tests.helpers.configs import rl_config
from tests.helpers.trainer_helpers import tiny_llama
from trainer.config.train_config import to_toml
from trainer.rl.config import OWN_KEYS

HERE = "tests.helpers.rl_helpers"


class Length:
    """One turn; the reward is in how long the action is."""

    def __init__(self, env_config, extras):
        self.env_config, self.extras = env_config, extras

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": len(action) % 7 / 6, "done": True}


class SomeConstant(Length):
    """Earns nothing where `constant` says so."""

    def step(self, action):
        return super().step(action) | ({"reward": 0.0} if self.extras["constant"] else {})


class TwoTurns(Length):
    """Asks again, once; both answers earn something."""

    turn = 0

    def step(self, action):
        self.turn += 1
        said = [{"role": "user", "content": "More."}]
        return super().step(action) | {"observations": said, "done": self.turn == 2}


class Slow(Length):
    """Takes up to 60 ms, one in five 300 ms."""

    def step(self, action):
        time.sleep(random.choice([0.0, 0.0, 0.03, 0.06, 0.3]))
        return super().step(action)


class Failing(Length):
    """Fails where `fails` says, or always."""

    def step(self, action):
        if self.extras.get("fails", True):
            raise OSError("no sandbox")
        return super().step(action)


class Worse(Length):
    """Fails after the first twelve trajectories of the process."""

    number = itertools.count(1)

    def step(self, action):
        if next(self.number) > 12:
            raise OSError("no sandbox")
        return super().step(action)


class Interrupting(Length):
    """The first step of all is when somebody presses Ctrl-C, once."""

    first = threading.Lock()

    def step(self, action):
        if self.first.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def save_model(path, tokenizer, *, max_position_embeddings=256):
    """A model of few weights, with SmolLM2's tokenizer."""
    settings = {
        "hidden_size": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": max_position_embeddings,
    }
    tiny_llama(vocab_size=49152, **settings).save_pretrained(path)
    tokenizer.backend.save_pretrained(path)
    return str(path)


def write_tasks(path, num_tasks, **extras):
    lines = [{"prompt": f"Say {i}.", "instance_id": f"t{i}", **extras} for i in range(num_tasks)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def config_of(folder, model, **settings):
    """Two groups of three trajectories an iteration, two updates of it; six tokens each."""
    generate = {
        "environment": f"{HERE}:Length",
        "group_size": 3,
        "max_response_tokens": 6,
    } | settings.pop("generate", {})
    usual = {
        "groups_per_batch": 2,
        "groups_per_mini_batch": 1,
        "learning_rate": 1e-3,
        "failed": "trajectory",
        "model": model,
        "tasks": write_tasks(folder / "tasks.jsonl", settings.pop("num_tasks", 4)),
        "out": str(folder / "run"),
        "num_iterations": 3,
    }
    return rl_config(**usual | settings.pop("train", {}) | settings, generate=generate)


def lines_of(path):
    """The lines of updates, without times."""
    return [line for line in trainer_helpers.lines_of(path) if "loss" in line]


def replay(config, out):
    """`rollouts train` on what the loop has sampled."""
    given = config.training
    data = dataclasses.replace(given.data, outcome=config.data.outcome)
    run = dataclasses.replace(given.run, out=str(out))
    return trainer.train(dataclasses.replace(given, data=data, run=run))


def weights_of(checkpoint):
    return (Path(checkpoint) / "model.safetensors").read_bytes()


def rows_of(config, iteration):
    return rollout_io.scan(f"{config.run.out}/rollouts/iteration_{iteration:05d}").collect()


def as_toml(config):
    """The file that makes it, but for `out`."""
    values = {
        name: value for name, value in dataclasses.asdict(config).items() if value is not None
    }
    for section, keys in OWN_KEYS.items():
        if section in ("data", "batch", "run"):
            values[section] = {k: v for k, v in values[section].items() if k not in keys}
    values["run"].pop("out")
    return to_toml(values)
