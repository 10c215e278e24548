"""Chat data sets and messages of frameworks: the same conversation, whoever saved it."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_io.formats.base import Options
from rollout_io.formats.chats import ADAPTER
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.parsing.messages import MARKED
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import planned, read_all, write_lines

CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"n":1}'}}
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Files?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "a.txt", "tool_call_id": "c1"},
    {"role": "assistant", "content": "One."},
]
LC_CALL = {"name": "ls", "args": {"n": 1}, "id": "c1", "type": "tool_call"}
LANGCHAIN = [
    {"type": "system", "content": "Be kind."},
    {"type": "human", "content": [{"type": "text", "text": "Files?"}]},
    {"type": "ai", "content": "I look.", "tool_calls": [LC_CALL], "id": "x"},
    {"type": "tool", "content": "a.txt", "tool_call_id": "c1", "artifact": {"big": "1"}},
    {"type": "ai", "content": "One."},
]
CLASSES = ["SystemMessage", "HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
PYDANTIC = [
    {
        "kind": "request",
        "instructions": "Be kind.",
        "parts": [{"part_kind": "user-prompt", "content": "Files?"}],
    },
    {
        "kind": "response",
        "parts": [
            {"part_kind": "text", "content": "I look."},
            {
                "part_kind": "tool-call",
                "tool_name": "ls",
                "args": '{"n": 1}',
                "tool_call_id": "c1",
            },
        ],
    },
    {
        "kind": "request",
        "instructions": "Be kind.",
        "parts": [
            {
                "part_kind": "tool-return",
                "tool_name": "ls",
                "content": "a.txt",
                "tool_call_id": "c1",
            }
        ],
    },
    {"kind": "response", "parts": [{"part_kind": "text", "content": "One."}]},
]
AUTOGEN = [
    {"type": "SystemMessage", "content": "Be kind."},
    {"type": "UserMessage", "content": "Files?", "source": "user"},
    {
        "type": "AssistantMessage",
        "content": ["I look.", {"id": "c1", "name": "ls", "arguments": '{"n": 1}'}],
        "source": "a",
    },
    {
        "type": "FunctionExecutionResultMessage",
        "content": [{"content": "a.txt", "call_id": "c1", "name": "ls", "is_error": False}],
    },
    {"type": "AssistantMessage", "content": "One.", "source": "a"},
]
LLAMA_INDEX = [
    {
        "role": message["role"],
        "additional_kwargs": {
            name: message[name] for name in ("tool_calls", "tool_call_id") if name in message
        },
        "blocks": [{"block_type": "text", "text": message["content"]}],
    }
    for message in CHAT
]
ITEMS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Files?"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    },
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"n":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
]
FRAMEWORKS = {
    "langchain": LANGCHAIN,
    "langchain data": [{"type": m["type"], "data": m} for m in LANGCHAIN],
    "langchain lc": [
        {"lc": 1, "type": "constructor", "id": ["langchain", name], "kwargs": message}
        for name, message in zip(CLASSES, LANGCHAIN, strict=True)
    ],
    "pydantic-ai": PYDANTIC,
    "llama_index": LLAMA_INDEX,
    "openai agents": ITEMS,
}
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Files?"},
    {"from": "gpt", "value": "One."},
]
SHORT = [CHAT[0], CHAT[1], CHAT[4]]
FORMATS = load_formats().adapters


def read_one(path):
    assert "chats" in recognize(path, FORMATS)
    ((run, found),), rejected = read_all(ADAPTER, path)
    assert rejected == []
    return run, found


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("is_line", [True, False])
def test_the_messages_of_each_framework_are_the_same_conversation(name, is_line, tmp_path):
    path, content = tmp_path / "chat.json", FRAMEWORKS[name]
    path.write_text(json.dumps(content if is_line else {"messages": content}, indent=None))
    _, found = read_one(path)
    assert (found.steps[0].messages, found.unread) == (CHAT, {})


def test_autogens_messages_which_traces_hold_are_the_same_conversation():
    assert frameworks.messages(AUTOGEN, "a") == CHAT


def test_sharegpt_is_read_with_its_tools_group_and_reward(tmp_path):
    line = {"conversations": SHAREGPT, "tools": json.dumps([{"name": "ls"}]), "id": 7}
    run, found = read_one(write_lines(tmp_path / "a.jsonl", line | {"reward": 0.5}))
    assert found.steps[0].messages == SHORT
    assert found.steps[0].tools == [{"type": "function", "function": {"name": "ls"}}]
    assert (run.instance_id, found.reward) == ("7", 0.5)


@pytest.mark.parametrize(
    "block", [{"source_type": "base64", "data": "AAAA"}, {"base64": "AAAA"}, {"url": "https://x/y"}]
)
def test_pictures_of_langchain_are_kept(block, tmp_path):
    picture = {"type": "image", "mime_type": "image/png"} | block
    messages = [{"type": "human", "content": [picture]}, {"type": "ai", "content": "One."}]
    _, found = read_one(write_lines(tmp_path / "a.jsonl", {"messages": messages}))
    (part,) = found.steps[0].messages[0]["content"]
    source = part["source"]
    assert (part["type"], source["media_type"]) == ("image", "image/png")
    assert source.get("data", source.get("url")) in {"AAAA", "https://x/y"}


def test_prompt_and_completion_of_messages_train_on_the_completion_alone(tmp_path):
    line = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    _, found = read_one(write_lines(tmp_path / "a.jsonl", line))
    assert (found.steps[0].messages, found.steps[0].num_given) == (CHAT, 3)


LOSS_OF_ONE = [
    {"from": "human", "value": "a?"},
    {"from": "gpt", "value": "A.", "loss": False},
    {"from": "human", "value": "b?"},
    {"from": "gpt", "value": "B.", "loss": True},
]
VERTEX = [
    {"role": "user", "parts": [{"text": "a?"}]},
    {"role": "model", "parts": [{"text": "A."}], "weight": 0},
    {"role": "user", "parts": [{"text": "b?"}]},
    {"role": "model", "parts": [{"text": "B."}]},
]


LINED = {
    "a record a line": lambda parts: "[\n" + ",\n".join(parts) + "\n]\n",
    "commas in front": lambda parts: "[\n" + "\n,".join(parts) + "\n]",
    "brackets beside records": lambda parts: "[" + ",\n".join(parts) + "]",
    "windows": lambda parts: "[\r\n" + ",\r\n".join(parts) + "\r\n]\r\n",
    "blank lines": lambda parts: "\n[\n\n" + "\n,\n".join(parts) + "\n\n]\n",
}


@pytest.mark.parametrize("layout", LINED)
@pytest.mark.parametrize("number", [1, 2, 5, 7, 8, 9, 15])
def test_a_list_with_a_record_a_line_is_read_whole(number, layout, tmp_path):
    path = tmp_path / "sharegpt.json"
    records = [{"conversations": LOSS_OF_ONE[2:], "id": i} for i in range(number)]
    path.write_bytes(LINED[layout]([*map(json.dumps, records)]).encode())
    assert recognize(path, FORMATS) == ["chats"]
    runs, rejected = read_all(ADAPTER, path)
    assert ([run.instance_id for run, _ in runs], rejected) == ([*map(str, range(number))], [])


def test_a_list_of_messages_with_one_a_line_is_one_conversation(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text("[\n" + ",\n".join(json.dumps(message) for message in CHAT) + "\n]")
    assert recognize(path, FORMATS) == ["chats"]
    ((_, found),), _ = read_all(ADAPTER, path)
    assert found.steps[0].messages == CHAT


@pytest.mark.parametrize("number", [2, 5, 15])
def test_a_list_that_is_cut_off_is_refused_whole_so_no_record_of_it_is_lost(number, tmp_path):
    path = tmp_path / "sharegpt.json"
    records = [json.dumps({"conversations": LOSS_OF_ONE, "id": i}) for i in range(number)]
    path.write_text("[\n" + ",\n".join(records) + "\n")
    runs, (rejected,) = read_all(ADAPTER, path)
    assert (runs, rejected.error.rule) == ([], "json_document")


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": LOSS_OF_ONE},
        {"messages": VERTEX},
        {
            "prompt": [{"role": "user", "content": "a?"}],
            "completion": [
                {"role": "assistant", "content": "A.", "train": False},
                {"role": "user", "content": "b?"},
                {"role": "assistant", "content": "B.", "train": True},
            ],
        },
        {
            "messages": [
                {"type": "human", "content": "a?"},
                {"type": "ai", "content": "A.", "loss_mask": 0},
                {"type": "human", "content": "b?"},
                {"type": "ai", "content": "B.", "loss_mask": 1},
            ]
        },
    ],
)
def test_an_answer_marked_as_not_trained_is_context_in_every_shape(record, tmp_path):
    record = {"id": "x", **record}
    ((_, found),), rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", record))
    (step,) = found.steps
    texts = [(m["role"], m["content"]) for m in step.messages]
    assert texts == [("user", "a?"), ("assistant", "A."), ("user", "b?"), ("assistant", "B.")]
    assert (step.num_given, found.notes, rejected) == (2, {MARKED: 1}, [])


ASIDE = {
    "sharegpt": {"from": "gpt", "value": "A."},
    "langchain": {"type": "ai", "content": "A."},
    "pydantic-ai": {"kind": "response", "parts": [{"part_kind": "text", "content": "A."}]},
    "llama_index": {"role": "assistant", "blocks": [{"block_type": "text", "text": "A."}]},
    "chat": {"role": "assistant", "content": "A."},
}


@pytest.mark.parametrize("name", ASIDE)
@pytest.mark.parametrize(
    ("key", "value"), [("aside", "Not read."), ("hidden", True), ("parent", "17")]
)
def test_text_and_marks_in_keys_that_no_shape_has_are_named(name, key, value, tmp_path):
    messages = [{"role": "user", "content": "a?"}, ASIDE[name] | {key: value}]
    path = write_lines(tmp_path / "a.jsonl", {"id": "x", "conversations": messages})
    ((_, trajectory),), _ = read_all(ADAPTER, path)
    assert trajectory.unread == {f"message.{key}": 1}


def test_the_mark_of_a_failed_call_in_langchain_is_kept(tmp_path):
    failed = LANGCHAIN[3] | {"status": "error"}
    path = write_lines(tmp_path / "a.jsonl", {"messages": [*LANGCHAIN[:3], failed, LANGCHAIN[4]]})
    ((_, trajectory),), _ = read_all(ADAPTER, path)
    assert [m.get("is_error") for m in trajectory.steps[0].messages] == [None] * 3 + [True, None]


def test_prompt_and_completion_of_text_stay_text(tmp_path):
    line = {"prompt": "1 + 5 =", "completion": " 6"}
    path = write_lines(tmp_path / "a.jsonl", line, line | {"completion": " 7"})
    runs, _ = read_all(ADAPTER, path)
    steps = [step for _, found in runs for step in found.steps]
    assert [(step.prompt, step.response) for step in steps] == [
        ("1 + 5 =", " 6"),
        ("1 + 5 =", " 7"),
    ]
    assert len({run.instance_id for run, _ in runs}) == 1


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_tables_are_read_row_by_row(kind, tmp_path):
    rows = [{"messages": SHORT, "instance_id": f"i{i}", "score": i / 4} for i in range(5)]
    rows[3]["messages"] = CHAT
    if kind == "parquet":
        path = tmp_path / "train-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "ds")
        (path,) = (tmp_path / "ds").glob("*.arrow")
    assert recognize(path, FORMATS) == ["chats"]
    runs, rejected = read_all(ADAPTER, path)
    assert rejected == []
    assert [run.instance_id for run, _ in runs] == [f"i{i}" for i in range(5)]
    assert [found.reward for _, found in runs] == [i / 4 for i in range(5)]
    assert runs[3][1].steps[0].messages == CHAT
    assert runs[4][1].steps[0].messages == SHORT


def test_a_shape_that_no_framework_has_is_refused_by_name(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"conversations": [*SHAREGPT, 7], "id": "x"})
    (run,) = planned(ADAPTER, path).runs
    with pytest.raises(RolloutError) as error:
        ADAPTER.read(run, Options())
    assert (error.value.rule, error.value.where) == ("message", f"{path}:1, messages[3]")


def test_real_messages_of_frameworks_are_read(harness_logs):
    folder = harness_logs.parent / "agent_traces"
    texts = {
        "langgraph.lc.jsonl": ["Weather in Paris?", "sunny in Paris", "The answer is 18."],
        "langgraph.messages.json": ["Weather in Paris?", "sunny in Paris", "The answer is 18."],
        "openai_agents.items.json": ["Weather in Paris?", "sunny in Paris", "The answer is 16."],
        "pydantic_ai.messages.json": ["help", "Weather?"],
    }
    for name, expected in texts.items():
        if not (folder / name).exists():
            pytest.skip(f"no {folder / name}")
        _, found = read_one(folder / name)
        said = [m["content"] for m in found.steps[0].messages if m["content"]]
        assert said[: len(expected)] == expected, name
