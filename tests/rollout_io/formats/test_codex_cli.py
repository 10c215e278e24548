import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.base import Options
from rollout_io.formats.codex_cli import ADAPTER, EDITED, LOST, SUMMARIES, UNENDED
from rollout_io.formats.dialects.responses import ENCRYPTED_THOUGHTS, WEB_SEARCHES
from rollout_io.formats.parsing.notes import UNREAD, noted
from rollout_io.formats.start import Start
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines


def line(kind, **payload):
    return {"timestamp": "2026-06-24T15:03:31.000Z", "type": kind, "payload": payload}


def item(kind, **fields):
    return line("response_item", type=kind, **fields)


def message(role, text, kind="input_text"):
    return item("message", role=role, content=[{"type": kind, "text": text}])


def answer(text):
    return message("assistant", text, "output_text")


def call(id, name="exec", arguments='{"cmd": "ls"}'):
    return item("function_call", name=name, arguments=arguments, call_id=id)


def output(id, value):
    return item("function_call_output", call_id=id, output=value)


UNKNOWN = {
    f"{UNREAD}response_item.payload[{name}]"
    for name in ("image_generation_call", "telepathy_output")
}
META = line("session_meta", id="s", cwd="/a", originator="codex", cli_version="1")


@pytest.fixture
def contexts(tmp_path):
    """Messages of each conversation of a session."""

    def read(*records):
        ((_, trajectory),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
        assert rejected == []
        return [step.messages for step in trajectory.steps]

    return read


@pytest.fixture
def noted_contexts(tmp_path):
    """Messages of each conversation of a session, and the notes about it."""

    def read(*records):
        (run,) = planned(ADAPTER, write_lines(tmp_path / "s", *records)).runs
        with noted() as notes:
            trajectory = ADAPTER.read(run, Options())
        told = {what: n for what, n in notes.items() if what not in UNKNOWN}
        return [step.messages for step in trajectory.steps], told

    return read


def said(messages):
    return [(m["role"], m["content"]) for m in messages]


def test_items_of_one_reply_are_one_message_whose_parallel_calls_and_reasoning_are_kept(contexts):
    summary = [{"type": "summary_text", "text": "Two calls."}]
    ((prompt, reply, *results, end),) = contexts(
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
    assert [(m["tool_call_id"], m["content"]) for m in results] == [
        ("a", "x"),
        ("b", "y"),
        ("c", "z"),
    ]
    assert end == {"role": "assistant", "content": "Done."}


def test_reasoning_is_its_text_where_the_model_shows_it_not_the_summary(contexts):
    thought = {"summary": [{"type": "summary_text", "text": "short"}]}
    thought["content"] = [{"type": "reasoning_text", "text": "long"}]
    ((_, reply),) = contexts(message("user", "Hi."), item("reasoning", **thought), answer("Ho."))
    assert reply["reasoning_content"] == "long"


def test_events_that_say_the_same_again_are_not_read_twice(contexts):
    (messages,) = contexts(
        message("user", "Hi."),
        line("event_msg", type="user_message", message="Hi."),
        line("event_msg", type="agent_message", message="Ho."),
        answer("Ho."),
        line("event_msg", type="token_count", info=None),
    )
    assert said(messages) == [("user", "Hi."), ("assistant", "Ho.")]


def test_instructions_stand_first_and_a_developer_later_speaks_as_a_user(contexts):
    (messages,) = contexts(
        line("session_meta", id="s", base_instructions={"text": "You are Codex."}),
        message("developer", "Sandbox off."),
        message("user", "Hi."),
        answer("Ho."),
        message("developer", "Sandbox on."),
        answer("Noted."),
    )
    roles = ["system", "system", "user", "assistant", "user", "assistant"]
    assert [role for role, _ in said(messages)] == roles
    assert messages[0]["content"] == "You are Codex."


def test_a_compaction_begins_a_new_context_with_the_history_that_was_kept(contexts):
    first, second, third = contexts(
        line("session_meta", id="s", base_instructions={"text": "You are Codex."}),
        message("user", "Hi."),
        answer("Ho."),
        line("compacted", message="", replacement_history=[message("user", "Hello.")["payload"]]),
        answer("On."),
        line("compacted", message="We greeted.", replacement_history=None),
        message("user", "Bye."),
        answer("Bye."),
        line("compacted", message="We parted.", replacement_history=None),
    )
    system = ("system", "You are Codex.")
    assert said(first) == [system, ("user", "Hi."), ("assistant", "Ho.")]
    assert said(second) == [system, ("user", "Hello."), ("assistant", "On.")]
    kept = [system, ("user", "Hello."), ("user", "We greeted."), ("user", "Bye.")]
    assert said(third) == [*kept, ("assistant", "Bye.")]


def test_a_summary_replaces_the_summary_before_it_and_user_messages_stay(contexts):
    (*_, last) = contexts(
        message("user", "One."),
        answer("Ho."),
        line("compacted", message="First summary."),
        message("user", "Two."),
        answer("Ho."),
        line("compacted", message="Second summary."),
        answer("Three."),
    )
    assert [text for _, text in said(last)] == ["One.", "Two.", "Second summary.", "Three."]


ENCRYPTED = [
    {"type": kind, "encrypted_content": "x"} for kind in ("compaction", "context_compaction")
]


@pytest.mark.parametrize(
    "summary", [*ENCRYPTED, {"type": "compaction_summary", "encrypted_content": "x"}]
)
def test_answers_without_their_summary_are_left_out_and_counted(noted_contexts, summary):
    kept = [message("user", "Hi.")["payload"], summary]
    found, notes = noted_contexts(
        message("user", "Hi."),
        answer("Ho."),
        line("compacted", message="", replacement_history=kept),
        message("user", "On."),
        answer("On it."),
        call("a"),
        output("a", "x"),
        answer("Done."),
        line(
            "compacted",
            message="All of it.",
            replacement_history=[message("user", "Go.")["payload"]],
        ),
        answer("Gone."),
    )
    texts = [[text for _, text in said(messages)] for messages in found]
    assert texts == [["Hi.", "Ho."], ["Go.", "Gone."]]
    assert notes == {LOST: 2}


def test_an_item_of_an_unknown_type_costs_the_answers_that_depend_on_it(noted_contexts):
    found, notes = noted_contexts(
        message("user", "Hi."),
        answer("Ho."),
        message("user", "Draw."),
        answer("I draw."),
        item("image_generation_call", id="i", status="completed", result="png"),
        answer("Drawn."),
        line("event_msg", type="thread_rolled_back", num_turns=1),
        message("user", "Write."),
        answer("Written."),
    )
    texts = [[text for _, text in said(messages)] for messages in found]
    assert texts == [["Hi.", "Ho.", "Write.", "Written."]]
    assert notes == {LOST: 1}


def test_an_unknown_output_does_not_cost_the_answer_before_it(noted_contexts):
    found, notes = noted_contexts(
        message("user", "Hi."), answer("Ho."), item("telepathy_output"), answer("Hm.")
    )
    assert [[text for _, text in said(messages)] for messages in found] == [["Hi.", "Ho."]]
    assert notes == {LOST: 1}


def test_items_of_new_codex_versions_are_read(noted_contexts):
    tools = [{"type": "function", "name": "get_weather", "parameters": {}}]
    ((*messages, last),), notes = noted_contexts(
        item("additional_tools", role="developer", tools=[{"type": "custom", "name": "exec"}]),
        message("user", "Find a tool."),
        item("configuration_update", reasoning={"effort": "high"}),
        item("tool_search_call", call_id="c1", execution="client", arguments={"query": "weather"}),
        item(
            "tool_search_output", call_id="c1", status="completed", execution="client", tools=tools
        ),
        item("function_call", namespace="mcp__sky", name="rain", arguments="{}", call_id="c2"),
        output("c2", "sunny"),
        item("web_search_call", id="ws", action={"type": "search", "query": "sun"}),
        item(
            "agent_message",
            author="a",
            recipient="b",
            content=[{"type": "input_text", "text": "Hurry."}],
        ),
        item("reasoning", summary=[], encrypted_content="x"),
        item("context_compaction"),
        answer("It is sunny."),
    )
    assert [m["role"] for m in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant", "user")
    ]
    assert json.loads(messages[0]["content"]) == [{"type": "custom", "name": "exec"}]
    assert json.loads(messages[3]["content"]) == tools
    names = [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())]
    assert names == ["tool_search", "mcp__sky.rain", "web_search"]
    assert messages[-1]["content"] == "Hurry."
    assert last["content"] == "It is sunny."
    assert notes == {WEB_SEARCHES: 1, ENCRYPTED_THOUGHTS: 1}


def usage(name):
    return line("token_usage_record", response_id=name, usage={"input_tokens": 1})


DOT = "iVBORw0KGgo="


@pytest.mark.parametrize("is_first", [True, False])
def test_a_picture_in_a_message_of_another_agent_is_kept(is_first, noted_contexts):
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{DOT}"}
    parts = [{"type": "input_text", "text": "Look."}, picture]
    seen = item("agent_message", author="a", recipient="b", content=parts[:: -1 if is_first else 1])
    ((*_, asked, reply),), notes = noted_contexts(
        META, message("user", "Go."), seen, answer("I do.")
    )
    source = {"type": "base64", "media_type": "image/png", "data": DOT}
    expected = [{"type": "text", "text": "Look."}, {"type": "image", "source": source}]
    assert asked == {"role": "user", "content": expected[:: -1 if is_first else 1]}
    assert (reply["content"], notes.get(LOST)) == ("I do.", None)


def test_the_summary_of_a_compaction_is_no_answer_and_is_counted(noted_contexts):
    found, notes = noted_contexts(
        message("user", "Hi."),
        answer("Ho."),
        usage("r1"),
        item("reasoning", summary=[{"type": "summary_text", "text": "Sum up."}]),
        answer("A summary."),
        usage("r2"),
        line(
            "compacted",
            message="A summary.",
            compaction_response_id="r2",
            replacement_history=[message("user", "A summary.")["payload"]],
        ),
        message("user", "Go on."),
        answer("On."),
        usage("r3"),
    )
    texts = [[text for _, text in said(messages)] for messages in found]
    assert texts == [["Hi.", "Ho."], ["A summary.", "Go on.", "On."]]
    assert notes == {SUMMARIES: 1}


def test_the_end_of_a_call_ends_its_answer(contexts):
    ((*_, first, second),) = contexts(
        message("user", "Hi."), answer("Ho."), usage("r1"), answer("Hm."), usage("r2")
    )
    assert [m["content"] for m in (first, second)] == ["Ho.", "Hm."]


def test_reasoning_after_a_call_begins_another_message(contexts):
    thought = {"type": "summary_text", "text": "More."}
    call = item("function_call", name="ls", arguments="{}", call_id="c1")
    ((_, first, second),) = contexts(
        message("user", "Hi."), answer("Ho."), call, item("reasoning", summary=[thought])
    )
    assert len(first["tool_calls"]) == 1
    assert second["reasoning_content"] == "More."


def test_tools_that_a_client_added_are_tools(tmp_path):
    tools = [{"name": "rain", "description": "Rain.", "input_schema": {"type": "object"}}]
    meta = line("session_meta", id="s", dynamic_tools=tools)
    path = write_lines(tmp_path / "s", meta, message("user", "Hi."), answer("Ho."))
    ((_, made),), _ = read_all(ADAPTER, path)
    function = {"name": "rain", "description": "Rain.", "parameters": {"type": "object"}}
    assert made.steps[0].tools == [{"type": "function", "function": function}]


def test_instructions_of_the_model_may_have_been_sent_in_part(noted_contexts):
    text = {"text": "Be brief.", "provenance": {"type": "model", "model": "m"}}
    meta = line("session_meta", id="s", base_instructions=text)
    (messages,), notes = noted_contexts(meta, message("user", "Hi."), answer("Ho."))
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert notes == {EDITED: 1}


def test_what_was_rolled_back_stays_a_context_of_its_own(contexts):
    def back(n):
        return line("event_msg", type="thread_rolled_back", num_turns=n)

    first, second = contexts(
        message("user", "Hi."),
        answer("Ho."),
        message("user", "Left?"),
        answer("Left."),
        back(1),
        message("user", "Lfet?"),
        back(1),
        back(0),
        message("user", "Right?"),
        answer("Right."),
    )
    assert [text for _, text in said(first)] == ["Hi.", "Ho.", "Left?", "Left."]
    assert [text for _, text in said(second)] == ["Hi.", "Ho.", "Right?", "Right."]


@pytest.mark.parametrize("unread", [item("telepathy"), item("compaction", encrypted_content="x")])
def test_a_session_whose_answers_all_depend_on_an_unread_item_is_refused_by_its_name(
    tmp_path, unread
):
    path = write_lines(tmp_path / "s", message("user", "Hi."), unread, answer("Ho."))
    _, rejected = read_all(ADAPTER, path)
    assert len(rejected) == 3
    error = rejected[1].error
    assert (error.rule, error.where) == ("message", f"{path}:2, payload")
    assert "'telepathy'" in str(error) or "encrypted" in str(error)
    assert "does not contain what the model saw" in error.hint


@pytest.mark.parametrize(
    "damaged", [b'{"type": "response_item", "payl', b"42", b'{"type": "\xff"}']
)
def test_a_damaged_line_takes_its_session_with_it_and_no_other(damaged, tmp_path):
    bad = write_lines(tmp_path / "bad", META, message("user", "Hi."), damaged, answer("Ho."))
    good = write_lines(tmp_path / "good", message("user", "Hi."), answer("Ho."))
    ((run, _),), rejected = read_all(ADAPTER, bad, good)
    assert run.instance_id == str(good)
    rules = [r.error.rule for r in rejected]
    assert rules[1:] == ["incomplete_trajectory"] * 3
    assert rules[0] in {"json_line", "record_type"}


def test_the_same_session_twice_is_refused_once(tmp_path):
    files = [write_lines(tmp_path / n, META, message("user", "Hi."), answer("Ho.")) for n in "ab"]
    plan = planned(ADAPTER, *files)
    assert [run.instance_id for run in plan.runs] == ["s"]
    assert {r.error.rule for r in plan.rejected} == {"duplicate_record"}


def test_the_real_session_is_read(harness_logs):
    path = harness_logs / "codex_cli" / "openagents.codex-rollout.sample.jsonl"
    ((run, session),), rejected = read_all(ADAPTER, path)
    assert (run.instance_id, len(run.places), rejected) == (
        "019efa28-63ad-76a2-8e9b-8a653170604e",
        15,
        [],
    )
    assert run.labels["cwd"] == "/Users/example/work"
    (step,) = session.steps
    assert "".join(m["role"][0] for m in step.messages) == "suatata"
    assert step.messages[2]["reasoning_content"].startswith("I'll inspect the working directory")
    assert step.messages[2]["content"] == "Inspecting the directory."
    assert step.messages[3]["content"].startswith("Process exited with code 0")
    assert session.user_values == {"model": "gpt-5.5"}
    assert session.reward is None


def test_the_real_session_without_messages_is_recognized_and_has_no_calls(harness_logs):
    path = harness_logs / "codex_cli" / "ccusage.session-alpha.jsonl"
    assert ADAPTER.recognizes(Start(path))
    found, rejected = read_all(ADAPTER, path)
    assert found == []
    assert [r.error.rule for r in rejected] == ["no_calls"] * 3


LOG = b"\n".join(
    json.dumps(record).encode()
    for record in [
        META,
        message("developer", "Be brief."),
        message("user", "Hi."),
        line("turn_context", model="m"),
        item("reasoning", summary=[{"type": "summary_text", "text": "x"}]),
        call("a"),
        output("a", {"content": [{"type": "input_text", "text": "x"}]}),
        item("custom_tool_call", name="patch", input="x", call_id="b"),
        item("local_shell_call", call_id="c", action={"command": ["ls"]}),
        answer("Ho."),
        line("compacted", message="x", replacement_history=[message("user", "y")["payload"]]),
        line("event_msg", type="thread_rolled_back", num_turns=1),
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
    damaged = item("telepathy", content="?")
    records = [damaged, answer("Hello."), line("compacted", message="We greeted.")]
    path = write_lines(tmp_path / "s", META, *records, message("user", "Go on."), answer("On."))
    check_lines(ADAPTER, path)


@pytest.mark.parametrize("opening", [b"{", b"["])
def test_a_damaged_first_line_is_one_line_and_not_a_document(opening, tmp_path):
    path = tmp_path / "rollout.jsonl"
    path.write_bytes(opening + b"\n" + LOG)
    check_lines(ADAPTER, path)


def turn(number, said):
    return [message("user", f"{number}?"), answer(said)]


@pytest.mark.parametrize("fork", ["first", "last"])
@pytest.mark.parametrize("num_copied", [1, 2])
def test_an_answer_that_a_fork_repeats_is_trained_on_once(fork, num_copied, tmp_path):
    turns = [*turn(1, "one"), *turn(2, "two")]
    forked = line("session_meta", id="f", forked_from_id="s")
    later = [line["payload"] | {"id": "new"} for line in turns[: 2 * num_copied]]
    copies = [item(**{"kind": fields.pop("type")} | fields) for fields in later]
    paths = [
        write_lines(tmp_path / "s.jsonl", META, *turns),
        write_lines(tmp_path / "f.jsonl", forked, META, *copies, *turn(3, "three")),
    ]
    found, rejected = read_all(ADAPTER, *(paths if fork == "last" else paths[::-1]))
    assert rejected == []
    answers = [
        m["content"]
        for _, made in found
        for step in made.steps
        for m in step.messages[step.num_given :]
        if m["role"] == "assistant"
    ]
    assert sorted(answers) == ["one", "three", "two"]
    assert sum(sum(made.notes.values()) for _, made in found) == num_copied
    by_name = {run.instance_id: made for run, made in found}
    texts = [m["content"] for m in by_name["f"].steps[-1].messages]
    assert texts == ["1?", "one", *["2?", "two"] * (num_copied - 1), "3?", "three"]


def test_two_forks_of_a_session_that_is_not_there_share_its_answers(tmp_path):
    paths = [
        write_lines(
            tmp_path / name,
            line("session_meta", id=name, forked_from_id="s"),
            *turn(1, "one"),
            *turn(2, name),
        )
        for name in ("f", "g")
    ]
    found, _ = read_all(ADAPTER, *paths)
    assert [sum(made.notes.values()) for _, made in found] == [0, 1]


def test_sessions_with_the_same_beginning_that_are_no_forks_are_not_copies(tmp_path):
    paths = [
        write_lines(tmp_path / name, line("session_meta", id=name), *turn(1, "one"))
        for name in ("f", "g")
    ]
    found, rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    assert [made.notes for _, made in found] == [{}, {}]


@pytest.mark.parametrize("first", ["main", "agent"])
def test_the_files_of_sub_agents_belong_to_the_run_of_their_session(first, tmp_path):
    spawned = {"parent_thread_id": "s", "agent_nickname": "Ada"}
    below = {"parent_thread_id": "a", "agent_role": "scout"}
    files = {
        "main": [META, message("user", "Go."), answer("Done.")],
        "agent": [line("session_meta", id="a", **spawned), message("user", "Look."), answer("A.")],
        "below": [line("session_meta", id="b", **below), message("user", "Here."), answer("B.")],
        "other": [line("session_meta", id="o", parent_thread_id="gone"), answer("Alone.")],
    }
    names = [first, *(name for name in files if name != first)]
    paths = [write_lines(tmp_path / name, *files[name]) for name in names]
    made, rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    found = {run.instance_id: found for run, found in made}
    assert found.keys() == {"s", "o"}
    steps = found["s"].steps
    assert [(step.agent, step.messages[-1]["content"]) for step in steps] == [
        (None, "Done."),
        ("Ada", "A."),
        ("scout", "B."),
    ]
    assert all(each.unread == {} for each in found.values())


def test_sub_agents_that_name_each_other_are_runs_of_their_own(tmp_path):
    paths = [
        write_lines(
            tmp_path / name,
            line("session_meta", id=name, parent_thread_id=parent),
            message("user", "Go."),
            answer("Done."),
        )
        for name, parent in (("a", "b"), ("b", "a"), ("c", "c"))
    ]
    made, rejected = read_all(ADAPTER, *paths)
    assert (sorted(run.instance_id for run, _ in made), rejected) == (["a", "b", "c"], [])


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
def test_a_rollback_counts_what_the_user_wrote_alone(between, num_turns, kept, is_before, contexts):
    second = [*between, *turn(2, "two")] if is_before else [*turn(2, "two"), *between]
    back = line("event_msg", type="thread_rolled_back", num_turns=num_turns)
    found = contexts(META, *turn(1, "one"), *second, back, *turn(3, "three"))
    assert [m["content"] for m in found[-1]] == [*kept, "3?", "three"]


def ended(number):
    return line("token_usage_record", response_id=f"r{number}", usage={})


def thought(text):
    return item("reasoning", summary=[{"type": "summary_text", "text": text}])


def trained_in(found):
    return [
        message["content"]
        for _, made in found
        for step in made.steps
        for message in step.messages[step.num_given :]
        if message["role"] == "assistant"
    ]


def test_an_answer_that_codex_wrote_after_a_review_is_context_and_counted(tmp_path):
    review = [message("user", "<user_action>review</user_action>"), answer("It is fine.")]
    lines = [META, *turn(1, "one"), ended(1), *review, *turn(2, "two"), ended(2)]
    found, _ = read_all(ADAPTER, write_lines(tmp_path / "s", *lines))
    assert trained_in(found) == ["one", "two"]
    assert "It is fine." in [m["content"] for m in found[0][1].steps[-1].messages]
    assert found[0][1].notes == {UNENDED: 1}


@pytest.mark.parametrize("more", [[], [call("c1"), output("c1", "x")]])
def test_the_thought_of_a_stream_that_broke_off_is_no_part_of_the_next_answer(more, tmp_path):
    retried = [thought("First."), thought("Second."), answer("two"), *more[:1], ended(2), *more[1:]]
    lines = [META, *turn(1, "one"), ended(1), message("user", "2?"), *retried]
    found, _ = read_all(ADAPTER, write_lines(tmp_path / "s", *lines))
    ((_, made),) = found
    thoughts = [
        (step.num_given <= i, m["reasoning_content"])
        for step in made.steps
        for i, m in enumerate(step.messages)
        if "reasoning_content" in m
    ]
    assert thoughts == [(False, "First."), (True, "Second.")]
    assert trained_in(found) == ["one", "two"]


def test_an_answer_that_was_interrupted_before_its_end_is_context_and_counted(tmp_path):
    lines = [META, message("user", "1?"), answer("Half of"), message("user", ABORTED)]
    lines += [*turn(2, "two"), ended(2)]
    found, _ = read_all(ADAPTER, write_lines(tmp_path / "s", *lines))
    assert trained_in(found) == ["two"]
    assert found[0][1].notes == {UNENDED: 1}


def referring(name, thread, number, *records, **more):
    base = {"thread_id": thread, "end_ordinal_exclusive": number}
    return [line("session_meta", id=name, history_base=base, **more), *records]


def test_a_fork_that_only_refers_begins_with_what_it_refers_to(tmp_path):
    origin = [META, *turn(1, "one"), *turn(2, "two")]
    fork = referring("f", "s", 3, *turn(3, "three"), forked_from_id="s")
    again = referring("g", "f", 5, *turn(4, "four"), forked_from_id="f")
    for order in ((origin, fork, again), (again, fork, origin)):
        paths = [write_lines(tmp_path / f"{i}", *lines) for i, lines in enumerate(order)]
        found, rejected = read_all(ADAPTER, *paths)
        assert rejected == []
        assert sorted(trained_in(found)) == ["four", "one", "three", "two"]
        texts = {
            run.instance_id: [m["content"] for m in made.steps[-1].messages] for run, made in found
        }
        assert texts["f"] == ["1?", "one", "3?", "three"]
        assert texts["g"][:2] == ["1?", "one"]
        assert texts["g"][-2:] == ["4?", "four"]


def test_a_fork_without_what_it_refers_to_has_no_answers(tmp_path):
    fork = referring("f", "s", 3, *turn(3, "three"), forked_from_id="s")
    found, rejected = read_all(ADAPTER, write_lines(tmp_path / "f", *fork))
    assert found == []
    assert "'s'" in rejected[0].error.got


def test_the_second_file_of_a_thread_continues_the_first_where_it_was_taken_back(tmp_path):
    first = write_lines(tmp_path / "a", META, *turn(1, "one"), *turn(2, "two"))
    second = write_lines(tmp_path / "b", *referring("s", "s", 3, *turn(3, "three")))
    found, rejected = read_all(ADAPTER, first, second)
    ((run, made),) = found
    assert (run.instance_id, rejected) == ("s", [])
    texts = [[m["content"] for m in step.messages] for step in made.steps]
    assert texts == [["1?", "one", "2?", "two"], ["1?", "one", "3?", "three"]]
    assert trained_in(found) == ["one", "two", "three"]
