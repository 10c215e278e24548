"""Sessions of Hermes Agent: what a compression or a branch wrote again is context, and trains once."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.hermes import ADAPTER, NO_PARENT
from rollout_io.formats.parsing.messages import INACTIVE
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all, write_lines

SUMMARY = "[CONTEXT COMPACTION - REFERENCE ONLY] Summary"
SYSTEM = {"role": "system", "content": "You are Hermes."}


def session(name, messages, parent=None, end=None, **fields):
    """A session as Hermes exports it; the time of a message is its place."""
    rows = [
        {"id": i, "session_id": name, "timestamp": 1.5e9 + i, "active": 1, "observed": 0} | message
        for i, message in enumerate(messages, 1)
    ]
    return {
        "id": name,
        "source": "cli",
        "system_prompt": SYSTEM["content"],
        "parent_session_id": parent,
        "end_reason": end,
        "started_at": 1.5e9,
        "message_count": len(rows),
        "title": "Sums",
        "messages": rows,
        **fields,
    }


def turn(number):
    """A question, and an answer with a call, its result and a text."""
    call = {"id": f"c{number}", "type": "function"}
    call["function"] = {"name": "ls", "arguments": "{}"}
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": f"call {number}", "tool_calls": [call]},
        {"role": "tool", "content": f"result {number}", "tool_call_id": f"c{number}"},
        {"role": "assistant", "content": f"answer {number}"},
    ]


def read_logged(*records):
    with tempfile.TemporaryDirectory() as folder:
        made, rejected = read_all(ADAPTER, write_lines(Path(folder) / "a.jsonl", *records))
    assert rejected == []
    return made


def texts(messages):
    return [message["content"] for message in messages]


def trained(trajectory):
    """Each answer that trains, with the texts before it."""
    return [
        (message["content"], texts(step.messages[:i]))
        for step in trajectory.steps
        for i, message in enumerate(step.messages)
        if i >= step.num_given and is_answer(message)
    ]


@st.composite
def compressions(draw):
    """The turns, each of which may end with a compression: messages at the head and the tail, role."""
    kept = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["user", "assistant"]))
    made = draw(st.lists(st.none() | kept, min_size=1, max_size=4))
    return [*made, None], draw(st.booleans())


@given(compressions())
def test_answers_train_once_whatever_was_compressed_in_place_or_into_children(drawn):
    turns, is_in_place = drawn
    live, expected = [], []
    rows, sessions = [], []  # of the open session, and the closed ones
    for number, kept in enumerate(turns):
        for message in turn(number):
            if message["role"] == "assistant":
                expected.append((message["content"], [SYSTEM["content"], *texts(live)]))
            live.append(message)
            rows.append(message)
        if kept is None:
            continue
        num_head, num_tail, role = kept
        head, tail = live[:num_head], live[len(live) - num_tail :]
        live = [*head, {"role": role, "content": f"{SUMMARY} {number}"}, *tail]
        if is_in_place:
            rows = [row | {"active": 0, "compacted": 1} for row in rows]
        else:
            sessions.append((rows, "compression"))
            rows = []
        rows += live
    sessions.append((rows, None))
    records = [
        session(f"s{i}", messages, f"s{i - 1}" if i else None, end)
        for i, (messages, end) in enumerate(sessions)
    ]
    ((run, found),) = read_logged(*records[::-1])  # the newest first, as a list of sessions is
    assert run.instance_id == "s0"
    assert sorted(trained(found)) == sorted(expected)
    assert found.notes.get(SUMMARIES, 0) == sum(kept is not None for kept in turns)
    assert found.metrics["message_count"] == sum(len(messages) for messages, _ in sessions)
    assert found.unread == {}


def test_a_branch_trains_what_is_new_in_it_and_a_helper_is_a_run_of_its_own():
    parent = session("a", [*turn(0), *turn(1)])
    branch = session("b", [*turn(0), *turn(2)], "a", "branched")
    helper = session("c", turn(3), "a")
    (first, found), (second, other) = read_logged(parent, branch, helper)
    assert (first.instance_id, second.instance_id) == ("a", "c")
    answers = [text for text, _ in trained(found)]
    assert answers == [f"{what} {i}" for i in (0, 1, 2) for what in ("call", "answer")]
    assert [text for text, _ in trained(other)] == ["call 3", "answer 3"]


def test_messages_that_were_taken_back_before_a_compression_are_left_out_and_counted():
    back = [message | {"active": 0, "compacted": 0} for message in turn(1)]
    old = [message | {"active": 0, "compacted": 1} for message in turn(0)]
    summary = {"role": "assistant", "content": SUMMARY}
    ((_, found),) = read_logged(session("a", [*old, *back, turn(0)[0], summary, *turn(2)]))
    assert found.notes == {INACTIVE: 4, SUMMARIES: 1}
    assert [text for text, _ in trained(found)] == ["call 0", "answer 0", "call 2", "answer 2"]


def test_a_compressed_session_without_its_parent_gives_the_summary_and_says_so():
    summary = {"role": "assistant", "content": SUMMARY}
    ((_, found),) = read_logged(session("b", [*turn(0), summary, *turn(1)], "a"))
    assert found.notes == {NO_PARENT: 1, SUMMARIES: 1}
    assert [text for text, _ in trained(found)] == ["call 1", "answer 1"]
