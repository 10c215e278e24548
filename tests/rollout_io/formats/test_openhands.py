import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.openhands import ADAPTER, HIDDEN
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import read_all as read_noted
from tests.helpers.text_log_helpers import (
    check_survives,
    found_in,
    mutated,
    read_all,
    read_one,
    roles,
)


def tool_call(name, number):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def answer(identity, *calls, content=None, ids=None, prompt=None):
    message = {"role": "assistant", "content": content, "tool_calls": list(calls) or None}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    if ids is not None:
        choice["provider_specific_fields"] = {"token_ids": ids}
    return {"id": identity, "choices": [choice], "prompt_token_ids": prompt}


def of_call(response, number, name="run"):
    found = {"function_name": name, "tool_call_id": number, "model_response": response}
    return {"tool_call_metadata": found}


def act(identity, action, args=None, source="agent", **fields):
    return {"id": identity, "source": source, "action": action, "args": args or {}, **fields}


def see(identity, content, observation="run", **fields):
    event = {"id": identity, "source": "environment", "observation": observation}
    return {**event, "content": content, "extras": {}, **fields}


def start():
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    return [
        act(0, "system", {"content": "s", "tools": tools}),
        act(1, "message", {"content": "task"}, source="user"),
        act(2, "recall", source="user"),
        see(4, "Added workspace context", "recall"),
    ]


def turn(identity, name, **fields):
    """One call with one tool call, and its result."""
    response = answer(name, tool_call("run", f"c{identity}"), **fields)
    metadata = of_call(response, f"c{identity}")
    return [act(identity, "run", **metadata), see(identity + 1, f"o{identity}", **metadata)]


def row(*history, **fields):
    metadata = {"llm_config": {"model": "m"}}
    return {"instance_id": "i-1", "history": list(history), "metadata": metadata} | fields


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def read(tmp_path, record):
    return read_one(ADAPTER, write(tmp_path / "output.jsonl", record))


@pytest.fixture
def logs(harness_logs):
    return harness_logs / "openhands"


def test_real_evaluation_rows_are_runs_of_their_instances(logs):
    path = logs / "multi_swe_bench.output.jsonl"
    runs, rejected, about = found_in(ADAPTER, path)
    assert [run.instance_id for run in runs] == [f"ponylang__ponyc-{n}" for n in (4595, 4593, 4588)]
    assert (rejected, about) == ([], {})
    found = read_all(ADAPTER, path)
    assert [roles(f.steps[0]).count("a") for f in found] == [23, 33, 49]
    assert [len(f.steps) for f in found] == [1, 1, 1]
    assert [f.reward for f in found] == [None] * 3
    assert [len(f.steps[0].tools) for f in found] == [4] * 3


def test_a_used_up_number_of_iterations_is_no_failure(logs):
    last = read_all(ADAPTER, logs / "multi_swe_bench.output.jsonl")[2]
    assert last.error is None
    assert "maximum iteration" in last.user_values["exit_status"]


def test_real_resolver_rows_are_judged_by_success_and_marked_as_reconstructed(logs):
    path = logs / "resolver_mock.output.jsonl"
    assert [run.instance_id for run in found_in(ADAPTER, path)[0]] == [
        "neubig/pr-viewer#5",
        "neubig/pr-viewer#1",
    ]
    found = read_all(ADAPTER, path)
    assert [f.reward for f in found] == [1.0, 1.0]
    assert [roles(f.steps[0]) for f in found] == ["uauauaua", "ua" * 22]
    assert (
        "<execute_bash>\ntouch LICENSE\n</execute_bash>" in found[0].steps[0].messages[1]["content"]
    )
    assert found[0].user_values["text_source"].startswith("reconstructed")


def test_events_of_one_response_are_one_message_with_parallel_calls(tmp_path):
    response = answer("r", tool_call("run", "a"), tool_call("run", "b"), content="both")
    one, two = of_call(response, "a"), of_call(response, "b")
    events = [act(5, "run", **one), see(6, "A", **one), act(7, "run", **two), see(8, "B", **two)]
    (conversation,) = read(tmp_path, row(*start(), *events, *turn(9, "next"))).steps
    assert roles(conversation) == "suatta"
    assert [call["id"] for call in conversation.messages[2]["tool_calls"]] == ["a", "b"]
    assert [m["content"] for m in conversation.messages[3:5]] == ["A", "B"]
    assert conversation.messages[2]["content"] == "both"


def test_responses_of_one_id_that_differ_are_several(tmp_path):
    (conversation,) = read(tmp_path, row(*start(), *turn(5, "same"), *turn(7, "same"))).steps
    assert roles(conversation) == "suata"


def test_a_call_logged_without_its_response_among_exact_ones_is_refused(tmp_path):
    said = act(9, "message", {"content": "done"})
    record = row(*start(), *turn(5, "r1", ids=[7], prompt=[1]), said)
    with pytest.raises(RolloutError, match=r"history\[6\].*no API response") as found:
        read(tmp_path, record)
    assert found.value.rule == "no_token_ids"


@pytest.mark.parametrize(
    "forgotten",
    [
        {"forgotten_event_ids": [5, 6, 7, 8]},
        {"forgotten_events_start_id": 5, "forgotten_events_end_id": 8},
    ],
)
def test_a_condensation_begins_a_new_context(tmp_path, forgotten):
    summary = {"summary": "so far", "summary_offset": 4, **forgotten}
    events = [*start(), *turn(5, "r1"), *turn(7, "r2"), *turn(9, "r3")]
    record = row(*events, act(11, "condensation", summary), *turn(12, "r4"), *turn(14, "r5"))
    first, second = read(tmp_path, record).steps
    assert roles(first) == "suatata"
    assert roles(second) == "suuatata"
    assert second.messages[2]["content"] == "so far"
    assert second.messages[3]["tool_calls"][0]["id"] == "c9"


def test_a_delegate_works_in_a_context_of_its_own(tmp_path):
    task = {"agent": "BrowsingAgent", "inputs": {"task": "look it up"}, "thought": "I ask."}
    said = act(6, "message", {"content": "found"})
    record = row(
        *start(), act(5, "delegate", task), said, see(7, "it is 4", "delegate"), *turn(8, "r")
    )
    main, other = read(tmp_path, record).steps
    assert (roles(main), roles(other), other.agent) == ("suaua", "ua", "BrowsingAgent")
    assert other.messages == [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "found"},
    ]


def test_events_that_are_hidden_from_the_agent_are_left_out_and_counted(tmp_path):
    hidden = [act(20, "run", {"command": "env", "hidden": True}, source="user")]
    hidden.append(see(21, "SECRET", extras={"hidden": True, "command": "env"}))
    shown = see(22, "seen", extras={"hidden": False, "command": "ls"})
    path = write(tmp_path / "a.jsonl", row(*start(), *hidden, shown, *turn(30, "a")))
    ((_, found),), _ = read_noted(ADAPTER, path)
    (step,) = found.steps
    assert [m["content"] for m in step.messages[:-1]] == ["s", "task", "seen"]
    assert (found.notes, found.unread) == ({HIDDEN: 2}, {})


def test_pairs_of_old_logs_are_read(tmp_path):
    pairs = [[act(1, "message", {"content": "t"}, source="user"), see(2, "", "null")]]
    pairs += [[act(3, "run", {"command": "ls", "thought": "I look."}), see(4, "files")]]
    pairs += [[act(5, "finish", {"thought": "Done."}), see(6, "", "null")]]
    (conversation,) = read(tmp_path, row(*pairs)).steps
    assert roles(conversation) == "uaua"
    assert conversation.messages[1]["content"] == "I look.\n<execute_bash>\nls\n</execute_bash>"


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({"test_result": {"report": {"resolved": True, "empty_generation": False}}}, 1.0),
        ({"test_result": {"report": {"resolved": False}}}, 0.0),
        ({"test_result": {"report": {"resolved": False, "error_eval": True}}}, None),
        ({"test_result": {"resolved": True}, "resolved": False}, 1.0),
        ({"report": {"resolved": True}}, 1.0),
        ({"resolved": False}, 0.0),
        ({"success": True}, 1.0),
        ({"test_result": {"git_patch": ""}}, None),
    ],
)
def test_the_reward_is_what_the_row_says_of_the_issue(tmp_path, fields, reward):
    found = read(tmp_path, row(*start(), *turn(5, "r"), **fields))
    assert found.reward == reward
    numbers = fields.get("test_result", {}).get("report", {})
    for name, value in numbers.items():
        assert found.metrics[f"test_result.report.{name}"] == float(value)


def test_a_failed_run_may_have_no_calls(tmp_path):
    found = read(tmp_path, row(error="RuntimeError: no container", history=None))
    assert (found.error, list(found.steps)) == ("RuntimeError: no container", [])
    with pytest.raises(RolloutError, match="no_calls"):
        read(tmp_path, row(history=[]))


def test_a_copied_line_is_refused_and_another_attempt_is_a_repetition(tmp_path):
    one, two = row(*start(), *turn(5, "r1")), row(*start(), *turn(5, "r2"))
    path = write(tmp_path / "output.jsonl", one, two, one)
    runs, (rejected,), _ = found_in(ADAPTER, path)
    assert [run.instance_id for run in runs] == ["i-1", "i-1"]
    assert (rejected.error.rule, rejected.place.where) == ("duplicate_record", f"{path}:3")


def test_damaged_lines_leave_the_others(tmp_path):
    path = tmp_path / "output.jsonl"
    whole = json.dumps(row(*start(), *turn(5, "r"))).encode()
    bad = [whole[:99], b"3", b'{"history": []}', b"[" * 10**5, b"\xff" + whole]
    path.write_bytes(b"\n".join([whole, *bad]) + b"\n")
    runs, rejected, _ = found_in(ADAPTER, path)
    assert len(runs) == 1
    assert [r.place.where for r in rejected] == [f"{path}:{n}" for n in range(2, 7)]


EVENTS = [*start(), *turn(5, "r1", ids=[7], prompt=[1]), act(8, "message", {"content": "x"})]
EVENTS += [act(9, "condensation", {"forgotten_event_ids": [5, 6], "summary": "s"}), *turn(10, "r2")]
ROW = json.dumps(row(*EVENTS, test_result={"report": {"resolved": True}})).encode()


@given(st.data())
def test_no_damage_gives_anything_but_rows_or_named_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "output.jsonl"
    damaged = data.draw(mutated(ROW)) + b"\n"
    path.write_bytes(damaged)
    num_records = sum(not line.isspace() for line in damaged.splitlines(keepends=True))
    check_survives(ADAPTER, path, num_records)


@given(st.data())
def test_damaged_lists_of_events_are_named_too(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "events.json"
    path.write_bytes(b"[" + data.draw(mutated(json.dumps(EVENTS).encode()))[1:])
    check_survives(ADAPTER, path)
