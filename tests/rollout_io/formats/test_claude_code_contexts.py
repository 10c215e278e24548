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
from tests.helpers.claude_code_lines import (
    attached,
    boundary,
    call,
    reply,
    result,
    system,
    text,
    thinking,
    thread,
    user,
)
from tests.helpers.examples import examples


def queued(operation, content, **fields):
    record = {"type": "queue-operation", "operation": operation, "sessionId": "s"}
    return record | {"content": content} | fields


def shown(message):
    """A message as one string."""
    calls = "".join(c["function"]["arguments"] for c in message.get("tool_calls", ()))
    return f"{message.get('reasoning_content', '')}{message['content']}{calls}"


def rows(trajectory):
    """(prompt, rest) of each conversation, as strings."""
    texts = [[shown(message) for message in step.messages] for step in trajectory.steps]
    places = (step.num_given for step in trajectory.steps)
    return [(item[:at], item[at:]) for item, at in zip(texts, places, strict=True)]


def answers_of(*trajectories):
    """The answers that are trained, sorted."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    return sorted(
        shown(m) for step in steps for m in step.messages[step.num_given :] if is_answer(m)
    )


@pytest.fixture
def session(tmp_path):
    """The trajectory of the only session of some lines."""

    def read(*records):
        ((_, trajectory),), rejected = read_all(ADAPTER, write_lines(tmp_path / "s", *records))
        assert rejected == []
        return trajectory

    return read


BEFORE = thread(u1="Count.", a1="Three.", u2="Remember zebra.", a2="Noted.")
TEXTS_BEFORE = ["Count.", "Three.", "Remember zebra.", "Noted."]
KEPT = {"preservedMessages": {"anchorUuid": "s1", "uuids": ["u2", "a2"]}}
SEGMENT = {"preservedSegment": {"headUuid": "u2", "anchorUuid": "s1", "tailUuid": "a2"}}
SUMMARY = user("s1", "Summary.", "b1", isCompactSummary=True)
AFTER = thread("s1", u3="Which?", a3="Zebra.")
ANSWERED = (["Summary.", "Remember zebra.", "Noted."], ["Which?", "Zebra."])


@pytest.mark.parametrize("staying", [KEPT, SEGMENT, KEPT | SEGMENT])
@pytest.mark.parametrize("parent", ["s1", "a2"])
@pytest.mark.parametrize("copies", [[], BEFORE[2:]])
def test_the_messages_that_a_compaction_keeps_follow_the_summary_as_context(
    staying, parent, copies, session
):
    after = thread(parent, u3="Which?", a3="Zebra.")
    trajectory = session(*BEFORE, boundary("b1", **staying), SUMMARY, *copies, *after)
    assert rows(trajectory) == [([], TEXTS_BEFORE), ANSWERED]


@pytest.mark.parametrize("logical", [None, "a2", "lost"])
@pytest.mark.parametrize("of_boundary", [None, "a2", "u1", "lost"])
@pytest.mark.parametrize("of_summary", ["b1", None, "a2", "lost"])
def test_a_compaction_begins_a_context_whatever_its_parents(
    logical, of_boundary, of_summary, session
):
    edge = boundary("b1") | {"parentUuid": of_boundary, "logicalParentUuid": logical}
    summary = SUMMARY | {"parentUuid": of_summary}
    for marks in ([edge, summary], [summary]):
        trajectory = session(*BEFORE, *marks, *AFTER)
        assert rows(trajectory) == [([], TEXTS_BEFORE), ([], ["Summary.", "Which?", "Zebra."])]


@pytest.mark.parametrize("staying", [KEPT, SEGMENT])
def test_messages_that_a_compaction_keeps_may_be_logged_after_its_summary_alone(staying, session):
    logged = [BEFORE[2] | {"parentUuid": "s1"}, BEFORE[3]]
    after = thread("a2", u3="Which?", a3="Zebra.")
    assert rows(session(boundary("b1", **staying), SUMMARY, *logged, *after)) == [ANSWERED]


def test_messages_kept_before_a_summary_precede_it(session):
    kept = {"preservedMessages": {"anchorUuid": "b1", "uuids": ["u1", "a1"]}}
    made = session(*BEFORE, boundary("b1", **kept), SUMMARY, *AFTER)
    assert rows(made)[1] == (["Count.", "Three."], ["Summary.", "Which?", "Zebra."])


def test_answers_after_a_compaction_whose_kept_messages_are_missing_are_counted(session):
    staying = {"preservedMessages": {"anchorUuid": "s1", "uuids": ["u2", "lost"]}}
    trajectory = session(*BEFORE, boundary("b1", **staying), SUMMARY, *AFTER)
    assert rows(trajectory) == [([], TEXTS_BEFORE)]
    reason = "answers after a compaction that keeps messages which are not in the log"
    assert trajectory.notes == {reason: 1, SUMMARIES: 1}


QUEUED = {"type": "queued_command", "prompt": "Also rename it.", "commandMode": "prompt"}
SENT = "While you worked: Also rename it."
RENDERED = attached("q", "u2", QUEUED, rendered=[{"content": SENT}], renderedRole="system")


@pytest.mark.parametrize(
    ("records", "seen"),
    [
        ([attached("q", "u2", QUEUED)], "Also rename it."),
        ([attached("q", "u2", QUEUED | {"prompt": [text("Also"), text("this.")]})], "Also\nthis."),
        ([RENDERED], SENT),
        ([queued("remove", "Also rename it.", reason="absorbed_mid_turn"), RENDERED], SENT),
        ([queued("remove", "Go left.", reason="absorbed_mid_turn")], "Go left."),
    ],
)
def test_a_queued_message_is_context_where_it_was_sent(records, seen, session):
    first, second, third = thread(u1="Fix.", a1=call("t1"), u2=[result("t1", "failed")])
    waits = queued("enqueue", "Also rename it.")
    trajectory = session(first, second, waits, third, *records, reply("a2", "Renamed.", "q"))
    assert rows(trajectory) == [([], ["Fix.", "{}", "failed", seen, "Renamed."])]
    assert trajectory.notes == {}


def test_what_may_have_been_sent_is_counted(session):
    made = session(
        user("u1", "Fix."),
        attached("x", "u1", {"type": "skill_listing", "content": "..."}),
        *(queued("enqueue", words) for words in ("Stop.", "Left?", "Right?")),
        queued("remove", "Stop."),
        queued("remove", "Left?", reason="cancelled"),
        queued("dequeue", None),
        *thread("x", a1="Done.", u2="Right?", a2="Right."),
    )
    assert made.notes == {
        "attachments without the text that was sent (skill_listing)": 1,
        "queued messages of which the log does not tell whether they were sent": 1,
    }


def test_texts_that_the_harness_sends_are_context(session):
    shape = {"system": [text("Be brief.")], "tools": [{"name": "Bash", "input_schema": {"a": 1}}]}
    replaced = {"toolUseId": "t1", "replacement": "short"}
    command = "<command-name>/cost</command-name>"
    trajectory = session(
        user("u1", "Hi."),
        attached("x", "u1", {"type": "date"}, rendered=[{"content": "It is May."}]),
        attached("y", "x", {"type": "session_context"}),
        {"type": "api-request-shape", "sessionId": "s", "shape": shape},
        *thread("y", a1=call("t1"), u2=[result("t1", "very long")]),
        {"type": "content-replacement", "sessionId": "s", "replacements": [replaced]},
        system("l", "u2", "local_command", content=command),
        *thread("l", a2="Ho."),
        user("u3", "Keep going.", "a2", isMeta=True, hookTextLead="A hook says:"),
        *thread("u3", a3="On."),
    )
    texts = ["Be brief.", "Hi.", "It is May.", "{}", "short", command, "Ho."]
    assert rows(trajectory) == [([], [*texts, "A hook says:\nKeep going.", "On."])]
    (step,) = trajectory.steps
    assert step.messages[0]["role"] == "system"
    function = {"name": "Bash", "parameters": {"a": 1}}
    assert step.tools == [{"type": "function", "function": function}]
    assert (trajectory.notes, trajectory.unread) == ({}, {})


def test_a_message_that_the_harness_wrote_for_the_model_is_context_alone(session):
    trajectory = session(
        *thread(u1="Hi.", a1="Ho."),
        user("u2", "Continue.", "a1", isMeta=True),
        reply("a2", "No response requested.", "u2", model="<synthetic>"),
        *thread("a2", u3="And?", a3="Yes."),
        reply("a4", "Failed", "a3", model="<synthetic>", isApiErrorMessage=True),
    )
    inputs = ["Hi.", "Ho.", "Continue.", "No response requested."]
    assert rows(trajectory) == [([], ["Hi.", "Ho.", "Continue."]), (inputs, ["And?", "Yes."])]


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
        reply(f"a{i}", blocks, f"a{i - 1}" if i else "u1", id="m1")
        for i, blocks in enumerate(states)
    ]
    assert rows(session(user("u1", "Go."), *replies)) == [([], ["Go.", *final])]


def test_a_block_index_tells_states_from_blocks(session):
    replies = [
        reply(f"a{i}", words, "u1", id="m1", apiBlockIndex=min(i, 1))
        for i, words in enumerate(("la", "la", "lala"))
    ]
    assert rows(session(user("u1", "Go."), *replies)) == [([], ["Go.", "la\nlala"])]


def test_an_exchange_that_is_logged_twice_is_trained_on_once(session):
    pieces = [
        record
        for mark in ("", "x")
        for record in (
            user(f"u1{mark}", "Capital?"),
            reply(f"a1{mark}", thinking("Peru."), f"u1{mark}", id="m1"),
            reply(f"b1{mark}", "Lima.", f"a1{mark}", id="m1"),
        )
    ]
    first = ["Capital?", "Peru.Lima."]
    trajectory = session(*pieces, *thread("b1x", u2="Population?", a2="Ten million."))
    assert rows(trajectory) == [([], first), (first, ["Population?", "Ten million."])]


RETRACTED = {"retractedMessageUuids": ["a0", "b0"]}
LONG = "0123abcd-0000-4000-8000-00000000000"


@pytest.mark.parametrize(
    ("partial", "marks", "fields"),
    [
        ("a0", [system("x", "a0", "model_refusal_fallback", **RETRACTED)], {}),
        ("a0", [system("x", "a0", "api_refusal", **RETRACTED)], {}),
        ("a0", [], {"supersedesUuids": ["a0", "b0"]}),
        # A list of retracted lines has the first characters of their names.
        (LONG + "1", [system("x", "u1", "api_refusal", retractedMessageUuids=[LONG + "9"])], {}),
    ],
)
def test_a_retracted_answer_neither_trains_nor_is_context(partial, marks, fields, session):
    trajectory = session(
        user("u1", "Do X."),
        reply(partial, "Partial", "u1", id="m0"),
        *([reply("b0", call("t0"), "a0", id="m0")] if partial == "a0" else []),
        *marks,
        reply("a1", "Here.", "u1", **fields),
        *thread("a1", u2="More.", a2="There."),
    )
    assert rows(trajectory) == [([], ["Do X.", "Here.", "More.", "There."])]


def test_a_second_answer_to_a_message_does_not_follow_the_first(session):
    trajectory = session(*thread(u1="Do X.", a1="One."), reply("a2", "Two.", "u1"))
    assert rows(trajectory) == [([], ["Do X.", "One."]), ([], ["Do X.", "Two."])]


@pytest.mark.parametrize("content", ["image", "a_new_type"])
def test_content_that_is_not_text_costs_the_answers_after_it_alone(content, session):
    side = {"isSidechain": True, "agentId": "x"}
    trajectory = session(
        *BEFORE,
        *thread("a2", u3=[{"type": content, "source": {}}, text("See?")], a3="Yes."),
        *thread(None, side, u8="Look.", a8="Seen."),
        *thread("a1", u4="Other?", a4="Other."),
    )
    assert [rest[-1] for _, rest in rows(trajectory)] == ["Noted.", "Seen.", "Other."]
    assert trajectory.notes == {f"answers after content of type '{content}'": 1}


def test_an_answer_with_an_unknown_block_costs_itself_and_what_follows(session):
    unknown = {"type": "server_tool_use", "id": "x"}
    trajectory = session(*BEFORE, *thread("a2", u3="Search.", a3=unknown, u4="So?", a4="So."))
    assert [rest[-1] for _, rest in rows(trajectory)] == ["Search."]
    assert trajectory.notes == {"answers after content of type 'server_tool_use'": 2}


def test_a_session_that_begins_with_an_image_is_refused_by_the_name_of_the_part(tmp_path):
    path = write_lines(tmp_path / "s", *thread(u1=[{"type": "image"}], a1="A cat."))
    _, rejected = read_all(ADAPTER, path)
    assert {(r.error.rule, r.error.where) for r in rejected} == {("message", f"{path}:1")}
    assert "'image'" in rejected[0].error.got
    assert rejected[0].error.hint


def test_a_loaded_tool_is_a_text_and_a_change_of_model_is_none(session):
    loaded = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    changed = {"type": "fallback", "from": {"model": "a"}, "to": {}}
    lines = thread(u1="Fetch.", a0=changed, a1=call("t1"), u2=[result("t1", loaded)], a2="Ready.")
    texts = ["Fetch.", "{}", "Loaded tool: WebFetch", "Ready."]
    assert rows(session(*lines)) == [([], texts)]


SIDE = {"isSidechain": True, "agentId": "h1"}
AUDIT = thread(
    u1="Audit.",
    a1=[text("Look."), call("t0")],
    r1=[result("t0", "a.py")],
    a2=call("t1"),
    r2=[result("t1", "fine")],
    a3="Good.",
)
TASK = thread("r1", SIDE, u9="Check a.py.", a9="Fine.")


def fork_file(folder, *records):
    """A file of a sub-agent of session s."""
    (folder / "s" / "subagents").mkdir(parents=True)
    return write_lines(folder / "s" / "subagents" / "agent-h1.jsonl", *records)


def the_fork(trajectory):
    steps = zip(rows(trajectory), trajectory.steps, strict=True)
    return next(row for row, step in steps if step.agent == "sidechain")


REF = {"type": "fork-context-ref", "agentId": "h1", "parentSessionId": "s", "parentLastUuid": "r1"}


@pytest.mark.parametrize("own", ["s", "of-its-own"])
@pytest.mark.parametrize(
    "inherited",
    [
        [record | SIDE for record in AUDIT[:3]],
        [REF],
        [REF, reply("copy", call("t1"), id="ma2") | SIDE],
    ],
)
@pytest.mark.parametrize("first", ["main", "fork"])
def test_a_forked_sub_agent_inherits_and_belongs_to_its_parents_session(
    inherited, own, first, tmp_path
):
    fork = [r | {"sessionId": own} if "sessionId" in r else r for r in [*inherited, *TASK]]
    paths = [write_lines(tmp_path / "s.jsonl", *AUDIT), fork_file(tmp_path, *fork)]
    ((run, made),), rejected = read_all(ADAPTER, *(paths if first == "main" else paths[::-1]))
    assert (run.instance_id, rejected) == ("s", [])
    prompt, rest = the_fork(made)
    assert [*prompt, *rest][:3] == ["Audit.", "Look.{}", "a.py"]
    assert rest[-2:] == ["Check a.py.", "Fine."]
    assert answers_of(made) == ["Fine.", "Good.", "Look.{}", "{}"]


def test_a_forked_sub_agent_with_a_session_of_its_own_is_known_by_the_lines_it_repeats(tmp_path):
    fork = [record | SIDE | {"sessionId": "own"} for record in [*AUDIT[:3], *TASK]]
    paths = [write_lines(tmp_path / "s", *AUDIT), write_lines(tmp_path / "agent-h1", *fork)]
    ((run, made),), rejected = read_all(ADAPTER, *paths)
    assert (run.instance_id, rejected) == ("s", [])
    assert the_fork(made) == (["Audit.", "Look.{}"], ["a.py", "Check a.py.", "Fine."])


UNREADABLE = user("r1", [{"type": "a_new_type"}], "a1")
UNKNOWN = "answers after content of type 'a_new_type'"
LOST = "answers of a forked sub-agent whose parent's messages are not in the log"
UNTIMED = "answers of a forked sub-agent whose log does not tell which context it inherited"
OF_A2 = {"preservedSegment": {"anchorUuid": "s1", "headUuid": "a2", "tailUuid": "a2"}}


@pytest.mark.parametrize(
    ("main", "last", "notes"),
    [
        (AUDIT, "lost", {LOST: 1}),
        ([*AUDIT[:2], UNREADABLE, *AUDIT[3:]], "r1", {UNKNOWN: 3}),
        ([*BEFORE, boundary("b1", **OF_A2), SUMMARY], "a2", {UNTIMED: 1, SUMMARIES: 1}),
    ],
)
def test_a_fork_whose_context_is_not_known_is_left_out_and_counted(main, last, notes, tmp_path):
    side = [REF | {"parentLastUuid": last}, *TASK]
    paths = [write_lines(tmp_path / "s.jsonl", *main), fork_file(tmp_path, *side)]
    ((_, trajectory),), rejected = read_all(ADAPTER, *paths)
    assert rejected == []
    assert [step.agent for step in trajectory.steps] == ["main"]
    assert trajectory.notes == notes


TRIP = thread(u1="Plan.", a1="North.", u2="Then?", a2="West.")
FOOD = thread("a1", u9="Food?", a9="Rice.")


def in_session(name, records, *, renamed=False):
    trajectory = [record | {"sessionId": name} for record in records]
    for record in trajectory if renamed else ():
        origin = {"sessionId": "a", "messageUuid": record["uuid"]}
        for key in ("uuid", "parentUuid"):
            record[key] = record[key] and f"{name}-{record[key]}"
        record["forkedFrom"] = origin
    return trajectory


def read_sessions(tmp_path, **sessions):
    """The trajectories of sessions, one a file in this order, and what was rejected."""
    paths = [write_lines(tmp_path / name, *lines) for name, lines in sessions.items()]
    runs, rejected = read_all(ADAPTER, *paths)
    return {run.instance_id: trajectory for run, trajectory in runs}, rejected


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("num_copied", [2, 4])
@pytest.mark.parametrize("first", ["origin", "fork"])
def test_a_sample_that_two_sessions_have_is_trained_on_once(renamed, num_copied, first, tmp_path):
    files = {"origin": in_session("a", TRIP)}
    files["fork"] = in_session("b", [*TRIP[:num_copied], *FOOD], renamed=renamed)
    trajectory, rejected = read_sessions(tmp_path, **{first: files.pop(first)}, **files)
    assert rejected == []
    assert answers_of(*trajectory.values()) == ["North.", "Rice.", "West."]
    assert sum(sum(item.notes.values()) for item in trajectory.values()) == num_copied // 2


def test_sessions_that_only_use_the_same_uuids_are_not_copies(tmp_path):
    other = [user("u1", "Plan."), reply("a1", "South.", "u1", id="m7")]
    trajectories, _ = read_sessions(tmp_path, a=in_session("a", TRIP), b=in_session("b", other))
    assert all(trajectory.notes == {} for trajectory in trajectories.values())


def test_a_session_without_an_answer_of_its_own_is_rejected_as_a_copy(tmp_path):
    trajectory, rejected = read_sessions(tmp_path, a=in_session("a", TRIP), b=in_session("b", TRIP))
    assert list(trajectory) == ["a"]
    assert {r.error.rule for r in rejected} == {"duplicate_record"}


def test_an_answer_that_a_fork_keeps_from_before_a_compaction_is_its_origins(tmp_path):
    log = [*BEFORE, *thread("a2", u3="More?", a3="No.")]
    fork = [boundary("b1", **KEPT), SUMMARY, BEFORE[2] | {"parentUuid": "s1"}, BEFORE[3]]
    fork += thread("a2", u4="Which?", a4="Zebra.")
    trajectory, rejected = read_sessions(tmp_path, a=in_session("a", fork), b=in_session("b", log))
    assert rejected == []
    assert rows(trajectory["a"]) == [ANSWERED]
    assert rows(trajectory["b"]) == [([], [*TEXTS_BEFORE, "More?", "No."])]


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
        (self.log if log is None else log).append(make(uuid, *arguments, self.tail, **fields))
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
            uuid = self._add(reply, state, id=id)
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
        self.log.append(user(summary, said, of_summary, isCompactSummary=True))
        self.context = [(summary, said), *kept]
        self.tail = uuids[-1] if kept and not to_anchor else summary

    def retract(self):
        tail = self.tail
        number = next(self.numbers)
        uuid = self._add(reply, f"partial {number}", id=f"m{number}")
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
        self._add(reply, said, log=self.side, id=f"m{number}", **agent)
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


def test_the_picture_of_a_file_is_sent_and_other_attachments_are_counted_by_kind(session):
    file = {"base64": "iVBORw0KGgo=", "type": "image/png"}
    data = {"type": "file", "filename": "/w/a.png", "content": {"type": "image", "file": file}}
    trajectory = session(
        user("u1", "Look at @a.png"),
        attached("x", "u1", {"type": "date"}, rendered=[{"content": "It is May."}]),
        attached("y", "x", data),
        attached("z", "y", {"type": "todo_reminder", "content": []}),
        *thread("z", a1="A dot."),
    )
    lead, picture = trajectory.steps[0].messages[2]["content"]
    assert '{"file_path":"/w/a.png"}' in lead["text"]
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert picture["source"] == source
    assert trajectory.notes == {"attachments without the text that was sent (todo_reminder)": 1}


def test_a_mark_of_a_message_that_is_not_known_is_reported_and_facts_about_calls_are_not(session):
    made = session(
        user("u1", "Go.", mcpCallNotReadOnly="no_hint", isHidden=True),
        reply("a1", "On.", "u1", attributionMcpServer="z", attributionMcpTool="t"),
        system("l", "a1", "local_command", content="x", commandRun={"command": "usage"}, level="i"),
    )
    assert made.unread == {"user.isHidden": 1}


@pytest.mark.parametrize("staying", [KEPT, SEGMENT])
def test_what_cannot_be_read_is_not_read_again_where_a_compaction_keeps_it(staying, session):
    unread = user("u2", [{"type": "a_new_type"}], "a1")
    trajectory = session(*BEFORE[:2], unread, BEFORE[3], boundary("b1", **staying), SUMMARY, *AFTER)
    assert rows(trajectory) == [([], ["Count.", "Three."])]
    assert trajectory.notes == {UNKNOWN: 2, SUMMARIES: 1}
