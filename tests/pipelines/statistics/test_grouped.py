"""Trajectories by task, by length and by tool."""

import json

import polars as pl
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

from pipelines import apply_filters, messages, where
from pipelines.merging.merge import merge
from pipelines.rewards import trajectory_returns
from pipelines.statistics.attempts import attempts, with_names
from pipelines.statistics.grouped import grouped, tools
from rollout_io import RolloutWriter
from rollout_io.cli.main import run
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.filter_helpers import one_step, table
from tests.helpers.refusals import refused
from tests.helpers.view_helpers import Asked


def said(*names, result="ok"):
    calls = [{"id": name, "function": {"name": name}} for name in names]
    results = [{"role": "tool", "tool_call_id": name, "content": result} for name in names]
    return {"messages": json.dumps([{"role": "assistant", "tool_calls": calls}, *results])}


def test_failures_are_unknown_where_no_call_has_a_result_and_0_without_calls(tmp_path):
    call = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "bash"}}]}]
    waits = {"messages": json.dumps(call)}
    rows = table(
        ("waits", 0, [waits]),
        ("none", 0, [{"messages": "[]"}]),
        ("ok", 0, [waits, said("1x", "bash", result="Error")]),
        optional=("messages",),
    )
    assert tools(rows).rows() == [("bash", 3, 1, 2), ("1x", 1, 1, 1)]
    assert tools(rows.filter(pc.equal(rows["instance_id"], "waits"))).rows() == [
        ("bash", 1, None, 1)
    ]
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(rows)
    found = {}
    for condition in ("num_tool_errors = 0", "num_tool_errors IS NULL", "tool_errors('bash') = 1"):
        filtered, _ = apply_filters(rows, [where(condition)])
        found[condition] = filtered.collect()["instance_id"].unique(maintain_order=True).to_list()
    assert found == {
        "num_tool_errors = 0": ["none"],
        "num_tool_errors IS NULL": ["waits"],
        "tool_errors('bash') = 1": ["ok"],
    }
    shown = Asked(tmp_path / "ds")("/api/datasets/d0/trajectories")
    counts = shown.select("instance_id", "num_tool_calls", "num_tool_errors").rows()
    assert counts == [("waits", 1, None), ("none", 0, 0), ("ok", 3, 2)]
    lines = grouped(rows, "instance_id").select("instance_id", "tool_errors").rows()
    assert lines == [("waits", None), ("none", None), ("ok", 1.0)]
    per_attempt, _ = with_names(attempts(rows), attempts(rows))
    assert per_attempt["failed calls of bash"].to_list() == [None, 0, 1]
    kinds = (
        messages(rows).filter(pl.col("failed").is_not_null()).select("name", "step_index", "failed")
    )
    assert kinds.collect().rows() == [("1x", 1, True), ("bash", 1, True)]


def test_a_task_says_whether_its_attempts_differ_and_what_is_unknown():
    rows = table(
        *one_step(1.0, 0.0, "failed", instance="a"),
        *one_step(0.5, 0.5, None, instance="b"),
        *one_step(1.0, instance="c"),
    )
    lines = grouped(rows, "instance_id").to_dicts()
    names = ("num_trajectories", "num_failed", "num_unknown_return", "return_mean", "has_variance")
    assert [tuple(line[name] for name in names) for line in lines] == [
        (3, 1, 0, 0.5, True),
        (3, 0, 1, 0.5, False),
        (1, 0, 0, 1.0, None),
    ]


def test_quarters_by_a_number_hold_equal_values_together():
    lengths = [1, 1, 1, 1, 1, 1, 2, 3]
    rows = table(*(("a", n, [{"response_ids": [7] * length}]) for n, length in enumerate(lengths)))
    lines = grouped(rows, "response_tokens", quantiles=True)
    assert lines.select("response_tokens", "num_trajectories").rows() == [
        ("1 to 1", 6),
        ("2 to 3", 2),
    ]


@settings(deadline=None, max_examples=examples(20))
@given(rollout_tables())
def test_every_trajectory_is_in_one_line_and_merging_moves_none(rows):
    names = ("instance_id", "num_turns", "response_tokens")
    for name in names:
        lines, merged = grouped(rows, name), grouped(merge(rows), name)
        assert lines["num_trajectories"].sum() == len(trajectory_returns(rows).collect())
        kept = (name, "num_trajectories", "num_failed", "return_mean", "num_turns_mean")
        assert lines.select(kept).equals(merged.select(kept), null_equal=True)


def test_tools_are_counted_once_and_failures_by_their_results():
    first, more = said("bash", "edit"), said("bash", "edit", "bash2", result="Error: no")
    rows = table(
        ("a", 0, [first, more]), ("a", 1, [said("bash")]), ("a", 2, [{}]), optional=("messages",)
    )
    assert tools(rows).rows() == [("bash", 2, 1, 2), ("bash2", 1, 1, 1), ("edit", 1, 1, 1)]
    (line,) = grouped(rows, "instance_id").to_dicts()
    assert line["num_tool_calls_mean"] == 2  # of the two attempts that have messages
    assert line["tool_errors"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("by", "quantiles", "rule"),
    [("nothing", False, "known_column"), ("instance_id", True, "condition")],
)
def test_a_column_that_cannot_split_is_refused(by, quantiles, rule):
    with refused(rule):
        grouped(table(*one_step(1.0)), by, quantiles=quantiles)


def test_the_command_prints_the_lines_and_the_tools(tmp_path, capsys):
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(
            table(("a", 0, [said("bash") | {"reward": 1.0}]), optional=("messages", "reward"))
        )
    path = str(tmp_path / "ds")
    assert run(["stats", path, "--by", "instance_id", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["instance_id"], line["return_mean"], line["tool_errors"]) == ("a", 1.0, 0.0)
    for arguments in (["--by-quantile", "response_tokens"], [], ["--all"]):
        assert run(["stats", path, *arguments]) == 0
        shown = capsys.readouterr().out
        assert ("1 to 1" if arguments[:1] == ["--by-quantile"] else "bash") in shown
    assert run(["stats", path, "--by", "agent", "--by-quantile", "num_turns"]) == 2


def test_unknown_and_none_are_different_in_the_table():
    rows = table(("a", 0, [{}]), ("b", 0, [{"messages": "[]"}]), optional=("messages",))
    assert grouped(rows, "instance_id")["num_tool_calls_mean"].to_list() == [None, 0.0]
    assert tools(rows).is_empty()


def test_calls_in_a_conversation_as_text_without_roles_are_unknown(tmp_path, capsys):
    call = "<tool_call>{}</tool_call>"
    rows = table(("text", 0, [{"messages": json.dumps(f"user\n{call}")}]), optional=("messages",))
    filtered, _ = apply_filters(rows, [where("num_tool_calls IS NULL")])
    assert len(filtered.collect()) == len(rows)
    path = str(tmp_path / "ds")
    with RolloutWriter(path) as writer:
        writer.write(rows)
    run(["rescore", path, "--findings", "loops"])
    capsys.readouterr()
    assert run(["stats", path, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["findings"]
    assert (told["name"], told["num_findings"]) == ("loops", None)
