"""Sessions of Goose: its database, with sub-agents and compactions."""

import sqlite3
from contextlib import closing

import pytest

from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.goose import ADAPTER, FAILED, REPLACED, WRITTEN
from tests.helpers.adapter_helpers import read_all
from tests.helpers.conversation_writers import GOOSE_TABLES, save_opencode

OLD = {"userVisible": True, "agentVisible": False}
NEW = {"userVisible": False, "agentVisible": True}
GONE = {"userVisible": False, "agentVisible": False}


def text(said):
    return {"type": "text", "text": said}


def call(id, name="shell", **arguments):
    value = {"name": name, "arguments": arguments}
    return {"type": "toolRequest", "id": id, "toolCall": {"status": "success", "value": value}}


def result(id, *content, is_list=False):
    value = [*content] if is_list else {"content": [*content], "isError": False}
    return {"type": "toolResponse", "id": id, "toolResult": {"status": "success", "value": value}}


def database(path, *messages, more=()):
    """A database with the session "s" and others; each message is (role, parts, metadata)."""
    tables = {"sessions": [], "messages": []}
    for name, parent, logged in [("s", None, messages), *more]:
        session = {"id": name, "working_dir": "/w", "parent_session_id": parent}
        tables["sessions"].append(session)
        for role, content, *facts in logged:
            row = {"id": len(tables["messages"]) + 1, "session_id": name, "role": role}
            row |= {"content_json": content, "created_timestamp": 1}
            tables["messages"].append(row | dict(zip(["metadata_json"], facts, strict=False)))
    save_opencode(path, tables, GOOSE_TABLES)
    return path


def read_one(path):
    made, rejected = read_all(ADAPTER, path)
    assert rejected == []
    ((run, found),) = made
    return run, found


def said(step):
    return [m["content"] for m in step.messages]


def trained(step):
    return [m["content"] for m in step.messages[step.num_given :] if m["role"] == "assistant"]


@pytest.mark.parametrize("is_list", [False, True])
def test_calls_results_and_reasoning_are_read_in_order(is_list, tmp_path):
    failed = {"type": "toolResponse", "id": "d", "toolResult": {"status": "error", "error": "No."}}
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("List.")]),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                text("Look."),
                call("c", n=1),
            ],
        ),
        ("user", [result("c", text("a.py"), is_list=is_list)]),
        ("assistant", [call("d")]),
        ("user", [failed, {"type": "actionRequired", "data": {"prompt": "Allow it?"}}]),
        ("assistant", [text("Done."), {"type": "systemNotification", "msg": "Tip of the day"}]),
    )
    assert recognize(path, load_formats().adapters) == ["goose"]
    run, found = read_one(path)
    assert (run.labels["session"], run.labels["directory"], found.unread) == ("s", "/w", {})
    (step,) = found.steps
    assert said(step) == ["List.", "Look.", "a.py", "", "No.", "Done."]
    assert step.messages[1]["reasoning_content"] == "Hm."
    assert step.messages[1]["tool_calls"][0]["function"] == {
        "name": "shell",
        "arguments": '{"n":1}',
    }
    assert [m.get("tool_call_id") for m in step.messages] == [None, None, "c", None, "d", None]


def test_a_compaction_begins_a_context_with_its_summary(tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")], OLD),
        ("assistant", [text("One.")], OLD),
        ("user", [text("On.")], GONE),
        ("user", [text("In short.")], GONE),
        ("assistant", [text("The previous message is a summary.")], GONE),
        ("user", [text("On.")], OLD),
        ("assistant", [text("Two.")], OLD),
        ("user", [text("Shorter.")], NEW),
        ("assistant", [text("The previous message is a summary.")], NEW),
        ("user", [text("Last?")]),
        ("assistant", [text("Three.")]),
    )
    found = read_one(path)[1]
    told = "The previous message is a summary."
    assert [said(step) for step in found.steps] == [
        ["Go.", "One.", "On."],
        ["In short.", told, "On.", "Two."],
        ["Shorter.", told, "Last?", "Three."],
    ]
    assert [trained(step) for step in found.steps] == [["One."], ["Two."], ["Three."]]
    assert found.notes == {SUMMARIES: 2, WRITTEN: 2}


def test_a_summary_of_one_call_is_left_out_by_name(tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("assistant", [call("c")], OLD),
        ("user", [result("c", text("a"))], OLD),
        ("user", [text("It listed a.")], NEW),
        ("assistant", [text("Done.")]),
    )
    found = read_one(path)[1]
    assert (said(found.steps[0]), found.notes) == (["Go.", "", "a", "Done."], {REPLACED: 1})


def test_sessions_with_a_parent_are_sub_agents_and_pictures_are_kept(tmp_path):
    picture = {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}
    more = [("t", "s", [("user", [text("See."), picture]), ("assistant", [text("A dot.")])])]
    path = database(
        tmp_path / "sessions.db", ("user", [text("Go.")]), ("assistant", [text("Done.")]), more=more
    )
    run, found = read_one(path)
    assert (run.instance_id, [step.agent for step in found.steps]) == ("s", [None, "t"])
    kinds = [part["type"] for part in found.steps[1].messages[0]["content"]]
    assert kinds == ["text", "image"]


@pytest.mark.parametrize("content", ["{", '{"type": "text"}', '[{"type": 1}]', "[3]"])
def test_damage_is_named(content, tmp_path):
    path = database(tmp_path / "sessions.db", ("user", [text("Go.")]))
    with closing(sqlite3.connect(path)) as made:
        made.execute("UPDATE messages SET content_json = ?", (content,))
        made.commit()
    found, rejected = read_all(ADAPTER, path)
    assert found == []
    assert {r.error.rule for r in rejected} <= {"record_type", "json_document"}
    assert rejected


def test_a_call_that_goose_could_not_read_is_counted(tmp_path):
    error = {"type": "toolRequest", "id": "c", "toolCall": {"status": "error", "error": "Bad JSON"}}
    path = database(
        tmp_path / "sessions.db", ("user", [text("Go.")]), ("assistant", [text("Hm."), error])
    )
    _, found = read_one(path)
    assert (said(found.steps[0]), found.unread, found.notes) == (["Go.", "Hm."], {}, {FAILED: 1})


def test_an_unknown_part_is_named(tmp_path):
    parts = [text("Hi."), {"type": "video", "link": "see this"}]
    path = database(tmp_path / "sessions.db", ("user", parts), ("assistant", [text("Ho.")]))
    _, found = read_one(path)
    assert found.unread == {"content[video]": 1}
