"""The messages of a row, before and after each of its answers, in the dialects of other projects."""

import json

import pyarrow as pa
import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from pipelines.exporting.samples import DIALECTS, plain, turns
from rollout_io.cli.main import run
from schemas.errors import InputError
from tests.conftest import EXAMPLES
from tests.helpers.pair_helpers import attempts, exported, write

ASK = {"role": "user", "content": "How many?"}
CALL = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"function": {"name": "ls", "arguments": '{"path": "."}'}}],
}
RESULT = {"role": "tool", "content": "a.txt"}
END = {"role": "assistant", "content": "One.", "reasoning_content": "I count."}
TALK = [ASK, CALL, RESULT, END]
TOOLS = json.dumps([{"type": "function", "function": {"name": "ls", "parameters": {}}}])


def test_a_retokenized_row_has_a_turn_for_each_of_its_answers():
    row = {"token_source": "retokenized", "messages": json.dumps(TALK)}
    row["segments"] = [{"start": 0, "length": 2}, {"start": 4, "length": 1}]
    assert turns(row) == [([ASK], CALL), ([ASK, CALL, RESULT], END)]
    assert turns(row | {"segments": None}) == [([ASK, CALL, RESULT], END)]


def test_an_engine_row_has_the_messages_that_were_sent_and_its_text():
    text = "I look.\n" + json.dumps(CALL["tool_calls"])
    row = {"token_source": "engine", "messages": json.dumps([ASK]), "response_text": text}
    assert turns(row) == [([ASK], CALL)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": None, "response_text": "x"},
        {"messages": json.dumps([ASK]), "response_text": None},
        {"messages": "plain text", "response_text": "x"},
        {"messages": json.dumps(["text"]), "response_text": "x"},
        {"messages": "[" * 100_000, "response_text": "x"},
        {"messages": json.dumps([ASK]), "response_text": "x", "segments": [{"start": 0}] * 2},
    ],
)
def test_a_row_whose_texts_are_unknown_has_no_turns(row):
    assert turns({"token_source": "engine"} | row) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "arguments", "name"]),
            inner | st.sampled_from(["user", "assistant", "tool"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(JSON, max_size=4), st.sampled_from(["engine", "retokenized"]))
def test_whatever_the_messages_are_they_become_samples_or_nothing(messages, source):
    row = {"token_source": source, "messages": json.dumps(messages), "response_text": "x"}
    for before, answer in turns(row):
        for dialect in DIALECTS.values():
            sample = dialect([plain(message) for message in (*before, answer)], None)
            assert json.loads(json.dumps(sample)) == sample


@pytest.mark.parametrize("tools", ["{", "{}", "3"])
def test_tools_that_are_no_list_are_refused(tools, tmp_path):
    table = attempts(
        ("a", 1.0, [([1], [2])]),
        messages=pa.array([json.dumps([ASK])]),
        response_text=pa.array(["x"]),
        tools=pa.array([tools]),
    )
    with pytest.raises(InputError, match=r"trajectory 'a_0', column 'tools'.*\[tools\]"):
        exported(write(tmp_path / "ds", table), "sft")


def test_sharegpt_has_calls_and_reasoning_in_the_text():
    sample = DIALECTS["sharegpt"]([plain(message) for message in TALK], TOOLS)
    assert sample["tools"] == TOOLS
    assert sample["conversations"] == [
        {"from": "human", "value": "How many?"},
        {
            "from": "gpt",
            "value": 'I look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>',
        },
        {"from": "tool", "value": "a.txt"},
        {"from": "gpt", "value": "<think>\nI count.\n</think>\nOne."},
    ]


def test_openai_has_an_id_for_each_call_and_its_result():
    sample = DIALECTS["openai"]([plain(message) for message in TALK], TOOLS)
    assert sample["tools"] == json.loads(TOOLS)
    _, call, result, end = sample["messages"]
    function = {"name": "ls", "arguments": '{"path": "."}'}
    assert call["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert result == {"role": "tool", "content": "a.txt", "tool_call_id": "call_0"}
    assert end == {"role": "assistant", "content": "One."}


def test_parts_of_text_become_one_text_and_damaged_arguments_stay():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts, "name": None}) == {
        "role": "user",
        "content": "a\nb",
    }
    damaged = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"arguments": "{"}}],
    }
    assert plain(damaged)["tool_calls"] == [{"type": "function", "function": {"arguments": "{"}}]


def test_merged_steps_have_the_messages_of_their_last_call(tmp_path):
    sent = [[ASK], [ASK, {"role": "assistant", "content": "x"}, RESULT]]
    table = attempts(
        ("a", 1.0, [([1], [2]), ([1, 2, 9], [3])]),
        messages=pa.array([json.dumps(messages) for messages in sent]),
        response_text=pa.array(["x", "One. ?"]),
        tools=pa.array([TOOLS] * 2),
    )
    for layout, rows in (("prefix", table), ("full", pipelines.merge(table).collect().to_arrow())):
        _, (sample,) = exported(write(tmp_path / layout / "ds", rows, layout=layout), "sft")
        assert sample["messages"] == [*sent[1], {"role": "assistant", "content": "One. ?"}]
        assert sample["tools"] == TOOLS
        _, steps = exported(tmp_path / layout / "ds", "kto", ">=0")
        assert [step["prompt"] for step in steps] == sent


def test_rows_without_texts_are_left_out_and_counted(tmp_path):
    table = attempts(
        ("a", 1.0, [([1], [2])]),
        ("a", 0.0, [([1], [3])]),
        ("a", 0.5, [([1], [4])]),
        messages=pa.array([json.dumps([ASK])] * 2 + [None]),
        response_text=pa.array(["x", "y", None]),
    )
    dataset = write(tmp_path / "ds", table)
    done, samples = exported(dataset, "sft")
    assert len(samples) == 2
    assert done.left_out == {"without messages, or without the text of an answer": 1}
    done, samples = exported(dataset, "dpo")
    assert [s["chosen"][0]["content"] for s in samples] == ["x"]
    assert [s["rejected"][0]["content"] for s in samples] == ["y"]


def test_datasets_loads_arguments_of_calls_without_other_calls_names(tmp_path):
    calls = [{"function": {"name": "a", "arguments": {"x": 1}}}]
    calls += [{"function": {"name": "b", "arguments": {"y": ["z"]}}}]
    said = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
    table = attempts(
        ("a", 1.0, [([1], [2])]),
        ("b", 1.0, [([1], [3])]),
        messages=pa.array([json.dumps(said), json.dumps([ASK])]),
        token_source=pa.array(["retokenized", "engine"]),
        response_text=pa.array([None, "x"]),
    )
    exported(write(tmp_path / "ds", table), "sft")
    (file,) = (path for path in tmp_path.iterdir() if path.is_file())
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "c"))
    found = rows[0]["messages"][1]["tool_calls"]
    assert [call["function"]["arguments"] for call in found] == [{"x": 1}, {"y": ["z"]}]
    assert rows[1]["messages"] == [ASK, {"role": "assistant", "content": "x"}]


@pytest.mark.slow
@pytest.mark.model
def test_sessions_of_a_coding_agent_are_chats_with_their_tool_calls(smollm2_dir, tmp_path):
    out, model = tmp_path / "ds", str(smollm2_dir)
    options = ["--tokenizer", model, "--chat-template", "chatml_tools_thinking"]
    command = ["convert", str(EXAMPLES / "claude_code"), *options, "--on-error", "skip"]
    assert run([*command, "--out", str(out)]) == 0
    done, samples = exported(out, "sft")
    assert (done.num_samples, done.left_out) == (3, {})
    calls = [m for s in samples for m in s["messages"] if m.get("tool_calls")]
    assert calls
    assert all(isinstance(m["tool_calls"][0]["function"]["arguments"], dict) for m in calls)
    done, steps = exported(out, "openai_sft")
    assert len(steps) == 3


def test_answers_of_another_sequence_have_weight_0_in_openai_sft(tmp_path):
    """A rewind repeats an answer in the prompt of a second sequence, where it must not train again."""
    first = {"role": "assistant", "content": "One."}
    ask, again = ASK, {"role": "user", "content": "Sure?"}
    table = attempts(
        ("a", 1.0, [([1], [2]), ([1, 7, 8], [3])]),
        messages=[json.dumps([ask]), json.dumps([ask, first, again])],
        response_text=["One.", "Yes."],
    )
    _, samples = exported(write(tmp_path / "ds", table), "openai_sft")
    weights = [
        [m.get("weight") for m in s["messages"] if m["role"] == "assistant"] for s in samples
    ]
    assert weights == [[None], [0, None]]
    _, samples = exported(tmp_path / "ds", "sft")
    assert all("weight" not in m for s in samples for m in s["messages"])
