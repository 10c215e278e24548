"""The loop in several processes: the updates of one, whoever forwards what."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import polars as pl
import psutil
import pytest
from safetensors.torch import load_file

from tests.helpers.rl_helpers import (
    HERE,
    as_toml,
    config_of,
    lines_of,
    rows_of,
    save_model,
    write_tasks,
)
from tests.helpers.routing_helpers import tiny_moe
from tests.helpers.trainer_helpers import check_same_checkpoints, relative_difference

pytestmark = pytest.mark.slow

GAE = {
    "estimator": "gae",
    "critic_learning_rate": 1e-3,
    "kl_reward_coef": 0.1,
    "kl_ctrl_type": "adaptive",
    "kl_target": 0.01,
    "kl_horizon": 20,
}
VARIANTS = {
    "gae": GAE,
    "lora": {"lora_rank": 4, "kl_loss_coef": 0.1, "learning_rate_schedule": "cosine"},
    "clip_cov": {"policy_loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -1.0},
    "tree": {"sequence_layout": "tree", "estimator": "reinforce++"},
    "merge": {"sequence_layout": "merge"},
    "routing": {"replay_routing": True, "learning_rate": 1e-4},  # more amplifies rounding
}
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
RECORDED = {"record_tokens": "all"}
KILLED = {"num_iterations": 8, "save_every_iterations": 2}
TIMES = {"wait_seconds", "sync_seconds"}
CUT = {"num_micro_batches", "num_forwarded_tokens", "repeated_share"}
"""Metrics that depend on how micro-batches are cut, so that each process has one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    """A tiny dense model, and one with experts."""
    folder = tmp_path_factory.mktemp("models")
    tiny_moe(vocab_size=49152).save_pretrained(folder / "experts")
    tokenizer.backend.save_pretrained(folder / "experts")
    return {"dense": save_model(folder / "dense", tokenizer), "routing": str(folder / "experts")}


def config_in(folder, model, train, **settings):
    """Two turns a trajectory; one at a time, so that groups end in the same order in every run."""
    folder.mkdir(parents=True)
    sampling = {"environment": f"{HERE}:TwoTurns", "max_turns": 2, "max_concurrency": 1}
    train = {"tokens_per_micro_batch": 64, "epochs_per_batch": 2} | train
    return config_of(folder, model, generate=sampling, train=train, **settings)


def job_of(config, num_processes, **job):
    return {"rl": dataclasses.asdict(config), "num_processes": num_processes, **job}


def check_same_weights(config, other, file):
    """Each version of the policy that the engine has loaded, to 1e-4."""
    for version in range(1, config.num_iterations + 1):
        found, wanted = (
            load_file(f"{one.run.out}/weights/version_{version}/{file}") for one in (config, other)
        )
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            if tensor.any():
                assert relative_difference(found[key].double(), tensor.double()) < 1e-4, key


def run(server, config, num_processes, **job):
    server.start(**job_of(config, num_processes, **job))
    assert server.answer() == [0] * num_processes, "\n".join(server.said())


def check_same_run(out, expected):
    """Equal rows, metrics to 1e-5, and the tensors of the same checkpoints to 1e-4."""
    lines, wanted = lines_of(out), lines_of(expected)
    assert len(lines) == len(wanted) > 0
    for line, other in zip(lines, wanted, strict=True):
        assert list(line) == list(other)
        for key in line.keys() - TIMES - CUT:
            assert line[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    check_same_checkpoints(out, expected)


def check_same_rows(config, other):
    for iteration in range(config.num_iterations):
        ids = "trajectory_id", "step_index", "response_ids", "policy_version"
        assert rows_of(config, iteration).select(ids).equals(rows_of(other, iteration).select(ids))


@pytest.mark.parametrize(
    ("name", "nums"),
    [("gae", (2,)), *(pytest.param(name, (2, 4), marks=pytest.mark.nightly) for name in VARIANTS)],
)
def test_runs_of_several_processes_are_that_of_one(name, nums, server, models, tmp_path):
    configs = {}
    for num in (1, *nums):
        model = models.get(name, models["dense"])
        configs[num] = config_in(tmp_path / str(num), model, VARIANTS[name], keep_weights=9)
        run(server, configs[num], num, takes_adapters=name == "lora")
        said = server.said(num)
        assert said[1:] == [""] * (num - 1)
        assert (f"training with {num} processes" in said[0]) == (num > 1)
    for num in nums:
        check_same_run(configs[num].run.out, configs[1].run.out)
        check_same_rows(configs[num], configs[1])
        check_same_weights(configs[num], configs[1], ADAPTER if name == "lora" else MODEL)
        starts = (Path(configs[num].run.out) / "starts.jsonl").read_text()
        assert json.loads(starts)["num_processes"] == num
    if name == "routing":
        assert rows_of(configs[nums[-1]], 0)["rollout_expert_indices"].list.len().min() > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "file"), [("gae", MODEL), ("lora", ADAPTER)])
def test_a_run_with_sharded_parameters_is_that_of_one_process(name, file, server, models, tmp_path):
    """With evaluations, audits, all versions of the weights, and samples of earlier weights."""
    configs = {}
    for num in (1, 2):
        folder = tmp_path / str(num)
        folder.mkdir()
        evaluate = {"tasks": write_tasks(folder / "held_out.jsonl", 2), "every_iterations": 1}
        own = {"evaluate": evaluate, "keep_weights": 9, "save_every_iterations": 1}
        configs[num] = config_in(folder / "a", models["dense"], VARIANTS[name], **own)
        how = {"sharded": "directly" if num > 1 else None, "takes_adapters": name == "lora"}
        run(server, configs[num], num, **how)
    check_same_run(configs[2].run.out, configs[1].run.out)
    check_same_rows(configs[2], configs[1])
    check_same_weights(configs[2], configs[1], file)
    verdicts = pl.read_parquet(f"{configs[2].run.out}/audit/*.parquet")
    assert "not_checked" not in verdicts["kind"]
    audited = [line.get("num_audited_rows") for line in lines_of(configs[2].run.out)]
    assert audited == [4, None, None, None] * 3
    lines = (Path(configs[2].run.out) / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if "evaluation/return_mean" in line]
    assert [line["iteration"] for line in evaluations] == [0, 1, 2, 3]


def test_a_killed_run_is_resumed_with_another_number_of_processes(server, models, tmp_path):
    """Two processes, killed within the third iteration; then one, and as a copy four."""
    settings = {"num_iterations": 4, "save_every_iterations": 2}
    alone = config_in(tmp_path / "alone", models["dense"], GAE, **settings)
    run(server, alone, 1)
    config = config_in(tmp_path / "a", models["dense"], GAE, **settings)
    ranks = server.start(**job_of(config, 2))
    wait_for(Path(config.run.out) / "checkpoints" / "global_step_8")
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    assert server.answer() == [-signal.SIGKILL] * 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = dataclasses.replace(
        config, run=dataclasses.replace(config.run, out=str(tmp_path / "b" / "run"))
    )
    for one, num in ((config, 1), (again, 4)):
        run(server, one, num, resume=True)
        check_same_run(one.run.out, alone.run.out)
        check_same_rows(one, alone)
        starts = (Path(one.run.out) / "starts.jsonl").read_text().splitlines()
        assert [json.loads(line)["num_processes"] for line in starts] == [2, num]


def wait_for(path):
    until = time.monotonic() + 300
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists()


@pytest.mark.parametrize(
    "killed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 3))]
)
def test_the_others_end_at_once_if_a_process_is_killed(killed, server, models, tmp_path):
    """Without a launcher: the others notice by themselves, in an update or while they wait."""
    config = config_in(tmp_path / "a", models["dense"], {}, num_iterations=400)
    ranks = server.start(**job_of(config, 4))
    wait_for(Path(config.run.out) / "checkpoints" / "global_step_4")
    os.kill(ranks[killed], signal.SIGKILL)
    before = time.monotonic()
    codes = server.answer()
    assert time.monotonic() - before < 30
    assert codes.pop(killed) == -signal.SIGKILL
    assert codes == [3, 3, 3]
    for rank, said in enumerate(server.said(4)):
        if rank != killed:
            assert "another process of the run has ended or does not respond" in said
            assert "[process_lost]" in said


def test_an_error_of_the_user_ends_every_process_and_keeps_the_progress(server, models, tmp_path):
    """All trajectories of the third iteration fail; the updates before it are saved."""
    config = config_in(tmp_path / "a", models["dense"], {}, num_iterations=9)
    failing = config.generate | {"environment": f"{HERE}:Worse"}
    server.start(**job_of(dataclasses.replace(config, generate=failing), 2))
    assert server.answer() == [3, 3]
    for said in server.said():
        assert "every trajectory failed (6)" in said
        assert "process_lost" not in said
    checkpoints = [path.name for path in (Path(config.run.out) / "checkpoints").iterdir()]
    assert sorted(checkpoints) == ["global_step_4", "global_step_8", "latest"]


@pytest.fixture(scope="module")
def undisturbed(server, models, tmp_path_factory):
    """Configuration of a run that is not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = config_in(folder / "a", models["dense"], RECORDED, **KILLED)
    run(server, config, 1)
    return config


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_is_killed_up_to_five_times_trains_the_rows_of_an_undisturbed_one(
    seed, undisturbed, server, models, tmp_path
):
    """After a random number of updates; a rank, all ranks, or the command that has started them."""
    rng = random.Random(seed)
    config = config_in(tmp_path / "a", models["dense"], RECORDED, **KILLED)
    (tmp_path / "c.toml").write_text(as_toml(config))
    kills = []
    for turn in range(5):
        num, num_updates = rng.choice([1, 2, 4]), rng.randint(0, 5)
        victim = "command" if turn == seed % 5 else rng.choice([*range(num), "all"])
        if victim == "command":
            was_killed = kill_command(tmp_path / "c.toml", config, num_updates)
        else:
            was_killed = kill_ranks(server, config, num, num_updates, victim)
        kills.append((num, victim, num_updates, was_killed))
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    run(server, config, rng.choice([1, 2, 4]), resume=True)
    check_same_rows(config, undisturbed)
    check_same_run(config.run.out, undisturbed.run.out)
    assert trained_rows(config) == trained_rows(undisturbed)
    assert sum(was_killed for *_, was_killed in kills) >= 4


def trained_rows(config):
    """By update: each row that entered its loss, and how many of its tokens did."""
    found = {}
    for file in sorted((Path(config.run.out) / "tokens").iterdir()):
        rows = pl.read_parquet(file).filter(pl.col("loss_mask").list.any())
        numbers = rows.select(
            "instance_id", "trajectory_id", "step_index", pl.col("loss_mask").list.sum()
        )
        found[file.name] = Counter(numbers.rows())
    assert len(found) == 4 * config.num_iterations
    return found


def kill(ids):
    for process in ids:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_for_updates(config, num_updates, is_alive):
    """Wait until a run has made so many updates more than before, and is within the next; or ended."""
    metrics, until = Path(config.run.out) / "metrics.jsonl", time.monotonic() + 300

    def num_made():
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    wanted = num_made() + num_updates
    while is_alive() and num_made() < wanted and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.3))


def is_running(process):
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def kill_ranks(server, config, num, num_updates, victim):
    """Kill one process or all, and end the others as a launcher does. False: the run had ended.

    Without it, processes that are still connecting would wait for the killed one.
    """
    ranks = server.start(**job_of(config, num, resume=True))
    wait_for_updates(config, num_updates, lambda: any(map(is_running, ranks)))
    killed = range(num) if victim == "all" else [int(victim)]
    kill(ranks[rank] for rank in killed)
    launcher = threading.Timer(15, kill, [ranks])
    launcher.start()
    codes = server.answer()
    launcher.cancel()
    assert all(codes[rank] in (0, -signal.SIGKILL) for rank in killed)
    was_killed = -signal.SIGKILL in codes
    return was_killed


def kill_command(toml, config, num_updates):
    """Kill a command with `--num-processes`: its processes end."""
    words = [sys.executable, "-P", "-m", "rollout_io", "rl"]
    resumes = (Path(config.run.out) / "config.json").exists()
    words += ["--resume", config.run.out] if resumes else [str(toml), "--out", config.run.out]
    for table in ("num_iterations", "save_every_iterations"):
        words += ["--set", f"{table}={getattr(config, table)}"]
    starts = (
        Path(config.run.out) / "starts.jsonl"
    )  # a line replaces that of a start at the same update
    before_ns, until = starts.stat().st_mtime_ns if starts.exists() else 0, time.monotonic() + 300
    with subprocess.Popen([*words, "--num-processes", "2"]) as process:
        while process.poll() is None and time.monotonic() < until:
            if starts.exists() and starts.stat().st_mtime_ns > before_ns:
                break
            time.sleep(0.02)
        wait_for_updates(config, num_updates, lambda: process.poll() is None)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    return process.returncode == -signal.SIGKILL
