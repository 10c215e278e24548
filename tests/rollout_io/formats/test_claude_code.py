import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.claude_code import ADAPTER
from rollout_io.formats.start import Start
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines, save_template


def line(uuid, parent=None, session="s", **fields):
    return {"uuid": uuid, "parentUuid": parent, "sessionId": session, "isSidechain": False} | fields


def user(uuid, text, parent=None, **fields):
    message = {"role": "user", "content": text}
    return line(uuid, parent, type="user", message=message, **fields)


def reply(uuid, *blocks, parent=None, id=None, stop=None, model="m", **fields):
    message = {"role": "assistant", "content": list(blocks), "id": id, "model": model}
    return line(uuid, parent, type="assistant", message=message | {"stop_reason": stop}, **fields)


def text(value):
    return {"type": "text", "text": value}


def tool_use(id, name="Bash", **arguments):
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id, value):
    return {"type": "tool_result", "tool_use_id": id, "content": value}


def boundary(uuid):
    fields = {"logicalParentUuid": "before", "compactMetadata": {"trigger": "auto"}}
    return line(uuid, type="system", subtype="compact_boundary", content="Compacted") | fields


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
        reply("2", {"type": "thinking", "thinking": "Two calls."}, parent="1", id="r1"),
        reply("3", text("Sure."), parent="2", id="r1"),
        reply("4", tool_use("a", command="ls a"), parent="3", id="r1"),
        user("5", [result("a", "x")], parent="4"),
        reply("6", tool_use("b", command="ls b"), parent="4", id="r1", stop="tool_use"),
        user("7", [result("b", [text("y"), text("z")])], parent="6"),
        reply("8", text("Done."), parent="7", id="r2"),
    )
    assert agent == "main"
    calls = messages[1].pop("tool_calls")
    assert messages == [
        {"role": "user", "content": "List both."},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Two calls."},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "tool", "tool_call_id": "b", "content": "y\nz"},
        {"role": "assistant", "content": "Done."},
    ]
    assert [call["id"] for call in calls] == ["a", "b"]
    assert calls[0]["type"] == "function"
    assert calls[0]["function"]["name"] == "Bash"
    assert json.loads(calls[1]["function"]["arguments"]) == {"command": "ls b"}


def test_text_beside_the_result_of_a_tool_follows_it_as_the_users(contexts):
    ((_, messages),) = contexts(
        user("1", "Go."),
        reply("2", tool_use("a")),
        user("3", [result("a", "x"), text("And stop.")]),
        reply("4", text("Stopped.")),
    )
    roles = [m["role"] for m in messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant"]


def test_a_sub_agent_is_a_conversation_of_its_own_before_the_end_of_the_main_one(contexts):
    side = {"isSidechain": True}
    found = contexts(
        user("1", "Ask two."),
        reply("2", tool_use("t", "Task"), parent="1"),
        user("a1", "First.", **side),
        user("b1", "Second.", **side),
        reply("a2", text("one"), parent="a1", **side),
        reply("b2", text("two"), parent="b1", **side),
        user("3", [result("t", "one, two")], parent="2"),
        reply("4", text("Both."), parent="3"),
    )
    assert [agent for agent, _ in found] == ["sidechain", "sidechain", "main"]
    assert said(found[0][1]) == [("user", "First."), ("assistant", "one")]
    assert said(found[1][1]) == [("user", "Second."), ("assistant", "two")]
    assert len(found[2][1]) == 4


def test_a_sub_agent_that_hangs_on_the_call_that_made_it_stays_apart(contexts):
    side = {"isSidechain": True}
    found = contexts(
        user("1", "Ask."),
        reply("2", tool_use("t", "Task"), parent="1"),
        user("a1", "First.", parent="2", **side),
        reply("a2", text("one"), parent="a1", **side),
        user("3", [result("t", "one")], parent="2"),
        reply("4", text("Told."), parent="3"),
    )
    assert [(agent, len(messages)) for agent, messages in found] == [("sidechain", 2), ("main", 4)]


def test_the_results_of_parallel_calls_and_an_interruption_stay_in_one_context(contexts):
    ((_, messages),) = contexts(
        user("1", "Both."),
        reply("2", tool_use("a"), parent="1", id="r1"),
        reply("3", tool_use("b"), parent="2", id="r1"),
        user("4", [result("b", "y")], parent="3"),
        user("5", [result("a", "x")], parent="2"),
        user("6", "Stop.", parent="4"),
        reply("7", text("Stopped."), parent="6", id="r2"),
    )
    assert "".join(m["role"][0] for m in messages) == "uattua"


def test_sub_agents_of_one_id_are_one_conversation_from_any_file_of_the_session(tmp_path):
    side = {"isSidechain": True, "agentId": "f00"}
    main = write_lines(tmp_path / "s.jsonl", user("1", "Hi."), reply("2", text("Ho.")))
    agent = write_lines(
        tmp_path / "agent-f00.jsonl",
        user("a1", "Look.", **side),
        reply("a2", text("Found."), **side),
    )
    ((run, trajectory),), rejected = read_all(ADAPTER, main, agent)
    assert rejected == []
    assert len(run.places) == 4
    assert [step.agent for step in trajectory.steps] == ["sidechain", "main"]


def test_a_compaction_begins_a_new_context_with_its_summary(contexts):
    found = contexts(
        user("1", "Hi."),
        reply("2", text("Ho."), parent="1"),
        boundary("3"),
        user("4", "We greeted.", parent="3", isCompactSummary=True),
        user("5", "Go on.", parent="4"),
        reply("6", text("On."), parent="5"),
    )
    assert [said(messages) for _, messages in found] == [
        [("user", "Hi."), ("assistant", "Ho.")],
        [("user", "We greeted."), ("user", "Go on."), ("assistant", "On.")],
    ]


def test_a_prompt_that_goes_back_begins_a_context_with_what_was_before(contexts):
    found = contexts(
        user("1", "Hi."),
        reply("2", text("Ho."), parent="1", id="r1"),
        user("3", "Left?", parent="2"),
        reply("4", text("Left."), parent="3", id="r2"),
        user("5", "Right?", parent="2"),
        reply("6", text("Right."), parent="5", id="r3"),
    )
    before = [("user", "Hi."), ("assistant", "Ho.")]
    assert [said(messages) for _, messages in found] == [
        [*before, ("user", "Left?"), ("assistant", "Left.")],
        [*before, ("user", "Right?"), ("assistant", "Right.")],
    ]


def test_a_prompt_that_was_taken_back_unanswered_leaves_no_context(contexts):
    ((_, messages),) = contexts(
        user("1", "Hi."),
        reply("2", text("Ho."), parent="1", id="r1"),
        user("3", "Lfet?", parent="2"),
        user("4", "Left?", parent="2"),
        reply("5", text("Left."), parent="4", id="r2"),
    )
    assert [content for _, content in said(messages)] == ["Hi.", "Ho.", "Left?", "Left."]


def test_copied_lines_and_what_the_model_did_not_write_are_left_out(contexts):
    hello = user("1", "Hi.")
    ((_, messages),) = contexts(
        hello,
        hello,
        reply("2", text("API Error"), parent="1", model="<synthetic>"),
        line("3", "2", type="progress", data={}),
        reply("4", {"type": "redacted_thinking", "data": "x"}, text("Ho."), parent="3"),
    )
    assert said(messages) == [("user", "Hi."), ("assistant", "Ho.")]


def test_sessions_of_one_file_are_runs_and_titles_belong_to_the_first(tmp_path):
    records = [
        {"type": "summary", "summary": "Greetings", "leafUuid": "2"},
        user("1", "Hi.", cwd="/a", gitBranch="main", version="2.0"),
        user("3", "Yo.", session="t"),
        reply("2", text("Ho.")),
        reply("4", text("Ya."), session="t", stop="end_turn"),
        {"type": "file-history-snapshot", "messageId": "1", "snapshot": {}},
    ]
    found, rejected = read_all(ADAPTER, write_lines(tmp_path / "both", *records))
    assert rejected == []
    assert [(run.instance_id, len(run.places)) for run, _ in found] == [("s", 4), ("t", 2)]
    labels = {"session": "s", "cwd": "/a", "git_branch": "main", "version": "2.0"}
    assert found[0][0].labels == labels
    assert found[1][1].steps[0].stop_reason == "end_turn"
    assert found[1][1].user_values == {"model": "m", "prompts": "messages"}
    assert found[1][1].reward is None
    assert planned(ADAPTER, tmp_path / "both").about["groups"].startswith("inferred: each session")


def test_a_file_of_titles_alone_has_no_session(tmp_path):
    path = write_lines(tmp_path / "titles", {"type": "summary", "summary": "x"})
    found, ((_, error, _),) = read_all(ADAPTER, path)
    assert found == []
    assert error.rule == "no_calls"


@pytest.mark.parametrize(
    ("damaged", "rule"),
    [
        (b'{"type": "user", "sessionId": "s", "mess', "json_line"),
        (
            b'{"sessionId": "s", "type": "user", "message": {"role": "user", "content": "\xff"}}',
            "json_line",
        ),
        (user("3", 42), "record_type"),
        (user("3", None), "record_type"),
        (reply("3", "words"), "record_type"),
        (reply("3", {"type": "text", "text": 1}), "record_type"),
        ({"type": "user", "sessionId": "s"}, "record_type"),
    ],
)
def test_a_damaged_line_takes_its_session_with_it_and_no_other(damaged, rule, tmp_path):
    others = [user("5", "Yo.", session="t"), reply("6", text("Ya."), session="t")]
    path = write_lines(tmp_path / "s", user("1", "Hi."), reply("2", text("Ho.")), damaged, *others)
    ((run, _),), rejected = read_all(ADAPTER, path)
    assert run.instance_id == "t"
    assert len(rejected) == 3
    assert rule in {r.error.rule for r in rejected}
    assert any(r.error.where.startswith(f"{path}:3") for r in rejected)


def test_a_session_in_which_the_model_wrote_nothing_has_no_calls(tmp_path):
    _, ((_, error, _),) = read_all(ADAPTER, write_lines(tmp_path / "s", user("1", "Hi.")))
    assert error.rule == "no_calls"


def test_without_a_tokenizer_a_session_is_refused_with_the_way_to_give_one(tmp_path):
    path = write_lines(tmp_path / "s", user("1", "Hi."), reply("2", text("Ho.")))
    with pytest.raises(RolloutError, match="no_token_ids") as caught:
        convert_with(ADAPTER, [path], tmp_path)
    assert "--tokenizer" in caught.value.hint


@pytest.mark.slow
@pytest.mark.model
def test_with_a_tokenizer_each_context_is_a_row_that_trains_what_the_model_wrote(
    tmp_path, smollm2_dir, harness_logs
):
    export = harness_logs / "claude_code" / "simonw.sample_session.json"
    choices = {"tokenizer": str(smollm2_dir), "chat_template": save_template(tmp_path)}
    done, table = convert_with(ADAPTER, [export], tmp_path, **choices)
    assert (done.summary.num_records, done.summary.num_written) == (1, 1)
    assert table["token_source"].to_pylist() == ["retokenized"] * 2
    assert table["agent"].to_pylist() == ["main"] * 2
    assert [len(segments) for segments in table["segments"].to_pylist()] == [13, 2]
    assert table["response_text"].to_pylist()[0].startswith("The user wants")


def test_the_real_sessions_are_read(harness_logs):
    logs = harness_logs / "claude_code"
    ((run, session),), rejected = read_all(ADAPTER, logs / "simonw.sample_session.jsonl")
    assert (run.instance_id, len(run.places), rejected) == ("test-session-id", 8, [])
    assert "".join(m["role"][0] for m in session.steps[0].messages) == "uatatua"
    path = logs / "claude-code-log.representative_messages.jsonl"
    ((run, session),), rejected = read_all(ADAPTER, path)
    assert (run.instance_id, len(run.places), rejected) == ("test_session", 12, [])
    assert "".join(m["role"][0] for m in session.steps[0].messages) == "uauatauatau"
    assert session.steps[0].stop_reason == "end_turn"


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
    assert str(rejected[-1].error).startswith(f"{path}:10, message: object miss")


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
        reply("2", text("Ho."), tool_use("a", n=1), parent="1", id="r1", stop="tool_use"),
        user("3", [result("a", [text("x"), {"type": "image"}])], parent="2"),
        reply("4", {"type": "thinking", "thinking": "y"}, text("z"), parent="3", id="r2"),
        boundary("5"),
        user("6", "Sum.", parent="5", isCompactSummary=True),
        reply("7", text("On."), parent="6", isSidechain=True),
        reply("8", text("On."), parent="6"),
        user("9", "Yo.", session="t"),
        reply("10", text("Ya."), session="t"),
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
    records = [user("0", "Hi.", parent=str(parents[0]))]
    for i, parent in enumerate(parents[1:], 1):
        make = user if i % 2 == 0 else reply
        block = f"u{i}" if make is user else text(f"a{i}")
        records.append(make(str(i), block, parent=str(parent)))
    with tempfile.TemporaryDirectory() as folder:
        ((_, run),), _ = read_all(ADAPTER, write_lines(Path(folder) / "s", *records))
    said = {m["content"] for step in run.steps for m in step.messages}
    assert {"a1", "a3", "a5"} <= said
