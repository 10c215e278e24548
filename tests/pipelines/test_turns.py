"""Messages as a table: everything that was said, once."""

import json

import polars as pl

import pipelines
from pipelines.merging.merge import merge
from rollout_io import read_log, scan
from rollout_io.conversion.plan import Keywords
from tests.conftest import EXAMPLES
from tests.helpers.filter_helpers import table

CALL = {"id": "1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
BEGUN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List."}]
ANSWERED = [
    *BEGUN,
    {"role": "assistant", "content": "Sure.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "a.txt"},
]


def said(frame):
    lines = pipelines.messages(frame).collect()
    return lines.select("step_index", "role", "kind", "name", "text", "start", "length").rows()


def test_every_message_is_listed_once_with_its_step_and_its_tokens():
    steps = [
        {"messages": json.dumps(BEGUN), "response_text": f"Sure.\n{json.dumps([CALL])}"},
        {"messages": json.dumps(ANSWERED), "response_text": "One file."},
    ]
    rows = table(("a", 0, steps), optional=("messages", "response_text"))
    expected = [
        (0, "system", "text", None, "Be brief.", None, None),
        (0, "user", "text", None, "List.", None, None),
        (0, "assistant", "text", None, "Sure.", 1, 1),
        (0, "assistant", "tool_call", "bash", '{"command": "ls"}', 1, 1),
        (1, "tool", "tool_result", "bash", "a.txt", None, None),
        (1, "assistant", "text", None, "One file.", 2, 1),
    ]
    assert said(rows) == expected


def test_the_answers_of_a_conversation_have_the_tokens_of_their_segments(smollm2_dir):
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    rows = read_log([str(EXAMPLES / "claude_code")], **choices)
    lines = pipelines.messages(rows).collect()
    sampled = lines.filter(pl.col("start").is_not_null())
    assert (sampled["role"] == "assistant").all()
    spans = sampled.unique(["trajectory_id", "agent", "start"])
    starts = {(line["trajectory_id"], line["start"]) for line in spans.to_dicts()}
    expected = {
        (row["trajectory_id"], len(row["prompt_token_ids"]) + segment["start"])
        for row in rows.to_pylist()
        for segment in row["segments"] or [{"start": 0}]
    }
    assert starts == expected


def test_merging_changes_no_message(shop_dataset):
    steps = pipelines.messages(scan(shop_dataset)).collect()
    merged = pipelines.messages(merge(scan(shop_dataset))).collect()
    names = ("trajectory_id", "role", "kind", "text", "start", "length")
    assert len(steps)
    assert merged.select(names).rows() == steps.select(names).rows()


def test_each_step_has_one_sampled_answer(shop_dataset):
    steps = scan(shop_dataset).select("trajectory_id", "step_index").collect()
    answers = pipelines.messages(scan(shop_dataset)).filter(pl.col("start").is_not_null())
    found = answers.select("trajectory_id", "step_index").unique(maintain_order=True).collect()
    assert set(found.rows()) == set(steps.rows())
