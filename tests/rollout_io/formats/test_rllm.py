import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from rollout_io.formats.base import Conversation, Options, Step
from rollout_io.formats.engines.files import Start
from rollout_io.formats.rllm import ADAPTER
from schemas import check
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import convert_with, planned, read_all
from tests.helpers.exact_log_helpers import check_converts
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import mutated

PEER = ROOT / "tests" / "data" / "peers" / "rllm" / "eval_results"
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
AGAIN = [*SAID, {"role": "user", "content": "so?"}, {"role": "assistant", "content": "no"}]


def step(prompt=(1, 2), response=(3,), chat=SAID, **fields):
    found = {"prompt_ids": list(prompt), "response_ids": list(response), "reward": 0.0}
    found |= {"logprobs": [-0.5] * len(response), "chat_completions": chat, "weight_version": 3}
    return found | fields


def agent(*steps, name="solver", reward=1.0, **fields):
    return {"name": name, "reward": reward, "steps": list(steps) or [step()]} | fields


def episode(*trajectories, id="task-7:0", **fields):
    found = {"id": id, "task": {"id": "task-7"}, "termination_reason": "env_done"}
    found |= {"is_correct": True, "metrics": {"num_turns": 2, "ok": True, "note": "x"}}
    return found | {"trajectories": list(trajectories) or [agent()]} | fields


def write(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")
    return path


def read(tmp_path, record):
    ((_, trajectory),), rejected = read_all(ADAPTER, write(tmp_path / "episode_0.json", record))
    assert not rejected
    return trajectory


def refusal(tmp_path, record):
    runs, (rejected,) = read_all(ADAPTER, write(tmp_path / "episode_0.json", record))
    assert not runs
    return rejected.error


def compact(record):
    """Schema 2 of an episode: each message once, in a chain by its digest."""
    for trajectory in record["trajectories"]:
        nodes = trajectory["message_nodes"] = {}
        for logged in trajectory["steps"]:
            parent, chat = None, logged.pop("chat_completions")
            for message in chat:
                text = f"{parent}:{json.dumps(message)}"
                name = hashlib.sha256(text.encode()).hexdigest()
                nodes[name] = {"p": parent, "m": message}
                parent = name
            logged["chat_completions_ref"] = [parent, len(chat)]
    return record | {"episode_schema": 2}


def test_a_real_run_directory_gives_exactly_the_steps_of_its_episodes(tmp_path):
    assert ADAPTER.recognizes(Start(PEER))
    paths = sorted((PEER / "episodes").iterdir())
    runs, rejected = read_all(ADAPTER, PEER)
    assert not rejected
    assert len(runs) == len(paths)
    for path, (run, trajectory) in zip(paths, runs, strict=True):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert run.instance_id == record["id"].split(":")[0]
        logged = [(t, s) for t in record["trajectories"] for s in t["steps"]]
        for (owner, call), found in zip(logged, trajectory.steps, strict=True):
            assert found.prompt_token_ids.tolist() == call["prompt_ids"]
            assert found.response_ids.tolist() == call["response_ids"]
            assert np.allclose(found.rollout_logprobs, call["logprobs"])
            assert found.agent == owner["name"]
            assert found.policy_version == call["weight_version"]
            assert found.stop_reason == call["model_output"]["finish_reason"]
            assert json.loads(found.messages) == call["chat_completions"][:-1]
            assert found.response_text == call["model_response"]
        assert trajectory.reward == record["trajectories"][0]["reward"]
        assert trajectory.metrics["checker.reward"] == record["trajectories"][1]["reward"]
        assert trajectory.metrics["is_correct"] == record["is_correct"]
    _, table = convert_with(ADAPTER, [PEER], tmp_path)
    assert check(table).is_empty()
    assert table["repetition_id"].to_pylist() == [0] * 4 + [1] * 4


def test_real_steps_hold_each_token_that_rllm_trains_on_once():
    expected = json.loads((PEER.parent / "expected.json").read_text(encoding="utf-8"))
    runs, _ = read_all(ADAPTER, PEER)
    calls = {}
    for run, trajectory in runs:
        for s in trajectory.steps:
            ids = (*s.prompt_token_ids.tolist(), *s.response_ids.tolist())
            calls[run.labels["episode"], s.agent, ids] = s.rollout_logprobs.tolist()
    used = []
    for sequence in expected:
        ids = [sequence["inputs"][0], *sequence["targets"]]
        mask = [0, *map(int, sequence["mask"])]
        ends = [i + 1 for i, m in enumerate(mask) if m and not (mask[i + 1 :] or [0])[0]]
        for end in ends:
            key = (sequence["episode"], sequence["name"], tuple(ids[:end]))
            begin = end - len(calls[key])
            assert mask[begin - 1 : end] == [0] + [1] * len(calls[key])
            assert np.allclose(sequence["logprobs"][begin - 1 : end - 1], calls[key])
            used.append(key)
    assert sorted(used) == sorted(calls)


def test_other_records_in_a_directory_make_it_no_log(tmp_path):
    write(tmp_path / "run" / "episodes" / "episode_0.json", episode())
    write(tmp_path / "run" / "meta.json", {})
    write(tmp_path / "run" / "progress" / "item_000000.json", {})
    assert ADAPTER.recognizes(Start(tmp_path / "run"))
    write(tmp_path / "run" / "result.json", {})
    assert not ADAPTER.recognizes(Start(tmp_path / "run"))


def test_episodes_of_one_task_are_a_group_by_id_or_else_by_task(tmp_path):
    records = [episode(), episode(id="task-7:1"), episode(id="a1b2"), episode(id="c", task="q")]
    records += [episode(id="d", task={"question": "1 + 1?"}), episode(id="e", task=None)]
    paths = [write(tmp_path / f"episode_{i}.json", r) for i, r in enumerate(records)]
    plan = planned(ADAPTER, *paths)
    names = [run.instance_id for run in plan.runs]
    assert names[:4] == ["task-7", "task-7", "task-7", "q"]
    assert names[4].startswith("task-")
    assert names[5] == "e"
    assert [run.repetition_id for run in plan.runs[:3]] == [0, 1, 2]
    assert "are grouped by task" in plan.about["groups"]


def test_rewards_of_steps_and_of_several_agents_keep_their_names(tmp_path):
    steps = [step(reward=0.25), step([1, 2, 3], [4], AGAIN, reward=0.5)]
    alone = read(tmp_path, episode(agent(*steps)))
    assert [s.reward for s in alone.steps] == [0.25, 0.5]
    assert alone.reward == alone.metrics["reward"] == 1.0
    assert alone.metrics["num_turns"] == 2
    two = read(tmp_path, episode(agent(signals={"f1": 0.5}), agent(reward=0.0), agent(name="b")))
    assert two.reward == 1.0
    assert two.metrics["solver0.f1"] == 0.5
    assert (two.metrics["solver1.reward"], two.metrics["b.reward"]) == (0.0, 1.0)
    unknown = read(tmp_path, episode(agent(reward=None)))
    assert (unknown.reward, unknown.steps[0].reward) == (None, None)


def test_ids_that_only_the_model_output_has_are_read(tmp_path):
    output = {"prompt_ids": [5], "completion_ids": [6], "logprobs": [-1.0], "weight_version": 8}
    bare = step([], [], logprobs=[], model_output=output, weight_version=None)
    (found,) = read(tmp_path, episode(agent(bare))).steps
    assert (found.prompt_token_ids.tolist(), found.response_ids.tolist()) == ([5], [6])
    assert (found.rollout_logprobs.tolist(), found.policy_version) == ([-1.0], 8)


@pytest.mark.parametrize("shape", [lambda record: record, compact])
def test_an_evaluation_without_ids_is_text_one_conversation_a_context(tmp_path, shape):
    steps = [step([], [], SAID), step([], [], AGAIN), step([], [], SAID)]
    record = shape(episode(agent(*steps), agent(step([], []), name="b")))
    trajectory = read(tmp_path, record)
    assert [type(s) for s in trajectory.steps] == [Conversation] * 3
    assert [s.messages for s in trajectory.steps] == [AGAIN, SAID, SAID]
    assert [s.agent for s in trajectory.steps] == ["solver", "solver", "b"]


def test_the_older_logger_of_training_is_read_as_text(tmp_path):
    bare = {"chat_completions": SAID, "reward": 1.0, "model_response": "ho"}
    record = {"training_step": 3, "episode_id": "t:1", "task": {}, "is_correct": False}
    record |= {"termination_reason": None, "trajectories": [{"name": "a", "steps": [bare]}]}
    path = write(tmp_path / "episode_hash1_idt_1.json", record)
    assert ADAPTER.recognizes(Start(path))
    (run,) = planned(ADAPTER, path).runs
    assert run.labels["training_step"] == "3"
    assert ADAPTER.read(run, Options()).steps[0].messages == SAID


def test_failures_are_named_and_a_timeout_can_be_kept(tmp_path):
    failed = episode(
        agent(step([], [])),
        termination_reason="sandbox_error",
        metadata={"error": {"message": "gone"}},
    )
    trajectory = read(tmp_path, failed)
    assert (trajectory.error, list(trajectory.steps)) == ("sandbox_error: gone", [])
    path = write(tmp_path / "episode_1.json", episode(termination_reason="timeout"))
    (run,) = planned(ADAPTER, path).runs
    assert ADAPTER.read(run, Options()).error == "timeout"
    kept = ADAPTER.read(run, Options(timeouts="keep"))
    assert kept.error is None
    assert isinstance(kept.steps[0], Step)


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (episode(agent(step(), step([], []))), "no_token_ids"),
        (episode(agent(step([], [], []))), "no_token_ids"),
        (episode(agent(step(logprobs=[-0.5, -0.5]))), "lengths_align"),
        (episode(agent(step(logprobs=[-9999.0]))), "logprobs_finite"),
        (episode(agent(step([-1], [1]))), "token_range"),
        (episode(agent(step([10**30], [1]))), "token_range"),
        (episode(agent(step(["a"], [1]))), "record_type"),
        (episode(agent(step(weight_version=2**40))), "record_type"),
        (episode(metrics={"x": 10**400}), "record_type"),
        (episode(trajectories=[]), "no_calls"),
        (episode(id=""), "group"),
        (episode(id=7), "record_type"),
        (episode(agent(step([], [], ["hi"]))), "record_type"),
        (episode(agent(step(chat_completions_ref=["x", 2]))), "dangling_reference"),
    ],
)
def test_an_episode_of_no_use_is_refused_by_name(tmp_path, record, rule):
    assert refusal(tmp_path, record).rule == rule


DOCUMENT = json.dumps(
    episode(agent(step(), step([1, 2, 3], [4], AGAIN, reward=0.5)), agent(name="b", reward=None))
).encode()
TEXT = json.dumps(compact(episode(agent(step([], []), step([], [], AGAIN))))).encode()


@pytest.mark.slow
@settings(max_examples=examples(80), deadline=None)
@given(mutated(DOCUMENT) | mutated(TEXT))
def test_a_damaged_episode_gives_rows_or_a_named_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode_0.json"
        path.write_bytes(content)
        check_converts(ADAPTER, path, 1)
