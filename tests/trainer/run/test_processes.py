"""Runs of two processes: the numbers of one, whoever forwards what and holds which parameters."""

import json
import os
import shutil
import signal
import time
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import rollout_io
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    check_same_checkpoints,
    gradient_of_update,
    group_rows,
    make_batch,
    metrics_of,
    relative_difference,
    save_tiny_model,
    step,
    tiny_policy,
    two_step_trajectory,
    write_dataset,
)
from trainer.training import train

COMMON = {
    "groups_per_batch": 3,
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 2,
    "learning_rate": 3e-4,
    "tokens_per_micro_batch": 45,
    "save_every_updates": 4,
    "partial_groups": "train",
}
GAE = {
    "estimator": "gae",
    "critic_learning_rate": 3e-4,
    "kl_reward_coef": 0.1,
    "kl_ctrl_type": "adaptive",
    "kl_target": 0.01,
    "kl_horizon": 20,
}
pytestmark = pytest.mark.slow
MINE = "tests.helpers.own_functions"
RUNS = {
    "token_mean": {"kl_loss_coef": 0.1},
    "prompt_mean": {
        "reduction": "prompt_mean",
        "policy_loss_type": "clip_cov",
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": -1.0,
        "entropy_loss_coef": 0.01,
        "sequence_layout": "step",
        "estimator": "gdpo",
        "reward_weights": {"correct": 1.0, "short": 0.5},
    },
    "gae": GAE,
    "tree": {"sequence_layout": "tree"},
    "own": {
        "policy_loss_type": f"{MINE}:regular",
        "loss_own": {"low": 0.2, "high": 0.2},
        "estimator": f"{MINE}:less_group_mean",
        "reduction": f"{MINE}:trajectory_mean",
    },
}
DEPENDING = {"seconds", "tokens_per_s", "num_micro_batches", "repeated_share"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Five scattered groups: three equal, one with a long row, one row alone; and a failed one."""
    folder, rng = tmp_path_factory.mktemp("start"), np.random.default_rng(1)
    sampled = {"rollout_logprobs": [-3.0] * 4}
    rows = group_rows(3, (1.0, 0.0, 0.5), **sampled)
    rows.sort(key=lambda row: row["repetition_id"])
    tokens = rng.integers(0, 61, 40).tolist()
    for repetition, (start, reward) in enumerate([(30, 1.0), (2, 0.0)]):
        response = tokens[start : start + 5]
        values = {"reward": reward, "is_last_step": True, "rollout_logprobs": [-3.0] * 5}
        rows.append(step("long", repetition, 0, tokens[:start], response, **values))
    rows += two_step_trajectory(rng, "alone", 0, 1.0, **sampled)
    failed = {"error": "timeout", "is_last_step": True, "rollout_logprobs": [-3.0]}
    rows.append(step("alonex", 0, 0, [1], [2], **failed))
    for row in rows:
        scores = {"correct": row["reward"] or 0.0, "short": float(rng.integers(3))}
        row["metrics"] = [{"key": key, "value": value} for key, value in scores.items()]
    model = save_tiny_model(folder / "model", tie_word_embeddings=True)
    return {"dataset": write_dataset(folder / "ds", rows), "model": model}


@pytest.fixture(scope="module")
def alone(paths, tmp_path_factory):
    """A run by one process, which is made once."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def run(name):
        train(train_config(**paths, **COMMON, **RUNS[name], out=str(folder / name)))
        return folder / name

    return run


def lines_of(out):
    lines = metrics_of(out)
    trees = {"num_forwarded_tokens"} if "repeated_share" in lines[0] else set()
    return [
        {k: -1.0 if v is None else v for k, v in line.items() if k not in DEPENDING | trees}
        for line in lines
    ]


def check_same_run(out, expected):
    """Metrics to 1e-4, the checkpoints' files and tensors, and how far the weights moved."""
    lines, wanted = lines_of(out), lines_of(expected)
    assert len(lines) == len(wanted) == 12
    for line, other in zip(lines, wanted, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert list(line) == list(other)
    check_same_tokens(out, expected)
    check_same_checkpoints(out, expected)


def check_same_tokens(out, expected):
    """The same rows and targets, and their values to 1e-4."""
    files = sorted(path.relative_to(expected) for path in (expected / "tokens").iterdir())
    assert files == sorted(path.relative_to(out) for path in (out / "tokens").iterdir())
    assert len(files) == max(line["global_step"] for line in lines_of(expected))
    for file in files:
        found, wanted = pl.read_parquet(out / file), pl.read_parquet(expected / file)
        exact = ["instance_id", "trajectory_id", "step_index", "loss_mask", "clipped"]
        assert found.select(exact).equals(wanted.select(exact))
        for name in wanted.columns[5:]:
            numbers = [frame[name].explode().cast(float).to_numpy() for frame in (found, wanted)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_processes_is_that_of_one(name, server, paths, alone, tmp_path):
    server.train({**paths, **COMMON, **RUNS[name], "out": str(tmp_path / "run")})
    check_same_run(tmp_path / "run", alone(name))
    assert "2 processes" in server.said()[0]
    assert server.said()[1] == ""


@pytest.mark.parametrize(
    "sharded", ["directly", pytest.param("by Accelerate", marks=pytest.mark.nightly)]
)
def test_a_run_with_sharded_parameters_is_that_of_one_process(
    sharded, server, paths, alone, tmp_path
):
    config = {**paths, **COMMON, **GAE, "out": str(tmp_path / "run")}
    server.train(config | {"max_updates": 4}, sharded=sharded)
    server.train(config, sharded=sharded, resume=True)
    check_same_run(tmp_path / "run", alone("gae"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_sharded_parameters_is_that_of_whole_ones(server, tmp_path, *, tied):
    rows = [([1, 2, 3], [4, 5], [True, True]), ([7] * 20, [8, 9, 10], [True, False, True])]
    job = {"rows": rows, "tied": tied, "budget": 24, "file": str(tmp_path / "gradient")}
    server.start(**job)
    assert server.answer() == [0, 0], server.said()
    found = load_file(job["file"])
    norm = float(found.pop("norm"))
    policy = tiny_policy(tie_word_embeddings=tied)
    expected = gradient_of_update(policy, make_batch(rows, advantages=[1.0, 2.0]))
    names = [name for name, p in policy.named_parameters() if p.grad is None or p.requires_grad]
    gradient = torch.cat([found[name].flatten() for name in names])
    assert relative_difference(gradient, expected) < 1e-5
    assert norm == pytest.approx(float(expected.norm()), rel=1e-5)


def test_sharded_weights_with_adapters_are_given_to_an_engine_as_whole_ones(server, tmp_path):
    server.start(weights=str(tmp_path))
    assert server.answer() == [0, 0], server.said()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.stem for file in files] == ["0", "1", "whole"]
    first, second, whole = map(load_file, files)
    assert first.keys() == second.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor)


def test_a_run_of_two_processes_that_is_killed_goes_on_with_one_and_with_two(
    server, paths, alone, tmp_path
):
    config = {**paths, **COMMON, **GAE, "out": str(tmp_path / "run")}
    ranks = server.start(config=config)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    until = time.monotonic() + 300
    while not (latest.exists()) and time.monotonic() < until:
        time.sleep(0.005)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    assert server.answer() == [-signal.SIGKILL] * 2
    assert 4 <= len(lines_of(tmp_path / "run")) < 12
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    train(train_config(**config), resume=True)
    server.train(config | {"out": str(tmp_path / "again")}, resume=True)
    for out in (tmp_path / "run", tmp_path / "again"):
        check_same_run(out, alone("gae"))


def zeroed(checkpoint):
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)


def edited(checkpoint):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))


def of_another_step(checkpoint):
    other = checkpoint.with_name("global_step_2") / "state" / "optimizer.safetensors"
    shutil.copyfile(other, checkpoint / "state" / "optimizer.safetensors")


TAMPERINGS = {
    "weights": (zeroed, "model.safetensors"),
    "configuration of the model": (edited, "config.json"),
    "optimizer": (of_another_step, "optimizer.safetensors"),
}


@pytest.fixture(scope="module")
def stopped(server, paths, tmp_path_factory):
    """A run of two processes with checkpoints of updates 2 and 4."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    config = {**paths, **COMMON, "out": str(out), "save_every_updates": 2, "max_updates": 4}
    server.train(config)
    return out


def check_refused(server, config, message, rule):
    """Both processes end with the same error, before anything is written."""
    out = Path(config["out"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    server.start(config=config, resume=True)
    assert server.answer() == [3, 3], server.said()
    for said in server.said():
        assert message in said
        assert f"[{rule}]" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_checkpoint_that_was_tampered_with_is_refused_by_every_process(
    name, server, paths, stopped, tmp_path
):
    tamper, file = TAMPERINGS[name]
    out = shutil.copytree(stopped, tmp_path / "run")
    tamper(out / "checkpoints" / "global_step_4")
    config = {**paths, **COMMON, "out": str(out), "save_every_updates": 2}
    check_refused(server, config, file, "checkpoint_state")


@pytest.mark.parametrize("changed", ["rollout_logprobs", "prompt_token_ids", "reward"])
def test_a_changed_dataset_is_refused_by_every_process(changed, server, paths, stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    rows = rollout_io.read(paths["dataset"]).to_pylist()
    values = {"reward": 0.25, "rollout_logprobs": [-2.0] * 4}
    rows[1][changed] = values.get(changed, rows[1]["prompt_token_ids"][::-1])
    dataset = Path(paths["dataset"])
    kept = shutil.move(dataset, tmp_path / "kept")
    try:
        write_dataset(dataset, rows)
        config = {**paths, **COMMON, "out": str(out), "save_every_updates": 2}
        check_refused(server, config, "have changed since the run started", "resume_dataset")
    finally:
        shutil.rmtree(dataset)
        shutil.move(kept, dataset)


def test_an_error_of_the_user_ends_every_process_and_is_said_once(server, paths, alone):
    command = ["train", paths["dataset"], "--model", paths["model"], "--out", str(alone("gae"))]
    server.start(command=command)
    assert server.answer() == [1, 1]
    said, nothing = server.said()
    assert "[existing_run]" in said
    assert nothing == ""


def test_what_the_main_process_cannot_write_ends_every_process_with_one_message(
    server, paths, tmp_path
):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "run")
    given = ["--model", paths["model"], "--out", out, "--set", "data.partial_groups=train"]
    server.start(command=["train", paths["dataset"], *given])
    assert server.answer() == [1, 1], server.said()
    assert f"Error: {out}: not a directory" in server.said()[0]
    assert server.said()[1] == ""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "found DeepSpeed; expected data parallelism or FSDP2",
        ),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "found gradient_accumulation_steps 4",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "found FSDP version 1"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "FSDP does not shard parameters on cpu",
        ),
    ],
)
def test_a_launch_that_cannot_be_had_is_refused(environment, said, server, paths, tmp_path):
    given = ["--out", str(tmp_path / "run"), "--set", "data.partial_groups=train"]
    command = ["train", paths["dataset"], "--model", paths["model"], *given]
    server.start(command=command, environment=environment)
    assert server.answer() == [1, 1], server.said()
    assert said in server.said()[0]
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_know_of_each_other_are_refused(paths, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RolloutError, match="WORLD_SIZE is 2 without RANK"):
        train(train_config(**paths, **COMMON, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_what_one_process_alone_cannot_read_is_an_error_of_all(server, paths, tmp_path):
    config = {**paths, **COMMON, "out": str(tmp_path / "run")}
    server.start(config=config, **{"rank 1": {"model": "elsewhere"}})
    assert server.answer() == [3, 3]
    for said in server.said():
        assert "elsewhere: the model directory does not exist" in said
    assert not (tmp_path / "run").exists()


def test_a_loss_of_the_users_that_fails_in_one_process_ends_every_one(server, paths, tmp_path):
    given = ["--model", paths["model"], "--out", str(tmp_path / "run")]
    given += ["--set", "data.partial_groups=train", "--set", "batch.tokens_per_micro_batch=45"]
    given += ["--set", f"loss.policy_loss_type={MINE}:fails_on_rank_1"]
    server.start(command=["train", paths["dataset"], *given])
    assert server.answer() == [1, 1], server.said()
    expected = f"{MINE}:fails_on_rank_1: raised ZeroDivisionError: on rank 1"
    assert expected in server.said()[0]
    assert server.said()[1] == ""
