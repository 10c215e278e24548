import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.dataset.prefix_layout import encode_prefixes
from rollout_io.formats.base import Conversation, Options
from rollout_io.formats.engines.files import Start
from rollout_io.formats.verifiers import ADAPTER
from schemas import check
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.exact_log_helpers import check_converts
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import mutated_lines
from tests.helpers.verifiers_helpers import (
    PEER,
    call,
    episode,
    lines_of,
    node,
    read,
    refusal,
    row,
    trace,
    turns,
)


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
    assert ADAPTER.recognizes(Start(tmp_path / "rollouts"))
    conversion, table = convert_with(ADAPTER, [tmp_path / "rollouts"], tmp_path / "out")
    assert (conversion.summary.num_records, conversion.summary.num_trajectories) == (3, 2)
    assert conversion.about["repeated_episodes"].startswith("1 episode in several files")
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


EPISODES = b"\n".join(
    json.dumps(record).encode()
    for record in (
        episode(run={"type": "train", "work": {"step": 1, "policy": {"start": 2, "end": 3}}}),
        episode(id="e2", group={"id": "g"}),
        row(trajectory=[call([1], [2, 3]), call([1, 2, 3, 4], [5])]),
        row(example_id=4),
    )
)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(content=mutated_lines(EPISODES))
def test_a_damaged_log_gives_rows_or_named_errors(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(content)
        check_converts(ADAPTER, path)


@settings(max_examples=examples(50), deadline=None)
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


def test_what_episodes_and_rows_hold_beside_the_fields_that_are_read_is_named(tmp_path):
    assert read(tmp_path, episode()).unread == {}
    nodes = [*turns()[:3], turns()[3] | {"hint": "Look there."}]
    odd = read(tmp_path, episode(trace(nodes, memo="Remember."), advice="Look here."))
    assert odd.unread == {"advice": 1, "traces.memo": 1, "traces.nodes.hint": 1}
    assert read(tmp_path, row(), name="results.jsonl").unread == {}
    odd = read(tmp_path, row(state="Remember.", depth=2, answer="5"), name="results.jsonl")
    assert odd.unread == {"state": 1}
