import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.base import Options
from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.gemini_cli import (
    ADAPTER,
    BROKEN_OFF,
    JOINED,
    PLACEHOLDER,
    THOUGHTS,
    UNCALLED,
    WRITTEN,
)
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_records
from tests.helpers.text_log_helpers import mutated, read_one, save


def response(**fields):
    return {"functionResponse": {"id": "a", "name": "ls", "response": fields}}


def call(id, result, **args):
    return {"id": id, "name": "ls", "args": args, "result": result, "status": "success"}


def gemini(content, **fields):
    return {"id": "2", "type": "gemini", "content": content} | fields


def session(*messages, **fields):
    user = {"id": "1", "type": "user", "content": "List both."}
    return {"sessionId": "s", "projectHash": "p", "messages": [user, *messages]} | fields


def test_parallel_calls_hold_their_results_and_thoughts_become_reasoning(tmp_path):
    thoughts = [{"subject": "Listing", "description": "Two calls.", "timestamp": "x"}]
    calls = [call("a", [response(output="x")], dir="a"), call("b", [response(error="none")])]
    calls.append(call("c", None))
    document = session(
        gemini("", thoughts=thoughts, toolCalls=calls, model="g-1"), gemini("Done.", model="g-2")
    )
    found = read_one(ADAPTER, save(tmp_path / "s.json", document))
    (step,) = found.steps
    prompt, reply, first, second, end = step.messages
    assert prompt == {"role": "user", "content": "List both."}
    assert reply["reasoning_content"] == "Listing\nTwo calls."
    assert [c["id"] for c in reply["tool_calls"]] == ["a", "b", "c"]
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"dir": "a"}
    assert first == {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert second == {"role": "tool", "tool_call_id": "b", "content": "none"}
    assert end == {"role": "assistant", "content": "Done."}
    assert found.user_values == {"model": "g-2"}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("x", "x"),
        ({"text": "x"}, "x"),
        ([{"text": "x"}, "y"], "x\ny"),
        ([response(rows=3)], '{"rows":3}'),
        ([{"inlineData": {}}], [{"type": "data"}]),
        (
            [{"inlineData": {"data": "AAAA", "mimeType": "image/png"}}],
            [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                }
            ],
        ),
        ([{"text": "x"}, {"fileData": {}}], [{"type": "text", "text": "x"}, {"type": "data"}]),
    ],
)
def test_the_result_of_a_tool_is_its_text_and_what_is_none_is_named(result, text, tmp_path):
    document = session(gemini("", toolCalls=[call("a", result)]))
    content = read_one(ADAPTER, save(tmp_path / "s", document)).steps[0].messages[2]["content"]
    assert (content.replace(" ", "") if isinstance(content, str) else content) == text


def test_messages_for_people_are_left_out_and_unknown_kinds_are_named(tmp_path):
    notes = [{"type": kind, "content": "x"} for kind in ("info", "warning", "error")]
    ((_, found),), _ = read_all(ADAPTER, save(tmp_path / "a", session(*notes, gemini("Done."))))
    assert [m["role"] for m in found.steps[0].messages] == ["user", "assistant"]
    assert found.unread == {}
    odd = save(tmp_path / "b", session({"type": "telepathy", "content": "x"}, gemini("Done.")))
    ((_, found),), _ = read_all(ADAPTER, odd)
    assert found.unread == {"session.messages[telepathy]": 1}


HEAD = {"sessionId": "s", "projectHash": "p", "startTime": "t", "kind": "main"}


def user(id, text):
    return {"id": id, "type": "user", "content": [{"text": text}]}


def said(step):
    return [m["content"] for m in step.messages]


def test_a_line_with_the_id_of_another_replaces_it_and_repeated_results_count_once(tmp_path):
    called = gemini("Look.", id="a", toolCalls=[call("c", [response(output="x")])])
    repeated = {"id": "r", "type": "user", "content": [response(output="x") | {}]}
    repeated["content"][0]["functionResponse"]["id"] = "c"
    lines = [HEAD, user("u", "Go."), gemini("Look.", id="a"), called, repeated]
    path = write_lines(tmp_path / "s.jsonl", *lines, gemini("Done.", id="b"))
    found = read_one(ADAPTER, path)
    (step,) = found.steps
    assert [(m["role"], m["content"]) for m in step.messages] == [
        ("user", "Go."),
        ("assistant", "Look."),
        ("tool", "x"),
        ("assistant", "Done."),
    ]
    assert step.messages[2]["tool_call_id"] == "c"


def test_the_files_of_a_session_are_one_run_and_a_copy_of_one_is_refused(tmp_path):
    files = [save(tmp_path / n, session(gemini(n) | {"id": n})) for n in "ab"]
    files.append(save(tmp_path / "c", session(gemini("b") | {"id": "b"})))
    plan = planned(ADAPTER, *files)
    assert [(run.instance_id, len(run.places)) for run in plan.runs] == [("s", 2)]
    assert plan.runs[0].labels == {"session": "s", "project": "p"}
    steps = ADAPTER.read(plan.runs[0], Options()).steps
    assert [step.messages[-1]["content"] for step in steps] == ["a", "b"]
    assert [r.error.rule for r in plan.rejected] == ["duplicate_record"]
    assert plan.about["groups"].startswith("inferred: each session")


CALLS = [call("a", [response(output="x")], n=1), call("b", [{"text": "x"}])]
DOCUMENT = json.dumps(
    session(gemini("x", thoughts=[{"subject": "x"}], toolCalls=CALLS), gemini("y", model="g"))
).encode()


@given(mutated(DOCUMENT))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_the_record_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.json"
        path.write_bytes(content)
        check_records(ADAPTER, path, int(bool(content.strip())))


HEAD = {"sessionId": "s", "projectHash": "p", "startTime": "t", "kind": "main"}


def asked(id, content):
    parts = [{"text": content}] if isinstance(content, str) else content
    return {"id": id, "type": "user", "content": parts}


def test_an_answer_that_the_program_wrote_into_a_history_is_context_alone(tmp_path):
    thoughts = [{"description": "Hm."}]
    first = gemini("One.", id="a", model="g", thoughts=thoughts)
    history = [asked("u", "In short."), gemini([{"text": "Got it."}], id="x")]
    path = write_lines(
        tmp_path / "s.jsonl",
        HEAD,
        asked("1", "Go."),
        first,
        gemini("Two.", id="b", model="g", thoughts=thoughts),
        {"$set": {"messages": history}},
        asked("2", "On."),
        gemini("Three.", id="c", model="g"),
        {"$set": {"messages": [*history, asked("2", "On."), gemini("Three.", id="c")]}},
    )
    ((_, found),), rejected = read_all(ADAPTER, path)
    assert rejected == []
    said = [([m["content"] for m in s.messages], s.num_given) for s in found.steps]
    assert said == [(["Go.", "One.", "Two."], 0), (["In short.", "Got it.", "On.", "Three."], 2)]
    assert found.notes == {WRITTEN: 1, SUMMARIES: 1, THOUGHTS: 1}


CONTEXT = {"id": "0", "type": "user", "content": [{"text": "<session_context>\nIt is May.\n"}]}
TOKENS = {"tokens": {"input": 1}, "model": "g"}


def ran(*names):
    """The record of an editor's session with the calls of all answers so far."""
    calls = [call(name, [answered(name)], n=name) for name in names]
    return {"id": "calls", "type": "gemini", "content": "", "toolCalls": calls}


def answered(name):
    return {"functionResponse": {"id": name, "name": "ls", "response": {"output": f"of {name}"}}}


def texts_of(step):
    return [message["content"] for message in step.messages]


def called_in(step):
    answers = (message.get("tool_calls", ()) for message in step.messages)
    return [[each["id"] for each in calls] for calls in answers if calls]


def editors_session(*, is_cancelled=False):
    lines = [
        HEAD,
        {"$set": {"messages": [CONTEXT]}},
        asked("1", "Go."),
        gemini("One.", id="a", **TOKENS),
        ran("x"),
        asked("2", [answered("x")]),
        gemini("Two.", id="b", **TOKENS),
        asked("3", "On."),
        gemini("Three.", id="c", **TOKENS),
    ]
    lines += [] if is_cancelled else [ran("x", "y")]
    return [*lines, asked("4", [answered("y")]), gemini("Four.", id="d", **TOKENS)]


def test_the_calls_of_an_editors_session_belong_to_the_answers_whose_results_follow(tmp_path):
    path = write_lines(tmp_path / "s.jsonl", *editors_session())
    ((_, found),), rejected = read_all(ADAPTER, path)
    (step,) = found.steps
    texts = ["Go.", "One.", "of x", "Two.", "On.", "Three.", "of y", "Four."]
    assert (texts_of(step)[1:], called_in(step), rejected) == (texts, [["x"], ["y"]], [])
    assert (step.num_given, found.notes) == (0, {})


def test_an_answer_whose_call_an_editors_session_lacks_is_context_and_counted(tmp_path):
    path = write_lines(tmp_path / "s.jsonl", *editors_session(is_cancelled=True))
    ((_, found),), _ = read_all(ADAPTER, path)
    trained = [texts_of(step)[step.num_given :] for step in found.steps]
    assert [
        [t for t in texts if t in {"One.", "Two.", "Three.", "Four."}] for texts in trained
    ] == [
        ["One.", "Two."],
        ["Four."],
    ]
    assert found.notes == {UNCALLED: 1}


def test_a_history_that_an_editors_session_shows_is_read_as_it_is(tmp_path):
    history = [CONTEXT, asked("1", "Go."), gemini([{"text": "One."}], id="a")]
    parts = [{"functionCall": {"id": n, "name": "ls", "args": {}}} for n in "xy"]
    history += [gemini(parts, id="calls"), asked("r", [answered("x"), answered("y")])]
    history += [asked("2", [answered("x")]), gemini([{"text": "Two."}], id="b")]
    history += [gemini([{"text": "Three."}], id="c")]
    lines = [*editors_session(), {"$set": {"messages": history}}, asked("5", "Resumed.")]
    path = write_lines(tmp_path / "s.jsonl", *lines, gemini("Five.", id="e", **TOKENS))
    ((_, found),), _ = read_all(ADAPTER, path)
    _, step = found.steps
    texts = ["Go.", "One.", "of x", "of y", "of x", "Two.\nThree.", "Resumed.", "Five."]
    assert (texts_of(step)[1:], called_in(step)) == (texts, [["x", "y"]])
    assert (len(step.messages) - 2, found.notes) == (step.num_given, {JOINED: 2})


def test_a_file_that_only_says_what_the_session_is_about_is_left_out(tmp_path):
    begun = [HEAD | {"sessionId": "other"}, {"$set": {"messages": [CONTEXT]}}]
    empty = write_lines(tmp_path / "a.jsonl", *begun, begun[0])
    said = write_lines(tmp_path / "b.jsonl", *editors_session())
    asked_only = write_lines(tmp_path / "c.jsonl", *begun, asked("1", "Go."))
    found, rejected = read_all(ADAPTER, empty, said)
    assert ([run.instance_id for run, _ in found], rejected) == (["s"], [])
    _, rejected = read_all(ADAPTER, asked_only)
    assert {each.error.rule for each in rejected} == {"no_calls"}


def test_a_turn_that_ended_with_a_result_is_closed_before_the_next_prompt(tmp_path):
    lines = [HEAD, asked("1", "Go."), gemini("One.", id="a", toolCalls=[call("x", None)], **TOKENS)]
    lines += [asked("2", [answered("x")]), asked("3", "On."), gemini("Two.", id="b", **TOKENS)]
    ((_, found),), _ = read_all(ADAPTER, write_lines(tmp_path / "s.jsonl", *lines))
    first, second = found.steps
    assert texts_of(first)[-1] == "of x"
    assert texts_of(second) == ["Go.", "One.", "of x", BROKEN_OFF, "On.", "Two."]
    assert (second.num_given, found.notes) == (4, {PLACEHOLDER: 1})
