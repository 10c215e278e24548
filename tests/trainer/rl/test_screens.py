"""examples/screens: a policy that sees samples, learns from what it saw, and trains on it again."""

import base64
import io
import json
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor

import rollout_io
import trainer
from examples import screens
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENGINE_DOWN
from rollout_io.dataset.blobs import Blobs
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.generation_helpers import generate_with
from tests.helpers.rl_helpers import config_of, lines_of, replay, rows_of, weights_of
from tests.helpers.screen_models import HERE, save_seeing
from trainer import rl
from trainer.engine.embedded import TransformersEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cache(lambda kind: save_seeing(tmp_path_factory.mktemp("model") / kind, kind))


def example():
    """The settings of the example; its rewards would be 0 with a random model."""
    settings = tomllib.loads(Path("examples/screens.toml").read_text(encoding="utf-8"))
    generate = settings["generate"]
    return generate | {"environment": f"{HERE}:Scored"}


def run_config(folder, model, **settings):
    """Two iterations of the example on a tiny model."""
    usual = {"num_iterations": 2, "seed": 3, "generate": example()}
    config = config_of(folder, model, **usual | settings)
    screens.main(folder / "tasks.jsonl")
    return config


def check_agreement(config, num_lines):
    lines = lines_of(config.run.out)
    assert len(lines) == num_lines
    assert not any(line["skipped"] for line in lines)
    assert max(line["rollout_logprobs_abs_diff_max"] for line in lines) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen3_vl", "tree"), ("gemma3", "merge"), ("smolvlm", "step")]
)
def test_sampler_and_trainer_see_the_same_screens(kind, layout, model, tmp_path):
    config = run_config(tmp_path, model(kind), train={"sequence_layout": layout})
    result = rl.run(config)
    check_agreement(config, 4)
    assert result.num_iterations == 2
    for iteration in range(2):
        path = tmp_path / "run" / "rollouts" / f"iteration_{iteration:05d}"
        moved = shutil.copytree(path, tmp_path / "moved" / path.name)
        shutil.copytree(f"{path}.blobs", f"{moved}.blobs")
        rollout_io.validate(moved)
        shown = {one["sha256"] for row in rows_of(config, iteration)["pictures"] for one in row}
        assert set(Blobs.of(moved).files) == shown
    again = replay(config, tmp_path / "again")
    assert weights_of(again.checkpoint) == weights_of(result.checkpoint)


@pytest.mark.slow
def test_a_resumed_run_with_screens_is_replayed_bit_for_bit(model, tmp_path):
    path, given = model("qwen2_5_vl"), {"save_every_iterations": 1}
    rl.run(run_config(tmp_path, path, num_iterations=1, **given))
    config = run_config(tmp_path, path, **given)
    result = rl.run(config, resume=True)
    check_agreement(config, 4)
    again = replay(config, tmp_path / "again")
    assert weights_of(again.checkpoint) == weights_of(result.checkpoint)


@pytest.mark.slow
def test_attempts_that_wait_for_a_resumed_run_keep_their_pictures(model, tmp_path):
    path, num_calls = model("gemma3"), 0

    class Interrupted(TransformersEngine):
        async def sample(self, *given, pictures=(), **named):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 8:
                raise RolloutError(ENGINE_DOWN, "engine", "no answer")
            return await super().sample(*given, pictures=pictures, **named)

    generate = example() | {"max_concurrency": 1}
    config = run_config(tmp_path, path, generate=generate)
    with pytest.raises(RolloutError):
        rl.run(config, open_engine=lambda sampling: Interrupted.load(sampling.model))
    unfinished = tmp_path / "run" / "unfinished"
    rollout_io.validate(unfinished)
    assert Blobs.of(unfinished).files
    rl.run(config, resume=True)
    check_agreement(config, 4)
    for iteration in range(2):
        rollout_io.validate(tmp_path / "run" / "rollouts" / f"iteration_{iteration:05d}")


@pytest.mark.slow
def test_evaluations_keep_the_screens_that_they_showed(model, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    screens.main(held_out)
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:2]))
    evaluate = {"tasks": str(held_out), "every_iterations": 1, "temperature": 0.0}
    config = run_config(tmp_path, model("gemma3"), num_iterations=1, evaluate=evaluate)
    rl.run(config)
    for version in (0, 1):
        path = tmp_path / "run" / "evaluations" / f"iteration_{version:05d}"
        rollout_io.validate(path)
        assert Blobs.of(path).files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_ten_updates_of_grpo_on_generated_screens_agree_in_every_layout(kind, model, tmp_path):
    screens.main(tmp_path / "tasks.jsonl")
    lines = (tmp_path / "tasks.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "tasks.jsonl").write_text("".join(lines[:2]))
    paths = {"tasks": str(tmp_path / "tasks.jsonl"), "out": str(tmp_path / "ds")}
    config = GenerateConfig(**example() | paths | {"model": model(kind), "seed": 3})
    engine = TransformersEngine.load(config.model)
    assert generate_with(engine, config).num_failed < 3  # some sample a placeholder
    firsts = []
    for layout in ("step", "merge", "tree"):
        out = tmp_path / layout
        settings = {"num_epochs": 5, "sequence_layout": layout, "record_tokens": "none"}
        sizes = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "learning_rate": 1e-3}
        run = {"dataset": config.out, "model": config.model, "out": str(out)}
        run["failed"] = "trajectory"
        trainer.train(train_config(**run | sizes | settings))
        updates = lines_of(out)
        assert len(updates) == 10
        assert not any(update["skipped"] for update in updates)
        assert updates[0]["rollout_logprobs_abs_diff_max"] < 1e-4
        firsts.append(updates[0])
    for name in ("loss", "grad_norm", "policy_entropy"):
        values = torch.tensor([first[name] for first in firsts])
        torch.testing.assert_close(values, values[:1].expand(3), rtol=1e-4, atol=1e-6)
    tokens = [first["num_forwarded_tokens"] for first in firsts]
    assert tokens[0] > tokens[1] > tokens[2]


def test_the_screen_that_is_asked_about_shows_the_colour_that_earns(tmp_path):
    screens.main(tmp_path / "tasks.jsonl")
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len(tasks) == len({task["instance_id"] for task in tasks}) == 27
    for task in tasks:
        environment = screens.Screens({}, task)
        (_, shown), _ = environment.init([{"role": "user", "content": task["prompt"]}])
        total = 0.0
        for number, (colour, cell) in enumerate(task["screens"]):
            url = shown["content"][0]["image_url"]["url"]
            content = base64.b64decode(url.removeprefix("data:image/png;base64,"))
            x, y = (screens.CELL * (at + 0.5) for at in (cell % 4, cell // 4))
            pixel = Image.open(io.BytesIO(content)).getpixel((int(x), int(y)))
            assert pixel == ImageColor.getrgb(colour)
            result = environment.step(f"It is {colour}.")
            total += result["reward"]
            assert result["done"] == (number == 2)
            (shown,) = result["observations"] or [None]
        assert total == pytest.approx(1.0)
