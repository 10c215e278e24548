import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.claude_code import ADAPTER
from rollout_io.formats.engines.files import Start
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.claude_code_lines import (
    boundary,
    call,
    line,
    reply,
    result,
    text,
    thinking,
    thread,
    user,
)
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines

SIDE = {"isSidechain": True}
SHORT = thread(u1="Hi.", a1="Ho.")
OTHER = thread(fields={"sessionId": "t"}, u5="Yo.", a5="Ya.")


@pytest.fixture
def contexts(tmp_path):
    """(agent, messages) of each conversation of the only session of some lines."""

    def read(*records):
        ((_, trajectory),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
        assert rejected == []
        return [(step.agent, step.messages) for step in trajectory.steps]

    return read


def said(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_pieces_of_one_reply_are_one_message_whose_parallel_calls_and_thoughts_are_kept(contexts):
    ((agent, messages),) = contexts(
        user("1", "List both."),
        reply("2", thinking("Two calls."), "1", id="r1"),
        reply("3", "Sure.", "2", id="r1"),
        reply("4", call("a", command="ls a"), "3", id="r1"),
        user("5", [result("a", "x")], "4"),
        reply("6", call("b", command="ls b"), "4", id="r1", stop="tool_use"),
        user("7", [result("b", [text("y"), text("z")]), text("And stop.")], "6"),
        reply("8", "Done.", "7", id="r2"),
    )
    assert agent == "main"
    calls = messages[1].pop("tool_calls")
    assert messages == [
        {"role": "user", "content": "List both."},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Two calls."},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "tool", "tool_call_id": "b", "content": "y\nz"},
        {"role": "user", "content": "And stop."},
        {"role": "assistant", "content": "Done."},
    ]
    assert [(c["id"], c["type"], c["function"]["name"]) for c in calls] == [
        ("a", "function", "Bash"),
        ("b", "function", "Bash"),
    ]
    assert json.loads(calls[1]["function"]["arguments"]) == {"command": "ls b"}


@pytest.mark.parametrize("parent", [None, "2"])
def test_sub_agents_are_conversations_of_their_own_before_the_end_of_the_main_one(parent, contexts):
    results = contexts(
        user("1", "Ask two."),
        reply("2", call("t"), "1"),
        user("x", "First.", parent, **SIDE),
        user("y", "Second.", parent, **SIDE),
        reply("a2", "one", "x", **SIDE),
        reply("b2", "two", "y", **SIDE),
        user("3", [result("t", "one, two")], "2"),
        reply("4", "Both.", "3"),
    )
    assert [(agent, [m["content"] for m in messages]) for agent, messages in results] == [
        ("sidechain", ["First.", "one"]),
        ("sidechain", ["Second.", "two"]),
        ("main", ["Ask two.", "", "one, two", "Both."]),
    ]


def test_the_results_of_parallel_calls_and_an_interruption_stay_in_one_context(contexts):
    ((_, messages),) = contexts(
        user("1", "Both."),
        reply("2", call("a"), "1", id="r1"),
        reply("3", call("b"), "2", id="r1"),
        user("4", [result("b", "y")], "3"),
        user("5", [result("a", "x")], "2"),
        user("6", "Stop.", "4"),
        reply("7", "Stopped.", "6"),
    )
    assert "".join(m["role"][0] for m in messages) == "uattua"


def test_sub_agents_of_one_id_are_one_conversation_from_any_file_of_the_session(tmp_path):
    main = write_lines(tmp_path / "s.jsonl", *SHORT)
    side = thread(fields=SIDE | {"agentId": "f00"}, u2="Look.", a2="Found.")
    ((run, trajectory),), rejected = read_all(ADAPTER, main, write_lines(tmp_path / "f00", *side))
    assert (len(run.places), rejected) == (4, [])
    assert [step.agent for step in trajectory.steps] == ["sidechain", "main"]


def test_a_prompt_that_was_taken_back_unanswered_leaves_no_context(contexts):
    ((_, messages),) = contexts(
        *SHORT, user("u2", "Lfet?", "a1"), *thread("a1", u3="Left?", a3="Left.")
    )
    assert [content for _, content in said(messages)] == ["Hi.", "Ho.", "Left?", "Left."]


def test_copied_lines_and_what_the_model_did_not_write_are_left_out(contexts):
    ((_, messages),) = contexts(
        SHORT[0],
        SHORT[0],
        reply("2", "API Error", "u1", model="<synthetic>"),
        line("3", "2", type="progress", data={}),
        reply("4", [{"type": "redacted_thinking", "data": "x"}, text("Ho.")], "3"),
    )
    assert said(messages) == [("user", "Hi."), ("assistant", "Ho.")]


def test_sessions_of_one_file_are_runs_and_titles_belong_to_the_first(tmp_path):
    path = write_lines(
        tmp_path / "both",
        {"type": "summary", "summary": "Greetings", "leafUuid": "a1"},
        SHORT[0] | {"cwd": "/a", "gitBranch": "main", "version": "2.0"},
        OTHER[0],
        SHORT[1],
        reply("a5", "Ya.", stop="end_turn", sessionId="t"),
        {"type": "file-history-snapshot", "messageId": "1", "snapshot": {}},
    )
    results, rejected = read_all(ADAPTER, path)
    assert rejected == []
    assert [(run.instance_id, len(run.places)) for run, _ in results] == [("s", 4), ("t", 2)]
    labels = {"session": "s", "cwd": "/a", "git_branch": "main", "version": "2.0"}
    assert results[0][0].labels == labels
    other = results[1][1]
    assert (other.steps[0].stop_reason, other.reward) == ("end_turn", None)
    assert other.user_values == {"model": "m", "prompts": "messages"}
    assert planned(ADAPTER, path).about["groups"].startswith("inferred: each session")


@pytest.mark.parametrize(
    ("damaged", "rule"),
    [
        (b'{"type": "user", "sessionId": "s", "mess', "json_line"),
        (b'{"sessionId": "s", "type": "user", "message": "\xff"}', "json_line"),
        (user("3", 42), "record_type"),
        (user("3", None), "record_type"),
        (reply("3", ["words"]), "record_type"),
        (reply("3", {"type": "text", "text": 1}), "record_type"),
        ({"type": "user", "sessionId": "s"}, "record_type"),
    ],
)
def test_a_damaged_line_takes_its_session_with_it_and_no_other(damaged, rule, tmp_path):
    path = write_lines(tmp_path / "s", *SHORT, damaged, *OTHER)
    ((run, _),), rejected = read_all(ADAPTER, path)
    assert (run.instance_id, len(rejected)) == ("t", 3)
    assert rule in {r.error.rule for r in rejected}
    assert any(r.error.where.startswith(f"{path}:3") for r in rejected)


def test_the_real_broken_lines_are_named_and_take_their_sessions_with_them(harness_logs):
    path = harness_logs / "claude_code" / "claude-code-log.edge_cases.jsonl"
    found, rejected = read_all(ADAPTER, path)
    assert [run.instance_id for run, _ in found] == ["todowrite_session"]
    reasons = [r.error for r in rejected if r.error.where.startswith(str(path))]
    assert [(r.where.split(":")[-1], r.got) for r in reasons[:4]] == [
        ("13", "a string as the entire line"),
        ("14", "object missing required field `type`"),
        ("15", "a number as the entire line"),
        ("16", "a list as the entire line"),
    ]
    assert len(rejected) == 18


def test_the_real_web_export_is_one_record_with_two_contexts(harness_logs):
    export = harness_logs / "claude_code" / "simonw.sample_session.json"
    assert ADAPTER.recognizes(Start(export))
    ((_, session),), _ = read_all(ADAPTER, export)
    assert [len(step.messages) for step in session.steps] == [28, 5]
    assert session.steps[1].messages[0]["content"].startswith("This is a session continuation")
    assert session.steps[0].messages[1]["reasoning_content"].startswith("The user wants a simple")


LOG = b"\n".join(
    json.dumps(record).encode()
    for record in [
        {"type": "summary", "summary": "x"},
        user("1", "Hi.", cwd="/a"),
        reply("2", [text("Ho."), call("a", n=1)], "1", stop="tool_use"),
        user("3", [result("a", [text("x"), {"type": "image"}])], "2"),
        reply("4", [thinking("y"), text("z")], "3"),
        boundary("5"),
        user("6", "Sum.", "5", isCompactSummary=True),
        reply("7", "On.", "6", **SIDE),
        reply("8", "On.", "6"),
        *OTHER,
    ]
)


@given(mutated_lines(LOG))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)


@given(st.permutations(range(6)))
@settings(deadline=None, max_examples=examples(20))
def test_no_message_of_a_thread_is_lost_whatever_the_parents(parents):
    records = [
        (reply if i % 2 else user)(str(i), f"{'ua'[i % 2]}{i}", str(parent))
        for i, parent in enumerate(parents)
    ]
    with tempfile.TemporaryDirectory() as folder:
        ((_, run),), _ = read_all(ADAPTER, write_lines(Path(folder) / "s", *records))
    texts = {m["content"] for step in run.steps for m in step.messages}
    assert {"a1", "a3", "a5"} <= texts
