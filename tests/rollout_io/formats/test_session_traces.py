"""Session traces: what an export writes is what the rows say, and comes back."""

import json

import pyarrow as pa
import pytest

import rollout_io
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.hugging_face import ADAPTER, NO_ANSWER, NOT_WRITTEN
from schemas.columns import arrow_schema
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.conversation_writers import log_of
from tests.helpers.structural_logs import CONVERSATION
from tests.rollout_io.formats.test_gemini_cli import HEAD, asked, gemini

SHOP = ROOT / "examples" / "shop.calls.jsonl"
SESSION = {"type": "session", "harness": "mine", "id": "s", "name": "Listing"}


def said(role, content="", **fields):
    return {"type": "message", "message": {"role": role, "content": content} | fields}


CALL = {"id": "c", "function": {"name": "ls", "arguments": '{"n": 1}'}}
TRACE = [
    SESSION,
    said("system", "Be brief."),
    said("user", "List."),
    said("assistant", reasoningContent="Hm.", toolCalls=[CALL], model="m"),
    said("tool", "a.py", toolCallId="c"),
    said("assistant", "One file.", timestamp=1.0),
]


def exported(dataset, tmp_path):
    """The lines of each exported file."""
    out = tmp_path / "out"
    rollout_io.export(dataset, out, "session_traces")
    return [[*map(json.loads, f.read_text().splitlines())] for f in sorted(out.iterdir())]


def test_the_header_has_the_group_the_attempt_the_reward_and_the_sub_agents(tmp_path):
    head = SESSION | {"instance_id": "task", "repetition_id": 3, "reward": 0.5}
    side = SESSION | {"id": "s/1", "parent": "s", "agent": "scout"}
    paths = [
        write_lines(tmp_path / "a.jsonl", head, *TRACE[1:]),
        write_lines(tmp_path / "b.jsonl", side, *TRACE[1:]),
    ]
    ((found_run, found),), rejected = read_all(ADAPTER, *paths)
    assert (rejected, found.reward) == ([], 0.5)
    assert (found_run.instance_id, found_run.repetition_id) == ("task", 3)
    assert [step.agent for step in found.steps] == [None, "scout"]


def test_damage_is_named(tmp_path):
    path = write_lines(tmp_path / "s.jsonl", SESSION, {"type": "message", "message": "Hi."})
    found, rejected = read_all(ADAPTER, path)
    assert (found, {r.error.rule for r in rejected}) == ([], {"record_type"})
    path = write_lines(tmp_path / "s.jsonl", SESSION | {"reward": "high"}, *TRACE[1:])
    _, rejected = read_all(ADAPTER, path)
    assert {r.error.rule for r in rejected} == {"record_type"}


def test_calls_are_exported_with_each_context_once(tmp_path):
    rollout_io.convert(SHOP, tmp_path / "ds", rewards=str(SHOP.with_name("shop.rewards.jsonl")))
    files = exported(tmp_path / "ds", tmp_path)
    heads = [lines[0] for lines in files]
    mains = [head for head in heads if "parent" not in head]
    rows = rollout_io.read(tmp_path / "ds").to_pylist()
    last = {row["trajectory_id"]: row for row in rows}
    assert {head["id"] for head in mains} == last.keys()
    for head, (_, *lines) in zip(heads, files, strict=True):
        assert all(line["type"] == "message" for line in lines)
        if "parent" not in head:
            row = last[head["id"]]
            assert (head.get("reward"), head.get("error")) == (row["reward"], row.get("error"))
            sent = json.loads(row["messages"])
            texts = [line["message"]["content"] for line in lines]
            assert texts[: len(sent)] == [m["content"] or "" for m in sent]
    messages = {row["response_text"] for row in rows if row["response_text"]}
    told = {line["message"]["content"] for lines in files for line in lines[1:]}
    assert len(messages & told) >= len(mains) / 2


@pytest.mark.model
def test_an_exported_conversation_comes_back_message_for_message(tmp_path, smollm2_dir):
    log = tmp_path / "log.jsonl"
    log.write_bytes(log_of("pi", CONVERSATION)[0])
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    rollout_io.convert(log, tmp_path / "ds", **choices)
    (lines,) = exported(tmp_path / "ds", tmp_path)
    assert lines[0]["harness"] == "rollout-io"
    rollout_io.convert(tmp_path / "out", tmp_path / "again", **choices)
    one, other = (rollout_io.read(tmp_path / name).to_pylist() for name in ("ds", "again"))
    same = ("prompt_token_ids", "response_ids", "loss_mask", "instance_id", "repetition_id")
    assert [{n: row[n] for n in same} for row in one] == [
        {n: row[n] for n in same} for row in other
    ]


@pytest.mark.model
def test_contexts_that_no_later_one_continues_are_sessions_of_one_run(tmp_path, smollm2_dir):
    picture = {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}
    log = write_lines(
        tmp_path / "log.jsonl",
        HEAD,
        {"id": "1", "type": "user", "content": [{"text": "Look."}, picture]},
        gemini("One.", id="a", model="g"),
        {"$set": {"messages": [asked("u", "In short.")]}},
        gemini("Two.", id="b", model="g"),
    )
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    rollout_io.convert(log, tmp_path / "ds", **choices)
    last, first = exported(tmp_path / "ds", tmp_path)
    assert (last[0]["id"], first[0]["id"], first[0]["parent"]) == ("s_0", "s_0/1", "s_0")
    assert [line["message"]["content"] for line in first[1:]] == ["Look.\n[image]", "One."]
    assert [line["message"]["content"] for line in last[1:]] == ["In short.", "Two."]
    assert last[2]["message"]["model"] == "g"
    ((_, found),), _ = read_all(ADAPTER, *sorted((tmp_path / "out").iterdir()))
    assert len(found.steps) == 2


def row(step, sent, text, **fields):
    """A row of engine tokens with what was sent and answered, as text."""
    return {
        "instance_id": "a",
        "repetition_id": 0,
        "trajectory_id": "a_0",
        "step_index": step,
        "is_last_step": False,
        "prompt_token_ids": [1, step + 2],
        "response_ids": [5],
        "loss_mask": [True],
        "reward": 0.0,
        "token_source": "engine",
        "messages": sent,
        "response_text": text,
        **fields,
    }


def written(tmp_path, *rows):
    """A dataset of the rows, the last of which ends the run."""
    rows[-1]["is_last_step"] = True
    table = pa.Table.from_pylist([*rows], schema=arrow_schema(tuple(rows[0])))
    with rollout_io.RolloutWriter(tmp_path / "ds", layout="prefix") as writer:
        writer.write(table)
    return tmp_path / "ds"


def asking(*texts):
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def read_back(tmp_path):
    ((_, found),), rejected = read_all(ADAPTER, *sorted((tmp_path / "out").iterdir()))
    assert rejected == []
    return found


def test_contexts_come_back_in_their_order_each_with_its_reward(tmp_path):
    dataset = written(
        tmp_path,
        row(0, asking("First."), "One.", reward=0.25),
        row(1, asking("Second."), "Two.", reward=0.5),
        row(2, asking("Second.", "Two.", "More."), "Three."),
        row(3, asking("Last."), "Four.", reward=0.75),
    )
    done = rollout_io.export(dataset, tmp_path / "out", "session_traces")
    found = read_back(tmp_path)
    said = [(step.messages[0]["content"], step.reward) for step in found.steps]
    assert said == [("First.", 0.25), ("Second.", 0.0), ("Last.", None)]
    assert found.reward == 0.75
    assert done.remarks == [f"{NOT_WRITTEN}: 1"]


def test_the_contexts_of_other_writers_keep_the_order_of_their_files(tmp_path):
    side = SESSION | {"id": "s/1", "parent": "s", "step_index": 0}
    paths = [
        write_lines(tmp_path / "a.jsonl", SESSION, said("user", "A."), TRACE[-1]),
        write_lines(tmp_path / "b.jsonl", side, said("user", "B."), TRACE[-1]),
    ]
    ((_, found),), _ = read_all(ADAPTER, *paths)
    assert [step.messages[0]["content"] for step in found.steps] == ["A.", "B."]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (json.dumps('Say "hi"\n'), 'Say "hi"\n'),
        ("Say hi", "Say hi"),
        ('{"Say": "hi"}', '{"Say": "hi"}'),
        (asking("Say \ud800"), "Say \ufffd"),
    ],
)
def test_a_prompt_is_written_as_it_was_sent(tmp_path, sent, told):
    dataset = written(tmp_path, row(0, sent, "Hi."))
    rollout_io.export(dataset, tmp_path / "out", "session_traces")
    (step,) = read_back(tmp_path).steps
    assert [message["content"] for message in step.messages] == [told, "Hi."]


def test_the_tool_calls_of_the_last_answer_stay_calls(tmp_path):
    call = CALL | {"type": "function"}
    dataset = written(tmp_path, row(0, asking("Go."), f"Yes.\n{json.dumps([call])}"))
    rollout_io.export(dataset, tmp_path / "out", "session_traces")
    (step,) = read_back(tmp_path).steps
    assert step.messages[-1]["content"] == "Yes."
    (made,) = step.messages[-1]["tool_calls"]
    assert (made["id"], made["function"]["name"]) == ("c", "ls")
    assert json.loads(made["function"]["arguments"]) == {"n": 1}


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path):
    rows = (row(0, asking("Go."), "Yes."), row(1, asking("Again."), "", reward=1.0))
    done = rollout_io.export(written(tmp_path, *rows), tmp_path / "out", "session_traces")
    assert (done.num_rows_written, done.left_out) == (1, {NO_ANSWER: 1})
    found = read_back(tmp_path)
    assert (len(found.steps), found.reward) == (1, 1.0)


def test_rows_of_token_ids_alone_are_left_out_and_counted(tmp_path, capsys):
    line = {
        "task": "t",
        "session": "a/0",
        "request": {},
        "response": {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3], "index": 0}]},
    }
    write_lines(tmp_path / "calls.jsonl", line)
    rollout_io.convert(tmp_path / "calls.jsonl", tmp_path / "ds")
    assert run(["export", str(tmp_path / "ds"), "--format", "session_traces", "--out", "x"]) == 1
    said = capsys.readouterr().err
    assert "[some_rows]" in said
    assert "1 without messages" in said
    assert "failed" not in said
