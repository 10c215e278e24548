"""Follow the guide of coding agents with the real agents, and check what it ends in."""

import json
import socket

import polars as pl
import pytest

import rollout_io
from tests.helpers.guide_helpers import VLLM, follow
from tests.real_harnesses.harnesses import NODE, PROGRAMS

AGENTS = {"claude": "claude_code", "codex": "codex", "opencode": "opencode"}
"""Agents of the guide, and their names as harnesses."""
SCORES = (("reward=${#answer}", "reward=$((1 - attempt))"), ("echo ${#answer}", "echo $RANDOM"))
"""Rewards in place of the guide's lengths, which are often the same for answers of a few tokens."""
HAS_AGENTS = pytest.mark.skipif(
    not PROGRAMS.exists(), reason=f"no {PROGRAMS}: run `make .venv-harnesses/.ready`"
)


def follow_with(url, folder, model, changes=(), num_blocks=None):
    """Follow the guide, or its first blocks of commands, with the engine at a URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = ((VLLM, url), ("8100", port), *SCORES, *changes)
    programs = (PROGRAMS, NODE)
    return follow(
        "coding_agents.md",
        folder,
        model=model,
        places=places,
        programs=programs,
        num_blocks=num_blocks,
    )


def updates_of(run):
    """The lines of a run's metrics that have a loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def check_exact(rows):
    """No attempt failed, and each row has tokens of the engine and says how they were sampled."""
    assert "error" not in rows.columns, rows["error"].drop_nulls().to_list()[:1]
    assert set(rows["token_source"]) == {"engine"}
    assert rows["response_ids"].list.len().min() > 0
    assert rows["rollout_logprobs"].list.len().equals(rows["response_ids"].list.len())
    for column in ("temperature", "top_p"):
        assert rows[column].null_count() == 0


def check_recorded(folder):
    """Two scored attempts of each agent; their rows."""
    rows = rollout_io.scan(folder / "runs" / "agents").collect()
    check_exact(rows)
    names = {f"hello-{agent}_{attempt}" for agent in AGENTS for attempt in (0, 1)}
    assert set(rows["trajectory_id"]) == names
    last = rows.filter(pl.col("is_last_step"))
    for name, reward in zip(last["trajectory_id"], last["reward"], strict=True):
        assert reward == (1.0 if name.endswith("_0") else 0.0)
    return rows


def check_trained(folder):
    """One update of every group; its metrics."""
    run = folder / "runs" / "agents-trained"
    (update,) = updates_of(run)
    assert update["num_trained_groups"] == len(AGENTS)
    assert update["grad_norm"] > 0
    assert (run / "checkpoints" / "global_step_1" / "model.safetensors").exists()
    return update


def check_same_weights(updates):
    """The weights that were updated are those that sampled."""
    for update in updates:
        assert update["rollout_logprobs_abs_diff_mean"] < 1e-3
        assert update["grad_norm"] > 0


def check(folder):
    """The recorded run and the loop of two iterations end in checkpoints."""
    check_recorded(folder)
    run = folder / "runs" / "agent-loop"
    updates = [check_trained(folder), *updates_of(run)]
    assert len(updates) == 3
    check_same_weights(updates)
    rows = pl.from_arrow(rollout_io.read(f"{run}/rollouts/*"))
    check_exact(rows)
    assert rows["trajectory_id"].n_unique() == 4
    assert set(rows["policy_version"]) == {0, 1}
    assert (run / "checkpoints" / "global_step_2" / "model.safetensors").exists()
