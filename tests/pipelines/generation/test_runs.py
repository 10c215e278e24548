import asyncio
import json
import signal
import subprocess
import sys
import time

import polars as pl
import pytest

import rollout_io
from pipelines.generation.config import load_generate_config
from pipelines.generation.run import generate
from rollout_io.cli.main import run
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.generation_helpers import HERE, SpyEngine, config_of, generate_with, write_tasks


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """A tiny model with SmolLM2's tokenizer."""
    from tests.helpers.trainer_helpers import tiny_llama

    path = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=49152, max_position_embeddings=2048).save_pretrained(path)
    tokenizer.backend.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    """Loading SmolLM2's tokenizer takes longer than most of these runs."""
    monkeypatch.setattr("pipelines.generation.run.load_tokenizer", lambda *_: tokenizer)


def config_in(tmp_path, model_dir, **settings):
    tasks = write_tasks(tmp_path / "tasks.jsonl", settings.pop("num_tasks", 4))
    given = {"tasks": tasks, "model": model_dir, "out": str(tmp_path / "ds"), "group_size": 2}
    return config_of(**given, **settings)


def ids_in(path):
    rows = rollout_io.scan(path).filter("is_last_step").collect()
    return rows["trajectory_id"].to_list()


ALL = [f"{i}_{r}" for i in range(4) for r in range(2)]


@pytest.mark.slow
def test_a_dead_engine_loses_no_finished_trajectory_and_a_second_run_makes_the_missing_ones(
    tmp_path, model, tokenizer, model_dir
):
    config = config_in(tmp_path, model_dir, max_concurrency=2, groups_per_shard=8)
    dying = SpyEngine(model, tokenizer, num_calls=10)
    with pytest.raises(RolloutError, match="engine_down"):
        generate_with(dying, config)
    finished = [s for s in {c[0] for c in dying.calls} if _count(dying, s) == 3]
    assert sorted(ids_in(config.out)) == sorted(finished)
    assert 2 <= len(finished) < 8
    engine = SpyEngine(model, tokenizer)
    result = generate_with(engine, config)
    assert (result.num_held, result.num_trajectories) == (len(finished), 8 - len(finished))
    assert sorted(ids_in(config.out)) == ALL
    assert {c[0] for c in engine.calls}.isdisjoint(finished)
    assert run(["validate", config.out]) == 0
    again = generate_with(SpyEngine(model, tokenizer, num_calls=0), config)
    assert (again.num_held, again.num_trajectories) == (8, 0)


def _count(engine, session):
    return sum(call[0] == session for call in engine.calls)


@pytest.mark.slow
def test_shards_hold_whole_groups_and_come_as_these_complete(tmp_path, model, tokenizer, model_dir):
    config = config_in(tmp_path, model_dir, max_concurrency=2, groups_per_shard=2)
    generate_with(SpyEngine(model, tokenizer, policy_version=3), config)
    shards = sorted((tmp_path / "ds").glob("*.parquet"))
    assert len(shards) == 2
    for shard in shards:
        ids = ids_in(shard)
        assert len(ids) == 4
        assert len({i.partition("_")[0] for i in ids}) == 2
    rows = rollout_io.scan(config.out).collect()
    assert set(rows["policy_version"]) == {3}
    metrics = rollout_io.read(config.out)["metrics"].to_pylist()
    assert [*map(metrics_dict, metrics)] == [None, None, {"turns": 3.0, "is_good": 1.0}] * 8
    metadata = rollout_io.read_metadata(config.out)
    assert metadata.logprobs_mode == "processed"
    assert metadata.tokenizer_fingerprint == tokenizer.fingerprint


@pytest.mark.slow
def test_another_configuration_does_not_go_on_with_a_dataset(
    tmp_path, model, tokenizer, model_dir, shop_dataset
):
    config = config_in(tmp_path, model_dir, num_tasks=1)
    generate_with(SpyEngine(model, tokenizer), config)
    other = config_in(tmp_path, model_dir, num_tasks=1, temperature=0.5, seed=1)
    named = r"`temperature` was 1\.0 and is 0\.5, `seed` was 0 and is 1"
    with pytest.raises(RolloutError, match=named):
        generate_with(SpyEngine(model, tokenizer), other)
    more = config_in(tmp_path, model_dir, num_tasks=2, max_concurrency=1)
    assert generate_with(SpyEngine(model, tokenizer), more).num_trajectories == 2
    foreign = config_of(tasks=more.tasks, model=model_dir, out=str(shop_dataset))
    with pytest.raises(RolloutError, match="was not created by `rollouts generate`"):
        generate_with(SpyEngine(model, tokenizer), foreign)


@pytest.mark.slow
def test_one_seed_one_dataset(tmp_path, model, tokenizer, model_dir):
    tables = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        settings = {"seed": 1 if name == "c" else 0, "max_concurrency": 1 + len(tables)}
        config = config_in(
            tmp_path / name, model_dir, num_tasks=1, max_response_tokens=8, **settings
        )
        generate_with(SpyEngine(model, tokenizer), config)
        tables.append(
            pl.from_arrow(rollout_io.read(config.out)).sort("trajectory_id", "step_index")
        )
    a, b, c = (t["response_ids"].to_list() for t in tables)
    assert a == b
    assert a != c
    assert len({tuple(r) for r in a}) > 2


CONFIG = """\
tasks = "{tasks}"
model = "{model}"
environment = "{here}:Echo"
max_turns = 3
group_size = 2
max_response_tokens = 8
"""


def command(tmp_path, model_dir, num_tasks):
    tasks = write_tasks(tmp_path / "tasks.jsonl", num_tasks)
    file = tmp_path / "c.toml"
    file.write_text(CONFIG.format(tasks=tasks, model=model_dir, here=HERE))
    return ["generate", str(file), "--out", str(tmp_path / "ds")]


@pytest.mark.slow
def test_the_command_makes_a_dataset_that_validates_and_trains(tmp_path, model_dir, capsys):
    assert run([*command(tmp_path, model_dir, 2), "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["num_trajectories"], result["num_steps"], result["num_failed"]) == (4, 12, 0)
    assert "4 of 4 trajectories" in said.err
    assert "mean reward 1.500" in said.err
    ds = str(tmp_path / "ds")
    assert run(["validate", ds]) == 0
    assert run(["merge", ds, "--out", str(tmp_path / "merged")]) == 0
    assert rollout_io.read(tmp_path / "merged").num_rows == 4
    settings = ["--set", "advantage.estimator=reinforce++", "--set", "data.outcome=sum"]
    train = ["train", ds, "--model", model_dir, "--out", str(tmp_path / "run"), *settings]
    assert run(train) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["return_mean"] == 1.5


@pytest.mark.slow
def test_a_run_whose_trajectories_fail_says_why_and_the_next_that_they_are_not_tried_again(
    tmp_path, model_dir, capsys
):
    arguments = [*command(tmp_path, model_dir, 1), "--set", f"environment={HERE}:Stepless"]
    assert run(arguments) == 1
    said = capsys.readouterr().err
    assert "first error: env_raised: trajectory '0_" in said
    assert "--where 'error is not null'" in said
    assert run(arguments) == 0
    assert (
        "the dataset is complete; to retry failed trajectories, choose a new --out"
        in capsys.readouterr().err
    )


@pytest.mark.nightly
def test_a_run_that_was_killed_goes_on_and_counts_no_trajectory_twice(tmp_path, model_dir):
    arguments = command(tmp_path, model_dir, 12)
    one_by_one = ["--set", "max_concurrency=2", "--set", "groups_per_shard=1"]
    program = [sys.executable, "-m", "rollout_io", *arguments, *one_by_one]
    process = subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "ds").glob("part-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = ids_in(tmp_path / "ds")
    assert 4 <= len(held) < 24
    assert run([*arguments, *one_by_one]) == 0
    assert sorted(ids_in(tmp_path / "ds")) == sorted(f"{i}_{r}" for i in range(12) for r in (0, 1))
    assert run(["validate", str(tmp_path / "ds")]) == 0


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_had_finished(tmp_path, model, tokenizer, model_dir):
    config = config_in(tmp_path, model_dir, max_concurrency=1)
    engine = SpyEngine(model, tokenizer)

    async def interrupted():
        running = asyncio.create_task(generate(config, lambda _: engine))
        while len(engine.calls) < 8:
            await asyncio.sleep(0.01)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert ids_in(config.out) == ALL[:2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("temprature = 1.0\n", "did you mean `temperature`?"),
        ('urls = ["http://h"]\n', "urls only if engine = vllm"),
        ("engine_args = {seed = 1}\n", "engine = vllm without urls"),
        ('engine = "vllm"\nrequests_per_s = 1\n', "it limits calls of servers"),
        ('history = "append_only"\n', "one of append, one_message, retokenize, step_wise"),
        ("max_turns = 0\n", "a whole number >= 1"),
        ("top_p = 0.0\n", "above 0, at most 1"),
        ('agent = "a:b"\n', "one of them"),
        ("env_config = 3\n", "expected a table"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(tmp_path, lines, message):
    file = tmp_path / "c.toml"
    given = 'tasks = "t"\nmodel = "m"\nout = "o"\nenvironment = "gsm8k"\n'
    file.write_text(given + lines)
    with pytest.raises(RolloutError) as error:
        load_generate_config(file)
    assert message in f"{error.value} {error.value.hint}"
