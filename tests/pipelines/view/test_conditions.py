"""A condition means the same to the page as to the command."""

import json

import polars as pl
import pytest
from hypothesis import given, settings

from pipelines.filtering import judge
from pipelines.filters import where
from pipelines.merging.merge import merge
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io import RolloutWriter, scan
from rollout_io.dataset.trajectory_conditions import COMPUTED
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.filter_helpers import table
from tests.helpers.refusals import refused

NUMBERS = [name for name, kind in COMPUTED.items() if kind.is_numeric()]


def of_command(path, condition):
    verdicts = judge(scan(path), [where(condition)])
    return verdicts.filter(pl.col("reason").is_null())["trajectory_id"].to_list()


def of_page(path, condition):
    index = TrajectoryIndex.read(path)
    return index.trajectories["trajectory_id"].filter(index.matching(condition)).to_list()


def called(call_id, name, arguments="{}"):
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "Refactor it."}
TWO_CALLS = {"role": "assistant", "tool_calls": [called("1", "bash"), called("2", "edit")]}
RESULTS = [
    {"role": "tool", "tool_call_id": "2", "content": "Error: no such file"},
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
]
SAME_AGAIN = {"role": "assistant", "tool_calls": [called(None, "bash"), called(None, "bash")]}
FLAGGED = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "3", "is_error": True, "content": "1"}],
}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "3", "name": "bash"}]}


def steps(*histories, last_response="Done."):
    rows = [{"messages": json.dumps(history), "response_text": "..."} for history in histories]
    return [*rows[:-1], rows[-1] | {"response_text": last_response}]


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Calls that every step repeats, no call, no messages, a compaction, and a call that is text."""
    begun = [ASKED, TWO_CALLS, *RESULTS]
    compacted = [{"role": "user", "content": "Summary."}, TWO_CALLS, *RESULTS, USED, FLAGGED]
    tagged = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    rows = table(
        ("a", 0, steps([ASKED], begun, [*begun, SAME_AGAIN])),
        ("b", 0, steps([ASKED])),
        ("c", 0, [{}]),
        ("d", 0, steps(begun, compacted)),
        ("e", 0, steps([ASKED], last_response=tagged)),
        optional=("messages", "response_text"),
    )
    path = tmp_path_factory.mktemp("tools") / "steps"
    with RolloutWriter(path) as writer:
        writer.write(rows)
    return path


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("num_tool_calls = 0", ["b_0"]),
        ("num_tool_calls = 1 AND tool_calls('bash') = 1", ["e_0"]),
        ("num_tool_calls = 3 AND tool_calls('bash') = 2", ["d_0"]),
        ("num_tool_calls > 3 AND error IS NULL", ["a_0"]),
        ("num_tool_calls IS NULL", ["c_0"]),
        ("num_tool_errors = 2", ["d_0"]),
        ("tool_errors('edit') >= 1", ["a_0", "d_0"]),
        ("tool_errors('bash') = 1 OR num_turns > 2", ["a_0", "d_0"]),
        ("task_text LIKE '%Refactor%' AND num_rows = 1", ["b_0", "e_0"]),
        ("any(messages LIKE '%Summary%')", ["d_0"]),
    ],
)
def test_a_condition_on_tools_keeps_the_same_trajectories_in_the_command_and_on_the_page(
    tools, condition, kept
):
    assert of_command(tools, condition) == kept
    assert of_page(tools, condition) == kept


def test_merging_changes_no_condition_on_tools(tools):
    merged = judge(merge(scan(tools)), [where("num_tool_calls > 3 OR tool_errors('bash') = 1")])
    kept = merged.filter(pl.col("reason").is_null())
    assert kept["trajectory_id"].to_list() == ["a_0", "d_0"]


@pytest.mark.parametrize("condition", ["tool_calls(bash) > 1", "tool_calls() > 1"])
def test_a_tool_is_named_in_quotes(tools, condition):
    with refused("condition"):
        of_command(tools, condition)
    with refused("condition"):
        of_page(tools, condition)


@settings(deadline=None, max_examples=examples(15))
@given(rollout_tables())
def test_each_number_that_the_page_shows_is_that_of_the_command(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("numbers") / "steps"
    with RolloutWriter(path) as writer:
        writer.write(rows)
    index = TrajectoryIndex.read(path)
    for name in NUMBERS:
        if name not in index.trajectories.columns:
            continue
        for value in index.trajectories[name].drop_nulls().drop_nans().unique().to_list()[:2]:
            condition = f'"{name}" = {value!r}'
            assert of_command(path, condition) == of_page(path, condition), condition
