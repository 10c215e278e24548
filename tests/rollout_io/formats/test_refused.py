import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.engines.files import Start
from rollout_io.formats.unrecognized import REFUSED
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with
from tests.helpers.text_log_helpers import check_survives, found_in, mutated, save

ADAPTER = REFUSED["terminal_bench"]
RESULT = {"trial_name": "t.1-of-1", "task_id": "t", "is_resolved": None, "failure_mode": "unset"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openhands-sonnet.hello-world", "is_resolved true, failure_mode unset"),
        ("orchestrator.blind-maze", "failure_mode agent_timeout"),
    ],
)
def test_a_real_result_is_recognised_and_refused_for_what_it_lacks(harness_logs, name, said):
    path = harness_logs / "terminal_bench_legacy" / f"{name}.results.json"
    assert ADAPTER.recognizes(Start(path))
    runs, (rejected,), _ = found_in(ADAPTER, path)
    assert not runs
    assert rejected.error.rule == "no_conversation"
    assert said in rejected.error.got


def test_each_result_of_a_benchmark_is_refused(tmp_path):
    path = save(tmp_path / "results.json", {"results": [RESULT, RESULT | {"is_resolved": False}]})
    assert ADAPTER.recognizes(Start(path))
    _, rejected, _ = found_in(ADAPTER, path)
    assert [r.place.where for r in rejected] == [f"{path}:1, results[{i}]" for i in (0, 1)]
    assert "is_resolved null" in rejected[0].error.got
    with pytest.raises(RolloutError, match=r"and 1 more record rejected.*\[no_conversation\]"):
        convert_with(ADAPTER, [path], tmp_path)


@pytest.mark.parametrize("value", [[], {"a": 1}, "yes", 1.5])
def test_a_result_with_a_damaged_verdict_is_refused_by_name(value, tmp_path):
    path = save(tmp_path / "results.json", {"results": [RESULT | {"is_resolved": value}]})
    _, (rejected,), _ = found_in(ADAPTER, path)
    assert f"is_resolved {json.dumps(value)}" in rejected.error.got


@given(st.data())
def test_no_damage_gives_anything_but_named_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "results.json"
    path.write_bytes(data.draw(mutated(json.dumps(RESULT).encode())))
    check_survives(ADAPTER, path)


def test_lines_without_a_conversation_are_refused_one_by_one(tmp_path):
    name, path = "openai_agents_trace", tmp_path / "a.jsonl"
    line = {"object": "trace.span", "id": "s", "span_data": {}}
    lines = [line, line, line | {"object": ["trace.span"]}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert REFUSED[name].recognizes(Start(path))
    _, rejected, _ = found_in(REFUSED[name], path)
    assert [(r.error.rule, r.place.where) for r in rejected] == [
        ("no_conversation", f"{path}:{i}") for i in (1, 2, 3)
    ]
