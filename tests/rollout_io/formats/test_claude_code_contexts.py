"""What the model saw in sessions of Claude Code: every text, in order, once."""

import json
import tempfile
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.claude_code import ADAPTER
from rollout_io.formats.contexts import SUMMARIES
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.examples import examples


def line(uuid, parent=None, session="s", **fields):
    return {"uuid": uuid, "parentUuid": parent, "sessionId": session, "isSidechain": False} | fields


def user(uuid, text, parent=None, **fields):
    return line(uuid, parent, type="user", message={"role": "user", "content": text}, **fields)


def reply(uuid, *blocks, parent=None, id=None, stop=None, model="m", **fields):
    message = {"role": "assistant", "content": list(blocks), "id": id, "model": model}
    return line(uuid, parent, type="assistant", message=message | {"stop_reason": stop}, **fields)


def text(value):
    return {"type": "text", "text": value}


def thinking(value):
    return {"type": "thinking", "thinking": value}


def call(id, **arguments):
    return {"type": "tool_use", "id": id, "name": "Bash", "input": arguments}


def result(id, value):
    return {"type": "tool_result", "tool_use_id": id, "content": value}


def boundary(uuid, **metadata):
    fields = {"type": "system", "subtype": "compact_boundary", "logicalParentUuid": "before"}
    return line(uuid, content="Compacted", compactMetadata={"trigger": "auto"} | metadata, **fields)


def system(uuid, parent, subtype, **fields):
    return line(uuid, parent, type="system", subtype=subtype, **fields)


def attached(uuid, parent, attachment, **fields):
    return line(uuid, parent, type="attachment", attachment=attachment, **fields)


def queued(operation, content, **fields):
    return {"type": "queue-operation", "operation": operation, "sessionId": "s"} | (
        {"content": content} | fields
    )


def shown(message):
    """A message as one string."""
    calls = "".join(c["function"]["arguments"] for c in message.get("tool_calls", ()))
    return f"{message.get('reasoning_content', '')}{message['content']}{calls}"


def rows(trajectory):
    """(prompt, rest) of each conversation, as strings."""
    made = []
    for step in trajectory.steps:
        texts = [shown(message) for message in step.messages]
        made.append((texts[: step.num_given], texts[step.num_given :]))
    return made


@pytest.fixture
def session(tmp_path):
    """The trajectory of the only session of some lines."""

    def read(*records):
        ((_, trajectory),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
        assert rejected == []
        return trajectory

    return read


BEFORE = [
    user("u1", "Count."),
    reply("a1", text("Three."), parent="u1", id="m1"),
    user("u2", "Remember zebra.", parent="a1"),
    reply("a2", text("Noted."), parent="u2", id="m2"),
]
KEPT = {"preservedMessages": {"anchorUuid": "s1", "uuids": ["u2", "a2"]}}
SEGMENT = {"preservedSegment": {"headUuid": "u2", "anchorUuid": "s1", "tailUuid": "a2"}}
SUMMARY = user("s1", "Summary.", parent="b1", isCompactSummary=True)
ANSWERED = (["Summary.", "Remember zebra.", "Noted."], ["Which?", "Zebra."])


@pytest.mark.parametrize("kept", [KEPT, SEGMENT, KEPT | SEGMENT])
@pytest.mark.parametrize("parent", ["s1", "a2"])
@pytest.mark.parametrize("copies", [[], BEFORE[2:]])
def test_the_messages_that_a_compaction_keeps_follow_the_summary_as_context(
    kept, parent, copies, session
):
    made = session(
        *BEFORE,
        boundary("b1", **kept),
        SUMMARY,
        *copies,
        user("u3", "Which?", parent=parent),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    assert rows(made) == [([], ["Count.", "Three.", "Remember zebra.", "Noted."]), ANSWERED]


@pytest.mark.parametrize("logical", [None, "a2", "lost"])
@pytest.mark.parametrize("of_boundary", [None, "a2", "u1", "lost"])
@pytest.mark.parametrize("of_summary", ["b1", None, "a2", "lost"])
def test_a_compaction_begins_a_context_whatever_its_parents(
    logical, of_boundary, of_summary, session
):
    made = session(
        *BEFORE,
        boundary("b1") | {"parentUuid": of_boundary, "logicalParentUuid": logical},
        SUMMARY | {"parentUuid": of_summary},
        user("u3", "Which?", parent="s1"),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    before = ["Count.", "Three.", "Remember zebra.", "Noted."]
    assert rows(made) == [([], before), ([], ["Summary.", "Which?", "Zebra."])]


@pytest.mark.parametrize("parent", [None, "a2", "lost"])
def test_a_summary_without_a_boundary_begins_a_context_whatever_its_parent(parent, session):
    made = session(
        *BEFORE,
        SUMMARY | {"parentUuid": parent},
        user("u3", "Which?", parent="s1"),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    assert [rest for _, rest in rows(made)][1:] == [["Summary.", "Which?", "Zebra."]]


@pytest.mark.parametrize("kept", [KEPT, SEGMENT])
def test_messages_that_a_compaction_keeps_may_be_logged_after_its_summary_alone(kept, session):
    made = session(
        boundary("b1", **kept),
        SUMMARY,
        BEFORE[2] | {"parentUuid": "s1"},
        BEFORE[3],
        user("u3", "Which?", parent="a2"),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    assert rows(made) == [ANSWERED]


def test_messages_kept_before_a_summary_precede_it(session):
    kept = {"preservedMessages": {"anchorUuid": "b1", "uuids": ["u1", "a1"]}}
    made = session(
        *BEFORE,
        boundary("b1", **kept),
        SUMMARY,
        user("u3", "Which?", parent="s1"),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    assert rows(made)[1] == (["Count.", "Three."], ["Summary.", "Which?", "Zebra."])


def test_answers_after_a_compaction_whose_kept_messages_are_missing_are_counted(session):
    kept = {"preservedMessages": {"anchorUuid": "s1", "uuids": ["u2", "lost"]}}
    after = [user("u3", "Which?", parent="s1"), reply("a3", text("Zebra."), parent="u3", id="m3")]
    made = session(*BEFORE, boundary("b1", **kept), SUMMARY, *after)
    assert rows(made) == [([], ["Count.", "Three.", "Remember zebra.", "Noted."])]
    assert made.notes == {
        "answers after a compaction that keeps messages which are not in the log": 1,
        SUMMARIES: 1,
    }


QUEUED = {"type": "queued_command", "prompt": "Also rename it.", "commandMode": "prompt"}
RENDERED = {
    "rendered": [{"content": "While you worked: Also rename it."}],
    "renderedRole": "system",
}


@pytest.mark.parametrize(
    ("records", "seen"),
    [
        ([attached("q", "u2", QUEUED)], "Also rename it."),
        ([attached("q", "u2", QUEUED | {"prompt": [text("Also"), text("this.")]})], "Also\nthis."),
        ([attached("q", "u2", QUEUED, **RENDERED)], "While you worked: Also rename it."),
        (
            [
                queued("remove", "Also rename it.", reason="absorbed_mid_turn"),
                attached("q", "u2", QUEUED, **RENDERED),
            ],
            "While you worked: Also rename it.",
        ),
        ([queued("remove", "Go left.", reason="absorbed_mid_turn")], "Go left."),
    ],
)
def test_a_queued_message_is_context_where_it_was_sent(records, seen, session):
    made = session(
        user("u1", "Fix."),
        reply("a1", call("t1"), parent="u1", id="m1"),
        queued("enqueue", "Also rename it."),
        user("u2", [result("t1", "failed")], parent="a1"),
        *records,
        reply("a2", text("Renamed."), parent="q", id="m2"),
    )
    assert rows(made) == [([], ["Fix.", "{}", "failed", seen, "Renamed."])]
    assert made.notes == {}


def test_what_may_have_been_sent_is_counted(session):
    made = session(
        user("u1", "Fix."),
        attached("x", "u1", {"type": "skill_listing", "content": "..."}),
        queued("enqueue", "Stop."),
        queued("enqueue", "Left?"),
        queued("enqueue", "Right?"),
        queued("remove", "Stop."),
        queued("remove", "Left?", reason="cancelled"),
        queued("dequeue", None),
        reply("a1", text("Done."), parent="x", id="m1"),
        user("u2", "Right?", parent="a1"),
        reply("a2", text("Right."), parent="u2", id="m2"),
    )
    assert made.notes == {
        "attachments without the text that was sent (skill_listing)": 1,
        "queued messages of which the log does not tell whether they were sent": 1,
    }


def test_texts_that_the_harness_sends_are_context(session):
    shape = {"system": [text("Be brief.")], "tools": [{"name": "Bash", "input_schema": {"a": 1}}]}
    made = session(
        user("u1", "Hi."),
        attached("x", "u1", {"type": "date"}, rendered=[{"content": "It is May."}]),
        attached("y", "x", {"type": "session_context"}),
        {"type": "api-request-shape", "sessionId": "s", "shape": shape},
        reply("a1", call("t1"), parent="y", id="m1"),
        user("u2", [result("t1", "very long")], parent="a1"),
        {
            "type": "content-replacement",
            "sessionId": "s",
            "replacements": [{"kind": "tool-result", "toolUseId": "t1", "replacement": "short"}],
        },
        system("l", "u2", "local_command", content="<command-name>/cost</command-name>"),
        reply("a2", text("Ho."), parent="l", id="m2"),
    )
    command = "<command-name>/cost</command-name>"
    assert rows(made) == [([], ["Be brief.", "Hi.", "It is May.", "{}", "short", command, "Ho."])]
    (step,) = made.steps
    assert step.messages[0]["role"] == "system"
    assert step.tools == [
        {"type": "function", "function": {"name": "Bash", "parameters": {"a": 1}}}
    ]
    assert made.notes == {}


def test_a_message_that_the_harness_wrote_for_the_model_is_context_alone(session):
    made = session(
        user("u1", "Hi."),
        reply("a1", text("Ho."), parent="u1", id="m1"),
        user("u2", "Continue.", parent="a1", isMeta=True),
        reply("a2", text("No response requested."), parent="u2", id="m2", model="<synthetic>"),
        user("u3", "And?", parent="a2"),
        reply("a3", text("Yes."), parent="u3", id="m3"),
        reply("a4", text("Failed"), parent="a3", model="<synthetic>", isApiErrorMessage=True),
    )
    given = ["Hi.", "Ho.", "Continue.", "No response requested."]
    assert rows(made) == [([], ["Hi.", "Ho.", "Continue."]), (given, ["And?", "Yes."])]


@pytest.mark.parametrize(
    ("states", "final"),
    [
        ([[text("Hello")], [text("Hello, friend.")]], ["Hello, friend."]),
        ([[text("Hi.")], [text("Hi.")]], ["Hi."]),
        ([[text("Hi there.")], [text("Hi")]], ["Hi there."]),
        ([[thinking("a")], [thinking("a"), text("b")]], ["ab"]),
        ([[thinking("a")], [text("b")], [thinking("a"), text("bc")]], ["abc"]),
        ([[text("a"), call("t")], [text("a"), call("t", n=1)]], ['a{"n":1}']),
        ([[call("t")], [call("t", n=1)]], ['{"n":1}']),
        ([[call("t", n=1)], [call("t")]], ['{"n":1}']),
        ([[text("a")], [call("t")], [call("t", n=1)], [call("v")]], ['a{"n":1}{}']),
        ([[text("a")], [call("t")], [text("a")]], ["a{}", "a"]),
        ([[thinking("a")], [call("t")], [thinking("b")], [call("v")]], ["a{}", "b{}"]),
        ([[text("a"), thinking("b"), text("c")]], ["a", "bc"]),
    ],
)
def test_of_the_states_of_a_block_the_most_complete_counts_and_blocks_keep_their_order(
    states, final, session
):
    replies = [
        reply(f"a{i}", *blocks, parent=f"a{i - 1}" if i else "u1", id="m1")
        for i, blocks in enumerate(states)
    ]
    assert rows(session(user("u1", "Go."), *replies)) == [([], ["Go.", *final])]


def test_a_block_index_tells_states_from_blocks(session):
    made = session(
        user("u1", "Go."),
        reply("a1", text("la"), parent="u1", id="m1", apiBlockIndex=0),
        reply("a2", text("la"), parent="a1", id="m1", apiBlockIndex=1),
        reply("a3", text("lala"), parent="a2", id="m1", apiBlockIndex=1),
    )
    assert rows(made) == [([], ["Go.", "la\nlala"])]


def test_an_exchange_that_is_logged_twice_is_trained_on_once(session):
    made = session(
        user("u1", "Capital?"),
        reply("a1", thinking("Peru."), parent="u1", id="m1"),
        reply("b1", text("Lima."), parent="a1", id="m1"),
        user("u1x", "Capital?"),
        reply("a1x", thinking("Peru."), parent="u1x", id="m1"),
        reply("b1x", text("Lima."), parent="a1x", id="m1"),
        user("u2", "Population?", parent="b1x"),
        reply("a2", text("Ten million."), parent="u2", id="m2"),
    )
    first = ["Capital?", "Peru.Lima."]
    assert rows(made) == [([], first), (first, ["Population?", "Ten million."])]


@pytest.mark.parametrize(
    "marks",
    [
        [system("x", "a0", "model_refusal_fallback", retractedMessageUuids=["a0", "b0"])],
        [system("x", "a0", "api_refusal", retractedMessageUuids=["a0", "b0"])],
        [],
    ],
)
def test_a_retracted_answer_neither_trains_nor_is_context(marks, session):
    own = {} if marks else {"supersedesUuids": ["a0", "b0"]}
    made = session(
        user("u1", "Do X."),
        reply("a0", text("Partial"), parent="u1", id="m0"),
        reply("b0", call("t0"), parent="a0", id="m0"),
        *marks,
        reply("a1", text("Here."), parent="u1", id="m1", **own),
        user("u2", "More.", parent="a1"),
        reply("a2", text("There."), parent="u2", id="m2"),
    )
    assert rows(made) == [([], ["Do X.", "Here.", "More.", "There."])]


def test_a_list_of_retracted_lines_has_the_first_characters_of_their_uuids(session):
    uuid = "0123abcd-0000-4000-8000-00000000000"
    made = session(
        user("u1", "Do X."),
        reply(uuid + "1", text("Partial"), parent="u1", id="m0"),
        system("x", "u1", "model_refusal_fallback", retractedMessageUuids=[uuid + "9"]),
        reply("a1", text("Here."), parent="u1", id="m1"),
    )
    assert rows(made) == [([], ["Do X.", "Here."])]


def test_a_second_answer_to_a_message_does_not_follow_the_first(session):
    made = session(
        user("u1", "Do X."),
        reply("a0", text("One."), parent="u1", id="m0"),
        reply("a1", text("Two."), parent="u1", id="m1"),
    )
    assert rows(made) == [([], ["Do X.", "One."]), ([], ["Do X.", "Two."])]


@pytest.mark.parametrize("content", ["image", "a_new_type"])
def test_content_that_is_not_text_costs_the_answers_after_it_alone(content, session):
    other = [{"type": content, "source": {}}, text("See?")]
    made = session(
        *BEFORE,
        user("u3", other, parent="a2"),
        reply("a3", text("Yes."), parent="u3", id="m3"),
        user("c1", "Look.", isSidechain=True, agentId="x"),
        reply("c2", text("Seen."), parent="c1", id="m4", isSidechain=True, agentId="x"),
        user("u4", "Other?", parent="a1"),
        reply("a4", text("Other."), parent="u4", id="m5"),
    )
    assert [rest[-1] for _, rest in rows(made)] == ["Noted.", "Seen.", "Other."]
    assert made.notes == {f"answers after content of type '{content}'": 1}


def test_an_answer_with_an_unknown_block_costs_itself_and_what_follows(session):
    made = session(
        *BEFORE,
        user("u3", "Search.", parent="a2"),
        reply("a3", {"type": "server_tool_use", "id": "x"}, parent="u3", id="m3"),
        user("u4", "So?", parent="a3"),
        reply("a4", text("So."), parent="u4", id="m4"),
    )
    assert [rest[-1] for _, rest in rows(made)] == ["Search."]
    assert made.notes == {"answers after content of type 'server_tool_use'": 2}


def test_a_session_that_begins_with_an_image_is_refused_by_the_name_of_the_part(tmp_path):
    records = [user("u1", [{"type": "image"}]), reply("a1", text("A cat."), parent="u1", id="m1")]
    _, rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
    assert {(r.error.rule, r.error.where) for r in rejected} == {("message", f"{tmp_path / 's'}:1")}
    assert "'image'" in str(rejected[0].error)
    assert rejected[0].error.hint


def test_a_loaded_tool_is_a_text_and_a_change_of_model_is_none(session):
    loaded = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    made = session(
        user("u1", "Fetch."),
        reply("a0", {"type": "fallback", "from": {"model": "a"}, "to": {}}, parent="u1", id="m0"),
        reply("a1", call("t1"), parent="a0", id="m1"),
        user("u2", [result("t1", loaded)], parent="a1"),
        reply("a2", text("Ready."), parent="u2", id="m2"),
    )
    assert rows(made) == [([], ["Fetch.", "{}", "Loaded tool: WebFetch", "Ready."])]


SIDE = {"isSidechain": True, "agentId": "h1"}
AUDIT = [
    user("u1", "Audit."),
    reply("a1", text("Look."), call("t0"), parent="u1", id="m1"),
    user("r1", [result("t0", "a.py")], parent="a1"),
    reply("a2", call("t1"), parent="r1", id="m2"),
    user("r2", [result("t1", "fine")], parent="a2"),
    reply("a3", text("Good."), parent="r2", id="m3"),
]


def fork_file(folder, *records):
    """A file of a sub-agent of session s."""
    (folder / "s" / "subagents").mkdir(parents=True)
    return write_lines(folder / "s" / "subagents" / "agent-h1.jsonl", *records)


def the_fork(trajectory):
    return next(
        row
        for row, step in zip(rows(trajectory), trajectory.steps, strict=True)
        if step.agent == "sidechain"
    )


REF = {"type": "fork-context-ref", "agentId": "h1", "parentSessionId": "s", "parentLastUuid": "r1"}


@pytest.mark.parametrize("own", ["s", "of-its-own"])
@pytest.mark.parametrize(
    "inherited",
    [
        [record | SIDE for record in AUDIT[:3]],
        [REF],
        [REF, reply("copy", call("t1"), id="m2") | SIDE],
    ],
)
@pytest.mark.parametrize("first", ["main", "fork"])
def test_a_forked_sub_agent_inherits_and_belongs_to_its_parents_session(
    inherited, own, first, tmp_path
):
    named = [r | {"sessionId": own} if "sessionId" in r else r for r in inherited]
    task = [
        user("f1", "Check a.py.", parent="r1", session=own, **SIDE),
        reply("f2", text("Fine."), parent="f1", id="m9", session=own, **SIDE),
    ]
    paths = [write_lines(tmp_path / "s.jsonl", *AUDIT), fork_file(tmp_path, *named, *task)]
    ((run, made),), rejected = read_all(ADAPTER, *(paths if first == "main" else paths[::-1]))
    assert (run.instance_id, rejected) == ("s", [])
    prompt, rest = the_fork(made)
    assert [*prompt, *rest][:3] == ["Audit.", "Look.{}", "a.py"]
    assert rest[-2:] == ["Check a.py.", "Fine."]
    answers = [m for step in made.steps for m in step.messages[step.num_given :] if is_answer(m)]
    assert sorted(map(shown, answers)) == ["Fine.", "Good.", "Look.{}", "{}"]


def test_a_forked_sub_agent_with_a_session_of_its_own_is_known_by_the_lines_it_repeats(tmp_path):
    task = [
        user("f1", "Check a.py.", parent="r1", **SIDE),
        reply("f2", text("Fine."), parent="f1", id="m9", **SIDE),
    ]
    fork = [record | SIDE | {"sessionId": "own"} for record in [*AUDIT[:3], *task]]
    paths = [write_lines(tmp_path / "s", *AUDIT), write_lines(tmp_path / "agent-h1", *fork)]
    ((run, made),), rejected = read_all(ADAPTER, *paths)
    assert (run.instance_id, rejected) == ("s", [])
    assert the_fork(made) == (["Audit.", "Look.{}"], ["a.py", "Check a.py.", "Fine."])


def test_a_fork_whose_parent_is_not_in_the_log_is_counted(tmp_path):
    lost = REF | {"parentLastUuid": "lost"}
    fork = [user("f1", "Check.", **SIDE), reply("f2", text("Fine."), parent="f1", id="m9", **SIDE)]
    paths = [write_lines(tmp_path / "s.jsonl", *AUDIT), fork_file(tmp_path, lost, *fork)]
    ((_, made),), _ = read_all(ADAPTER, *paths)
    assert [step.agent for step in made.steps] == ["main"]
    reason = "answers of a forked sub-agent whose parent's messages are not in the log"
    assert made.notes == {reason: 1}


TRIP = [
    user("u1", "Plan."),
    reply("a1", text("North."), parent="u1", id="m1"),
    user("u2", "Then?", parent="a1"),
    reply("a2", text("West."), parent="u2", id="m2"),
]
FOOD = [user("u9", "Food?", parent="a1"), reply("a9", text("Rice."), parent="u9", id="m9")]


def in_session(name, records, *, renamed=False):
    made = [record | {"sessionId": name} for record in records]
    if renamed:
        new = {record["uuid"]: f"{name}-{record['uuid']}" for record in made}
        made = [
            record
            | {
                "uuid": new[record["uuid"]],
                "parentUuid": new.get(record["parentUuid"]),
                "forkedFrom": {"sessionId": "a", "messageUuid": record["uuid"]},
            }
            for record in made
        ]
    return made


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("num_copied", [2, 4])
@pytest.mark.parametrize("first", ["origin", "fork"])
def test_a_sample_that_two_sessions_have_is_trained_on_once(renamed, num_copied, first, tmp_path):
    prefix = TRIP[:num_copied]
    fork = in_session("b", [*prefix, *FOOD], renamed=renamed)
    paths = [
        write_lines(tmp_path / "a.jsonl", *in_session("a", TRIP)),
        write_lines(tmp_path / "b.jsonl", *fork),
    ]
    found, rejected = read_all(ADAPTER, *(paths if first == "origin" else paths[::-1]))
    assert rejected == []
    made = [trajectory for _, trajectory in found]
    answers = [
        shown(m)
        for each in made
        for step in each.steps
        for m in step.messages[step.num_given :]
        if is_answer(m)
    ]
    assert sorted(answers) == ["North.", "Rice.", "West."]
    assert sum(sum(each.notes.values()) for each in made) == num_copied // 2


def test_sessions_that_only_use_the_same_uuids_are_not_copies(tmp_path):
    other = [user("u1", "Plan."), reply("a1", text("South."), parent="u1", id="m7")]
    paths = [
        write_lines(tmp_path / "a.jsonl", *in_session("a", TRIP)),
        write_lines(tmp_path / "b.jsonl", *in_session("b", other)),
    ]
    found, _ = read_all(ADAPTER, *paths)
    assert all(trajectory.notes == {} for _, trajectory in found)


def test_a_session_without_an_answer_of_its_own_is_rejected_as_a_copy(tmp_path):
    paths = [
        write_lines(tmp_path / "a.jsonl", *in_session("a", TRIP)),
        write_lines(tmp_path / "b.jsonl", *in_session("b", TRIP)),
    ]
    ((run, _),), rejected = read_all(ADAPTER, *paths)
    assert run.instance_id == "a"
    assert {r.error.rule for r in rejected} == {"duplicate_record"}


class Timed(list):
    """Lines with the time of their appending."""

    numbers = count()

    def append(self, record):
        at = f"2026-01-01T00:00:00.{next(self.numbers):09}Z"
        super().append({"timestamp": at} | record)


class Harness:
    """A session that is logged as Claude Code logs it, with what the model saw before each answer.

    Attributes:
        log: Lines of the main agent.
        side: Lines of forked sub-agents.
        context: (uuid, text) of each message of the current context.
        seen: Texts before each answer.
    """

    def __init__(self):
        self.log, self.side, self.context, self.seen = Timed(), Timed(), [], {}
        self.numbers, self.tail = count(), None

    def _add(self, make, *arguments, log=None, **fields):
        uuid = f"l{next(self.numbers)}"
        (self.log if log is None else log).append(
            make(uuid, *arguments, parent=self.tail, **fields)
        )
        self.tail = uuid
        return uuid

    def say(self):
        said = f"user {next(self.numbers)}"
        self.context.append((self._add(user, said), said))

    def answer(self, style):
        number = next(self.numbers)
        said, id = f"answer {number}.", f"m{number}"
        self.seen[said] = [each for _, each in self.context]
        states = {"whole": [said], "growing": [said[:4], said], "twice": [said, said]}[style]
        for state in states:
            uuid = self._add(reply, text(state), id=id)
        self.context.append((uuid, said))

    def queue(self):
        said = f"queued {next(self.numbers)}"
        uuid = f"l{next(self.numbers)}"
        command = {"type": "queued_command", "prompt": said}
        self.log.append(queued("enqueue", said))
        self.log.append(queued("remove", said, reason="absorbed_mid_turn"))
        self.log.append(attached(uuid, self.tail, command))
        self.tail = uuid
        self.context.append((uuid, said))

    def compact(self, num_kept, parents, *, by_list, to_anchor):
        kept = self.context[len(self.context) - num_kept :] if num_kept else []
        edge, summary = f"l{next(self.numbers)}", f"l{next(self.numbers)}"
        said = f"summary {summary}"
        uuids = [uuid for uuid, _ in kept]
        segment = {"headUuid": uuids[0], "tailUuid": uuids[-1]} if kept else {}
        listed = {"preservedMessages": {"anchorUuid": summary, "uuids": uuids}}
        ends = {"preservedSegment": {"anchorUuid": summary} | segment}
        of_edge, of_summary = ({"none": None, "end": self.tail, "edge": edge}[p] for p in parents)
        edged = boundary(edge, **((listed if by_list else ends) if kept else {}))
        self.log.append(edged | {"parentUuid": of_edge})
        self.log.append(user(summary, said, parent=of_summary, isCompactSummary=True))
        self.context = [(summary, said), *kept]
        self.tail = uuids[-1] if kept and not to_anchor else summary

    def retract(self):
        tail = self.tail
        number = next(self.numbers)
        uuid = self._add(reply, text(f"partial {number}"), id=f"m{number}")
        mark = f"l{next(self.numbers)}"
        retracted = {"retractedMessageUuids": [uuid]}
        self.log.append(system(mark, uuid, "model_refusal_fallback", **retracted))
        self.tail = tail

    def fork(self, *, copies):
        if not self.context or self.tail != self.context[-1][0]:
            return
        tail, number = self.tail, next(self.numbers)
        agent = {"isSidechain": True, "agentId": f"f{number}"}
        if copies:
            lines = {record.get("uuid"): record for record in self.log}
            uuids = [None, *(uuid for uuid, _ in self.context)]
            for parent, uuid in pairwise(uuids):
                self.side.append(lines[uuid] | agent | {"parentUuid": parent})
        else:
            self.side.append(REF | {"agentId": f"f{number}", "parentLastUuid": tail})
        said = f"answer {number} of a fork."
        self._add(user, f"task {number}", log=self.side, **agent)
        self._add(reply, text(said), log=self.side, id=f"m{number}", **agent)
        self.seen[said] = [*(each for _, each in self.context), f"task {number}"]
        self.tail = tail


actions = st.one_of(
    st.just(("say",)),
    st.tuples(st.just("answer"), st.sampled_from(["whole", "growing", "twice"])),
    st.just(("queue",)),
    st.tuples(
        st.just("compact"),
        st.integers(0, 3),
        st.tuples(st.sampled_from(["none", "end"]), st.sampled_from(["edge", "none", "end"])),
        st.booleans(),
        st.booleans(),
    ),
    st.just(("retract",)),
    st.tuples(st.just("fork"), st.booleans()),
)


@given(st.lists(actions, max_size=12))
@settings(deadline=None, max_examples=examples(150))
def test_every_text_that_the_model_saw_is_before_its_answer_in_order_once(script):
    harness = Harness()
    harness.say()
    harness.answer("whole")
    for name, *choices in script:
        if name == "compact":
            kept, parents, by_list, to_anchor = choices
            kept = min(kept, len(harness.context))
            harness.compact(kept, parents, by_list=by_list, to_anchor=to_anchor)
        elif name == "fork":
            harness.fork(copies=choices[0])
        elif name == "answer":
            harness.say()
            harness.answer(*choices)
        else:
            getattr(harness, name)()
    with tempfile.TemporaryDirectory() as folder:
        main = write_lines(Path(folder) / "s.jsonl", *harness.log)
        ((_, made),), rejected = read_all(ADAPTER, main, fork_file(Path(folder), *harness.side))
    assert rejected == []
    num_compactions = sum(name == "compact" for name, *_ in script)
    assert made.notes == ({SUMMARIES: num_compactions} if num_compactions else {})
    found = {}
    for step in made.steps:
        texts = [shown(message) for message in step.messages]
        for i, message in enumerate(step.messages):
            if i >= step.num_given and is_answer(message):
                assert texts[i] not in found
                found[texts[i]] = texts[:i]
    assert found == harness.seen, json.dumps(harness.log)


def test_a_fork_of_a_kept_message_without_times_is_left_out_and_counted(tmp_path):
    kept = {"preservedSegment": {"anchorUuid": "s", "headUuid": "a", "tailUuid": "a"}}
    log = [
        user("u", "Hi."),
        reply("a", text("Ho."), parent="u"),
        boundary("b", **kept),
        user("s", "Summary.", parent="b", isCompactSummary=True),
    ]
    side = [
        REF | {"agentId": "f", "parentLastUuid": "a"},
        user("t", "Task.", parent="a", isSidechain=True, agentId="f"),
        reply("o", text("Done."), parent="t", isSidechain=True, agentId="f"),
    ]
    paths = write_lines(tmp_path / "s.jsonl", *log), fork_file(tmp_path, *side)
    ((_, made),), rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    reason = "answers of a forked sub-agent whose log does not tell which context it inherited"
    assert made.notes == {reason: 1, SUMMARIES: 1}
    assert rows(made) == [([], ["Hi.", "Ho."])]


def test_the_picture_of_a_file_is_sent_and_other_attachments_are_counted_by_kind(session):
    data = {"type": "image", "file": {"base64": "iVBORw0KGgo=", "type": "image/png"}}
    made = session(
        user("u1", "Look at @a.png"),
        attached("x", "u1", {"type": "date"}, rendered=[{"content": "It is May."}]),
        attached("y", "x", {"type": "file", "filename": "/w/a.png", "content": data}),
        attached("z", "y", {"type": "todo_reminder", "content": []}),
        attached("w", "z", {"type": "session_context"}),
        reply("a1", text("A dot."), parent="w", id="m1"),
    )
    (step,) = made.steps
    lead, picture = step.messages[2]["content"]
    assert '{"file_path":"/w/a.png"}' in lead["text"]
    assert picture["source"] == {
        "type": "base64",
        "media_type": "image/png",
        "data": "iVBORw0KGgo=",
    }
    assert made.notes == {"attachments without the text that was sent (todo_reminder)": 1}


def test_what_says_where_the_text_of_a_hook_comes_from_is_sent_with_it(session):
    made = session(
        user("u1", "Go."),
        reply("a1", text("On."), parent="u1", id="m1"),
        user("u2", "Keep going.", parent="a1", isMeta=True, hookTextLead="A hook says:"),
        reply("a2", text("Done."), parent="u2", id="m2"),
    )
    assert rows(made) == [([], ["Go.", "On.", "A hook says:\nKeep going.", "Done."])]
    assert made.unread == {}


def test_a_mark_of_a_message_that_is_not_known_is_reported_and_facts_about_calls_are_not(session):
    made = session(
        user("u1", "Go.", mcpCallNotReadOnly="no_hint", isHidden=True),
        reply("a1", text("On."), parent="u1", attributionMcpServer="z", attributionMcpTool="t"),
        system("l", "a1", "local_command", content="x", commandRun={"command": "usage"}, level="i"),
    )
    assert made.unread == {"user.isHidden": 1}


@pytest.mark.parametrize("kept", [KEPT, SEGMENT])
def test_what_cannot_be_read_is_not_read_again_where_a_compaction_keeps_it(kept, session):
    made = session(
        *BEFORE[:2],
        user("u2", [{"type": "a_new_type"}], parent="a1"),
        BEFORE[3],
        boundary("b1", **kept),
        SUMMARY,
        user("u3", "Which?", parent="s1"),
        reply("a3", text("Zebra."), parent="u3", id="m3"),
    )
    assert rows(made) == [([], ["Count.", "Three."])]
    assert made.notes == {"answers after content of type 'a_new_type'": 2, SUMMARIES: 1}


def test_a_fork_of_what_cannot_be_read_is_left_out_and_counted(tmp_path):
    main = [*AUDIT[:2], user("r1", [{"type": "a_new_type"}], parent="a1"), *AUDIT[3:]]
    side = [
        REF,
        user("f1", "Check.", parent="r1", **SIDE),
        reply("f2", text("Fine."), parent="f1", id="m9", **SIDE),
    ]
    paths = [write_lines(tmp_path / "s.jsonl", *main), fork_file(tmp_path, *side)]
    ((_, made),), rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    assert [step.agent for step in made.steps] == ["main"]
    assert made.notes == {"answers after content of type 'a_new_type'": 3}


def test_an_answer_that_a_fork_keeps_from_before_a_compaction_is_its_origins(tmp_path):
    log = [
        *BEFORE,
        user("u3", "More?", parent="a2"),
        reply("a3", text("No."), parent="u3", id="m3"),
    ]
    fork = [
        boundary("b1", **KEPT),
        SUMMARY,
        BEFORE[2] | {"parentUuid": "s1"},
        BEFORE[3],
        user("u4", "Which?", parent="a2"),
        reply("a4", text("Zebra."), parent="u4", id="m4"),
    ]
    paths = [
        write_lines(tmp_path / "a.jsonl", *in_session("a", fork)),
        write_lines(tmp_path / "b.jsonl", *in_session("b", log)),
    ]
    found, rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    assert [rows(made) for _, made in found] == [
        [ANSWERED],
        [([], ["Count.", "Three.", "Remember zebra.", "Noted.", "More?", "No."])],
    ]
