"""The loop with the embedded engine, and the replay of what it sampled."""

import asyncio
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import polars as pl
import pytest

import rollout_io
from pipelines.generation import Sampling
from rollout_io.cli.main import run as command
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import SpyEngine
from tests.helpers.rl_helpers import (
    HERE,
    Interrupting,
    Length,
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
from trainer import update as updates
from trainer.engine.embedded import TransformersEngine
from trainer.reports.run_plot import read_metrics
from trainer.rl.groups import Collector
from trainer.rl.weight_sync import WeightSwapEngine
from trainer.run.checkpoint import checkpoint_path

LOOP_ONLY = {"iteration", "staleness_mean", "staleness_max", "staleness_histogram"}
LOOP_ONLY |= {
    "num_dropped_groups",
    "num_audited_rows",
    "num_mismatched_rows",
    "response_tokens_mean",
    "steps_mean",
    "wait_seconds",
    "sync_seconds",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A tiny model with SmolLM2's tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    """Loading SmolLM2's tokenizer takes longer than most of these runs."""
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


class Moving(Length):
    """Moves the working directory, as code of a repository that is being worked on may do."""

    def step(self, action):
        os.chdir("/")
        return super().step(action)


@pytest.mark.slow
def test_an_environment_that_moves_the_working_directory_does_not_move_the_run(
    model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    generate = {"environment": "tests.trainer.rl.test_rl:Moving"}
    evaluate = {"tasks": "tasks.jsonl", "chat_template": "qwen3_acc_thinking", "temperature": 1.0}
    config = config_of(Path(), "model", num_iterations=2, generate=generate, evaluate=evaluate)
    result = rl.run(config)
    assert (result.out, result.checkpoint) == ("run", "run/checkpoints/global_step_4")
    assert Path.cwd() == Path("/")
    assert len(list((tmp_path / "run" / "evaluations").iterdir())) == 2
    for written in (result.checkpoint, "run/weights/version_2"):
        names = {path.name for path in (tmp_path / written).iterdir()}
        assert {"model.safetensors", "tokenizer.json"} <= names
    assert len(lines_of(tmp_path / "run")) == 4


def check_replay(config, result, out):
    """Training on what was sampled makes the same updates, bit for bit."""
    again = replay(config, out)
    assert weights_of(again.checkpoint) == weights_of(result.checkpoint)
    kept = [{k: v for k, v in x.items() if k not in LOOP_ONLY} for x in lines_of(config.run.out)]
    assert kept == lines_of(out)
    check_same_tokens(config, out)


def check_same_tokens(config, out):
    """The tokens are recorded at the rows of the iteration that sampled them."""
    lines = [line for line in lines_of(config.run.out) if not line["skipped"]]
    assert len(list((out / "tokens").iterdir())) == len(lines) > 0
    for line in lines:
        name = f"tokens/global_step_{line['global_step']}.parquet"
        records, again = pl.read_parquet(f"{config.run.out}/{name}"), pl.read_parquet(out / name)
        assert records.drop("dataset").equals(again.drop("dataset"))
        (dataset,) = records["dataset"].unique()
        rows = rollout_io.scan(dataset).select("trajectory_id", "step_index").collect()
        assert len(records.join(rows, on=rows.columns, how="semi")) == len(records) > 0
        assert rows.equals(rows_of(config, line["iteration"]).select(rows.columns))


def versions_of(config):
    return [set(rows_of(config, k)["policy_version"]) for k in range(config.num_iterations)]


def ids_in(config, part="rollouts"):
    rows = rollout_io.scan(f"{config.run.out}/{part}/**/*.parquet").filter("is_last_step").collect()
    return rows["trajectory_id"].to_list()


@pytest.mark.slow
def test_each_iteration_trains_what_its_own_weights_sampled_and_train_replays_the_run(
    tmp_path, model, capsys
):
    config = config_of(tmp_path, model, num_tasks=3, train={"epochs_per_batch": 2})
    result = rl.run(config, resume=True)
    assert versions_of(config) == [{0}, {1}, {2}]
    assert (result.num_iterations, result.num_updates, result.num_skipped_updates) == (3, 12, 0)
    groups = [name for k in range(3) for name in rows_of(config, k)["instance_id"].unique()]
    assert sorted(groups) == ["t0", "t0@2", "t1", "t1@2", "t2", "t2@2"]
    check_replay(config, result, tmp_path / "again")
    lines = read_metrics(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line.get("staleness_histogram") for line in lines] == [{"0": 6}, None, None, None] * 3
    assert sorted(p.name for p in (tmp_path / "run" / "weights").iterdir()) == [
        "version_2",
        "version_3",
    ]
    said = capsys.readouterr().err
    assert said.startswith(f"no run in {config.run.out}: starting from the beginning\n")
    assert "iteration 3 of 3: return_mean 0." in said
    assert "the dataset's tokenizer" not in said.partition("iteration 3 of 3")[0]
    assert command(["validate", f"{config.run.out}/rollouts/*"]) == 0


@pytest.mark.parametrize(
    ("seed", "max_staleness"),
    [
        pytest.param(0, 2, marks=pytest.mark.slow),
        *(pytest.param(s, 1 + s % 3, marks=pytest.mark.nightly) for s in range(1, 9)),
    ],
)
def test_sampling_ahead_keeps_to_its_bound_and_replays_too(
    tmp_path, model, monkeypatch, seed, max_staleness
):
    begun, begin = [], Collector._begin_group

    def spied(self):
        may = begin(self)
        most = (max_staleness + self.iteration + 1) * 2
        assert self.num_begun <= min(most, 10)
        assert len(self._under_way.running) <= 4
        begun.append(self.num_begun)
        return may

    monkeypatch.setattr(Collector, "_begin_group", spied)
    sampling = {"environment": f"{HERE}:Slow", "max_concurrency": 4}
    settings = {"max_staleness": max_staleness, "seed": seed, "num_iterations": 5}
    config = config_of(tmp_path, model, generate=sampling, keep_weights=4, **settings)
    result = rl.run(config)
    kept = {path.name for path in (tmp_path / "run" / "weights").iterdir()}
    assert kept == {"version_2", "version_3", "version_4", "version_5"}
    ages = {k - v for k, found in enumerate(versions_of(config)) for v in found}
    assert 0 < max(ages) <= max_staleness
    assert max(begun) == 10
    check_replay(config, result, tmp_path / "again")


async def helped(client, _):
    """Three calls: a helper's and a judge's, both greedy, of which the judge's is marked."""
    await client.sample([1, 2, 3], temperature=0.0)
    said = await client.sample([5, 6, 7, 8])
    await client.sample([9, 8], temperature=0, trains=False, agent="judge")
    return float(len(said.text) % 5)


@pytest.mark.slow
def test_greedy_calls_of_an_agent_are_masked_and_counted_and_end_no_run(tmp_path, model, capsys):
    sampling = {"environment": None, "agent": f"{__name__}:helped"}
    config = config_of(tmp_path, model, num_tasks=3, num_iterations=2, generate=sampling)
    result = rl.run(config)
    assert (result.num_iterations, result.num_greedy_rows) == (2, 12)
    rows = rows_of(config, 0)
    assert [any(mask) for mask in rows["loss_mask"]] == [True, True, False] * 6
    assert [line["num_greedy_rows"] for line in lines_of(config.run.out)] == [3, 3, 3, 3]
    printed = capsys.readouterr().err
    assert (
        printed.count("warning: 6 rows sampled at temperature 0 will be excluded from training: ")
        == 1
    )
    check_replay(config, result, tmp_path / "again")


def test_groups_of_one_are_refused_where_trajectories_are_compared(tmp_path, model):
    with pytest.raises(
        RolloutError, match=r"\[generate\] group_size: found 1; expected at least 2"
    ):
        config_of(tmp_path, model, generate={"group_size": 1})
    config_of(tmp_path, model, generate={"group_size": 1}, train={"estimator": "reinforce++"})


@pytest.mark.slow
def test_a_dead_engine_ends_the_run_and_a_resumed_one_loses_and_repeats_nothing(tmp_path, model):
    config = config_of(tmp_path, model, num_iterations=4, save_every_iterations=2)
    engines = []

    def dying(num_calls):
        def make(sampling):
            engine = SpyEngine.load(sampling.model, max_batch_size=4, num_calls=num_calls)
            engines.append(engine)
            return engine

        return make

    with pytest.raises(RolloutError, match="engine_down") as error:
        rl.run(config, open_engine=dying(16))
    assert f"continue with --resume {config.run.out}" in error.value.hint
    held = [*ids_in(config), *ids_in(config, "unfinished")]
    assert len(held) == len(set(held)) == 16
    with pytest.raises(RolloutError, match="existing_run"):
        rl.run(config)
    (shard,) = (tmp_path / "run" / "unfinished").glob("*.parquet")
    shutil.copy(shard, shard.with_name("part-00001-again.parquet"))  # as a kill leaves it
    other = config_of(tmp_path, model, num_iterations=4, train={"learning_rate": 1e-4})
    with pytest.raises(
        RolloutError, match=r"optimizer\.learning_rate: found 0\.0001; expected 0\.001"
    ):
        rl.run(other, resume=True)
    result = rl.run(config, resume=True, open_engine=dying(None))
    sessions = [call[0] for call in engines[1].calls]
    assert len(sessions) == len(set(sessions)) == 24 - 16
    assert {*sessions, *held} == set(ids_in(config))
    assert not list((tmp_path / "run" / "unfinished").glob("*.parquet"))
    assert versions_of(config) == [{0}, {1}, {2}, {3}]
    check_replay(config, result, tmp_path / "again")


class Terminated(SpyEngine):
    """The process is told to end at the second call."""

    async def sample(self, *args, **settings):
        if self.calls:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return await super().sample(*args, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_that_is_told_to_end_keeps_what_had_finished_in_a_background_job_too(
    tmp_path, model, ctrl_c
):
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        _told_to_end(tmp_path, model)
    finally:
        signal.signal(signal.SIGINT, before)


def _told_to_end(tmp_path, model):
    config = config_of(tmp_path, model, generate={"max_concurrency": 1})
    with pytest.raises(KeyboardInterrupt):
        rl.run(config, open_engine=lambda sampling: Terminated.load(sampling.model))
    assert len(ids_in(config, "unfinished")) == 1


@pytest.mark.slow
def test_a_loop_that_is_interrupted_saves_its_update_and_resumes_bit_for_bit(
    tmp_path, model, monkeypatch
):
    micro_batch, calls = updates.objective, []

    def interrupted(*args, **settings):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread answers while this micro-batch runs
        return micro_batch(*args, **settings)

    monkeypatch.setattr(updates, "objective", interrupted)
    settings = {"num_iterations": 3, "save_every_iterations": None}
    config = config_of(tmp_path, model, **settings, train={"tokens_per_micro_batch": 24})
    with pytest.raises(KeyboardInterrupt):
        rl.run(config)
    assert len(calls) > 3, "the iteration has more micro-batches than ran before the interrupt"
    num_calls, num_lines = len(calls), len(lines_of(config.run.out))
    assert checkpoint_path(Path(config.run.out), num_lines).is_dir()
    result = rl.run(config, resume=True)
    assert len(calls) == num_calls * config.num_iterations
    check_replay(config, result, tmp_path / "again")


@pytest.mark.slow
def test_evaluations_are_datasets_of_their_own_and_are_not_sampled_again(tmp_path, model, capsys):
    tasks = write_tasks(tmp_path / "held_out.jsonl", 2)
    evaluate = {"tasks": tasks, "every_iterations": 2, "temperature": 0.0, "group_size": 2}
    config = config_of(tmp_path, model, evaluate=evaluate)
    result = rl.run(config)
    folder = tmp_path / "run" / "evaluations"
    shards = {path.parent.name: path.read_bytes() for path in folder.rglob("*.parquet")}
    assert sorted(shards) == ["iteration_00000", "iteration_00002", "iteration_00003"]
    for name in shards:
        rows = rollout_io.scan(folder / name).collect()
        assert len(rows) == 4
        assert set(rows["temperature"]) == {0.0}
        assert set(rows["policy_version"]) == {int(name[-1])}
    lines = [x for x in read_metrics(tmp_path / "run") if "evaluation/return_mean" in x]
    assert [(x["iteration"], x["global_step"]) for x in lines] == [(0, 0), (2, 4), (3, 6)]
    assert lines[-1]["evaluation/return_mean"] == result.evaluation
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert command(["rl", "--resume", config.run.out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(result)
    assert {p.parent.name: p.read_bytes() for p in folder.rglob("*.parquet")} == shards
    assert [x for x in read_metrics(tmp_path / "run") if "evaluation/return_mean" in x] == lines
    assert command(["rl", "--resume", config.run.out]) == 0
    said = capsys.readouterr()
    assert "reward " not in said.out
    assert "all iterations are already complete" in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "how"), [("rl", "rollouts rl --resume"), ("generate", "the same command")]
)
def test_an_interrupted_run_says_how_to_go_on(tmp_path, model, monkeypatch, capsys, verb, how):
    monkeypatch.setattr(Interrupting, "first", threading.Lock())
    config = config_of(tmp_path, model, generate={"environment": f"{HERE}:Interrupting"})
    file = tmp_path / "c.toml"
    file.write_text(as_toml(config))
    if verb == "generate":
        environment = json.dumps(f"{HERE}:Interrupting")
        given = f"model = {json.dumps(model)}\ntasks = {json.dumps(config.loop.tasks)}\n"
        file.write_text(f"{given}environment = {environment}\nmax_response_tokens = 4\n")
    assert command([verb, str(file), "--out", str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err
    assert "stopped: " in said
    assert how in said


@pytest.mark.slow
def test_failed_trajectories_stay_and_an_iteration_of_nothing_else_ends_the_run(tmp_path, model):
    failing = {"environment": f"{HERE}:Failing"}
    config = config_of(tmp_path, model, generate=failing, num_tasks=2)
    lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
    tasks = [json.loads(line) | {"fails": number == 0} for number, line in enumerate(lines)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    result = rl.run(config)
    assert (result.num_updates, result.num_skipped_updates) == (3, 3)
    assert rows_of(config, 0)["error"].null_count() == 3
    check_replay(config, result, tmp_path / "again")
    (tmp_path / "b").mkdir()
    with pytest.raises(
        RolloutError, match=r"every trajectory failed \(6\); first error: env_raised"
    ) as e:
        rl.run(config_of(tmp_path / "b", model, generate=failing))
    assert "remove" in e.value.hint
    assert rows_of(config_of(tmp_path / "b", model), 0)["error"].null_count() == 0


@pytest.mark.slow
def test_groups_without_variance_are_dropped_and_others_sampled_in_their_place(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr("trainer.rl.groups.DROPPED_IN_A_ROW", 3)
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "Go.", "instance_id": f"t{i}", "constant": i < 3} for i in range(6)]
    drops = {"drop_zero_variance_groups": True}
    sampling = {"environment": f"{HERE}:SomeConstant"}
    config = config_of(tmp_path, model, train=drops, generate=sampling)
    tasks.write_text("\n".join(map(json.dumps, lines)))
    result = rl.run(config)
    dropped = {name.partition("@")[0].partition("_")[0] for name in ids_in(config, "dropped")}
    assert dropped <= {"t0", "t1", "t2"}
    assert {name[:2] for name in ids_in(config)} == {"t3", "t4", "t5"}
    assert versions_of(config) == [{0}, {1}, {2}]
    counts = [line.get("num_dropped_groups", 0) for line in lines_of(config.run.out)]
    assert sum(counts) * 3 == len(ids_in(config, "dropped")) > 0
    check_replay(config, result, tmp_path / "again")
    tasks.write_text("\n".join(map(json.dumps, lines[:3])))
    longer = config_of(tmp_path, model, train=drops, generate=sampling, num_iterations=4)
    tasks.write_text("\n".join(map(json.dumps, lines[:3])))
    with pytest.raises(RolloutError, match="returns do not vary within any of the last 6 groups"):
        rl.run(longer, resume=True)


VARIANTS = {
    "gae": {
        "estimator": "gae",
        "critic_learning_rate": 1e-3,
        "kl_reward_coef": 0.1,
        "kl_ctrl_type": "adaptive",
        "kl_target": 0.01,
        "kl_horizon": 20,
    },
    "lora": {
        "lora_rank": 4,
        "kl_loss_coef": 0.1,
        "learning_rate_schedule": "cosine",
        "warmup_updates": 2,
    },
    "kl_cov": {"policy_loss_type": "kl_cov", "outcome": "sum"},
    "tree": {"sequence_layout": "tree", "estimator": "reinforce++"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_whatever_trains_a_run_that_is_resumed_is_replayed_by_train(tmp_path, model, name):
    config = config_of(
        tmp_path,
        model,
        num_iterations=5,
        max_staleness=1,
        save_every_iterations=1,
        generate={"environment": f"{HERE}:TwoTurns", "max_turns": 2},
        train=VARIANTS[name] | {"epochs_per_batch": 2, "keep_checkpoints": 1},
    )

    def dying(sampling):
        return SpyEngine.load(sampling.model, max_batch_size=4, num_calls=40)

    with pytest.raises(RolloutError, match="engine_down"):
        rl.run(config, open_engine=dying)
    check_replay(config, rl.run(config, resume=True), tmp_path / "again")
    rates = {line["learning_rate"] for line in lines_of(config.run.out)}
    assert (len(rates) > 1) == (name == "lora")
    assert [line["iteration"] for line in lines_of(config.run.out)] == [k // 4 for k in range(20)]


class Shifted(TransformersEngine):
    """Says that each token was less likely than it was."""

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        sampled = await super().sample(prompt_token_ids, sampling, session=session)
        low = tuple(value - 1 for value in sampled.rollout_logprobs)
        return dataclasses.replace(sampled, rollout_logprobs=low)


@pytest.mark.slow
def test_why_the_sampler_disagrees_is_said_once_and_before_the_first_update(
    tmp_path, model, capsys
):
    engine = Shifted.load(model)
    rl.run(config_of(tmp_path, model, num_iterations=3), open_engine=lambda _: engine)
    lines = lines_of(tmp_path / "run")
    assert all(line["rollout_logprobs_abs_diff_mean"] > 0.9 for line in lines)
    printed = capsys.readouterr().err
    assert printed.count("warning: rollout_logprobs differ") == printed.count(
        "rollout_logprobs differ"
    )
    # The audit of an iteration, which not every one gets, names a cause too.
    assert len(re.findall(r"rollout_logprobs differ.*\nlikely cause:", printed)) == 1


class Told(TransformersEngine):
    """Keeps what happens, in order."""

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        self.told.append(f"{session} begins")
        sampled = await super().sample(prompt_token_ids, sampling, session=session)
        self.told.append(f"{session} ends, of version {sampled.policy_version}")
        return sampled

    async def load_weights(self, path, *, policy_version):
        self.told.append("load")
        await super().load_weights(path, policy_version=policy_version)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        (True, ["a begins", "a ends, of version 0", "load", "b begins", "b ends, of version 1"]),
        (False, ["a begins", "load", "b begins", "a ends, of version 0", "b ends, of version 1"]),
    ],
)
def test_calls_under_way_end_before_new_weights_if_they_are_waited_for(model, waits, expected):
    async def play(engine):
        async with WeightSwapEngine(engine, waits=waits) as gate:
            a = asyncio.create_task(gate.sample([5], Sampling(max_tokens=99), session="a"))
            await asyncio.sleep(0.02)
            load = asyncio.create_task(gate.load_weights(model, policy_version=1))
            await asyncio.sleep(0)
            b = asyncio.create_task(gate.sample([5], Sampling(max_tokens=1), session="b"))
            await asyncio.gather(a, load, b)

    engine = Told.load(model)
    engine.told = []
    asyncio.run(play(engine))
    assert engine.told == expected


def test_an_adapter_waits_only_for_calls_older_than_the_current_one(model, tmp_path):
    class Slow(Told):
        """Ends a call when told to."""

        async def sample(self, _, __, *, session=None):
            self.told.append(f"{session} begins")
            await self.ends[session].wait()
            self.told.append(f"{session} ends")

        async def load_weights(self, _, *, policy_version):
            self.told.append(f"load {policy_version}")
            self.policy_version = policy_version

    (tmp_path / "adapter_config.json").touch()

    async def play(engine):
        engine.ends = {name: asyncio.Event() for name in "abc"}

        async def soon():
            for _ in range(9):
                await asyncio.sleep(0)

        async with WeightSwapEngine(engine, waits=True) as gate:
            load = functools.partial(gate.load_weights, str(tmp_path))
            a = asyncio.create_task(gate.sample([5], Sampling(), session="a"))
            await soon()
            await load(policy_version=1)
            b = asyncio.create_task(gate.sample([5], Sampling(), session="b"))
            await soon()
            second = asyncio.create_task(load(policy_version=2))
            await soon()
            c = asyncio.create_task(gate.sample([5], Sampling(), session="c"))
            await soon()
            for name in "acb":
                engine.ends[name].set()
                await soon()
            await asyncio.gather(a, b, c, second)

    engine = Slow.load(model)
    engine.told = []
    asyncio.run(play(engine))
    begins = ["a begins", "load 1", "b begins", "c begins"]
    assert engine.told == [*begins, "a ends", "load 2", "c ends", "b ends"]


@pytest.mark.slow
def test_a_run_whose_rows_cannot_fit_the_model_or_the_engine_samples_nothing(tmp_path, model):
    config = config_of(tmp_path, model, generate={"max_input_tokens": 251})
    with pytest.raises(RolloutError, match=r"max_position_embeddings.*\[row_too_long\]"):
        rl.run(config)
    small = TransformersEngine.load(model)
    small.model.config.max_position_embeddings = 64
    config = config_of(tmp_path, model, generate={"max_input_tokens": 60})
    with pytest.raises(RolloutError, match=r"the engine's context.*\[row_too_long\]"):
        rl.run(config, open_engine=lambda _: small)
    assert not (tmp_path / "run" / "rollouts").exists()
