"""Metrics of environments that aggregate their own."""

import asyncio
import json

import pytest

from pipelines import GymGenerator
from pipelines.generation.environments import environment_metrics
from pipelines.generation.tasks import finished_of, rows_of
from rollout_io.formats.base import Step
from tests.helpers import generation_helpers as helpers
from tests.helpers.generation_helpers import ASK, SpyEngine, config_of
from tests.helpers.rl_helpers import Length, save_model
from tests.helpers.rl_helpers import config_of as rl_config_of
from trainer import rl

HERE = "tests.pipelines.generation.test_environment_metrics"


class Best(helpers.Echo):
    """Reports the most turns, and the number of trajectories."""

    @staticmethod
    def aggregate_metrics(metrics):
        return {"most_turns": max(one["turns"] for one in metrics), "runs": len(metrics), "a": "b"}


class Unaggregated(Best):
    @staticmethod
    def aggregate_metrics(_metrics):
        raise KeyError("no such metric")


class Nonsense(Best):
    @staticmethod
    def aggregate_metrics(metrics):
        return len(metrics)


class Lengths(Length):
    """Reports the number of its trajectories."""

    def get_metrics(self):
        return {"characters": 3}

    @staticmethod
    def aggregate_metrics(metrics):
        return {"runs": len(metrics)}


def metrics_of(model, tokenizer, classes, num_turns):
    asked = {"prompts": [ASK] * len(classes), "env_classes": classes}
    asked["env_extras"] = [{"num_turns": number} for number in num_turns]

    async def run():
        async with SpyEngine(model, tokenizer) as engine:
            config = config_of(environment=None, max_turns=3)
            output = await GymGenerator(engine, tokenizer, config).generate(asked)
            return output["rollout_metrics"]

    found = asyncio.run(run())
    return {k: v for k, v in found.items() if k.startswith("environment/")}


def test_an_environment_aggregates_its_own_metrics(model, tokenizer):
    found = metrics_of(model, tokenizer, [f"{HERE}:Best"] * 3, [1, 3, 2])
    assert found == {"environment/most_turns": 3.0, "environment/runs": 3.0}


def test_environments_of_one_batch_are_aggregated_apart(model, tokenizer):
    classes = [f"{HERE}:Best", f"{helpers.HERE}:Echo", f"{helpers.HERE}:Echo"]
    found = metrics_of(model, tokenizer, classes, [1, 3, 2])
    assert found == {
        "environment/most_turns": 1.0,
        "environment/runs": 1.0,
        "environment/turns": 2.5,
        "environment/is_good": 1.0,
    }


def test_skyrl_gyms_own_aggregation_is_used():
    steps = [Step(source="s", metrics={"steps": float(number)}) for number in (1, 2)]
    rows = [
        finished_of(task, [step]) for task, step in zip(helpers.tasks_of(1), steps, strict=True)
    ]
    found, problems = asyncio.run(environment_metrics(rows_of(rows), {"t0": "gsm8k"}, 5.0))
    assert (found, problems) == ({"environment/steps": 1.5}, [])


@pytest.mark.parametrize(
    ("name", "text"), [("Unaggregated", "KeyError: 'no such metric'"), ("Nonsense", "a dict")]
)
def test_an_aggregation_that_fails_leaves_means_and_a_warning(model, tokenizer, name, text):
    with pytest.warns(UserWarning, match=text):
        found = metrics_of(model, tokenizer, [f"{HERE}:{name}"] * 2, [1, 2])
    assert found == {"environment/turns": 1.5, "environment/is_good": 1.0}


@pytest.mark.slow
def test_the_loop_logs_what_the_environment_makes_of_its_metrics(tmp_path, tokenizer, monkeypatch):
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)
    model_dir = save_model(tmp_path / "model", tokenizer)
    sampling = {"environment": f"{HERE}:Lengths"}
    config = rl_config_of(tmp_path, model_dir, num_tasks=1, num_iterations=1, generate=sampling)
    rl.run(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    found = {k: v for k, v in first.items() if k.startswith("environment/")}
    assert found == {"environment/runs": 6.0}
