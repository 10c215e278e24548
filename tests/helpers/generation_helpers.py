"""Environments, agents and a tiny model that ends its messages, for the tests of generation."""

import asyncio
import json
import threading
import time
from typing import Any

import torch

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENGINE_DOWN
from pipelines.generation.generator import Generator
from pipelines.generation.run import generate
from pipelines.generation.tasks import Task, attempts, rows_of
from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import tiny_llama
from trainer.engine.embedded import TransformersEngine

EOS = 2
HERE = "tests.helpers.generation_helpers"
ASK = [{"role": "user", "content": "Say something."}]


def chatty_model(eos_bias=9.0):
    """Random weights over SmolLM2's tokens; every tenth token or so ends the message."""
    model = tiny_llama(vocab_size=49152, max_position_embeddings=2048)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[EOS] = eos_bias
        head.bias[:17] -= 100.0 * (torch.arange(17) != EOS)
    model.lm_head = head
    return model


class SpyEngine(TransformersEngine):
    """Keeps what it was sent and what it answered; dies after `num_calls` of them."""

    def __init__(self, *args, num_calls=None, **settings):
        super().__init__(*args, **settings)
        self.calls: list[Any] = []
        self.num_left = num_calls

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                raise RolloutError(ENGINE_DOWN, "engine", "no answer")
        sampled = await super().sample(prompt_token_ids, sampling, session=session)
        self.calls.append((session, list(prompt_token_ids), sampling, sampled))
        return sampled


class Echo:
    """`num_turns` turns; each says something back and earns a quarter more than the one before."""

    def __init__(self, env_config=None, extras=None):
        self.thread = threading.get_ident()
        self.extras, self.turn, self.env_config = extras or {}, 0, env_config
        self.num_turns = self.extras.get("num_turns", 3)

    def init(self, prompt):
        return prompt, {}

    def step(self, _action):
        assert self.thread == threading.get_ident()
        self.turn += 1
        said = self.extras.get("say", "Go on.")
        return {
            "observations": [{"role": "user", "content": said}] if said else [],
            "reward": 0.25 * self.turn,
            "done": self.turn >= self.num_turns,
            "metadata": {},
        }

    def get_metrics(self):
        return {"turns": self.turn, "is_good": True, "note": "no number"}

    def close(self):
        pass


class Broken(Echo):
    """Does at its second turn, or where `at` says, what `how` says."""

    def _act(self, place):
        if self.extras.get("at", "step") != place or (place == "step" and self.turn < 1):
            return None
        how = self.extras.get("how")
        if how == "raise":
            raise KeyError("no such tool")
        if how == "exit":
            raise SystemExit(3)
        if how == "panic":
            raise GeneratorExit("no Exception")
        if how == "surrogate":
            raise ValueError("\ud83d")
        if how == "hang":
            time.sleep(30)
        return how

    def init(self, prompt):
        return self._act("init") or super().init(prompt)

    def step(self, action):
        how = self._act("step")
        if how is None:
            return super().step(action)
        nonsense = {
            "none": None,
            "no reward": {"observations": [], "done": True},
            "nan": {"observations": [], "reward": float("nan"), "done": True},
            "huge reward": {"observations": [], "reward": 10**400, "done": True},
            "text reward": {"observations": [], "reward": "1", "done": True},
            "maybe": {"observations": [], "reward": 0.0, "done": "maybe"},
            "image": {"observations": [{"role": "user", "content": 7}], "reward": 0, "done": False},
            "text": {"observations": "Go on.", "reward": 0, "done": False},
        }
        return nonsense[how]

    def close(self):
        self._act("close")


class Unreadable:
    """Nobody can look at it."""

    def __repr__(self):
        raise TypeError("no text of it")


class Secretive(Echo):
    """Answers with what cannot be looked at, and names numbers by half a character."""

    def step(self, action):
        return super().step(action) if self.extras.get("tells") else Unreadable()

    def get_metrics(self):
        return {"num_\ud83d": 1}


class Meddling(Echo):
    """Changes what it is given; earns how much of it was there before."""

    def init(self, prompt):
        self.found = len(self.extras["items"])
        self.extras["items"].append("mine")
        return super().init(prompt)

    def step(self, action):
        return super().step(action) | {"reward": self.found}


class Stepless:
    def __init__(self, env_config, extras):
        pass

    def init(self, prompt):
        return prompt, {}


class Cutting(Echo):
    """Takes the first word of what was said."""

    def step(self, action):
        return super().step(action) | {"postprocessed_action": "Yes."}


async def curious(client, task):
    """Asks twice, the second time about the answer, as another agent."""
    first = await client.chat(task.prompt)
    more = [*task.prompt, first.message, {"role": "user", "content": "Sure?"}]
    await client.chat(more, temperature=0.5, agent="checker")
    return 0.5


async def failing(client, task):
    how = task.extras["how"]
    if how != "silent":
        await client.chat(task.prompt)
    if how == "raise":
        raise OSError("no sandbox")
    if how == "exit":
        raise SystemExit(3)
    if how == "hang":
        await asyncio.sleep(30)
    return {"nonsense": "good", "nan": float("nan"), "huge": 10**400}.get(how, 1.0)


async def meddling(client, task):
    """Goes on in the prompt it was given; earns the messages that were there before."""
    found = len(task.prompt)
    answer = await client.chat(task.prompt)
    task.prompt.append(answer.message)
    return found


async def stubborn(client, task):
    """Goes on whatever happens."""
    try:
        await client.chat(task.prompt)
    except RolloutError:
        return 1.0
    return 0.0


def not_async(_client, _task):
    return 1.0


def config_of(**settings):
    defaults = {"tasks": "t", "model": "m", "out": "o"}
    defaults |= {"max_response_tokens": 16, "seed": 0}
    if "agent" not in settings:
        defaults |= {"environment": f"{HERE}:Echo", "max_turns": 3}
    return GenerateConfig(**defaults | settings)


def tasks_of(num_tasks=2, group_size=2, **extras):
    tasks = [
        Task(instance_id=f"t{i}", repetition_id=0, prompt=ASK, extras=extras)
        for i in range(num_tasks)
    ]
    return [attempt for task in tasks for attempt in attempts(task, group_size)]


def trajectories(engine, tokenizer, tasks, **settings):
    """The finished trajectories of tasks, and their table."""

    async def run():
        async with engine:
            generator = Generator(engine, tokenizer, config_of(**settings))
            generator.check(tasks)
            return await generator.collect(tasks)

    finished = asyncio.run(run())
    return finished, rows_of(finished)


def write_tasks(path, num_tasks=2, **extras):
    lines = [json.dumps({"prompt": ASK, **extras}) for _ in range(num_tasks)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def generate_with(engine, config):
    return asyncio.run(generate(config, lambda _: engine))
