import json
from pathlib import Path

import numpy as np
import pytest

from rollout_io.formats.engines.files import Start
from rollout_io.formats.verifiers import ADAPTER
from rollout_io.formats.verifiers_rows import metadata_beside
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.verifiers_helpers import (
    PEER,
    call,
    episode,
    lines_of,
    read,
    refusal,
    row,
    trace,
)


def test_real_rows_with_tokens_are_exactly_their_trajectory():
    path = PEER / "legacy" / "tokens" / "results.jsonl"
    runs, rejected = read_all(ADAPTER, PEER / "legacy" / "tokens")
    assert not rejected
    for record, (run, trajectory) in zip(lines_of(path), runs, strict=True):
        assert run.instance_id == str(record["example_id"])
        assert trajectory.reward == record["reward"]
        assert trajectory.metrics["brief"] == record["metrics"]["brief"]
        for logged, step in zip(record["trajectory"], trajectory.steps, strict=True):
            tokens = logged["tokens"]
            assert step.prompt_token_ids.tolist() == tokens["prompt_ids"]
            assert step.response_ids.tolist() == tokens["completion_ids"]
            assert np.allclose(step.rollout_logprobs, tokens["completion_logprobs"])
            assert step.stop_reason == logged["response"]["message"]["finish_reason"]
            assert step.temperature == 1.0
            assert step.reward is None


def test_real_rows_of_text_are_conversations_and_are_refused_without_a_tokenizer(tmp_path):
    runs, _ = read_all(ADAPTER, PEER / "legacy" / "text")
    for _, trajectory in runs:
        (conversation,) = trajectory.steps
        assert [m["role"][0] for m in conversation.messages] == list("suaua")
    with pytest.raises(RolloutError, match="no_token_ids"):
        convert_with(ADAPTER, [PEER / "legacy" / "text"], tmp_path)


@pytest.mark.parametrize(
    ("name", "group_sizes", "num_messages"),
    [("arc_agi_3", [1], 172), ("math_python", [3] * 5, 77), ("mcp_env", [3], 12)],
)
def test_public_v0_saves_are_one_log_each_with_all_their_text(
    harness_logs, name, group_sizes, num_messages
):
    folder = harness_logs / "verifiers" / f"v0_eval_{name}"
    assert ADAPTER.recognizes(Start(folder))
    records = lines_of(folder / "results.jsonl")
    runs, rejected = read_all(ADAPTER, folder)
    assert not rejected
    groups = [run.instance_id for run, _ in runs]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == group_sizes
    env = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["env"]
    assert set(groups) == {f"{env}/{record['id']}" for record in records}
    found = 0
    for record, (_, trajectory) in zip(records, runs, strict=True):
        (conversation,) = trajectory.steps
        found += len(conversation.messages)
        logged = [*record["prompt"], *record["completion"]]
        for message, said in zip(conversation.messages, logged, strict=True):
            assert message["content"] == said["content"]
            calls = [json.loads(c) for c in said.get("tool_calls") or []]
            assert [c["function"] for c in message.get("tool_calls", [])] == [
                c["function"] for c in calls
            ]
        assert trajectory.reward == record["reward"]
        assert trajectory.metrics["generation_ms"] == record["generation_ms"]
        tools = record["info"].get("oai_tools")
        assert conversation.tools == (tools or None)
    assert found == num_messages


def test_public_v0_saves_of_several_environments_are_one_log_together(harness_logs):
    plan = planned(ADAPTER, harness_logs / "verifiers")
    assert plan.num_records == len(plan.runs) == 19
    assert not ADAPTER.recognizes(Start(harness_logs))
    assert not ADAPTER.recognizes(Start(harness_logs / "prime_hosted_rl"))


def test_rows_of_two_files_that_name_no_environment_are_not_one_group(tmp_path):
    paths = [write_lines(tmp_path / f"{n}.jsonl", row(reward=n)) for n in (0, 1)]
    plan = planned(ADAPTER, *paths)
    assert [run.instance_id for run in plan.runs] == [f"{path}/3" for path in paths]
    assert "by file and example" in plan.about["groups"]


@pytest.mark.parametrize(
    ("trajectory", "rule"),
    [
        ([call([1], [2]), call([1, 2, 3], [4], tokens=None)], "no_token_ids"),
        ([call([1], [2], tokens={"completion_ids": [1]})], "no_token_ids"),
        ([call([1], [2], tokens={"overlong_prompt": True})], "no_token_ids"),
        ([call([1], [2], tokens={"prompt_ids": [1], "completion_ids": ["2"]})], "record_type"),
        ([call([1], [2], tokens={"completion_ids": [2], "completion_mask": [-1]})], "record_type"),
        (
            [
                call(
                    [1],
                    [2],
                    tokens={"prompt_ids": [1], "completion_ids": [2, 3], "completion_mask": [1]},
                )
            ],
            "lengths_align",
        ),
    ],
)
def test_calls_of_a_row_without_their_tokens_are_named(tmp_path, trajectory, rule):
    assert refusal(tmp_path, row(trajectory=trajectory)).rule == rule


def test_masks_sub_agents_and_step_rewards_of_a_row_are_kept(tmp_path):
    first = call([1], [2, 3], reward=0.25, trajectory_id="sub")
    first["tokens"]["completion_mask"] = [1, 0]
    trajectory = read(tmp_path, row(trajectory=[first, call([5], [6])]))
    assert [step.agent for step in trajectory.steps] == ["sub", "t"]
    assert [step.reward for step in trajectory.steps] == [0.25, 1.0]
    assert trajectory.steps[0].loss_mask.tolist() == [True, False]


def test_text_of_completions_and_both_shapes_of_tool_calls_survive(tmp_path):
    named = json.dumps({"id": "c", "name": "add", "arguments": "{}"})
    said = [{"role": "assistant", "content": "<think>x</think>", "tool_calls": [named, named]}]
    tool_defs = [{"name": "add", "description": "", "parameters": {}}]
    trajectory = read(tmp_path, row(prompt="2 + 2", completion=said, tool_defs=tool_defs))
    user, assistant = trajectory.steps[0].messages
    assert user == {"role": "user", "content": "2 + 2"}
    function = {"name": "add", "arguments": "{}"}
    assert assistant["tool_calls"] == [{"id": "c", "type": "function", "function": function}] * 2
    assert assistant["content"] == "<think>x</think>"
    assert trajectory.steps[0].tools == [{"type": "function", "function": tool_defs[0]}]


def test_a_failed_row_without_an_answer_is_kept_with_its_error(tmp_path):
    error = {"error": "SandboxError", "message": "gone"}
    trajectory = read(tmp_path, row(completion=[], error=error))
    assert (trajectory.error, list(trajectory.steps)) == ("SandboxError: gone", [])
    assert refusal(tmp_path, row(completion=[])).rule == "no_calls"


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (b"{", "json_line"),
        (b"[1]", "record_type"),
        (b'{"traces": [' + b"[" * 100_000, "json_line"),
        (b'{"traces": [], "id": "\xff"}', "json_line"),
        (episode(group={"id": None}, task={"type": "T"}), "group"),
        (episode(id=3), "record_type"),
        (episode(trace([])), "no_calls"),
        (row(example_id=None), "group"),
        (row(example_id=[1]), "group"),
        (row(reward="1"), "record_type"),
        (row(metrics={"a": 10**400}), "record_type"),
        (row(completion=[{"content": "no role"}]), "record_type"),
        (row(completion=[{"role": "assistant", "tool_calls": ["{"]}]), "json_line"),
    ],
)
def test_a_record_of_no_use_is_refused_by_name(tmp_path, record, rule):
    assert refusal(tmp_path, record).rule == rule


def test_rows_beside_a_damaged_metadata_file_are_refused_by_its_name(tmp_path):
    write_lines(tmp_path / "results.jsonl", row())
    (tmp_path / "metadata.json").write_text("{", encoding="utf-8")
    (rejected,) = planned(ADAPTER, tmp_path).rejected
    assert (rejected.error.rule, Path(rejected.error.where).name) == (
        "json_document",
        "metadata.json",
    )


def test_a_directory_with_other_records_is_not_one_log(tmp_path):
    write_lines(tmp_path / "results.jsonl", row())
    assert ADAPTER.recognizes(Start(tmp_path))
    write_lines(tmp_path / "calls.jsonl", row())
    assert not ADAPTER.recognizes(Start(tmp_path))


def test_metadata_that_were_replaced_are_read_again_by_the_same_process(tmp_path):
    for env in ("sums", "maths"):
        (tmp_path / "new").write_text(json.dumps({"env": env}))
        (tmp_path / "new").replace(tmp_path / "metadata.json")
        assert metadata_beside(tmp_path / "results.jsonl").env == env
