from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.adapters import Conversation, Options
from rollout_io.adapters.verifiers import ADAPTER
from rollout_io.prefix import encode_prefixes
from schemas import check
from schemas.errors import RolloutError
from tests.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.conftest import ROOT
from tests.exact_log_helpers import check_converts
from tests.line_log_helpers import mutated_lines

PEER = ROOT / "tests" / "data" / "peers" / "verifiers"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"


def node(parent, role="user", ids=(), mask=(), logprobs=(), **fields):
    message = {"role": role, "content": f"{role} {list(ids)}"}
    found = {"message": message, "sampled": role == "assistant", "token_ids": list(ids)}
    found |= {"mask": [bool(m) for m in mask] or [False] * len(ids), "logprobs": list(logprobs)}
    return found | ({} if parent is None else {"parent": parent}) | fields


def turns():
    """A prompt of 1 2, a header 3, an answer 4 5 with an appended 6, another turn."""
    return [
        node(None, ids=[1, 2]),
        node(0, "assistant", [3, 4, 5, 6], [0, 1, 1, 0], [-0.5, -0.25]),
        node(1, ids=[7]),
        node(2, "assistant", [3, 8], [0, 1], [-1.0]),
    ]


def trace(nodes=None, **fields):
    agent = {"name": "agent", "trainable": True}
    rewards = {"correct": {"score": 1.0, "weight": 1.0}, "brief": {"score": 0.5, "weight": 0.5}}
    found = {"agent": agent, "nodes": turns() if nodes is None else nodes, "rewards": rewards}
    return {**found, "metrics": {"chars": 7}, "ok": True, "errors": []} | fields


def episode(*traces, id="e1", **fields):
    found = {"id": id, "task": {"type": "T", "data": {}, "key": "k1"}, "ok": True, "errors": []}
    return found | {"traces": list(traces) or [trace()]} | fields


def row(**fields):
    found = {"example_id": 3, "reward": 1.0, "metrics": {"a": 0.5}, "timing": {"total": 1.0}}
    found |= {"prompt": [{"role": "user", "content": "hi"}]}
    return found | {"completion": [{"role": "assistant", "content": "ho"}]} | fields


def call(prompt, response, **fields):
    lists = {"prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": response}
    lists |= {"completion_mask": [1] * len(response)}
    lists |= {"completion_logprobs": [-0.5] * len(response)}
    tokens = fields.pop("tokens", lists)
    return {"tokens": tokens, "reward": 1.0, "trajectory_id": "t", "prompt": []} | fields


def read(tmp_path, *records, name="traces.jsonl"):
    (found,), rejected = read_all(ADAPTER, write_lines(tmp_path / name, *records))
    assert not rejected
    return found[1]


def refusal(tmp_path, *records):
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *records))
    assert not runs
    return rejected[0].error


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["eval", "user_sim"])
def test_steps_of_a_real_trace_are_what_verifiers_trains_on_and_nothing_twice(name):
    expected = json.loads((PEER / name / "expected.json").read_text(encoding="utf-8"))
    runs, rejected = read_all(ADAPTER, PEER / name / "traces.jsonl")
    assert not rejected
    sampled: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for run, trajectory in runs:
        for step in trajectory.steps:
            prompt, response = step.prompt_token_ids.tolist(), step.response_ids.tolist()
            known = sampled.setdefault(f"{run.labels['episode']} {step.agent}", {})
            assert (*prompt, *response) not in known
            known[*prompt, *response] = step.rollout_logprobs.tolist()
    for branch in expected:
        calls = sampled[f"{branch['episode']} {branch['agent']}"]
        ids, mask = branch["token_ids"], branch["sampled_mask"]
        ends = [i + 1 for i, m in enumerate(mask) if m and not (mask[i + 1 :] or [False])[0]]
        for end in ends:
            logprobs = calls[tuple(ids[:end])]
            begin = end - len(logprobs)
            assert mask[begin:end] == [True] * len(logprobs)
            assert np.allclose(branch["logprobs"][begin:end], logprobs, atol=1e-6)
        assert len(ends) == len({tuple(ids[:end]) for end in ends})


def test_rewards_failures_and_dropped_compactions_of_real_episodes():
    records = lines_of(PEER / "eval" / "traces.jsonl")
    expected = json.loads((PEER / "eval" / "expected.json").read_text(encoding="utf-8"))
    runs, _ = read_all(ADAPTER, PEER / "eval" / "traces.jsonl")
    dropped = 0
    for record, (_, trajectory) in zip(records, runs, strict=True):
        branches = [b for b in expected if b["episode"] == record["id"]]
        assert trajectory.reward == (branches[0]["reward"] if record["ok"] else None)
        rewards = record["traces"][0]["rewards"]
        assert all(trajectory.metrics[name] == r["score"] for name, r in rewards.items())
        assert (trajectory.error is None) == record["ok"]
        assert len(trajectory.steps) == len(record["traces"][0]["calls"])
        untrained = [step for step in trajectory.steps if not step.trains]
        assert len(untrained) == sum(not b["trainable"] for b in branches)
        dropped += len(untrained)
    assert dropped > 0
    assert "HarnessError" in next(t.error for _, t in runs if t.error)


def test_the_prefix_tree_finds_the_branches_of_a_real_compaction(tmp_path):
    _, table = convert_with(ADAPTER, [PEER / "eval" / "traces.jsonl"], tmp_path)
    assert check(table).is_empty()
    branched = [r for r in table.to_pylist() if r["step_index"] == 4]
    names = [r["trajectory_id"] for r in branched]
    encoded = encode_prefixes(table).to_pylist()
    for name in names:
        rows = [r for r in encoded if r["trajectory_id"] == name]
        assert [r["parent_step_index"] for r in rows[:4]] == [None, 0, 1, 2]
        assert rows[3]["prompt_suffix_ids"] == []
        assert 0 < rows[4]["prefix_length"] < rows[1]["prefix_length"]


def test_groups_and_policy_versions_of_a_trainer_are_kept(tmp_path):
    conversion, table = convert_with(ADAPTER, [PEER / "train"], tmp_path)
    assert conversion.about == {}
    groups = {record["group"]["id"] for record in lines_of(PEER / "train" / "traces.jsonl")}
    assert set(table["instance_id"].to_pylist()) == groups
    assert set(table["policy_version"].to_pylist()) == {2}
    assert set(table["policy_end"].to_pylist()) == {"3"}


def test_an_agent_that_is_not_trained_comes_first_and_does_not_train():
    ((_, trajectory),), _ = read_all(ADAPTER, PEER / "user_sim" / "traces.jsonl")
    assert [(s.agent, s.trains) for s in trajectory.steps] == [
        *[("user", False)] * 2,
        *[("assistant", True)] * 2,
    ]


def test_a_node_gives_its_sampled_tokens_after_all_that_came_before(tmp_path):
    trajectory = read(tmp_path, episode())
    first, second = trajectory.steps
    assert first.prompt_token_ids.tolist() == [1, 2, 3]
    assert first.response_ids.tolist() == [4, 5]
    assert second.prompt_token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 3]
    assert second.response_ids.tolist() == [8]
    assert first.rollout_logprobs.tolist() == [-0.5, -0.25]
    assert trajectory.reward == 1.25
    names = ("correct", "brief", "brief.weight", "chars", "reward")
    values = (1.0, 0.5, 0.5, 7.0, 1.25)
    assert trajectory.metrics == dict(zip(names, values, strict=True))


def test_tokens_inside_an_answer_that_were_not_sampled_do_not_train(tmp_path):
    nodes = [node(None, ids=[1]), node(0, "assistant", [2, 3, 4], [1, 0, 1], [-0.5, -0.25])]
    (step,) = read(tmp_path, episode(trace(nodes))).steps
    assert step.loss_mask.tolist() == [True, False, True]
    assert list(step.spans) == [(0, 1), (2, 1)]
    assert step.rollout_logprobs.tolist() == [-0.5, 0.0, -0.25]


def test_an_episode_in_two_subsets_is_one_run_with_two_records(tmp_path):
    for subset in ("all", "effective"):
        folder = tmp_path / "rollouts" / "step_1" / "train" / subset
        folder.mkdir(parents=True)
        write_lines(folder / "traces.jsonl", episode(), *[episode(id="e2")] * (subset == "all"))
    assert ADAPTER.recognizes(tmp_path / "rollouts")
    conversion, table = convert_with(ADAPTER, [tmp_path / "rollouts"], tmp_path / "out")
    assert (conversion.summary.num_records, conversion.summary.num_trajectories) == (3, 2)
    assert conversion.about["repeated_episodes"].startswith("1 episodes")
    assert table.num_rows == 4


def test_two_episodes_of_one_id_with_other_tokens_are_refused(tmp_path):
    other = episode(trace([node(None, ids=[1]), node(0, "assistant", [2], [1], [-0.5])]))
    assert refusal(tmp_path, episode(), other).rule == "tokens_disagree"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"parent": 7}, "dangling_reference"),
        ({"parent": 1}, "dangling_reference"),
        ({"mask": [True]}, "lengths_align"),
        ({"logprobs": [-0.5]}, "lengths_align"),
        ({"logprobs": [-0.5, -9999.0]}, "logprobs_finite"),
        ({"token_ids": [3, 4, 5, -6]}, "token_range"),
        ({"token_ids": [3, 4, 5, 10**30]}, "token_range"),
        ({"token_ids": "3456"}, "record_type"),
        ({"token_ids": [], "mask": [], "logprobs": []}, "no_token_ids"),
        ({"mask": [False] * 4, "logprobs": []}, "nonempty_response"),
        ({"message": None}, "record_type"),
    ],
)
def test_a_damaged_node_is_refused_by_name_and_place(tmp_path, fields, rule):
    nodes = turns()
    nodes[1] |= fields
    error = refusal(tmp_path, episode(trace(nodes)))
    assert error.rule == rule
    assert "a.jsonl:1" in error.where


def test_a_trace_without_tokens_is_a_conversation_per_context(tmp_path):
    nodes = [{**n, "token_ids": [], "mask": [], "logprobs": []} for n in turns()]
    nodes.append(node(0, "assistant"))
    trajectory = read(tmp_path, episode(trace(nodes)))
    assert all(isinstance(step, Conversation) for step in trajectory.steps)
    roles = [[m["role"] for m in step.messages] for step in trajectory.steps]
    assert roles == [["user", "assistant", "user", "assistant"], ["user", "assistant"]]
    _, rejected = read_all(ADAPTER, write_lines(tmp_path / "b.jsonl", episode(trace(nodes))))
    assert not rejected
    with pytest.raises(RolloutError, match="no_token_ids"):
        convert_with(ADAPTER, [tmp_path / "b.jsonl"], tmp_path)


def test_a_judge_without_tokens_is_left_out_and_counted(tmp_path):
    judge = trace([node(None), node(0, "assistant")], agent={"name": "j", "trainable": False})
    trajectory = read(tmp_path, episode(trace(), judge))
    assert len(trajectory.steps) == 2
    assert trajectory.metrics["num_calls_without_tokens"] == 1
    assert trajectory.metrics["j.correct"] == 1


def test_a_failed_episode_keeps_what_has_tokens(tmp_path):
    nodes = turns()
    nodes[3] |= {"token_ids": [], "mask": [], "logprobs": []}
    failed = {"ok": False, "errors": [{"type": "SandboxError", "message": "gone"}]}
    trajectory = read(tmp_path, episode(trace(nodes, **failed, rewards={}), ok=False))
    assert trajectory.error == "SandboxError: gone"
    assert len(trajectory.steps) == 1
    assert trajectory.reward is None


def test_a_timeout_fails_unless_it_is_to_be_kept(tmp_path):
    path = write_lines(tmp_path / "traces.jsonl", episode(trace(is_timeout=True)))
    (run,) = planned(ADAPTER, path).runs
    assert ADAPTER.read(run, Options()).error == "timeout"
    assert ADAPTER.read(run, Options(timeouts="keep")).error is None


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


def test_real_rows_of_text_are_re_tokenised(tmp_path, smollm2_dir):
    choices = {"tokenizer": str(smollm2_dir)}
    _, table = convert_with(ADAPTER, [PEER / "legacy" / "text"], tmp_path, **choices)
    assert set(table["token_source"].to_pylist()) == {"retokenized"}
    assert all(len(row) == 2 for row in table["segments"].to_pylist())


@pytest.mark.parametrize(
    ("name", "group_sizes", "num_messages"),
    [("arc_agi_3", [1], 172), ("math_python", [3] * 5, 77), ("mcp_env", [3], 12)],
)
def test_public_v0_saves_are_one_log_each_with_all_their_text(
    harness_logs, name, group_sizes, num_messages
):
    folder = harness_logs / "verifiers" / f"v0_eval_{name}"
    assert ADAPTER.recognizes(folder)
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
    assert not ADAPTER.recognizes(harness_logs)
    assert not ADAPTER.recognizes(harness_logs / "prime_hosted_rl")


def test_rows_of_two_files_that_name_no_environment_are_not_one_group(tmp_path):
    paths = [write_lines(tmp_path / f"{n}.jsonl", row(reward=n)) for n in (0, 1)]
    plan = planned(ADAPTER, *paths)
    assert [run.instance_id for run in plan.runs] == [f"{path}/3" for path in paths]
    assert "in one file" in plan.about["groups"]


@pytest.mark.parametrize(
    ("trajectory", "rule"),
    [
        ([call([1], [2]), call([1, 2, 3], [4], tokens=None)], "no_token_ids"),
        ([call([1], [2], tokens={"completion_ids": [1]})], "no_token_ids"),
        ([call([1], [2], tokens={"overlong_prompt": True})], "no_token_ids"),
        ([call([1], [2], tokens={"prompt_ids": [1], "completion_ids": ["2"]})], "record_type"),
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


def test_a_pointer_of_git_lfs_is_named_and_the_other_files_are_read(tmp_path):
    for name, content in (("one", POINTER), ("two", json.dumps(row()).encode())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(content)
    plan = planned(ADAPTER, tmp_path)
    assert [rejected.error.rule for rejected in plan.rejected] == ["lfs_pointer"]
    assert len(plan.runs) == 1


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
    assert ADAPTER.recognizes(tmp_path)
    write_lines(tmp_path / "calls.jsonl", row())
    assert not ADAPTER.recognizes(tmp_path)


EPISODES = b"\n".join(
    json.dumps(record).encode()
    for record in (
        episode(run={"type": "train", "work": {"step": 1, "policy": {"start": 2, "end": 3}}}),
        episode(id="e2", group={"id": "g"}),
        row(trajectory=[call([1], [2, 3]), call([1, 2, 3, 4], [5])]),
        row(example_id=4),
    )
)


def test_a_row_twice_is_refused(tmp_path):
    plan = planned(ADAPTER, write_lines(tmp_path / "a.jsonl", row(), row()))
    assert [r.error.rule for r in plan.rejected] == ["duplicate_record"]


@settings(max_examples=100, deadline=None)
@given(content=mutated_lines(EPISODES))
def test_a_damaged_log_gives_rows_or_named_errors(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(content)
        check_converts(ADAPTER, path)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-2, 4), min_size=4, max_size=4), st.data())
def test_any_graph_of_nodes_is_read_or_refused(parents, data):
    nodes = copy.deepcopy(turns())
    for item, parent in zip(nodes, parents, strict=True):
        item["parent"] = None if parent == -2 else parent
    nodes[data.draw(st.integers(0, 3))]["semantic_parents"] = [
        {
            "node": data.draw(st.integers(-1, 9)),
            "type": data.draw(st.sampled_from(["compaction", "compaction_attempt"])),
        }
    ]
    with tempfile.TemporaryDirectory() as folder:
        check_converts(ADAPTER, write_lines(Path(folder) / "a.jsonl", episode(trace(nodes))), 1)
