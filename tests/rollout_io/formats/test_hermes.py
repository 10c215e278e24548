"""Sessions of Hermes Agent: what a compression or a branch wrote again is context, and trains once."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.hermes import (
    ADAPTER,
    ASKED,
    NO_OLD,
    NO_PARENT,
    NOT_SAMPLED,
    NOT_SENT,
    ORPHANS,
    THOUGHTS,
    UNANSWERED,
)
from rollout_io.formats.parsing.messages import INACTIVE
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all, write_lines

SUMMARY = "[CONTEXT COMPACTION - REFERENCE ONLY] Summary"
ENDED = {"finish_reason": "stop"}
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
        {"role": "assistant", "content": f"call {number}", "tool_calls": [call]} | ENDED,
        {"role": "tool", "content": f"result {number}", "tool_call_id": f"c{number}"},
        {"role": "assistant", "content": f"answer {number}"} | ENDED,
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


def bounded(live, num_head, num_tail):
    """The messages at the head and the tail that Hermes keeps: calls with their results."""
    while num_head < len(live) and live[num_head]["role"] == "tool":
        num_head += 1
    start = max(len(live) - num_tail, num_head)
    while start < len(live) and live[start]["role"] == "tool":
        start -= 1
    return live[:num_head], live[start:]


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
        head, tail = bounded(live, num_head, num_tail)
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


def inserted(messages, second):
    """What a compression writes in its own session: messages a microsecond apart."""
    return [
        message | {"timestamp": second + i * 1e-6, "finish_reason": "stop"}
        for i, message in enumerate(messages)
    ]


def test_a_session_compressed_in_place_without_its_old_messages_trains_what_came_after():
    written = [turn(0)[0], {"role": "assistant", "content": SUMMARY}, *turn(1)]
    written = inserted(written, 2e9)
    written[2] |= {"timestamp": 1.9e9}  # the user's messages have their own time
    ((_, found),) = read_logged(session("a", [*written, *inserted(turn(2), 2.1e9)]))
    assert found.notes == {NO_OLD: 1, SUMMARIES: 1}
    assert [text for text, _ in trained(found)] == ["call 2", "answer 2"]


def test_a_summary_behind_the_text_of_a_kept_answer_is_no_answer():
    merged = (
        "[PRIOR CONTEXT \u2014 for reference only; not a new message]\nanswer 0\n\n"
        f"[END OF PRIOR CONTEXT \u2014 COMPACTION SUMMARY BELOW]\n\n{SUMMARY}"
    )
    child = [*turn(0)[:3], {"role": "assistant", "content": merged}, *turn(1)]
    ((_, found),) = read_logged(session("a", turn(0), end="compression"), session("b", child, "a"))
    assert [text for text, _ in trained(found)] == ["call 0", "answer 0", "call 1", "answer 1"]
    assert found.notes == {SUMMARIES: 1}


def test_copies_whose_arguments_a_compression_shortened_are_known():
    short = turn(0)[1]
    short["tool_calls"][0]["function"] |= {"arguments": '{"path": "..."}'}
    head = [turn(0)[0], short, turn(0)[2]]
    summary = {"role": "user", "content": SUMMARY}
    parent = session("a", [*turn(0), *turn(1)], end="compression")
    ((_, found),) = read_logged(parent, session("b", [*head, summary, *turn(1)[1:], *turn(2)], "a"))
    answers = [f"{what} {i}" for i in (0, 1, 2) for what in ("call", "answer")]
    assert [text for text, _ in trained(found)] == answers


def test_messages_have_the_text_that_was_sent_and_others_are_left_out():
    question, *rest = turn(0)
    rest[1] |= {"content": " result 0\n"}
    sent = "question 0\n\n<memory-context>It rains.</memory-context>"
    other = {"role": "session_meta", "content": "{}"}
    messages = [question | {"api_content": sent, "token_count": None}, other, *rest]
    ((_, found),) = read_logged(session("a", messages, display_name="Sums"))
    (step,) = found.steps
    assert texts(step.messages) == [SYSTEM["content"], sent, "call 0", "result 0", "answer 0"]
    assert (found.notes, found.unread) == ({NOT_SENT: 1}, {})


def test_an_answer_that_no_call_ended_is_part_of_the_prompt():
    first, second = inserted(turn(0), 2e9), inserted(turn(1), 2.1e9)
    first[3] |= {"finish_reason": None}
    ((_, found),) = read_logged(session("a", [*first, *second]))
    assert [text for text, _ in trained(found)] == ["call 0", "call 1", "answer 1"]
    assert "answer 0" in texts(found.steps[-1].messages)
    assert found.notes == {NOT_SAMPLED: 1}


def test_results_without_a_call_are_left_out_and_calls_without_a_result_get_hermess_own():
    stray = {"role": "tool", "content": "stray", "tool_call_id": "c9"}
    messages = [*turn(0)[:2], *turn(1), stray, *turn(2)]
    ((_, found),) = read_logged(session("a", messages))
    (step,) = found.steps
    results = [m["content"] for m in step.messages if m["role"] == "tool"]
    unavailable = "[Result unavailable \u2014 see context summary above]"
    assert results == [unavailable, "result 1", "result 2"]
    assert found.notes == {ORPHANS: 1, UNANSWERED: 1}


def test_what_the_user_wrote_in_a_row_is_one_message():
    more = {"role": "user", "content": "more"}
    ((_, found),) = read_logged(session("a", [turn(0)[0], more, *turn(0)[1:]]))
    (step,) = found.steps
    assert texts(step.messages)[1:3] == ["question 0\n\nmore", "call 0"]


def test_an_answer_of_thoughts_alone_trains_and_is_not_sent_again():
    thought = {"role": "assistant", "content": "", "reasoning": "Hm."} | ENDED
    ((_, found),) = read_logged(session("a", [turn(0)[0], thought, *turn(1)]))
    first, second = found.steps
    assert texts(first.messages) == [SYSTEM["content"], "question 0", ""]
    assert texts(second.messages)[1:3] == ["question 0\n\nquestion 1", "call 1"]
    assert (first.num_given, second.num_given) == (0, 0)


def test_an_answer_that_was_to_be_verified_is_replaced_and_the_next_one_is_no_answer():
    first, second = inserted(turn(0), 2e9), inserted(turn(1), 2.1e9)
    first[3] |= {"finish_reason": "verification_required"}
    verified = [{"role": "assistant", "content": "verified", "finish_reason": "stop"}]
    ((_, found),) = read_logged(session("a", [*first, *verified, *second]))
    assert [text for text, _ in trained(found)] == ["call 0", "answer 0", "call 1", "answer 1"]
    last = texts(found.steps[-1].messages)
    assert last[1:6] == ["question 0", "call 0", "result 0", "verified", "question 1"]
    assert found.notes == {ASKED: 1}


def test_an_answer_behind_another_is_merged_with_it():
    more = [{"role": "assistant", "content": "more", "finish_reason": "stop"}]
    messages = [*inserted(turn(0), 2e9), *more, *inserted(turn(1), 2.1e9)]
    ((_, found),) = read_logged(session("a", messages))
    assert "answer 0\nmore" in texts(found.steps[-1].messages)
    assert [text for text, _ in trained(found)] == ["call 0", "answer 0", "call 1", "answer 1"]
    assert found.notes == {ASKED: 1}


def test_thoughts_that_the_provider_is_not_sent_again_are_counted():
    messages = [m | ({"reasoning": "Hm."} if m["role"] == "assistant" else {}) for m in turn(0)]
    for provider, model, count in (("openrouter", "kimi-k2", 1), ("deepseek", "v4", 0)):
        fields = {"billing_provider": provider, "model": model}
        ((_, found),) = read_logged(session("a", messages, **fields))
        assert found.notes.get(THOUGHTS, 0) == count
