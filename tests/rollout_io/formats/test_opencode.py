"""Sessions of OpenCode: its database, which is never changed, and the files of older versions."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.engines.runs import COPIED
from rollout_io.formats.opencode import ADAPTER, FILES, INVALID, REMINDED, UNENDED, WRITTEN
from rollout_io.formats.opencode_stores import REVERTED
from tests.helpers.adapter_helpers import read_all
from tests.helpers.conversation_writers import opencode_tables, save_opencode
from tests.helpers.session_facts import opencode
from tests.helpers.structural_logs import CONVERSATION

FORMATS = load_formats().adapters


def user(*parts, **fields):
    """A message of the user; texts stand for their parts."""
    return "user", fields, [text(part) if isinstance(part, str) else part for part in parts]


def answer(*parts, **fields):
    return "assistant", *user(*parts, **fields)[1:]


def database(path, *messages):
    """A database with one session, whose messages are m0, m1, ..."""
    tables = {"session": [{"id": "s"}], "message": [], "part": []}
    for i, (role, fields, parts) in enumerate(messages):
        row = {"session_id": "s", "time_created": i, "time_updated": i}
        tables["message"].append({"id": f"m{i}", **row, "data": {"role": role} | fields})
        tables["part"] += [
            {"id": f"m{i}{j}", "message_id": f"m{i}", **row, "data": part}
            for j, part in enumerate(parts)
        ]
    save_opencode(path, tables)
    return path


@pytest.fixture
def read(tmp_path):
    """The trajectory of a session with these messages."""
    return lambda *messages: read_one(database(tmp_path / "opencode.db", *messages))[1]


def text(said):
    return {"type": "text", "text": said}


def tool(status="completed", **state):
    return {"type": "tool", "callID": "c", "tool": "ls", "state": {"status": status} | state}


def read_one(*paths):
    ((run, found),), rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    return run, found


def said(step):
    return [m["content"] for m in step.messages]


def save_storage(root, tables):
    """The same session as files."""
    for row in tables["session"]:
        fields = {"id": row["id"], "parentID": row.get("parent_id")}
        write(root / "session" / "p" / f"{row['id']}.json", fields)
    for row in tables["message"]:
        fields = row["data"] | {"id": row["id"], "time": {"created": row["time_created"]}}
        write(root / "message" / row["session_id"] / f"{row['id']}.json", fields)
    for row in tables["part"]:
        write(root / "part" / row["message_id"] / f"{row['id']}.json", row["data"])
    return root


def write(path, fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))


def test_the_database_and_the_files_read_the_same_and_a_session_in_both_counts_once(tmp_path):
    tables = opencode_tables(CONVERSATION)
    path = tmp_path / "opencode.db"
    save_opencode(path, tables)
    storage = save_storage(tmp_path / "storage", tables)
    assert recognize(path, FORMATS) == recognize(storage, FORMATS) == ["opencode"]
    (_, one), (_, other), (run, both) = read_one(path), read_one(storage), read_one(storage, path)
    assert one.steps[0].messages == other.steps[0].messages == both.steps[0].messages
    assert one.unread == other.unread == {}
    assert (len(both.steps), len(run.places)) == (1, len(tables["message"]))


def test_a_database_in_use_is_read_with_its_log_and_not_changed(tmp_path):
    path = database(tmp_path / "opencode.db", user("Go."))
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        row = ("b", "s", 1, 1, '{"role": "assistant"}')
        writer.execute("INSERT INTO message VALUES (?, ?, ?, ?, ?)", row)
        part = ("p", "b", "s", 1, 1, json.dumps(text("Done.")))
        writer.execute("INSERT INTO part VALUES (?, ?, ?, ?, ?, ?)", part)
        writer.commit()
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        for file in (path, path.with_name("opencode.db-wal")):
            shutil.copy(file, copy.parent)
        before = digests(copy.parent)
        assert said(read_one(copy)[1].steps[0]) == ["Go.", "Done."]
        assert digests(copy.parent) == before


def digests(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def test_a_compaction_begins_a_context_with_the_summary_and_the_kept_end(read):
    compaction = {"type": "compaction", "auto": True, "tail_start_id": "m2"}
    messages = [user("Go."), answer("One."), user("On."), answer("Two."), user(compaction)]
    result = read(*messages, answer("In short.", summary=True), answer("Three."))
    ask = "What did we do so far?"
    assert [(said(step), step.num_given) for step in result.steps] == [
        (["Go.", "One.", "On.", "Two.", ask], 0),
        ([ask, "In short.", "On.", "Two.", "Three."], 4),
    ]


def test_steps_results_and_failures_of_calls_are_read_in_order(read):
    parts = [STEP, {"type": "reasoning", "text": "Hm."}, "Look.", tool(input={"n": 1}, output="a")]
    parts += [{"type": "step-finish"}, STEP, tool("error", input={}, error="No.")]
    parts += [tool("running", input={}), "Done."]
    hidden = text("Hidden") | {"ignored": True}
    result = read(user("Go.", hidden), answer(*parts, modelID="m"))
    (step,) = result.steps
    stopped = "[Tool execution was interrupted]"
    assert said(step) == ["Go.", "Look.", "a", "", "No.", stopped, "Done."]
    assert step.messages[1]["reasoning_content"] == "Hm."
    assert result.user_values == {"model": "m"}


def test_failed_answers_are_left_out_and_fail_the_run_if_they_are_the_last(read):
    failed = answer("Ha", error={"name": "APIError", "data": {"message": "No credit."}})
    result = read(user("Go."), failed, answer("Done."))
    assert (result.error, said(result.steps[0])) == (None, ["Go.", "Done."])
    result = read(user("Go."), failed)
    assert (result.error, result.steps) == ("No credit.", [])


def trained(step):
    """The answers that are trained on."""
    return [m for m in step.messages[step.num_given :] if m["role"] == "assistant"]


STEP = {"type": "step-start"}
SYNTHETIC = {"synthetic": True}
RAN = text("The following tool was executed by the user") | SYNTHETIC
SUBTASK = {"type": "subtask", "agent": "a", "prompt": "Look.", "description": "d"}


def test_a_text_that_the_program_wrote_into_an_answer_is_context_alone(read):
    parts = [tool(input={}, output="a"), text("Continuing.") | SYNTHETIC]
    parts += [{"type": "reasoning", "text": "Hm."}, "Done.", text("Bye.") | SYNTHETIC]
    question = user("Go.", text("Called Read") | SYNTHETIC)
    result = read(question, answer(*parts), user("On."), answer("End."))
    first = ["Go.\nCalled Read", "", "a"]
    second = [*first, "Continuing.", "Done."]
    assert [said(step) for step in result.steps] == [
        first,
        second,
        [*second, "Bye.", "On.", "End."],
    ]
    answers = [message for step in result.steps for message in trained(step)]
    assert [message["content"] for message in answers] == ["", "Done.", "End."]
    assert result.steps[1].messages[4]["reasoning_content"] == "Hm."
    assert result.notes == {WRITTEN: 2}


@pytest.mark.parametrize("question", [RAN, SUBTASK])
@pytest.mark.parametrize("parent", [{}, {"parentID": "m2"}])
def test_a_call_that_the_user_ran_is_context_alone(question, parent, read):
    ran = answer(tool(input={"command": "ls"}, output="a"), **parent)
    messages = [user("Go."), answer(STEP, "One."), user(question), ran]
    result = read(*messages, answer(STEP, "Two.", **parent))
    begun = ["Go.", "One.", "The following tool was executed by the user"]
    assert [said(step) for step in result.steps] == [begun, [*begun, "", "a", "Two."]]
    assert [m["content"] for step in result.steps for m in trained(step)] == ["One.", "Two."]
    assert result.notes == {WRITTEN: 1}
    assert WRITTEN not in read(*messages[:3], answer("Late.", parentID="m0")).notes


def test_a_file_beside_an_answer_is_left_out_by_name(read):
    file = {"type": "file", "mime": "text/plain", "filename": "a.log", "url": "file:///a.log"}
    result = read(user("Go."), answer("Done.", file))
    assert (said(result.steps[0]), result.notes) == (["Go.", "Done."], {FILES: 1})


def test_an_interrupted_call_has_the_output_until_then(read):
    state = {"input": {}, "error": "Aborted", "metadata": {"interrupted": True, "output": "half"}}
    result = read(user("Go."), answer(tool("error", **state)))
    assert said(result.steps[0]) == ["Go.", "", "half"]


def test_damage_is_named(tmp_path):
    path = tmp_path / "opencode.db"
    save_opencode(path, opencode_tables(CONVERSATION))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    made, rejected = read_all(ADAPTER, path)
    assert (made, [r.error.rule for r in rejected]) == ([], ["sqlite_file"])
    storage = save_storage(tmp_path / "storage", opencode_tables(CONVERSATION))
    (storage / "part" / "m0" / "p0000.json").write_text('{"type": 1}')
    made, rejected = read_all(ADAPTER, storage)
    assert (made, {r.error.rule for r in rejected}) == ([], {"record_type"})
    (storage / "session" / "p" / "s.json").write_text("{")
    _, rejected = read_all(ADAPTER, storage)
    assert [r.error.rule for r in rejected] == ["json_document"]


def test_the_real_files_say_what_a_plain_reader_finds(harness_logs):
    path = harness_logs.parent / "harness_logs_2026" / "opencode" / "storage_v2"
    if not path.is_dir():
        pytest.skip(f"no {path}")
    assert recognize(path, FORMATS) == ["opencode"]
    made, rejected = read_all(ADAPTER, path)
    assert rejected == []
    assert all(found.unread == {} for _, found in made)
    texts = {run.instance_id: json.dumps(found.steps[-1].messages) for run, found in made}
    for name, role, parts in opencode(path):
        for part in parts:
            if part["type"] in {"text", "reasoning"}:
                assert json.dumps(part["text"])[1:-1] in texts[name], role
            elif part["type"] == "tool":
                assert json.dumps(part["state"]["output"])[1:-1] in texts[name]
    answers = [m["content"] for _, found in made for step in found.steps for m in trained(step)]
    for _, _, parts in opencode(path):
        for part in parts:
            is_written = part["type"] == "text" and part.get("synthetic")
            assert not (is_written and part["text"] in answers)


def trained_in(*paths):
    """The text of each answer that trains, and the texts before it; and the notes."""
    made, rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    answers, notes = [], {}
    for _, found in made:
        notes |= found.notes
        for step in found.steps:
            for i, message in enumerate(step.messages):
                if i >= step.num_given and message["role"] == "assistant":
                    answers.append((message["content"], said(step)[:i]))
    return answers, notes


def ended(start=1, **fields):
    return {"time": {"created": start, "completed": start + 1}, "finish": "stop"} | fields


@pytest.mark.parametrize("number", [1, 2])
def test_answers_that_a_fork_copied_under_new_ids_train_once(number, tmp_path):
    tables = {"session": [], "message": [], "part": []}
    for i in range(number + 1):
        tables["session"].append({"id": f"s{i}", "title": f"Sums (fork #{i})"})
        turns = [("user", {"time": {"created": 1}}, "Go."), ("assistant", ended(2), "One.")]
        turns += [
            ("user", {"time": {"created": 9 + i}}, f"{i}?"),
            ("assistant", ended(20 + i), f"{i}."),
        ]
        for j, (role, fields, words) in enumerate(turns):
            row = {"session_id": f"s{i}", "time_created": j, "time_updated": j}
            key = f"m{i}{j}"
            tables["message"].append({"id": key, **row, "data": {"role": role} | fields})
            tables["part"].append({"id": f"p{key}", "message_id": key, **row, "data": text(words)})
    path = tmp_path / "opencode.db"
    save_opencode(path, tables)
    answers, notes = trained_in(path)
    assert sorted(answers) == sorted(
        [("One.", ["Go."]), *((f"{i}.", ["Go.", "One.", f"{i}?"]) for i in range(number + 1))]
    )
    assert notes == {COPIED: 1}


def test_thoughts_of_another_model_are_sent_to_a_model_as_text(read):
    def of(model, number):
        thought = {"type": "reasoning", "text": f"Hm {number}."}
        fields = ended(number, modelID=model, providerID="p")
        return answer(STEP, thought, f"Say {number}.", **fields)

    first, second = read(user("Go."), of("m", 1), user("Go."), of("n", 2)).steps
    assert [m.get("reasoning_content") for m in first.messages[:2]] == [None, "Hm 1."]
    assert said(second) == ["Go.", "Hm 1.Say 1.", "Go.", "Say 2."]
    assert [m.get("reasoning_content") for m in second.messages] == [None, None, None, "Hm 2."]


def test_a_call_of_a_tool_that_there_is_not_is_context_and_counted(tmp_path):
    wrong = tool(input={"tool": "nosuch", "error": "no"}, output="no") | {"tool": "invalid"}
    messages = [
        user("Go."),
        answer(STEP, "One.", wrong, **ended()),
        answer(STEP, "Two.", **ended(3)),
    ]
    path = database(tmp_path / "opencode.db", *messages)
    assert trained_in(path) == ([("Two.", ["Go.", "One.", "no"])], {INVALID: 1})


def test_an_answer_that_broke_off_is_context_and_counted(tmp_path):
    half = answer(STEP, "Hal", tool("running", input={}), time={"created": 2})
    messages = [user("Go."), half, user("On."), answer(STEP, "Two.", **ended(3))]
    answers, notes = trained_in(database(tmp_path / "opencode.db", *messages))
    stopped = "[Tool execution was interrupted]"
    assert (answers, notes) == ([("Two.", ["Go.", "Hal", stopped, "On."])], {UNENDED: 1})


def test_answers_whose_messages_a_revert_deleted_are_counted(tmp_path):
    path = database(tmp_path / "opencode.db", user("Go."), answer(STEP, "One.", **ended()))
    deleted = {"m2": "user", "m3": "assistant", "m4": "assistant"}
    said_once = [{"info": {"id": name, "role": role}} for name, role in deleted.items()]
    events = [("message.updated.1", fields) for fields in said_once * 2]
    events += [("message.removed.1", {"messageID": name}) for name in deleted]
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE event (id, aggregate_id, seq, type, data)")
        for i, (kind, fields) in enumerate(events):
            row = (f"e{i}", "s", i, kind, json.dumps(fields))
            store.execute("INSERT INTO event VALUES (?, ?, ?, ?, ?)", row)
    assert trained_in(path) == ([("One.", ["Go."])], {REVERTED: 2})


def test_prompts_to_which_the_program_adds_a_reminder_are_counted(tmp_path):
    turns = [("plan", "Plan."), ("build", "Build."), ("build", "More.")]
    messages = [
        message
        for i, (agent, words) in enumerate(turns)
        for message in (user(words, agent=agent), answer(STEP, f"{i}.", **ended(i, agent=agent)))
    ]
    _, notes = trained_in(database(tmp_path / "plan.db", *messages))
    assert notes == {REMINDED: 3}
    _, notes = trained_in(database(tmp_path / "build.db", *messages[2:]))
    assert notes == {}


V2 = (
    "CREATE TABLE session_v2(id text, parent_id text, directory text, model text)",
    "CREATE TABLE session_message(id text, session_id text, type text, seq integer, data text)",
)


def upgraded(path, *, is_used):
    """A database with the tables of version 2, in which an old session went on, and a new one began."""
    database(path, user("Go."), answer("One.", **ended()))
    with closing(sqlite3.connect(path)) as store:
        for table in V2:
            store.execute(table)
        turns = {"s": ["Go.", "One.", "On.", "Two."], "new": ["Hi.", "Ho."]} if is_used else {}
        for name, texts in turns.items():
            store.execute("INSERT INTO session_v2(id) VALUES(?)", (name,))
            for i, words in enumerate(texts):
                data = {"text": words} if i % 2 == 0 else {"content": [text(words)]} | ended(i)
                kind = "user" if i % 2 == 0 else "assistant"
                row = (f"{name}{i}", name, kind, i, json.dumps(data))
                store.execute("INSERT INTO session_message VALUES(?,?,?,?,?)", row)
        store.commit()
    return path


def test_sessions_that_version_2_continues_or_begins_are_read_whole(tmp_path):
    answers, _ = trained_in(upgraded(tmp_path / "a.db", is_used=True))
    assert sorted(answers) == [
        ("Ho.", ["Hi."]),
        ("One.", ["Go."]),
        ("Two.", ["Go.", "One.", "On."]),
    ]


def test_new_tables_without_rows_leave_the_old_ones_in_use(tmp_path):
    answers, _ = trained_in(upgraded(tmp_path / "a.db", is_used=False))
    assert answers == [("One.", ["Go."])]
