"""Prompts from the requests that Claude Code logs, on sessions of our own."""

import base64
import hashlib
import json
from contextlib import nullcontext

import pytest

from rollout_io.conversion.text import with_answers
from rollout_io.formats.claude_code import ADAPTER
from rollout_io.formats.parsing.media import storing
from tests.helpers.adapter_helpers import read_all, write_lines

TOOLS = [{"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}]
SHAPE = {"system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}


def text(said):
    return {"type": "text", "text": said}


def named(message):
    """The name of a message: a digest of its sorted, compact JSON."""
    content = json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


def user(uuid, content, parent=None, **more):
    message = {"role": "user", "content": content}
    return (
        {"type": "user", "sessionId": "s", "uuid": uuid, "parentUuid": parent}
        | {"message": message}
        | more
    )


def reply(uuid, *content, parent, request=None, **more):
    message = {"role": "assistant", "id": f"m-{uuid}", "model": "m", "content": [*content]}
    line = {"type": "assistant", "sessionId": "s", "uuid": uuid, "parentUuid": parent} | more
    return line | {"message": message} | ({"requestRef": request} if request else {})


def shape(name="sh", value=SHAPE):
    return {"type": "api-request-shape", "sessionId": "s", "shapeHash": name, "shape": value}


def blob(message):
    return {
        "type": "api-request-blob",
        "sessionId": "s",
        "hash": named(message),
        "message": message,
    }


def request(name, *tail, base=None, keep=0, **more):
    line = {"type": "api-request", "sessionId": "s", "id": name, "shapeHash": "sh", "keep": keep}
    line |= {"tail": [named(message) for message in tail]} | ({"base": base} if base else {})
    return line | {"thread": {"type": "none"}} | more


def call(call_id, command="ls"):
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": {"command": command}}


def result(call_id, content):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


FIRST = {"role": "user", "content": [text("<reminder>It is May.</reminder>"), text("Go.")]}
CALLS = {"role": "assistant", "content": [text("I look."), call("a"), call("b")]}
RESULTS = {"role": "user", "content": [result("a", "x"), result("b", "y")]}
SESSION = [
    user("u1", "Go."),
    shape(),
    blob(FIRST),
    request("r1", FIRST, params={"temperature": 0.5}),
    reply("a1", *CALLS["content"], parent="u1", request="r1"),
    user("u2", [result("a", "x")], "a1"),
    user("u3", [result("b", "y")], "a1"),
    request("r2", CALLS, RESULTS, base="r1", keep=1),
    reply("a2", text("Done."), parent="u3", request="r2"),
]


def read_one(tmp_path, *records):
    ((_, made),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s.jsonl", *records))
    assert rejected == []
    made.steps = with_answers(made)
    return made


def said(step):
    return [(m["role"], m["content"]) for m in step.messages]


def test_the_prompt_is_what_was_sent_with_its_system_prompt_and_tools(tmp_path):
    made = read_one(tmp_path, *SESSION)
    (step,) = made.steps
    assert said(step) == [
        ("system", "Be brief."),
        ("user", "<reminder>It is May.</reminder>\nGo."),
        ("assistant", "I look."),
        ("tool", "x"),
        ("tool", "y"),
        ("assistant", "Done."),
    ]
    assert step.num_given == 2
    function = {"name": "Bash", "description": "Run.", "parameters": {"type": "object"}}
    assert step.tools == [{"type": "function", "function": function}]
    assert made.user_values == {"model": "m", "prompts": "requests"}
    assert (made.notes, made.unread) == ({}, {})


def test_a_request_that_does_not_continue_the_one_before_it_begins_a_context(tmp_path):
    other = {"role": "user", "content": [text("A summary."), text("Go on.")]}
    tail = [user("u4", "Go on.", "a2"), blob(other), request("r3", other)]
    made = read_one(tmp_path, *SESSION, *tail, reply("a3", text("On."), parent="u4", request="r3"))
    first, second = made.steps
    assert said(second) == [
        ("system", "Be brief."),
        ("user", "A summary.\nGo on."),
        ("assistant", "On."),
    ]
    changed = [shape("s2", SHAPE | {"tools": []}), request("r3", base="r2", keep=3, shapeHash="s2")]
    made = read_one(
        tmp_path, *SESSION, *changed, reply("a3", text("On."), parent="a2", request="r3")
    )
    assert [step.tools is None for step in made.steps] == [False, True]
    assert len(first.messages) == 6


@pytest.mark.parametrize(
    "broken",
    [
        request("r2", {"role": "user", "content": "elsewhere"}, base="r1", keep=1),
        request("r2", CALLS, RESULTS, base="r0", keep=1),
        request("r2", CALLS, RESULTS, base="r1", keep=2),
        request("r2", CALLS, RESULTS, base="r2", keep=3),
        request("r2", CALLS, RESULTS, base="r1", keep=1, thread={"type": "stored"}),
    ],
)
def test_a_request_that_the_log_does_not_tell_is_counted_and_read_from_the_messages(
    broken, tmp_path
):
    lines = [broken if line.get("id") == "r2" else line for line in SESSION]
    made = read_one(tmp_path, *lines)
    (step,) = made.steps
    assert said(step)[-3:] == [("tool", "x"), ("tool", "y"), ("assistant", "Done.")]
    assert made.user_values["prompts"] == "requests and messages"
    ((what, number),) = made.notes.items()
    assert number == 1
    assert what.startswith("requests with a message that is not in the log")


def test_the_requests_of_a_session_that_has_none_at_first_are_used_for_the_rest(tmp_path):
    old = {"role": "user", "content": [text("Hi.")]}
    answer = {"role": "assistant", "content": [text("Ho.")]}
    lines = [
        user("u0", "Hi."),
        reply("a0", text("Ho."), parent=None),
        user("u1", "Go.", "a0"),
        shape(),
        blob(FIRST),
        request("r1", old, answer, FIRST),
        reply("a1", text("Done."), parent="u1", request="r1"),
    ]
    lines[1]["parentUuid"] = "u0"
    made = read_one(tmp_path, *lines)
    assert said(made.steps[0])[1:3] == [("user", "Hi."), ("assistant", "Ho.")]
    assert said(made.steps[1])[-1] == ("assistant", "Done.")
    assert said(made.steps[1])[1:3] == [("user", "Hi."), ("assistant", "Ho.")]
    assert made.user_values["prompts"] == "requests and messages"


def test_a_damaged_request_is_refused_by_its_field(tmp_path):
    lines = [*SESSION[:3], request("r1", FIRST) | {"tail": "x"}, *SESSION[4:]]
    _, rejected = read_all(ADAPTER, write_lines(tmp_path / "s.jsonl", *lines))
    assert {r.error.rule for r in rejected} == {"record_type"}
    assert rejected[0].error.where.endswith(":4, $.tail")


LATER = {"role": "system", "content": [text("A hook says: be brief.")]}


def test_a_system_message_after_the_first_answer_is_the_users(tmp_path):
    early = {"role": "system", "content": "# Environment"}
    lines = [
        user("u1", "Go."),
        shape(),
        *map(blob, (FIRST, early, LATER)),
        request("r1", FIRST, early),
        reply("a1", text("One."), parent="u1", request="r1"),
        request("r2", {"role": "assistant", "content": [text("One.")]}, LATER, base="r1", keep=2),
        reply("a2", text("Two."), parent="a1", request="r2"),
    ]
    (step,) = read_one(tmp_path, *lines).steps
    assert [m["role"] for m in step.messages] == [
        *("system", "user", "system", "assistant", "user", "assistant"),
    ]
    assert step.messages[4]["content"] == "A hook says: be brief."


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
PICTURE["source"]["data"] = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(9000)).decode()


class Store(dict):
    def add(self, content):
        name = "sha256:" + hashlib.sha256(content).hexdigest()
        self[name] = content
        return name

    read = dict.get


@pytest.mark.parametrize(
    "parts",
    [
        [[result("a", "x"), result("b", "y")], "# A skill"],
        [[result("a", "x")], [result("b", "y")], [text("Read this.")], "And this."],
        [[result("a", "x"), result("b", [PICTURE])], [text("[Image: source: b.png]")]],
    ],
)
@pytest.mark.parametrize("is_stored", [False, True])
def test_lines_of_the_user_that_follow_each_other_may_be_one_message(parts, is_stored, tmp_path):
    blocks = [
        block for part in parts for block in ([text(part)] if isinstance(part, str) else part)
    ]
    lines = [
        *SESSION[:5],
        *(user(f"v{i}", part, "a1") for i, part in enumerate(parts)),
        request("r2", CALLS, {"role": "user", "content": blocks}, base="r1", keep=1),
        reply("a2", text("Done."), parent="v0", request="r2"),
    ]
    with storing(Store()) if is_stored else nullcontext():
        made = read_one(tmp_path, *lines)
    assert made.user_values["prompts"] == "requests"
    assert made.notes == {}
    (step,) = made.steps
    assert [m["role"] for m in step.messages][3:] == [
        *("tool", "tool", "user", "assistant"),
    ]


def test_what_claude_code_adds_to_a_call_of_edit_is_not_the_models(tmp_path):
    arguments = {"file_path": "s", "old_string": "a", "new_string": "b"}
    edit = {"type": "tool_use", "id": "e", "name": "Edit"}
    added = edit | {"input": {"replace_all": False} | arguments}
    own = edit | {"id": "f", "input": arguments | {"replace_all": False}}
    answer = {"role": "assistant", "content": [added, own]}
    results = {"role": "user", "content": [result("e", "x"), result("f", "y")]}
    lines = [
        *SESSION[:4],
        reply("a1", added, own, parent="u1", request="r1"),
        user("u2", results["content"], "a1"),
        request("r2", answer, results, base="r1", keep=1),
        reply("a2", text("Done."), parent="u2", request="r2"),
    ]
    made = read_one(tmp_path, *lines)
    (step,) = made.steps
    calls = [c["function"]["arguments"] for m in step.messages for c in m.get("tool_calls", ())]
    assert [list(json.loads(call)) for call in calls] == [
        [*arguments],
        [*arguments, "replace_all"],
    ]
    assert [number for what, number in made.notes.items() if "`replace_all`" in what] == [1]
