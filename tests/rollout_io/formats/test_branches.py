"""An answer that several branches of a text log share is one sample: it trains once.

What trains is what the model was called for: the first branch, in the order of the rows, trains an
answer, and later branches have it in their prompt.
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.conversion.text import Retokenizer, with_answers, with_tokens
from rollout_io.formats import claude_code, codex_cli, rllm, verifiers
from rollout_io.formats.base import Trajectory, noted
from rollout_io.formats.parsing.model_calls import EMPTY, Call, conversations_of, steps_of
from schemas.errors import RolloutError
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import save

SHARED, LEFT, RIGHT = (
    (None, "Which way?", "Left or right."),
    (0, "Left.", "A wall."),
    (0, "Right.", "A door."),
)


def asked(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def chat_of(turns, index):
    """The messages from the first one to the answer of a turn (parent turn, question, answer)."""
    parent, question, answer = turns[index]
    before = [] if parent is None else chat_of(turns, parent)
    return [*before, asked(question), said(answer)]


def verifiers_log(folder, turns):
    nodes = []
    for parent, question, answer in turns:
        above = {} if parent is None else {"parent": 2 * parent + 1}
        nodes.append({"message": asked(question), "sampled": False, **above})
        nodes.append({"message": said(answer), "sampled": True, "parent": len(nodes) - 1})
    record = {"id": "e", "task": {"key": "k"}, "ok": True, "errors": []}
    record["traces"] = [{"agent": {"name": "a", "trainable": True}, "nodes": nodes}]
    return verifiers.ADAPTER, write_lines(folder / "traces.jsonl", record)


def rllm_log(folder, turns):
    steps = [{"chat_completions": chat_of(turns, i)} for i in range(len(turns))]
    record = {"id": "t:0", "is_correct": True, "termination_reason": "env_done"}
    record |= {"task": None, "trajectories": [{"name": "a", "reward": 1.0, "steps": steps}]}
    return rllm.ADAPTER, save(folder / "episode_0.json", record)


def claude_log(folder, turns):
    lines = []
    for i, (parent, question, answer) in enumerate(turns):
        above = None if parent is None else f"a{parent}"
        content = [{"type": "text", "text": answer}]
        message = said(content) | {"id": f"msg_{i}", "model": "m"}
        lines.append({"type": "user", "uuid": f"u{i}", "parentUuid": above})
        lines[-1]["message"] = asked(question)
        lines.append({"type": "assistant", "uuid": f"a{i}", "parentUuid": f"u{i}"})
        lines[-1]["message"] = message
    records = [line | {"sessionId": "s"} for line in lines]
    return claude_code.ADAPTER, write_lines(folder / "s.jsonl", *records)


LOGS = [verifiers_log, rllm_log, claude_log]


def read(log, turns):
    with tempfile.TemporaryDirectory() as folder:
        adapter, path = log(Path(folder), turns)
        ((_, trajectory),), rejected = read_all(adapter, path)
    assert not rejected
    return trajectory


def trained(trajectory):
    """How often each answer trains."""
    return Counter(
        m["content"]
        for step in with_answers(trajectory)
        for m in step.messages[step.num_given :]
        if step.trains and is_answer(m)
    )


@pytest.mark.parametrize("log", LOGS)
def test_the_first_branch_trains_what_both_share_and_the_second_has_it_in_its_prompt(log):
    first, second = with_answers(read(log, [SHARED, LEFT, RIGHT]))
    which_way = [asked("Which way?"), said("Left or right.")]
    assert first.messages == [*which_way, asked("Left."), said("A wall.")]
    assert second.messages == [*which_way, asked("Right."), said("A door.")]
    assert (first.num_given, second.num_given) == (1, 3)


@st.composite
def trees(draw):
    """Turns of one root, in the order of their calls; few answers, so that some are equal."""
    texts = st.sampled_from(["yes", "no", "maybe"])
    above = [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 7)))]
    return [(p, f"q{i}", draw(texts)) for i, p in enumerate([None, *above])]


@pytest.mark.parametrize("log", LOGS)
@settings(max_examples=examples(40), deadline=None)
@given(turns=trees())
def test_each_answer_of_a_tree_of_branches_trains_exactly_once(log, turns):
    assert trained(read(log, turns)) == Counter(answer for _, _, answer in turns)


@settings(max_examples=examples(40), deadline=None)
@given(turns=trees())
def test_each_answer_of_logged_calls_trains_exactly_once(turns):
    calls = []
    for i, (_, _, answer) in enumerate(turns):
        calls.append(Call(where=f"a:{i}", prompt=chat_of(turns, i)[:-1], reply=said(answer)))
    assert trained(Trajectory(steps=conversations_of(calls))) == Counter(
        answer for _, _, answer in turns
    )


def test_a_call_whose_answer_says_nothing_is_counted_and_stays_in_the_prompts_that_have_it():
    first, empty, last = [asked("a")], said(""), said("c")
    second = [*first, empty, asked("b")]
    calls = [
        Call(where=f"a:{i}", prompt=prompt, reply=reply)
        for i, (prompt, reply) in enumerate([(first, empty), (second, last)])
    ]
    with noted() as notes:
        (conversation,) = conversations_of(calls)
    assert conversation.messages == [*second, last]
    assert (conversation.num_given, notes) == (3, {EMPTY: 1})
    with pytest.raises(RolloutError, match=r"\[no_calls\]"):
        steps_of(calls[:1], "a")


def test_an_answer_that_the_log_marks_as_not_sampled_does_not_train():
    def log(folder, turns):
        adapter, path = verifiers_log(folder, turns)
        record = json.loads(path.read_text(encoding="utf-8"))
        nodes = record["traces"][0]["nodes"]
        nodes[1]["sampled"] = nodes[5]["sampled"] = False
        return adapter, write_lines(path, record)

    chain = [(None, "q0", "a0"), (0, "q1", "a1"), (1, "q2", "a2"), (2, "q3", "a3")]
    assert trained(read(log, chain)) == {"a1": 1, "a3": 1}


def test_a_compaction_that_was_dropped_leaves_what_it_shares_to_the_branch_that_trains():
    def log(folder, turns):
        adapter, path = verifiers_log(folder, turns)
        record = json.loads(path.read_text(encoding="utf-8"))
        link = {"node": 3, "type": "compaction_attempt"}
        record["traces"][0]["nodes"][3]["semantic_parents"] = [link]
        return adapter, write_lines(path, record)

    assert trained(read(log, [SHARED, LEFT, RIGHT])) == {"Left or right.": 1, "A door.": 1}


def test_a_step_of_rllm_trains_its_last_answer_and_no_example_before_it():
    chat = [asked("1 + 1?"), said("2"), asked("2 + 2?"), said("4")]
    steps = [{"chat_completions": chat}]
    record = {"id": "t:0", "is_correct": True, "termination_reason": "env_done", "task": None}
    record |= {"trajectories": [{"name": "a", "reward": 1.0, "steps": steps}]}
    log = lambda folder, _: (rllm.ADAPTER, save(folder / "episode_0.json", record))  # noqa: E731
    assert trained(read(log, [])) == {"4": 1}


def codex_item(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return {"type": "message", "role": role, "content": content}


def codex_log(folder, payloads):
    head = {"type": "session_meta", "payload": {"id": "s"}}
    records = [head, *({"type": kind, "payload": payload} for kind, payload in payloads)]
    return codex_cli.ADAPTER, write_lines(
        folder / "rollout-1.jsonl", *({"timestamp": "t", **record} for record in records)
    )


def turn(number):
    question, answer = codex_item("user", f"q{number}"), codex_item("assistant", f"a{number}")
    return [("response_item", question), ("response_item", answer)]


def rolled_back(num_turns):
    return ("event_msg", {"type": "thread_rolled_back", "num_turns": num_turns})


def compacted(*kept):
    return ("compacted", {"message": "", "replacement_history": list(kept)})


def test_codex_trains_once_what_a_rollback_or_a_compaction_kept():
    kept = [codex_item("user", "q0"), codex_item("assistant", "a0")]
    events = [*turn(0), *turn(1), rolled_back(1), *turn(2), compacted(*kept), *turn(3)]
    trajectory = read(codex_log, events)
    assert [len(step.messages) for step in trajectory.steps] == [4, 4, 4]
    assert trained(trajectory) == {"a0": 1, "a1": 1, "a2": 1, "a3": 1}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(-1, 3), max_size=8))
def test_each_answer_of_a_codex_session_trains_exactly_once(moves):
    events = turn(0)
    for i, move in enumerate(moves, 1):
        if move < 0:
            events.append(compacted(codex_item("user", "q0"), codex_item("assistant", "a0")))
        elif move:
            events.append(rolled_back(move))
        events += turn(i)
    expected = Counter(f"a{i}" for i in range(len(moves) + 1))
    assert trained(read(codex_log, events)) == expected


@pytest.mark.model
@pytest.mark.parametrize("log", LOGS)
def test_tokens_of_a_shared_answer_are_response_once_and_prompt_after(log, smollm2_dir):
    retokenizer = Retokenizer(directory=str(smollm2_dir))
    rows = with_tokens(read(log, [SHARED, LEFT, RIGHT]), retokenizer)
    decode = retokenizer.tokenizer.decode
    assert [decode(row.response_ids[row.loss_mask]) for row in rows] == [
        "Left or right.<|im_end|>A wall.<|im_end|>",
        "A door.<|im_end|>",
    ]
    assert "assistant\nLeft or right.<|im_end|>\n<|im_start|>user\nRight." in decode(
        rows[1].prompt_token_ids
    )


def chained(number):
    """Return calls each of which has the messages of all calls before it."""
    calls, said = [], []
    for i in range(number):
        said = [*said, {"role": "user", "content": f"question {i}"}]
        reply = {"role": "assistant", "content": f"answer {i}"}
        calls.append(Call(where=f"log:{i}", prompt=[dict(each) for each in said], reply=reply))
        said = [*said, reply]
    return calls


def separate(number):
    """Return calls that have no message in common."""
    calls = (chained(1)[0] for _ in range(number))
    return [
        replace(call, where=f"log:{i}", prompt=[{"role": "user", "content": f"question {i}"}])
        for i, call in enumerate(calls)
    ]


def shared(number):
    """Return calls whose first message is the same, and no other."""
    first = {"role": "system", "content": "Be brief."}
    return [replace(call, prompt=[first, *call.prompt]) for call in separate(number)]


def num_lines_run(calls):
    total, before = 0, sys.gettrace()

    def count(*_):
        nonlocal total
        total += 1
        return count

    sys.settrace(count)
    try:
        conversations_of(calls)
    finally:
        sys.settrace(before)
    return total


@pytest.mark.parametrize("log", [chained, separate, shared])
def test_the_work_of_reading_calls_grows_as_their_number_does(log):
    conversations_of(log(2))  # what is done once
    assert num_lines_run(log(160)) < 4.4 * num_lines_run(log(40))
