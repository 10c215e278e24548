import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.drift_diagnosis import HINTS, Report, TextReading, diagnose, drift
from pipelines.drift_diagnosis.breaks import changed, returns
from pipelines.drift_diagnosis.diagnosis import render, render_break
from pipelines.drift_diagnosis.texts import Turn, compare, num_off
from pipelines.merging.merge import merge_table
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas.strategies import rollout_tables
from tests.conftest import ROOT
from tests.helpers.drift_helpers import breaks_of, only_break, steps_of
from tests.helpers.examples import examples
from tests.helpers.table_helpers import seen_tokens

ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
BREAK = {
    "trajectory_id": "a_0",
    "step_index": 1,
    "agent": None,
    "cause": "edited",
    "continues_lineage": False,
    "from_step_index": 0,
    "token_index": 2,
    "num_lost_tokens": 1,
    "evidence": "",
    "kept_ids": [1],
    "lost_ids": [2],
    "now_ids": [],
}
AGAIN = {"role": "user", "content": "Sure?"}


def said(text):
    return {"role": "assistant", "content": text}


def logged(before, response, now):
    """Two steps whose ids part inside the first one's response."""
    return steps_of(
        [[1, 2], [1, 2, 3, 9]],
        [[3, 4], [5]],
        messages=[json.dumps(before), json.dumps(now)],
        response_text=[response, "x"],
    )


def test_the_worked_example_breaks_where_two_ids_became_one():
    before = [69622, 11397, 26951, 3834, 198, 12]
    now = [69622, 11397, 94224, 198, 12, 41151]
    found = only_break(steps_of([before[:2], now], [before[2:], [7]]))
    assert (found["step_index"], found["from_step_index"], found["token_index"]) == (1, 0, 2)
    assert (found["kept_ids"], found["lost_ids"]) == ([69622, 11397], [26951, 3834])
    assert (found["now_ids"], found["num_lost_tokens"]) == ([94224], 4)
    assert (found["cause"], found["continues_lineage"]) == ("unknown", False)
    assert found["evidence"] == "2 ids became 1, then the ids agree again"
    assert found["kept_text"] is found["lost_text"] is found["now_text"] is None


def test_steps_that_continue_the_one_before_are_no_breaks():
    assert breaks_of(steps_of([[1, 2], [1, 2, 3, 9]], [[3], [4]])) == []
    assert breaks_of(steps_of([[1, 2], [1, 2, 3]], [[3], [4]])) == []


def test_first_steps_and_steps_without_a_call_are_no_breaks():
    assert breaks_of(steps_of([[1], []], [[2], []])) == []
    assert breaks_of(steps_of([], [])) == []


def test_the_first_step_of_another_agent_and_the_one_that_goes_on_after_it_lose_nothing():
    table = steps_of(
        [[1, 2], [7, 8], [1, 2, 3, 9]], [[3], [4], [5]], agent=["main", "checker", "main"]
    )
    start, resumed = breaks_of(table)
    assert (start["cause"], start["continues_lineage"]) == ("new_agent", False)
    assert (resumed["cause"], resumed["continues_lineage"]) == ("new_agent", True)
    assert (resumed["from_step_index"], resumed["token_index"]) == (0, 3)
    assert start["num_lost_tokens"] == resumed["num_lost_tokens"] == 0


def test_branches_of_one_step_are_an_overlap_and_one_of_them_continues_it():
    table = steps_of([[1, 2], [1, 2, 3, 8], [1, 2, 3, 9]], [[3], [4], [5]])
    found = only_break(table)
    assert (found["step_index"], found["cause"]) == (2, "overlap")
    assert (found["num_lost_tokens"], found["token_index"]) == (0, 3)


def test_a_prompt_asked_again_is_an_overlap():
    found = only_break(steps_of([[1, 2], [1, 2]], [[3], [4]]))
    assert (found["cause"], found["now_ids"], found["num_lost_tokens"]) == ("overlap", [], 0)


def test_the_agents_own_latest_step_is_told_from_where_another_agent_shares_as_much():
    table = steps_of(
        [[1, 2, 3], [1, 5, 6], [1, 2, 8]], [[4], [7], [9]], agent=["main", "checker", "main"]
    )
    found = breaks_of(table)[-1]
    assert (found["from_step_index"], found["token_index"]) == (0, 2)
    assert found["cause"] != "new_agent"


def test_a_step_that_shares_nothing_is_told_from_the_step_before():
    found = only_break(steps_of([[1, 2], [7, 8]], [[3], [4]]))
    assert (found["from_step_index"], found["token_index"], found["kept_ids"]) == (0, 0, [])
    assert found["cause"] == "unknown"
    assert "a new context or another agent" in found["evidence"]


def test_a_known_agent_whose_answer_does_not_return_began_a_new_context():
    end = 0
    table = steps_of([[1, 2], [1, 8, end, 9]], [[3, end], [4]], agent=["main", "main"])
    found = only_break(table)
    assert (found["cause"], found["num_lost_tokens"]) == ("reset", 3)
    edited = steps_of([[1, 2], [1, 8, 3, end, 9]], [[3, end], [4]], agent=["main", "main"])
    assert only_break(edited)["cause"] == "unknown"


@pytest.mark.parametrize(
    ("now", "cause", "evidence"),
    [
        ([*ASKED, said("4, I think."), AGAIN], "unknown", "repeat the earlier ones word for word"),
        ([*ASKED, said("4"), AGAIN], "edited", "assistant message, after '4': ', I think.' -> ''"),
        ([*ASKED, said("4, I think.\n"), AGAIN], "template", "whitespace"),
        ([*ASKED, {"role": "user", "content": "Summary: 4."}], "reset", "from there on: 0 of 1"),
        ([ASKED[0], {"role": "user", "content": "3+3?"}], "reset", "from there on: 0 of 2"),
        (
            [{"role": "system", "content": "Check."}, AGAIN],
            "new_agent",
            "a different first message",
        ),
    ],
)
def test_without_a_tokenizer_the_logged_messages_tell(now, cause, evidence):
    found = only_break(logged(ASKED, "4, I think.", now))
    assert found["cause"] == cause
    assert evidence in found["evidence"]


def test_a_changed_system_message_above_the_same_conversation_is_an_edit():
    now = [{"role": "system", "content": "Add!"}, ASKED[1], said("4"), AGAIN]
    assert only_break(logged(ASKED, "4", now))["cause"] == "edited"


@pytest.mark.parametrize("messages", [None, "{", '"text"', "[1]", "[" * 100_000])
def test_messages_that_cannot_be_read_leave_it_to_the_ids(messages):
    table = steps_of(
        [[1, 2], [1, 2, 3, 9]], [[3, 4], [5]], messages=[messages] * 2, response_text=["x", "y"]
    )
    assert only_break(table)["cause"] == "unknown"


def test_tool_calls_that_are_only_spelled_otherwise_are_the_same_message():
    called = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    now = [*ASKED, {"role": "assistant", "content": None, "tool_calls": called}, AGAIN]
    response = json.dumps(called, separators=(",", ":"))
    assert "word for word" in only_break(logged(ASKED, response, now))["evidence"]


def test_dropped_thinking_and_spelled_calls_are_layout_and_not_text():
    call = '<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>'
    other = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    before = [Turn("assistant", f"<think>\nx\n</think>\n\n{call}")]
    assert compare(before, [Turn("assistant", call)], whole=False)[0] == "layout"
    assert compare(before, [Turn("assistant", other)], whole=False)[0] == "layout"
    assert compare(before, [Turn("assistant", "{}")], whole=False)[0] == "text"


def test_changed_finds_the_fewest_tokens_that_differ():
    lost, same = np.arange(100, 120), np.arange(200, 230)
    assert changed(np.append(lost, same), np.append([7, 8], same)) == (20, 2)
    assert changed(np.array([5, 2]), np.array([2, 9])) == (1, 0)
    assert changed(np.array([5, 6]), np.array([7, 8])) is None
    assert changed(np.array([5, 6]), np.array([], np.int64)) is None


ids = st.lists(st.integers(0, 2), max_size=24).map(lambda values: np.array(values, np.int32))


@given(ids.filter(len), ids)
def test_what_follows_the_changed_tokens_is_the_same_on_both_sides(lost, now):
    found = changed(lost, now)
    if found is not None:
        size = min(8, len(lost) - found[0])
        assert lost[found[0] :][:size].tolist() == now[found[1] :][:size].tolist()
        assert size > 0
    assert returns(lost, lost)
    assert not returns(lost[:0], now)


@pytest.mark.slow
@given(rollout_tables())
@settings(deadline=None, max_examples=examples(80))
def test_every_break_is_listed_and_is_where_it_says(table):
    found = diagnose(table)
    rows = table.to_pylist()
    content = {(r["trajectory_id"], r["step_index"]): seen_tokens(r) for r in rows}
    prompts = {
        key: content[key][: len(r["prompt_token_ids"])]
        for r in rows
        if (key := (r["trajectory_id"], r["step_index"]))
    }
    listed = {(b["trajectory_id"], b["step_index"]): b for b in found.breaks.to_dicts()}
    for (name, step), prompt in prompts.items():
        before = content.get((name, step - 1))
        if prompt and before is not None and prompt[: len(before)] != before:
            assert (name, step) in listed
    for (name, step), one in listed.items():
        before, prompt, at = (
            content[name, one["from_step_index"]],
            prompts[name, step],
            one["token_index"],
        )
        assert prompt[:at] == before[:at]
        assert at in {len(prompt), len(before)} or prompt[at] != before[at]
        for part, name in ((before, "lost_ids"), (prompt, "now_ids")):
            ids = one[name]
            assert [token[0] for token in part[at:][: len(ids)]] == ids
        assert one["num_lost_tokens"] in {0, len(before) - at}
        assert one["cause"] in HINTS
        assert not one["continues_lineage"] or at == len(before)


@pytest.mark.slow
@given(rollout_tables(min_trajectories=1))
@settings(deadline=None, max_examples=examples(40))
def test_layout_and_merging_change_nothing(table):
    if "segments" in table.column_names:
        table = table.drop_columns(["segments"])
    found = diagnose(table)
    for other in (encode_prefixes(table), merge_table(table)):
        again = diagnose(other)
        assert again.breaks.equals(found.breaks)
        assert (again.num_steps, again.num_following) == (found.num_steps, found.num_following)


def test_drift_of_a_frame_has_one_row_a_break_and_a_schema_when_empty():
    table = steps_of([[1, 2], [1, 7]], [[3], [4]])
    frame = pl.from_arrow(table).with_columns(mine=pl.lit(1))
    assert drift(frame).select("step_index", "token_index").collect().rows() == [(1, 1)]
    assert drift(frame.clear()).collect().columns == drift(frame).collect().columns


def test_the_report_adds_up_over_pieces_and_keeps_the_first_breaks():
    pieces = [diagnose(steps_of([[1, 2], [1, 7], [1, 8]], [[3], [4], [5]]))] * 3
    report = Report.of(pieces, limit=4)
    found = report.to_dict()
    assert (found["num_steps"], found["num_following"], found["num_breaks"]) == (9, 6, 6)
    assert found["num_continuing"] == 0
    assert [row["num_breaks"] for row in found["turns"]] == [3, 3]
    assert sum(row["num_lost_tokens"] for row in found["causes"]) == found["num_lost_tokens"] == 12
    assert len(found["breaks"]) == 4
    lines = list(render(report))
    assert "a_0 step 1: unknown, at token 1 of step 0, 2 tokens lost" in lines
    assert "  ...1 | 2,3 -> 7" in lines


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (
            {"token_source": "retokenized"},
            "the ids come from re-tokenized text, not from the engine",
        ),
        ({"messages": None}, "no logged text"),
        ({"messages": "{"}, "[messages]"),
        ({"messages": '"text"'}, "text without roles"),
    ],
)
def test_steps_without_text_or_exact_ids_are_counted_as_not_compared(columns, reason):
    values = {"token_source": "engine", "messages": "[]", "response_text": "x"} | columns
    table = steps_of([[1]], [[2]], **{name: [value] for name, value in values.items()})
    found = TextReading.of([table], None)
    assert (found.num_compared, found.num_not_compared) == (0, 1)
    assert reason in found.first_reason


def test_tokens_off_are_those_between_the_first_and_the_last_difference():
    assert num_off(np.array([1, 26951, 3834, 2]), np.array([1, 94224, 2])) == 2
    assert num_off(np.array([1, 2]), np.array([1, 2])) == 0
    assert num_off(np.array([1, 1]), np.array([1, 1, 1])) == 1


def test_control_characters_are_shown_and_not_sent_to_the_terminal():
    shown = list(render_break(BREAK | {"kept_text": "a\x1b[2J", "lost_text": "\n", "now_text": ""}))
    assert shown[-1] == "  ...a\\x1b[2J | \\n -> "


def test_the_page_names_every_cause():
    page = (ROOT / "docs" / "drift.md").read_text()
    assert all(f"| `{cause}` |" in page for cause in HINTS)
