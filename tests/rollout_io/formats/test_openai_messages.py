import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.base import Options, noted
from rollout_io.formats.chats import OPENAI_MESSAGES
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.messages import INACTIVE, MARKED
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines, save_template
from tests.helpers.text_log_helpers import save

USER, ANSWER = {"role": "user", "content": "1 + 5?"}, {"role": "assistant", "content": "6"}
CHAT = [USER, ANSWER]


def lines(tmp_path, *records):
    return write_lines(tmp_path / "chat.jsonl", *records)


def read_one(tmp_path, record):
    ((_, found),), rejected = read_all(OPENAI_MESSAGES, lines(tmp_path, record))
    assert rejected == []
    return found


def test_messages_tools_reward_and_numbers_of_a_line_are_read(tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "ls", "arguments": '{"n":1}'}}
    turns = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look.",
            "tool_calls": [call] * 2,
        },
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        ANSWER,
    ]
    record = {"messages": turns, "reward": 1, "score": 0.5, "turns": 2, "ok": True, "note": "x"}
    record |= {"rewards": {"style": 0.25, "why": "x"}, "id": 7, "extra": {"deep": 1}}
    record["tools"] = [{"type": "function", "function": {"name": "ls"}}]
    found = read_one(tmp_path, record)
    (step,) = found.steps
    assert [m["role"] for m in step.messages] == ["user", "assistant", "tool", "assistant"]
    assert step.messages[1]["reasoning_content"] == "Look."
    assert step.messages[1]["tool_calls"] == [call] * 2
    assert step.tools == record["tools"]
    assert found.reward == 1.0
    numbers = {"reward": 1.0, "score": 0.5, "turns": 2.0, "ok": 1.0, "rewards.style": 0.25}
    assert found.metrics == numbers


@pytest.mark.parametrize("name", ["system_prompt", "system", "system_message", "instructions"])
@pytest.mark.parametrize("prompt", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_system_prompt_beside_the_messages_is_the_first_message(name, prompt, tmp_path):
    (step,) = read_one(tmp_path, {"messages": CHAT, name: prompt}).steps
    assert step.messages == [{"role": "system", "content": "Be brief."}, *CHAT]
    (again,) = read_one(tmp_path, {"messages": step.messages, name: prompt}).steps
    assert again.messages == step.messages


def test_two_different_system_prompts_are_refused_by_name(tmp_path):
    both = [{"role": "system", "content": "Be long."}, *CHAT]
    for record in (
        {"messages": both, "system_prompt": "Be brief."},
        {"messages": CHAT, "system_prompt": "Be brief.", "instructions": "Be long."},
    ):
        _, (rejected,) = read_all(OPENAI_MESSAGES, lines(tmp_path, record))
        assert rejected.error.rule == "message"
        assert rejected.error.where.endswith(("system_prompt", "instructions"))


def test_messages_that_a_user_took_back_are_left_out_and_counted(tmp_path):
    back = [m | {"active": 0} for m in CHAT]
    (run,) = planned(OPENAI_MESSAGES, lines(tmp_path, {"messages": [*back, *CHAT], "id": 1})).runs
    with noted() as notes:
        (step,) = OPENAI_MESSAGES.read(run, Options()).steps
    assert (step.messages, notes) == (CHAT, {INACTIVE: 2})


OFF = [{"weight": 0}, {"loss_mask": 0}, {"loss": False}, {"train": False}, {"training": False}]
ON = [{"weight": 1}, {"loss_mask": 1}, {"loss": True}, {"train": True}, {}, {"loss": None}]


@given(st.lists(st.sampled_from([*OFF, *ON]), min_size=1, max_size=6))
def test_an_answer_marked_as_not_trained_is_context_of_the_later_ones_and_counted(marks):
    chat = []
    for i, mark in enumerate(marks):
        chat += [{"role": "user", "content": f"{i}?"}]
        chat += [{"role": "assistant", "content": f"{i}."} | mark]
    plain = [{name: m[name] for name in ("role", "content")} for m in chat]
    off = [i for i, mark in enumerate(marks) if mark in OFF]
    with tempfile.TemporaryDirectory() as folder:
        made, rejected = read_all(OPENAI_MESSAGES, lines(Path(folder), {"messages": chat}))
    if len(off) == len(marks):
        assert [each.error.rule for each in rejected] == ["no_calls"]
        return
    ((_, found),) = made
    trained = []
    for step in found.steps:
        assert step.messages == plain[: len(step.messages)]
        answers = range(step.num_given, len(step.messages))
        trained += [i // 2 for i in answers if plain[i]["role"] == "assistant"]
    assert trained == [i for i in range(len(marks)) if i not in off]
    assert found.notes.get(MARKED, 0) == len(off)
    assert found.unread == {}


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"loss_mask": [0, 1]}, {"train": "no"}])
def test_a_mark_that_is_neither_on_nor_off_is_refused_by_name(mark, tmp_path):
    chat = {"messages": [USER | mark, ANSWER | mark]}
    _, (rejected,) = read_all(OPENAI_MESSAGES, lines(tmp_path, chat))
    (name,) = mark
    assert rejected.error.rule == "message"
    assert rejected.error.where.endswith("messages[1]")
    assert f"`{name}`" in rejected.error.got


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({}, None),
        ({"score": 0.5}, 0.5),
        ({"reward": None, "score": 0.5}, 0.5),
        ({"reward": 0}, 0.0),
    ],
)
def test_the_outcome_is_the_reward_else_the_score_else_unknown(fields, reward, tmp_path):
    assert read_one(tmp_path, {"messages": CHAT} | fields).reward == reward


def test_a_stated_id_is_the_group_else_equal_prompts_are(tmp_path):
    records = [
        {"messages": CHAT, "instance_id": "a", "id": 1},
        {"messages": CHAT, "instance_id": "a", "repetition_id": 0},
        {"messages": CHAT, "id": 1},
        {"messages": CHAT},
        [USER, {"role": "assistant", "content": "7"}],
        [{"role": "user", "content": "2 + 2?"}, ANSWER],
    ]
    plan = planned(OPENAI_MESSAGES, lines(tmp_path, *records))
    names = [(run.instance_id, run.repetition_id) for run in plan.runs]
    assert names[:3] == [("a", 1), ("a", 0), ("1", 0)]
    (third, _), (fourth, _), (fifth, _) = names[3:]
    assert third == fourth != fifth
    assert third.startswith("prompt-")
    assert plan.about["groups"].startswith("inferred: lines without an id")


def test_where_all_lines_have_ids_nothing_is_inferred(tmp_path):
    assert planned(OPENAI_MESSAGES, lines(tmp_path, {"messages": CHAT, "id": "a"})).about == {}


def test_a_document_over_several_lines_is_no_jsonl(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(CHAT, indent=1))
    assert not OPENAI_MESSAGES.recognizes(Start(path))
    assert OPENAI_MESSAGES.recognizes(Start(save(tmp_path / "b.json", CHAT)))


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (b'{"messages": [{"ro', "json_line"),
        (b'[{"role": "user", "content": "\xff"}]', "json_line"),
        ({"messages": [USER]}, "no_calls"),
        ({"messages": [USER, 7]}, "record_type"),
        ({"messages": [USER, {"content": "x"}]}, "record_type"),
        ({"messages": CHAT, "reward": "1"}, "record_type"),
        ({"messages": CHAT, "rewards": {"a": 10**400}}, "record_type"),
        ({"messages": CHAT, "repetition_id": -1}, "record_type"),
        ({"messages": CHAT, "repetition_id": 2**31}, "record_type"),
        (42, "record_type"),
    ],
)
def test_a_damaged_line_is_refused_by_name_and_no_other_is(record, rule, tmp_path):
    path = lines(tmp_path, {"messages": CHAT}, record, CHAT)
    found, ((place, error, _),) = read_all(OPENAI_MESSAGES, path)
    assert len(found) == 2
    assert (place.where, error.rule) == (f"{path}:2", rule)


@pytest.mark.slow
@pytest.mark.model
def test_with_a_tokenizer_lines_become_rows_grouped_and_rewarded_as_chosen(tmp_path, smollm2_dir):
    records = [{"messages": CHAT, "task": i, "id": i, "rewards": {"style": i}} for i in range(3)]
    choices = {"tokenizer": str(smollm2_dir), "chat_template": save_template(tmp_path)}
    choices |= {"reward": "rewards.style", "on_error": "skip"}
    path = lines(tmp_path, *records, {"messages": [USER]})
    done, table = convert_with(OPENAI_MESSAGES, [path], tmp_path, **choices)
    assert (done.summary.num_records, done.summary.num_rejected) == (4, 1)
    assert table["instance_id"].to_pylist() == ["0", "1", "2"]
    assert table["reward"].to_pylist() == [0.0, 1.0, 2.0]
    assert table["token_source"].to_pylist() == ["retokenized"] * 3


CALLS = [
    {"id": i, "function": {"name": "ls", "arguments": a}} for i, a in (("a", {"n": 1}), ("b", "{}"))
]
LOG = b"\n".join(
    json.dumps(record).encode()
    for record in [
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": CALLS}], "tools": [{"name": "x"}]},
        {"messages": CHAT, "id": 1, "repetition_id": 3, "reward": 0.5, "metrics": {"a": 1}},
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}, ANSWER],
    ]
)


@given(mutated_lines(LOG))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.jsonl"
        path.write_bytes(content)
        check_lines(OPENAI_MESSAGES, path)
