"""A generator of the user's own, with SkyRL's interface, in `generate` and in the loop."""

import asyncio
import json
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from polars.testing import assert_frame_equal

import rollout_io
from pipelines import GymGenerator, merge
from pipelines.generation.engines.base import ENGINE_DOWN, Sampling
from pipelines.generation.generator import Generator
from pipelines.generation.skyrl import OwnGenerator
from rollout_io import TrajectoryID, read_generator_output, write_generator_output
from rollout_io.cli.main import run as command
from rollout_io.retokenize import encode_response
from schemas.checker import validate
from schemas.errors import RolloutError
from tests.helpers import generation_helpers as helpers
from tests.helpers.generation_helpers import SpyEngine, generate_with
from tests.helpers.rl_helpers import HERE as RL
from tests.helpers.rl_helpers import config_of, lines_of, replay, rows_of, save_model, weights_of
from trainer import rl

pytestmark = pytest.mark.slow

HERE = "tests.pipelines.generation.test_own_generator"
LEFT_OUT = {"metrics", "error", "rewards", "source", "messages", "response_text"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    """Loading SmolLM2's tokenizer takes longer than most of these runs."""
    for module in (
        *("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"),
        "pipelines.generation.run",
    ):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


class Sums:
    """One call per prompt; the reward is in the number of tokens. Written with no help of ours."""

    seen: ClassVar[list] = []

    def __init__(self, engine, tokenizer, config):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config

    async def generate(self, input_batch):
        self.seen.append(input_batch)
        sampled = await asyncio.gather(*map(self.sample, input_batch["prompts"]))
        return {
            "prompt_token_ids": [one.prompt_token_ids for one in sampled],
            "response_ids": [one.response_ids for one in sampled],
            "rewards": [sum(one.response_ids) % 7 / 6 for one in sampled],
            "loss_masks": [[1] * len(one.response_ids) for one in sampled],
            "stop_reasons": [one.stop_reason for one in sampled],
            "rollout_logprobs": [one.rollout_logprobs for one in sampled],
            "rollout_metrics": {"generate/own": 1.0},
            "trajectory_ids": None,
        }

    async def sample(self, prompt):
        ids = self.tokenizer.encode([self.tokenizer.render(prompt)], ["prompt"])[0]
        return await self.engine.sample(ids, Sampling(max_tokens=6))


class Steps(Sums):
    """The same prompt twice a trajectory, as two steps; ids as `as_id` makes them."""

    @staticmethod
    def as_id(own):
        return SimpleNamespace(instance_id=own.instance_id, repetition_id=own.repetition_id)

    async def generate(self, input_batch):
        twice = {"prompts": [prompt for prompt in input_batch["prompts"] for _ in range(2)]}
        output = await super().generate(input_batch | twice)
        ids = [self.as_id(own) for own in input_batch["trajectory_ids"] for _ in range(2)]
        last = [False, True] * len(input_batch["prompts"])
        rewards = [r * is_last for r, is_last in zip(output["rewards"], last, strict=True)]
        return output | {"trajectory_ids": ids, "is_last_step": last, "rewards": rewards}


class Retokenizing(Sums):
    """Encodes text instead of keeping the engine's ids, and says so."""

    async def generate(self, input_batch):
        output = await super().generate(input_batch)
        said = [{"role": "assistant", "content": "four"}]
        answer = encode_response(said, self.tokenizer)
        num = len(output["response_ids"])
        return output | {
            "response_ids": [answer.response_ids] * num,
            "loss_masks": [answer.loss_mask] * num,
            "rollout_logprobs": None,
            "token_source": ["retokenized"] * num,
            "temperature": [0.25] * num,
            "rollout_metrics": {"tool/calls": np.int64(num), "notes": "x"},
        }


class StepsOfDicts(Steps):
    @staticmethod
    def as_id(own):
        return {"instance_id": own.instance_id, "repetition_id": np.int64(own.repetition_id)}


class Spoiling(Sums):
    """Returns what `spoil` of the configuration makes of a good output."""

    async def generate(self, input_batch):
        output = await super().generate(input_batch)
        output["trajectory_ids"] = list(input_batch["trajectory_ids"])
        return SPOILED[self.config.generator_config["spoil"]](output)


class Patient(Sums):
    """Fails or hangs as `how` of the task says."""

    async def generate(self, input_batch):
        how = input_batch["env_extras"][0].get("how")
        if how == "raise":
            raise KeyError("no such tool")
        if how == "exit":
            raise SystemExit(3)
        if how == "hang":
            await asyncio.sleep(30)
        return await super().generate(input_batch)


class Flaky(Sums):
    """Gives placeholders for all but the first trajectory when first called."""

    async def generate(self, input_batch):
        output = await super().generate(input_batch)
        if len(self.seen) == 1:
            for field, value in PLACEHOLDER.items():
                output[field][1:] = [value] * (len(output[field]) - 1)
        return output


PLACEHOLDER = {
    "prompt_token_ids": [0],
    "response_ids": [0],
    "rewards": 0.0,
    "loss_masks": [0],
    "stop_reasons": "error",
    "rollout_logprobs": [0.0],
}


def with_first(output, field, value):
    return output | {field: [value, *output[field][1:]]}


def rows(output, *chosen):
    lists = {k: [v[i] for i in chosen] for k, v in output.items() if isinstance(v, list)}
    return output | lists


SPOILED = {
    "none": lambda _: None,
    "list": lambda output: list(output.values()),
    "unreadable": lambda output: with_first(output, "stop_reasons", helpers.Unreadable()),
    "field": lambda output: {k: v for k, v in output.items() if k != "rewards"},
    "lengths": lambda output: with_first(output, "loss_masks", [1]),
    "rows": lambda output: output | {"rewards": output["rewards"][1:]},
    "mixed": lambda output: with_first(output, "rewards", [0.5]),
    "nan": lambda output: with_first(output, "rewards", float("nan")),
    "positive": lambda output: with_first(
        output, "rollout_logprobs", [1.0] * len(output["response_ids"][0])
    ),
    "vocabulary": lambda output: with_first(output, "prompt_token_ids", [60_000]),
    "lost": lambda output: rows(output, 0, 1),
    "lost without ids": lambda output: rows(output, 0, 1) | {"trajectory_ids": None},
    "twice": lambda output: rows(output, 0, 1, 1),
    "unknown": lambda output: with_first(output, "trajectory_ids", TrajectoryID("other", 0)),
    "no id": lambda output: with_first(output, "trajectory_ids", "t0"),
    "steps without ids": lambda output: (
        output | {"trajectory_ids": None, "is_last_step": [True] * 3}
    ),
    "apart": lambda output: rows(output, 0, 1, 0, 2) | {"is_last_step": [False, True, True, True]},
}
RULES = {
    "none": "generator_output",
    "list": "generator_output",
    "unreadable": "generator_output",
    "field": "fields",
    "lengths": "lengths_align",
    "rows": "fields_align",
    "mixed": "reward_kind",
    "nan": "reward_finite",
    "positive": "logprobs_nonpositive",
    "vocabulary": "token_range",
    "lost": "trajectories",
    "lost without ids": "trajectories",
    "twice": "unique_trajectory",
    "unknown": "trajectories",
    "no id": "trajectory_id",
    "steps without ids": "fields",
    "apart": "contiguous_trajectory",
}


def finished_by(tokenizer, model, name, tasks=None, **settings):
    """Trajectories of a group of three, and their table."""
    settings = {"environment": None, "generator": f"{HERE}:{name}"} | settings
    engine = SpyEngine(model, tokenizer)
    return helpers.trajectories(engine, tokenizer, tasks or helpers.tasks_of(1, 3), **settings)


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bad_output_fails_its_trajectories_with_the_rule_and_the_generator(
    model, tokenizer, spoil
):
    found, table = finished_by(tokenizer, model, "Spoiling", generator_config={"spoil": spoil})
    validate(table)
    assert table["trajectory_id"].to_pylist() == ["t0_0", "t0_1", "t0_2"]
    (error,) = {one.error for one in found}
    assert error.startswith(f"{RULES[spoil]}: generator {HERE}:Spoiling, group 't0'")


def test_lost_and_unknown_trajectories_are_named(model, tokenizer):
    for spoil, named in (("lost", "2 of 3 trajectories, missing t0_2"), ("unknown", "other_0")):
        found, _ = finished_by(tokenizer, model, "Spoiling", generator_config={"spoil": spoil})
        assert named in found[0].error


def test_rows_are_those_of_the_output_with_the_version_and_sampling_of_the_loop(model, tokenizer):
    Sums.seen.clear()
    settings = {"temperature": 0.5, "top_k": 9, "policy_version": 0}
    engine_rows, table = finished_by(tokenizer, model, "Sums", **settings)
    assert [one.error for one in engine_rows] == [None] * 3
    assert table["policy_version"].to_pylist() == [0] * 3
    assert (table["temperature"].to_pylist(), table["top_k"].to_pylist()) == ([0.5] * 3, [9] * 3)
    (given,) = Sums.seen
    assert given["trajectory_ids"] == [TrajectoryID("t0", r) for r in range(3)]
    assert given["prompts"] == [helpers.ASK] * 3
    assert given["sampling_params"] | {"temperature": 0.5, "top_k": 9} == given["sampling_params"]
    assert given["batch_metadata"].training_phase == "train"


def test_a_generator_says_how_its_rows_were_made_and_what_it_counted(model, tokenizer, tmp_path):
    found, table = finished_by(tokenizer, model, "Retokenizing")
    validate(table)
    assert table["token_source"].to_pylist() == ["retokenized"] * 3
    assert table["temperature"].to_pylist() == [0.25] * 3
    assert table["rollout_metrics"].to_pylist() == ['{"tool/calls": 3.0}', None, None]
    assert "notes" in found[0].warnings[0]
    write_generator_output(table, tmp_path / "out.json")
    again = read_generator_output(tmp_path / "out.json")
    assert again["token_source"].to_pylist() == ["retokenized"] * 3


@pytest.mark.parametrize("name", ["Steps", "StepsOfDicts"])
def test_step_wise_outputs_are_rows_by_step_whatever_their_ids_are_made_of(model, tokenizer, name):
    _, table = finished_by(tokenizer, model, name)
    validate(table)
    assert table["step_index"].to_pylist() == [0, 1] * 3
    assert table["repetition_id"].to_pylist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "generator_raised: generator {}, group 't0': KeyError: 'no such tool'"),
        ("exit", "generator_raised: generator {}, group 't0': RuntimeError: SystemExit: 3"),
        ("hang", "generator_timeout: generator {}, group 't0': no result within 2 s"),
    ],
)
def test_a_call_that_fails_or_hangs_fails_its_own_group_alone(model, tokenizer, how, error):
    tasks = [*helpers.tasks_of(1, 2, how=how), *helpers.tasks_of(2, 2)[2:]]
    found, table = finished_by(tokenizer, model, "Patient", tasks, agent_timeout_s=2)
    expected = error.format(f"{HERE}:Patient")
    assert [one.error for one in found] == [expected, expected, None, None]
    validate(table)


def test_only_failed_trajectories_are_asked_for_again(model, tokenizer):
    Sums.seen.clear()
    found, _ = finished_by(tokenizer, model, "Flaky", max_retries=1)
    assert [one.error for one in found] == [None] * 3
    assert [len(batch["prompts"]) for batch in Sums.seen] == [3, 2]
    assert "try 1 failed: failed: a placeholder row" in found[1].warnings[0]


class Stubborn(Sums):
    """Goes on whatever happens."""

    async def generate(self, input_batch):
        try:
            return await super().generate(input_batch)
        except RolloutError:
            num = len(input_batch["prompts"])
            return {field: [value] * num for field, value in PLACEHOLDER.items()}


@pytest.mark.parametrize("name", ["Sums", "Stubborn"])
def test_a_dead_engine_ends_the_run_even_if_the_generator_goes_on(model, tokenizer, name):
    engine = SpyEngine(model, tokenizer, num_calls=1)
    settings = {"environment": None, "generator": f"{HERE}:{name}"}
    with pytest.raises(RolloutError, match=ENGINE_DOWN):
        helpers.trajectories(engine, tokenizer, helpers.tasks_of(1, 3), **settings)


class Early(Sums):
    """The group t1 waits for its answer until t0 has found the engine dead."""

    has_died = asyncio.Event()

    async def generate(self, input_batch):
        if input_batch["trajectory_ids"][0].instance_id == "t1":
            output = await super().generate(input_batch)
            await self.has_died.wait()
            return output
        await asyncio.sleep(0.2)
        try:
            return await super().generate(input_batch)
        finally:
            self.has_died.set()


def test_a_group_that_is_whole_when_the_engine_dies_is_kept(
    tmp_path, model, tokenizer, model_dir, monkeypatch
):
    monkeypatch.setattr(Early, "has_died", asyncio.Event())
    lines = [{"prompt": helpers.ASK, "instance_id": name} for name in ("t1", "t0")]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, lines)))
    given = {"tasks": str(tasks), "model": model_dir, "environment": None, "group_size": 2}
    config = helpers.config_of(**given, generator=f"{HERE}:Early", out=str(tmp_path / "ds"))
    with pytest.raises(RolloutError, match=ENGINE_DOWN):
        generate_with(SpyEngine(model, tokenizer, num_calls=2), config)
    held = rollout_io.read(config.out)
    assert held["trajectory_id"].to_pylist() == ["t1_0", "t1_1"]


class NoMethod:
    pass


class Unmakeable(Sums):
    def __init__(self, engine):
        pass


def test_generators_that_are_not_there_or_not_usable_are_refused_by_name(model, tokenizer):
    engine = SpyEngine(model, tokenizer)
    for name, message in (
        ("Nobody", "has no attribute 'Nobody'"),
        ("NoMethod", "async def generate"),
    ):
        config = helpers.config_of(environment=None, generator=f"{HERE}:{name}")
        with pytest.raises(RolloutError, match=message):
            Generator(engine, tokenizer, config)
    with pytest.raises(RolloutError, match=r"cannot construct it from \(engine"):
        finished_by(tokenizer, model, "Unmakeable")
    for settings, message in (
        ({"agent": "m:f"}, "agent and generator"),
        ({"mask_overlong": True}, "mask_overlong and generator"),
    ):
        with pytest.raises(RolloutError, match=message):
            helpers.config_of(environment=None, generator="m:C", **settings)


def test_a_group_larger_than_the_concurrency_is_one_call_and_groups_keep_to_it(
    model, tokenizer, monkeypatch
):
    sizes, finish = [], OwnGenerator.finish

    async def spied(self, tasks):
        sizes.append(len(tasks))
        assert sum(sizes) <= 3
        found = await finish(self, tasks)
        sizes.remove(len(tasks))
        return found

    monkeypatch.setattr(OwnGenerator, "finish", spied)
    tasks = [*helpers.tasks_of(1, 3), *helpers.tasks_of(4, 1)[1:]]
    found, _ = finished_by(tokenizer, model, "Sums", tasks, max_concurrency=2)
    assert [one.error for one in found] == [None] * 6


def test_generate_writes_what_a_generator_returns_and_continues(
    tmp_path, model, tokenizer, model_dir
):
    Sums.seen.clear()
    given = {"tasks": helpers.write_tasks(tmp_path / "tasks.jsonl"), "model": model_dir}
    given |= {"environment": None, "generator": f"{HERE}:Steps", "group_size": 2}
    config = helpers.config_of(**given, out=str(tmp_path / "ds"))
    result = generate_with(SpyEngine(model, tokenizer), config)
    assert (result.num_trajectories, result.num_failed, result.num_steps) == (4, 0, 8)
    assert rollout_io.read_metadata(config.out).outcome == "last"
    assert command(["validate", config.out]) == 0
    again = generate_with(SpyEngine(model, tokenizer), config)
    assert (again.num_held, again.num_trajectories) == (4, 0)
    assert len(Sums.seen) == 2


@pytest.mark.slow
def test_the_loop_trains_evaluates_resumes_and_replays_what_a_generator_returns(
    tmp_path, model_dir
):
    Sums.seen.clear()
    settings = {
        "generate": {"environment": None, "generator": f"{HERE}:Steps"},
        "evaluate": {"tasks": str(tmp_path / "tasks.jsonl"), "every_iterations": 9},
    }
    rl.run(config_of(tmp_path, model_dir, num_iterations=1, **settings))
    config = config_of(tmp_path, model_dir, num_iterations=2, **settings)
    result = rl.run(config, resume=True)
    assert [set(rows_of(config, k)["policy_version"]) for k in range(2)] == [{0}, {1}]
    phases = [batch["batch_metadata"].training_phase for batch in Sums.seen]
    assert (phases.count("train"), phases.count("eval")) == (2 * 2, 3 * 4)
    greedy = next(b for b in Sums.seen if b["batch_metadata"].training_phase == "eval")
    assert greedy["sampling_params"]["temperature"] == 0.0
    assert result.evaluation is not None
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["generate/own"] for line in found if "generate/own" in line] == [2.0, 2.0]
    assert [line["eval/all/generate/own"] for line in found if "eval/all/avg_score" in line]
    again = replay(config, tmp_path / "again")
    assert weights_of(again.checkpoint) == weights_of(result.checkpoint)


def test_our_generator_in_this_place_trains_as_its_environment_does(tmp_path, model_dir):
    name = f"{GymGenerator.__module__}:GymGenerator"
    lines, sampled = [], []
    for folder, sampling in (("plain", {}), ("own", {"generator": name})):
        (tmp_path / folder).mkdir()
        sampling |= {"environment": f"{RL}:TwoTurns", "max_turns": 2}
        # One update of both groups: which of them ends first is left to chance.
        settings = {"generate": sampling, "train": {"groups_per_mini_batch": 2}}
        config = config_of(tmp_path / folder, model_dir, num_iterations=1, **settings)
        rl.run(config)
        rows = (
            merge(rollout_io.scan(f"{config.run.out}/rollouts/*")).collect().sort("trajectory_id")
        )
        sampled.append(rows.select("trajectory_id", "reward", "response_ids", "loss_mask"))
        lines.append(lines_of(config.run.out))
    assert_frame_equal(*sampled)
    for plain, own in zip(*lines, strict=True):
        for key in ("loss", "return_mean", "grad_norm"):
            assert own[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6)


def test_an_iteration_whose_every_output_is_bad_ends_the_run_with_the_reason(tmp_path, model_dir):
    sampling = {"environment": None, "generator": f"{HERE}:Spoiling"}
    sampling |= {"generator_config": {"spoil": "lost"}}
    config = config_of(tmp_path, model_dir, generate=sampling, num_iterations=1)
    with pytest.raises(
        RolloutError, match=r"first error: trajectories: generator.*\[iteration_failed\]"
    ):
        rl.run(config)
    held = rollout_io.scan(f"{config.run.out}/rollouts/*").collect()
    assert len(held) == 6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["generate"]["generator"]
