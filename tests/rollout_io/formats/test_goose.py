"""Sessions of Goose: its database, with sub-agents and compactions."""

import sqlite3
from contextlib import closing

import pytest

from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.goose import (
    ADAPTER,
    FAILED,
    INVERTED,
    PICTURED,
    PLACEHOLDERS,
    REPEATED,
    REPLACED,
    SPLIT,
    UNSENT,
    WRITTEN,
)
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
    """A database with the session "s" and others; each message is (role, parts, metadata, time)."""
    tables = {"sessions": [], "messages": []}
    for name, parent, logged in [("s", None, messages), *more]:
        session = {"id": name, "working_dir": "/w", "parent_session_id": parent}
        tables["sessions"].append(session)
        for role, content, *facts in logged:
            row = {"id": len(tables["messages"]) + 1, "session_id": name, "role": role}
            row |= {"content_json": content, "created_timestamp": row["id"]}
            names = ["metadata_json", "created_timestamp"]
            tables["messages"].append(row | dict(zip(names, facts, strict=False)))
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
        ("user", [text("It listed a.")], NEW, 3),
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
    assert not found.notes


def test_a_picture_of_a_result_which_may_be_sent_behind_it_is_said(tmp_path):
    picture = {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}
    found = read_one(
        database(
            tmp_path / "sessions.db",
            ("user", [text("Go.")]),
            ("assistant", [call("c")]),
            ("user", [result("c", picture)]),
            ("assistant", [text("A dot.")]),
        )
    )[1]
    assert found.notes == {PICTURED: 1}
    (message,) = (m for m in found.steps[0].messages if m["role"] == "tool")
    assert [part["type"] for part in message["content"]] == ["image"]


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


def for_audience(said, *roles):
    return text(said) | {"annotations": {"audience": [*roles], "priority": 0.0}}


def test_what_is_not_meant_for_the_assistant_is_not_sent(tmp_path):
    output = [for_audience("a.py", "assistant"), for_audience("1 file", "user")]
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("List."), for_audience("Attached.", "user")]),
        ("assistant", [call("c")]),
        ("user", [result("c", *output)]),
        ("assistant", [call("d")]),
        ("user", [result("d", for_audience("Done", "user"))]),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    assert said(found.steps[0]) == ["List.", "", "a.py", "", "(empty result)", "Done."]
    assert found.unread == {}


@pytest.mark.parametrize("facts", [NEW | {"turnContext": True}, NEW])
def test_hidden_messages_of_the_program_are_sent_with_the_prompt(facts, tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("user", [text("It is noon.")], facts),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    assert (said(found.steps[0]), found.notes) == (["Go.\nIt is noon.", "Done."], {})


def test_a_context_keeps_the_prompt_and_the_turn_that_a_compaction_carries(tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")], OLD),
        ("user", [text("It is noon.")], GONE | {"turnContext": True}),
        ("assistant", [call("c")], OLD),
        ("user", [result("c", text("a"))], OLD),
        ("user", [text("In short.")], NEW),
        ("assistant", [text("Continue.")], NEW),
        ("user", [text("Go.")], NEW),
        ("user", [text("It is noon.")], NEW | {"turnContext": True}),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    first, second = found.steps
    assert said(first)[:2] == ["Go.\nIt is noon.", ""]
    assert said(second) == ["In short.", "Continue.", "Go.\nIt is noon.", "Done."]


def test_commands_and_what_the_program_replies_are_not_sent(tmp_path):
    commands = [
        ("user", [text("/compact")], OLD),
        ("assistant", [text("Compaction complete")], OLD),
    ]
    compaction = [
        ("user", [text("In short.")], NEW),
        ("assistant", [text("Continue.")], NEW),
    ]
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")], OLD),
        ("assistant", [text("One.")], OLD),
        *commands,
        ("user", [text("/review all")], OLD),
        ("user", [text("Review all.")], GONE),
        ("assistant", [text("Two.")], OLD),
        *compaction,
        *commands,
        ("user", [text("/mine")], OLD),
        ("assistant", [text("Known to nobody else.")], OLD),
        ("user", [text("On.")]),
        ("assistant", [text("Three.")]),
    )
    _, found = read_one(path)
    assert [said(step) for step in found.steps] == [
        ["Go.", "One.", "Review all.", "Two."],
        ["In short.", "Continue.", "On.", "Three."],
    ]
    assert found.notes[UNSENT] == 7


@pytest.mark.parametrize("has_text", [True, False])
def test_a_call_without_a_result_is_no_part_of_later_prompts(has_text, tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("assistant", [*([text("Look.")] if has_text else []), call("c")]),
        ("user", []),
        ("user", [text("Stop.")]),
        ("assistant", [text("Fine.")]),
    )
    _, found = read_one(path)
    first, second = found.steps
    assert [m.get("tool_calls") is not None for m in first.messages] == [False, True]
    later = ["Go.", "Look.", "Stop."] if has_text else ["Go.\nStop."]
    assert said(second) == [*later, "Fine."]
    assert not any("tool_calls" in m for m in second.messages)
    assert (trained(first), trained(second)) == (["Look." if has_text else ""], ["Fine."])


def test_consecutive_messages_of_a_role_are_one(tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("user", [text("Now.")]),
        ("assistant", [text("Look.")]),
        ("assistant", [call("c")]),
        ("user", [result("c", text("a"))]),
        ("user", [text("On.")]),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    assert said(found.steps[0]) == ["Go.\nNow.", "Look.", "a", "On.", "Done."]
    assert len(found.steps[0].messages[1]["tool_calls"]) == 1


@pytest.mark.parametrize("is_same", [True, False])
def test_calls_of_one_answer_are_read_as_one_by_their_time(is_same, tmp_path):
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    time = 3 if is_same else 5
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")], None, 1),
        ("assistant", [thought, text("Look."), call("c")], None, 3),
        ("user", [result("c", text("a"))], None, 3),
        ("assistant", [thought, call("d")], None, time),
        ("user", [result("d", text("b"))], None, time),
        ("assistant", [text("Done.")], None, 7),
    )
    _, found = read_one(path)
    names = [[c["id"] for c in m.get("tool_calls", ())] for m in found.steps[0].messages]
    assert names[1:4] == ([["c", "d"], [], []] if is_same else [["c"], [], ["d"]])
    assert found.notes == ({SPLIT: 1} if is_same else {})


def test_a_call_that_is_stored_as_later_than_its_result_stands_before_it(tmp_path):
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")], None, 1),
        ("assistant", [call("c")], None, 5),
        ("user", [result("c", text("a"))], None, 3),
        ("assistant", [text("Done.")], None, 6),
    )
    _, found = read_one(path)
    assert [m["role"] for m in found.steps[0].messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.notes == {INVERTED: 1}


def test_what_the_program_writes_as_an_answer_is_part_of_the_prompt(tmp_path):
    failed = {"type": "toolResponse", "id": "c", "toolResult": {"status": "error", "error": "No."}}
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("assistant", [call("c", "unparseable_tool_call")]),
        ("user", [failed]),
        ("assistant", [call("d", "recipe__final_output", n=1)]),
        ("user", [result("d", text("Collected."))]),
        ("assistant", [text('{"n": 1}')]),
        ("user", [text("On.")]),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    assert [trained(step) for step in found.steps] == [[""], ["Done."]]
    assert found.notes == {PLACEHOLDERS: 1, REPEATED: 1}


def test_a_fork_of_a_session_that_was_compacted_later_trains_once(tmp_path):
    turn = [("user", [text("Go.")]), ("assistant", [text("One.")])]
    compacted = [(role, content, OLD, i + 1) for i, (role, content) in enumerate(turn)]
    fork = [(role, content, None, i + 1) for i, (role, content) in enumerate(turn)]
    path = database(
        tmp_path / "sessions.db",
        *compacted,
        ("user", [text("In short.")], NEW),
        ("assistant", [text("Continue.")], NEW),
        more=[("t", None, [*fork, ("user", [text("On.")]), ("assistant", [text("Two.")])])],
    )
    runs, _ = read_all(ADAPTER, path)
    answers = [answer for _, found in runs for step in found.steps for answer in trained(step)]
    assert answers == ["One.", "Two."]


def test_texts_of_resources_and_older_thoughts_are_sent(tmp_path):
    resource = {"type": "resource", "resource": {"uri": "file:///a", "text": "b"}}
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("assistant", [{"type": "reasoning", "text": "Hm."}, call("c")]),
        ("user", [result("c", text("a"), resource)]),
        ("assistant", [text("Done."), {"type": "conversationCompacted", "msg": "Compacted"}]),
    )
    _, found = read_one(path)
    assert said(found.steps[0]) == ["Go.", "", "a\nb", "Done."]
    assert (found.steps[0].messages[1]["reasoning_content"], found.unread) == ("Hm.", {})


def test_the_content_of_a_binary_resource_is_named(tmp_path):
    resource = {"type": "resource", "resource": {"uri": "file:///a", "blob": "QUFBQQ=="}}
    path = database(
        tmp_path / "sessions.db",
        ("user", [text("Go.")]),
        ("assistant", [call("c")]),
        ("user", [result("c", text("a"), resource)]),
        ("assistant", [text("Done.")]),
    )
    _, found = read_one(path)
    assert [*found.unread.values()] == [1]
    assert any("resource.blob" in name for name in found.unread)
