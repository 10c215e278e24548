import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.codex_cli import ADAPTER, EDITED, LOST, SUMMARIES, UNENDED
from rollout_io.formats.dialects.responses import ENCRYPTED_THOUGHTS, WEB_SEARCHES
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines


def line(kind, **payload):
    return {"timestamp": "2026-06-24T15:03:31.000Z", "type": kind, "payload": payload}


def meta(id="s", **fields):
    return line("session_meta", id=id, **fields)


def item(kind, **fields):
    return line("response_item", type=kind, **fields)


def message(role, text, kind="input_text"):
    return item("message", role=role, content=[{"type": kind, "text": text}])


def chat(*texts):
    """Messages of the user and answers, in turns."""
    return [
        message("assistant", text, "output_text") if i % 2 else message("user", text)
        for i, text in enumerate(texts)
    ]


def answer(text):
    return chat("", text)[1]


def turn(number, text):
    return chat(f"{number}?", text)


def thought(text):
    return item("reasoning", summary=[{"type": "summary_text", "text": text}])


def call(id, name="exec", arguments='{"cmd": "ls"}', **fields):
    return item("function_call", name=name, arguments=arguments, call_id=id, **fields)


def output(id, value):
    return item("function_call_output", call_id=id, output=value)


def ended(number):
    """The end of a call of the model."""
    return line("token_usage_record", response_id=f"r{number}", usage={})


def back(num_turns=1):
    return line("event_msg", type="thread_rolled_back", num_turns=num_turns)


def compacted(summary, *staying, **fields):
    history = [record["payload"] for record in staying] or None
    return line("compacted", message=summary, replacement_history=history, **fields)


META = meta(cwd="/a", originator="codex", cli_version="1")


@pytest.fixture
def read(tmp_path):
    """Messages of each conversation of a session, and the notes about it."""

    def read(*records):
        ((_, result),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
        assert rejected == []
        return [step.messages for step in result.steps], result.notes

    return read


@pytest.fixture
def texts(read):
    """The texts of each conversation of a session, and the notes about it."""

    def texts(*records):
        result, notes = read(*records)
        return [[m["content"] for m in messages] for messages in result], notes

    return texts


def read_files(tmp_path, **files):
    """The trajectories of files, in this order, by the session's name."""
    result, rejected = read_all(ADAPTER, *(write_lines(tmp_path / n, *f) for n, f in files.items()))
    assert rejected == []
    return {run.instance_id: trajectory for run, trajectory in result}


def trained_in(result):
    return [
        message["content"]
        for trajectory in result.values()
        for step in trajectory.steps
        for message in step.messages[step.num_given :]
        if message["role"] == "assistant"
    ]


def test_items_of_one_reply_are_one_message_whose_parallel_calls_and_reasoning_are_kept(read):
    summary = [{"type": "summary_text", "text": "Two calls."}]
    ((prompt, reply, *results, end),), _ = read(
        META,
        message("user", "List both."),
        item("reasoning", summary=summary, content=None, encrypted_content="x"),
        answer("Sure."),
        call("a"),
        item("custom_tool_call", name="patch", input="*** Begin", call_id="b"),
        item("local_shell_call", call_id="c", action={"type": "exec", "command": ["ls"]}),
        output("a", "x"),
        item("custom_tool_call_output", call_id="b", output={"content": "y", "success": True}),
        output("c", [{"type": "input_text", "text": "z"}]),
        # Events say the same again.
        line("event_msg", type="agent_message", message="Done."),
        answer("Done."),
    )
    assert prompt == {"role": "user", "content": "List both."}
    calls = [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in reply.pop("tool_calls")
    ]
    assert reply == {"role": "assistant", "content": "Sure.", "reasoning_content": "Two calls."}
    assert calls == [
        ("a", "exec", {"cmd": "ls"}),
        ("b", "patch", {"input": "*** Begin"}),
        ("c", "local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    expected = [("a", "x"), ("b", "y"), ("c", "z")]
    assert [(m["tool_call_id"], m["content"]) for m in results] == expected
    assert end == {"role": "assistant", "content": "Done."}


def test_reasoning_is_its_text_where_the_model_shows_it_not_the_summary(read):
    shown = thought("short")
    shown["payload"]["content"] = [{"type": "reasoning_text", "text": "long"}]
    question, reply = chat("Hi.", "Ho.")
    (((_, result),), _) = read(question, shown, reply)
    assert result["reasoning_content"] == "long"


def test_instructions_stand_first_and_a_developer_later_speaks_as_a_user(read):
    (messages,), _ = read(
        meta(base_instructions={"text": "You are Codex."}),
        message("developer", "Sandbox off."),
        *chat("Hi.", "Ho."),
        message("developer", "Sandbox on."),
        answer("Noted."),
    )
    assert "".join(m["role"][0] for m in messages) == "ssuaua"
    assert messages[0]["content"] == "You are Codex."


def test_a_compaction_begins_a_new_context_with_what_it_keeps_or_its_summary(texts):
    result, _ = texts(
        meta(base_instructions={"text": "You are Codex."}),
        *chat("Hi.", "Ho."),
        compacted("", message("user", "Hello.")),
        answer("On."),
        compacted("We greeted."),
        *chat("Bye.", "Bye."),
        compacted("We parted."),
        answer("Alone."),
    )
    assert result == [
        ["You are Codex.", "Hi.", "Ho."],
        ["You are Codex.", "Hello.", "On."],
        ["You are Codex.", "Hello.", "We greeted.", "Bye.", "Bye."],
        ["You are Codex.", "Hello.", "Bye.", "We parted.", "Alone."],
    ]


@pytest.mark.parametrize("kind", ["compaction", "context_compaction", "compaction_summary"])
def test_answers_without_their_summary_are_left_out_and_counted(texts, kind):
    encrypted = item(kind, encrypted_content="x")
    result, notes = texts(
        *chat("Hi.", "Ho."),
        compacted("", message("user", "Hi."), encrypted),
        *chat("On.", "On it."),
        call("a"),
        output("a", "x"),
        answer("Done."),
        compacted("All of it.", message("user", "Go.")),
        answer("Gone."),
    )
    assert (result, notes) == ([["Hi.", "Ho."], ["Go.", "Gone."]], {LOST: 2})


@pytest.mark.parametrize(
    ("unknown", "after", "expected"),
    [
        (
            [*chat("Draw.", "I draw."), item("image_generation_call", result="png")],
            [back(), *chat("Write.", "Written.")],
            ["Hi.", "Ho.", "Write.", "Written."],
        ),
        ([item("telepathy_output")], [], ["Hi.", "Ho."]),
    ],
)
def test_an_item_of_an_unknown_type_costs_the_answers_that_depend_on_it(
    unknown, after, expected, texts
):
    result, notes = texts(*chat("Hi.", "Ho."), *unknown, answer("Drawn."), *after)
    assert (result, notes) == ([expected], {LOST: 1})


def test_items_of_new_codex_versions_are_read(read):
    tools = [{"type": "function", "name": "get_weather", "parameters": {}}]
    search = {"call_id": "c1", "execution": "client"}
    hurry = [{"type": "input_text", "text": "Hurry."}]
    ((*messages, last),), notes = read(
        item("additional_tools", role="developer", tools=[{"type": "custom", "name": "exec"}]),
        message("user", "Find a tool."),
        item("configuration_update", reasoning={"effort": "high"}),
        item("tool_search_call", arguments={"query": "weather"}, **search),
        item("tool_search_output", status="completed", tools=tools, **search),
        call("c2", "rain", "{}", namespace="mcp__sky"),
        output("c2", "sunny"),
        item("web_search_call", id="ws", action={"type": "search", "query": "sun"}),
        item("agent_message", author="a", recipient="b", content=hurry),
        item("reasoning", summary=[], encrypted_content="x"),
        item("context_compaction"),
        answer("It is sunny."),
    )
    assert "".join(m["role"][0] for m in messages) == "suatatau"
    assert json.loads(messages[0]["content"]) == [{"type": "custom", "name": "exec"}]
    assert json.loads(messages[3]["content"]) == tools
    names = [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())]
    assert names == ["tool_search", "mcp__sky.rain", "web_search"]
    assert [m["content"] for m in (messages[-1], last)] == ["Hurry.", "It is sunny."]
    assert notes == {WEB_SEARCHES: 1, ENCRYPTED_THOUGHTS: 1}


DOT = "iVBORw0KGgo="


@pytest.mark.parametrize("is_first", [True, False])
def test_a_picture_in_a_message_of_another_agent_is_kept(is_first, read):
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{DOT}"}
    parts = [{"type": "input_text", "text": "Look."}, picture][:: -1 if is_first else 1]
    seen = item("agent_message", author="a", recipient="b", content=parts)
    ((*_, prompt_record, reply),), notes = read(META, message("user", "Go."), seen, answer("I do."))
    source = {"type": "base64", "media_type": "image/png", "data": DOT}
    expected = [{"type": "text", "text": "Look."}, {"type": "image", "source": source}]
    assert prompt_record == {"role": "user", "content": expected[:: -1 if is_first else 1]}
    assert (reply["content"], notes.get(LOST)) == ("I do.", None)


def test_the_summary_of_a_compaction_is_no_answer_and_is_counted(texts):
    result, notes = texts(
        *chat("Hi.", "Ho."),
        ended(1),
        thought("Sum up."),
        answer("A summary."),
        ended(2),
        compacted("A summary.", message("user", "A summary."), compaction_response_id="r2"),
        *chat("Go on.", "On."),
        ended(3),
    )
    assert result == [["Hi.", "Ho."], ["A summary.", "Go on.", "On."]]
    assert notes == {SUMMARIES: 1}


def test_the_end_of_a_call_and_reasoning_after_a_call_end_an_answer(read):
    ((*_, first, second),), _ = read(*chat("Hi.", "Ho."), ended(1), answer("Hm."), ended(2))
    assert [m["content"] for m in (first, second)] == ["Ho.", "Hm."]
    ((_, first, second),), _ = read(*chat("Hi.", "Ho."), call("c1"), thought("More."))
    assert len(first["tool_calls"]) == 1
    assert second["reasoning_content"] == "More."


def test_tools_that_a_client_added_are_tools(tmp_path):
    tools = [{"name": "rain", "description": "Rain.", "input_schema": {"type": "object"}}]
    made = read_files(tmp_path, s=[meta(dynamic_tools=tools), *chat("Hi.", "Ho.")])["s"]
    function = {"name": "rain", "description": "Rain.", "parameters": {"type": "object"}}
    assert made.steps[0].tools == [{"type": "function", "function": function}]


def test_instructions_of_the_model_may_have_been_sent_in_part(read):
    text = {"text": "Be brief.", "provenance": {"type": "model", "model": "m"}}
    (messages,), notes = read(meta(base_instructions=text), *chat("Hi.", "Ho."))
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert notes == {EDITED: 1}


def test_what_was_rolled_back_stays_a_context_of_its_own(texts):
    lines = [*chat("Hi.", "Ho.", "Left?", "Left."), back(), *chat("Lfet?"), back(), back(0)]
    result, _ = texts(*lines, *chat("Right?", "Right."))
    assert result == [["Hi.", "Ho.", "Left?", "Left."], ["Hi.", "Ho.", "Right?", "Right."]]


@pytest.mark.parametrize("unread", [item("telepathy"), item("compaction", encrypted_content="x")])
def test_a_session_whose_answers_all_depend_on_an_unread_item_is_refused_by_its_name(
    tmp_path, unread
):
    question, reply = chat("Hi.", "Ho.")
    path = write_lines(tmp_path / "s", question, unread, reply)
    _, rejected = read_all(ADAPTER, path)
    assert len(rejected) == 3
    error = rejected[1].error
    assert (error.rule, error.where) == ("message", f"{path}:2, payload")
    assert "'telepathy'" in error.got or "encrypted" in error.got
    assert error.hint


@pytest.mark.parametrize(
    "damaged", [b'{"type": "response_item", "payl', b"42", b'{"type": "\xff"}']
)
def test_a_damaged_line_takes_its_session_with_it_and_no_other(damaged, tmp_path):
    question, reply = chat("Hi.", "Ho.")
    bad = write_lines(tmp_path / "bad", META, question, damaged, reply)
    good = write_lines(tmp_path / "good", question, reply)
    ((run, _),), rejected = read_all(ADAPTER, bad, good)
    assert run.instance_id == str(good)
    rules = [r.error.rule for r in rejected]
    assert rules[1:] == ["incomplete_trajectory"] * 3
    assert rules[0] in {"json_line", "record_type"}


def test_the_same_session_twice_is_refused_once(tmp_path):
    files = [write_lines(tmp_path / n, META, *chat("Hi.", "Ho.")) for n in "ab"]
    ((run, _),), rejected = read_all(ADAPTER, *files)
    assert run.instance_id == "s"
    assert {r.error.rule for r in rejected} == {"duplicate_record"}


LOG = b"\n".join(
    json.dumps(record).encode()
    for record in [
        META,
        message("developer", "Be brief."),
        message("user", "Hi."),
        line("turn_context", model="m"),
        thought("x"),
        call("a"),
        output("a", {"content": [{"type": "input_text", "text": "x"}]}),
        item("custom_tool_call", name="patch", input="x", call_id="b"),
        item("local_shell_call", call_id="c", action={"command": ["ls"]}),
        answer("Ho."),
        compacted("x", message("user", "y")),
        back(),
        answer("Ho."),
    ]
)


@given(mutated_lines(LOG))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollout.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)


def test_a_compaction_after_a_damaged_first_item_costs_what_depends_on_it(tmp_path):
    records = [item("telepathy", content="?"), answer("Hello."), compacted("We greeted.")]
    check_lines(ADAPTER, write_lines(tmp_path / "s", META, *records, *chat("Go on.", "On.")))


@pytest.mark.parametrize("opening", [b"{", b"["])
def test_a_damaged_first_line_is_one_line_and_not_a_document(opening, tmp_path):
    path = tmp_path / "rollout.jsonl"
    path.write_bytes(opening + b"\n" + LOG)
    check_lines(ADAPTER, path)


@pytest.mark.parametrize("fork", ["first", "last"])
@pytest.mark.parametrize("num_copied", [1, 2])
def test_an_answer_that_a_fork_repeats_is_trained_on_once(fork, num_copied, tmp_path):
    turns = [*turn(1, "one"), *turn(2, "two")]
    copies = [t | {"payload": t["payload"] | {"id": "new"}} for t in turns[: 2 * num_copied]]
    forked = [meta("f", forked_from_id="s"), META, *copies, *turn(3, "three")]
    files = {"s": [META, *turns], "f": forked}
    result = read_files(tmp_path, **dict(sorted(files.items(), reverse=fork == "last")))
    assert sorted(trained_in(result)) == ["one", "three", "two"]
    assert sum(sum(trajectory.notes.values()) for trajectory in result.values()) == num_copied
    texts = [m["content"] for m in result["f"].steps[-1].messages]
    assert texts == ["1?", "one", *["2?", "two"] * (num_copied - 1), "3?", "three"]


@pytest.mark.parametrize(("forked", "num_shared"), [({"forked_from_id": "s"}, 1), ({}, 0)])
def test_forks_of_a_session_that_is_not_there_share_its_answers_and_others_none(
    forked, num_shared, tmp_path
):
    files = {n: [meta(n, **forked), *turn(1, "one"), *turn(2, n)] for n in "fg"}
    result = read_files(tmp_path, **files)
    assert [sum(trajectory.notes.values()) for trajectory in result.values()] == [0, num_shared]


@pytest.mark.parametrize("first", ["main", "agent"])
def test_the_files_of_sub_agents_belong_to_the_run_of_their_session(first, tmp_path):
    files = {
        "main": [META, *chat("Go.", "Done.")],
        "agent": [meta("a", parent_thread_id="s", agent_nickname="Ada"), *chat("Look.", "A.")],
        "below": [meta("b", parent_thread_id="a", agent_role="scout"), *chat("Here.", "B.")],
        "other": [meta("o", parent_thread_id="gone"), answer("Alone.")],
    }
    result = read_files(tmp_path, **{first: files.pop(first)}, **files)
    assert result.keys() == {"s", "o"}
    steps = [(step.agent, step.messages[-1]["content"]) for step in result["s"].steps]
    assert steps == [(None, "Done."), ("Ada", "A."), ("scout", "B.")]
    assert all(one.unread == {} for one in result.values())


def test_sub_agents_that_name_each_other_are_runs_of_their_own(tmp_path):
    parents = {"a": "b", "b": "a", "c": "c"}
    files = {n: [meta(n, parent_thread_id=p), *chat("Go.", "Done.")] for n, p in parents.items()}
    assert sorted(read_files(tmp_path, **files)) == ["a", "b", "c"]


SETTING = "<permissions instructions>full access</permissions instructions>"
ENVIRONMENT = "<environment_context>\n<cwd>/a</cwd>\n</environment_context>"
ABORTED = "<turn_aborted>\nThe user interrupted the turn.\n</turn_aborted>"


@pytest.mark.parametrize(
    ("between", "num_turns", "kept"),
    [
        ([], 1, ["1?", "one"]),
        ([message("user", ABORTED)], 1, ["1?", "one"]),
        ([message("developer", SETTING), message("user", ENVIRONMENT)], 1, ["1?", "one"]),
        ([message("developer", SETTING)], 2, []),
        ([message("user", "# AGENTS.md instructions for /a\nBe brief.")], 2, []),
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_rollback_counts_what_the_user_wrote_alone(between, num_turns, kept, is_before, texts):
    second = [*between, *turn(2, "two")] if is_before else [*turn(2, "two"), *between]
    found, _ = texts(META, *turn(1, "one"), *second, back(num_turns), *turn(3, "three"))
    assert found[-1] == [*kept, "3?", "three"]


REVIEW = chat("<user_action>review</user_action>", "It is fine.")
INTERRUPTED = [*chat("1?", "Half of"), message("user", ABORTED)]


@pytest.mark.parametrize("written", [REVIEW, INTERRUPTED])
def test_an_answer_that_no_call_ended_is_context_and_counted(written, tmp_path):
    lines = [META, *turn(1, "one"), ended(1), *written, *turn(2, "two"), ended(2)]
    result = read_files(tmp_path, s=lines)
    assert trained_in(result) == ["one", "two"]
    text = written[1]["payload"]["content"][0]["text"]
    assert text in [m["content"] for m in result["s"].steps[-1].messages]
    assert result["s"].notes == {UNENDED: 1}


@pytest.mark.parametrize("more", [[], [call("c1"), output("c1", "x")]])
def test_the_thought_of_a_stream_that_broke_off_is_no_part_of_the_next_answer(more, tmp_path):
    retried = [thought("First."), thought("Second."), answer("two"), *more[:1], ended(2), *more[1:]]
    lines = [META, *turn(1, "one"), ended(1), message("user", "2?"), *retried]
    found = read_files(tmp_path, s=lines)
    thoughts = [
        (step.num_given <= i, m["reasoning_content"])
        for step in found["s"].steps
        for i, m in enumerate(step.messages)
        if "reasoning_content" in m
    ]
    assert thoughts == [(False, "First."), (True, "Second.")]
    assert trained_in(found) == ["one", "two"]


def referring(name, thread, number, *records, **more):
    base = {"thread_id": thread, "end_ordinal_exclusive": number}
    return [meta(name, history_base=base, **more), *records]


def test_a_fork_that_only_refers_begins_with_what_it_refers_to(tmp_path):
    files = {
        "s": [META, *turn(1, "one"), *turn(2, "two")],
        "f": referring("f", "s", 3, *turn(3, "three"), forked_from_id="s"),
        "g": referring("g", "f", 5, *turn(4, "four"), forked_from_id="f"),
    }
    for order in ("sfg", "gfs"):
        result = read_files(tmp_path, **{name: files[name] for name in order})
        assert sorted(trained_in(result)) == ["four", "one", "three", "two"]
        texts = {
            n: [m["content"] for m in trajectory.steps[-1].messages]
            for n, trajectory in result.items()
        }
        assert texts["f"] == ["1?", "one", "3?", "three"]
        assert texts["g"][:2] + texts["g"][-2:] == ["1?", "one", "4?", "four"]


def test_a_fork_without_what_it_refers_to_has_no_answers(tmp_path):
    fork = referring("f", "s", 3, *turn(3, "three"), forked_from_id="s")
    found, rejected = read_all(ADAPTER, write_lines(tmp_path / "f", *fork))
    assert found == []
    assert "'s'" in rejected[0].error.got


def test_the_second_file_of_a_thread_continues_the_first_where_it_was_taken_back(tmp_path):
    first = [META, *turn(1, "one"), *turn(2, "two")]
    result = read_files(tmp_path, a=first, b=referring("s", "s", 3, *turn(3, "three")))
    texts = [[m["content"] for m in step.messages] for step in result["s"].steps]
    assert texts == [["1?", "one", "2?", "two"], ["1?", "one", "3?", "three"]]
    assert trained_in(result) == ["one", "two", "three"]
