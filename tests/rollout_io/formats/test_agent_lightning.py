import base64
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from rollout_io.formats.agent_lightning import ADAPTER
from rollout_io.formats.engines.files import Start
from schemas import check
from schemas.columns import metrics_dict
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.exact_log_helpers import check_converts
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import mutated_lines
from tests.helpers.text_log_helpers import mutated

PEER = ROOT / "tests" / "data" / "peers" / "agent_lightning"
EVENTS, ROLLOUTS = PEER / "events.jsonl", PEER / "rollouts.jsonl"


def event(kind, at=1.0, rollout="r1", attempt="0", **data):
    found = {"event_type": kind, "rollout_id": rollout, "attempt_id": attempt}
    return found | {"timestamp": at, "data": data}


def choice(ids, index=0, **fields):
    content = [{"logprob": -0.5} for _ in ids]
    found = {"index": index, "token_ids": list(ids), "logprobs": {"content": content}}
    return found | {"message": {"content": "x"}, "finish_reason": "stop"} | fields


def request(prompt=(1, 2), *choices, at=1.0, rollout="r1", attempt="0", **data):
    body = {"prompt_token_ids": list(prompt), "choices": list(choices) or [choice([3])]}
    messages = [{"role": "user", "content": "hi"}]
    sent = {"request": {"messages": messages, "temperature": 0.5}, "http_status": 200}
    sent |= {"response": body, "status": "ok", "model_version": 4} | data
    return event("model_request", at, rollout, attempt, **sent)


def reward(value, at=9.0, **fields):
    return event("reward", at, value=value, source="agent", **fields)


def rollout(name="r1", state="succeeded", **fields):
    found = {"rollout_id": name, "input": {"question": "2 + 3?"}, "is_train": True, "config": {}}
    return found | {"status": {"state": state, "last_attempt_id": "0"}} | fields


def read(tmp_path, *records):
    ((_, trajectory),), rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *records))
    assert not rejected
    return trajectory


def refusal(tmp_path, *records):
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *records))
    assert not runs
    return rejected[0].error


def test_what_an_event_holds_beside_the_fields_that_are_read_is_named(tmp_path):
    assert read(tmp_path, request(), reward(1.0), rollout()).unread == {}
    odd = [request(hint="Look here."), event("memo", text="Remember."), reward(1.0)]
    assert read(tmp_path, *odd).unread == {"model_request.data.hint": 1, "memo": 1}


def packed(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_real_triplets_are_the_last_step_of_each_prompt():
    triplets = json.loads((PEER / "expected.json").read_text(encoding="utf-8"))
    runs, rejected = read_all(ADAPTER, EVENTS)
    assert not rejected
    for events, (run, trajectory) in zip(triplets, runs, strict=True):
        assert run.labels["rollout_id"] == events[0]["rollout_id"]
        assert {e["attempt_id"] for e in events} == {run.labels["attempt_id"]}
        calls = [e["data"] for e in events if e["event_type"] == "model_request"]
        calls = [c for c in calls if c["status"] == "ok"]
        first = {}
        for step in trajectory.steps:
            first.setdefault(tuple(json.loads(step.prompt_token_ids)), step)
        for call in calls:
            step = first[tuple(call["prompt_token_ids"])]
            assert json.loads(step.response_ids) == call["response_token_ids"]
            assert np.allclose(step.rollout_logprobs, call["response_log_probs"])
            assert step.policy_version == call["server"]["version"]
        values = [e["data"]["value"] for e in events if e["event_type"] == "reward"]
        assert trajectory.reward == (values[-1] if values else None)


def test_real_events_keep_all_samples_and_count_refused_requests(tmp_path):
    conversion, table = convert_with(ADAPTER, [EVENTS], tmp_path)
    assert check(table).is_empty()
    assert "each rollout is a separate group" in conversion.about["groups"]
    rows = table.filter(np.array(table["rollout_id"]) == "sum-1-1").to_pylist()
    sampled = [choice for r in logged("sum-1-1") for choice in r["choices"]]
    assert [r["response_ids"] for r in rows] == [choice["token_ids"] for choice in sampled]
    assert rows[0]["prompt_token_ids"] == rows[1]["prompt_token_ids"]
    assert metrics_dict(rows[-1]["metrics"])["num_failed_requests"] == 1
    records = [json.loads(line) for line in EVENTS.read_text(encoding="utf-8").splitlines()]
    assert conversion.summary.num_records == len(records)


def logged(rollout_id):
    lines = EVENTS.read_text(encoding="utf-8").splitlines()
    events = [e for e in map(json.loads, lines) if e["rollout_id"] == rollout_id]
    return [e["data"]["response"] for e in events if e["data"].get("status") == "ok"]


def test_real_rollouts_beside_the_events_name_the_groups_and_the_failures(tmp_path):
    conversion, table = convert_with(ADAPTER, [EVENTS, ROLLOUTS], tmp_path)
    assert "data_id" in conversion.about["groups"]
    names = dict(
        zip(table["rollout_id"].to_pylist(), table["trajectory_id"].to_pylist(), strict=True)
    )
    assert list(names.values()) == ["sum-0_0", "sum-0_1", "sum-1_0", "sum-1_1"]
    errors = dict(zip(table["rollout_id"].to_pylist(), table["error"].to_pylist(), strict=True))
    assert [errors[name] for name in names] == [None, None, None, "rollout failed"]
    assert conversion.summary.num_records == conversion.summary.num_written == 17


def test_a_list_of_events_is_read_as_its_lines_are(tmp_path):
    records = [json.loads(line) for line in EVENTS.read_text(encoding="utf-8").splitlines()]
    path = tmp_path / "events.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    assert ADAPTER.recognizes(Start(path))
    _, expected = convert_with(ADAPTER, [EVENTS], tmp_path / "lines")
    _, found = convert_with(ADAPTER, [path], tmp_path / "list")
    drop = ["source"]
    assert found.drop_columns(drop).equals(expected.drop_columns(drop))
    assert found["source"][0].as_py() == f"{path}[0]"


def test_calls_are_in_the_order_of_their_times_and_ties_in_that_of_the_log(tmp_path):
    late, tie = request([7], at=3.0), request([6], choice([4]), at=2.0)
    steps = read(tmp_path, late, tie, request([5], at=2.0), reward(1)).steps
    assert [json.loads(s.prompt_token_ids) for s in steps] == [[6], [5], [7]]


def test_all_samples_of_one_prompt_are_kept(tmp_path):
    records = [request([1], choice([2]), choice([3], 1)), request([1], choice([4]), at=2.0)]
    trajectory = read(tmp_path, *records, reward(0.5))
    assert [json.loads(s.response_ids) for s in trajectory.steps] == [[2], [3], [4]]
    assert {s.temperature for s in trajectory.steps} == {0.5}
    assert trajectory.user_values["reward_source"] == "agent"


def test_old_raw_chunks_of_a_stream_are_joined(tmp_path):
    chunks = [
        {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"content": ""}}]},
        {"choices": [choice([3], delta={"content": "b"}, message=None, finish_reason=None)]},
        {"choices": [choice([4, 5], delta={"content": "c"}, message=None)]},
    ]
    (step,) = read(tmp_path, request(response=chunks)).steps
    assert json.loads(step.prompt_token_ids) == [1, 2]
    assert json.loads(step.response_ids) == [3, 4, 5]
    assert (step.response_text, step.stop_reason) == ("bc", "stop")


def test_the_last_reward_is_the_outcome_and_the_others_are_kept(tmp_path):
    trajectory = read(tmp_path, request(), reward(0.25, 2.0), reward(True, 3.0))
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"reward[0]": 0.25, "reward": 1.0}


def test_refused_requests_are_counted_and_a_run_of_them_alone_has_failed(tmp_path):
    bad = {"response": {"error": {"message": "no"}}, "http_status": 500, "status": "error"}
    trajectory = read(tmp_path, request(**bad), request(at=2.0), reward(1))
    assert (len(trajectory.steps), trajectory.metrics["num_failed_requests"]) == (1, 1)
    failed = read(tmp_path, request(**bad), reward(1))
    assert failed.error == "all 1 model requests failed (HTTP 500)"


def test_an_attempt_that_was_tried_again_has_failed_unless_it_has_a_reward(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", request(), request(attempt="1"), rollout())
    runs, _ = read_all(ADAPTER, path)
    assert [t.error for _, t in runs] == [None, "superseded by attempt 0"]
    path = write_lines(tmp_path / "b.jsonl", request(), reward(1), request(attempt="1"))
    assert [t.error for _, t in read_all(ADAPTER, path)[0]] == [None, None]


def test_rollouts_without_events_are_failed_runs_or_refused(tmp_path):
    trajectory = read(
        tmp_path, rollout(state="failed", status={"state": "failed", "error_message": "oom"})
    )
    assert (trajectory.error, list(trajectory.steps)) == ("rollout failed: oom", [])
    assert refusal(tmp_path, rollout()).rule == "no_calls"
    assert ADAPTER.recognizes(Start(write_lines(tmp_path / "r.jsonl", rollout())))


def test_events_of_equal_prompts_can_be_grouped(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", request(), request(rollout="r2"))
    plan = planned(ADAPTER, path, group_by=["prompt"])
    assert len({run.instance_id for run in plan.runs}) == 1
    assert [run.repetition_id for run in plan.runs] == [0, 1]


def test_routes_beside_the_response_are_of_its_first_choice(tmp_path):
    routes = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    for given_routes in (packed(routes), routes.tolist()):
        (step,) = read(tmp_path, request(routed_experts=given_routes)).steps
        assert step.rollout_expert_indices.tolist() == routes.tolist()


def test_triplets_are_read_where_there_is_nothing_else(tmp_path):
    ids = {"prompt_token_ids": [1], "response_token_ids": [2], "response_log_probs": [-0.5]}
    (step,) = read(tmp_path, event("model_request", **ids, server={"version": 5})).steps
    assert (step.prompt_token_ids.tolist(), step.response_ids.tolist()) == ([1], [2])
    assert step.policy_version == 5


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (
            request(response={"choices": [{"index": 0, "message": {"content": "x"}}]}),
            "no_token_ids",
        ),
        (request([1], choice([])), "nonempty_response"),
        (request(response={}), "nonempty_response"),
        (request(response=None), "no_response"),
        (request(response=7), "record_type"),
        (request(model_version=2**40), "record_type"),
        (request(routed_experts="no base64!"), "routing_shape"),
        (request(routed_experts=packed(np.zeros((9, 1, 1), np.uint8))), "routing_shape"),
        (request(routed_experts=packed(np.array([{}], dtype=object))), "routing_shape"),
        (event("note", text="x"), "no_calls"),
        (reward("1"), "record_type"),
        ({"rollout_id": "r"}, "record_type"),
        ({"rollout_id": "r", "event_type": "note"}, "record_type"),
        ({"rollout_id": 7}, "record_type"),
        (b"{", "json_line"),
    ],
)
def test_a_record_of_no_use_is_refused_by_name(tmp_path, record, rule):
    assert refusal(tmp_path, record).rule == rule


LOG = b"\n".join(
    json.dumps(r).encode()
    for r in (
        request(),
        request([1, 2, 3, 4], choice([5, 6]), at=2.0),
        reward(1.0),
        request(rollout="r2", http_status=500),
        rollout("r2", "failed"),
    )
)
LIST = json.dumps([json.loads(line) for line in LOG.splitlines()]).encode()


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(mutated_lines(LOG) | mutated(LIST))
def test_damaged_events_give_rows_or_named_errors(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(content)
        check_converts(ADAPTER, path)


@pytest.mark.parametrize(
    "damaged",
    [
        event("model_request", rollout="r1") | {"data": "x"},
        request(at=2.0) | {"timestamp": "noon"},
        request(at=2.0) | {"event_type": None},
        json.dumps(request(at=2.0)).replace("[3]", "[NaN]").encode(),
        json.dumps(request(at=2.0)).encode()[:-40],
    ],
)
def test_a_damaged_event_takes_its_attempt_with_it_and_no_other(tmp_path, damaged):
    others = [request(attempt="1"), reward(1.0) | {"attempt_id": "1"}, request(rollout="r2")]
    log = write_lines(tmp_path / "a.jsonl", request(), damaged, reward(0.5), *others)
    runs, rejected = read_all(ADAPTER, log)
    names = [(run.labels["rollout_id"], run.labels["attempt_id"]) for run, _ in runs]
    assert names == [("r1", "1"), ("r2", "0")]
    assert [item.error.rule for item in rejected[1:]] == ["incomplete_trajectory"] * 2
    assert rejected[0].place.where == f"{log}:2"


def test_a_damaged_record_of_a_rollout_takes_all_its_attempts_with_it(tmp_path):
    bad = rollout(state="failed") | {"status": "failed"}
    log = write_lines(tmp_path / "a.jsonl", request(), request(attempt="1"), bad)
    runs, rejected = read_all(ADAPTER, log)
    assert not runs
    assert len(rejected) == 3


def test_a_last_attempt_that_is_damaged_is_still_the_last(tmp_path):
    events = [request(), request(attempt="1") | {"data": "x"}]
    ended = rollout(status={"state": "succeeded", "last_attempt_id": "1"})
    log = write_lines(tmp_path / "a.jsonl", *events, ended)
    ((run, found),), rejected = read_all(ADAPTER, log)
    assert (run.labels["attempt_id"], run.labels["superseded_by"]) == ("0", "1")
    assert found.error == "superseded by attempt 1"
    assert len(rejected) == 2
