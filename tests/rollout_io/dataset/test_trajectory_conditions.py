"""Conditions on trajectories: what they see, and which are refused because they have two readings."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.merging.merge import merge
from pipelines.rewards import trajectory_returns
from rollout_io.cli.main import run
from rollout_io.dataset.trajectory_conditions import TrajectoryCondition, decided, evaluate
from schemas.errors import ConfigError
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.filter_helpers import table
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import write_example

STEP = st.fixed_dictionaries(
    {
        "reward": st.none() | st.sampled_from([0.0, 0.5, 1.0]),
        "agent": st.none() | st.sampled_from(["main", "checker"]),
        "error": st.none() | st.just("crashed"),
    }
)
ATTEMPTS = st.lists(st.lists(STEP, min_size=1, max_size=4), min_size=1, max_size=5)


def matching(frame, text, outcome="last"):
    condition = TrajectoryCondition.parse(text)
    found = evaluate(frame.lazy(), condition, outcome)
    return found.filter(decided(found, condition))["trajectory_id"].to_list()


def made(attempts):
    filled = [[{"agent": None} | step for step in steps] for steps in attempts]
    return pl.from_arrow(table(*(("a", i, steps) for i, steps in enumerate(filled))))


def low(step):
    return step["reward"] is not None and step["reward"] < 1


def plain_return(steps, outcome):
    rewards = [step["reward"] for step in steps]
    if any(step["error"] for step in steps):
        return None
    if outcome == "last":
        return rewards[-1]
    return None if None in rewards else sum(rewards)


@pytest.mark.parametrize("outcome", ["last", "sum"])
@settings(deadline=None, max_examples=examples(20))
@given(ATTEMPTS)
def test_each_form_keeps_what_it_says(outcome, attempts):
    frame = made(attempts)
    expected = {
        "any(reward < 1)": [any(map(low, steps)) for steps in attempts],
        "all(reward < 1)": [all(map(low, steps)) for steps in attempts],
        "last(reward) < 1": [low(steps[-1]) for steps in attempts],
        "NOT any(agent = 'checker')": [
            not any(step["agent"] == "checker" for step in steps) for steps in attempts
        ],
        "error IS NULL": [not any(step["error"] for step in steps) for steps in attempts],
        "num_turns = 2": [len(steps) == 2 for steps in attempts],
        '"return" > 0 AND any(agent IS NULL)': [
            (plain_return(steps, outcome) or 0) > 0 and any(not step["agent"] for step in steps)
            for steps in attempts
        ],
    }
    for text, kept in expected.items():
        ids = [f"a_{i}" for i, is_kept in enumerate(kept) if is_kept]
        assert matching(frame, text, outcome) == ids, text


@settings(deadline=None, max_examples=examples(20))
@given(ATTEMPTS)
def test_a_condition_on_rows_is_refused_exactly_where_its_readings_differ(attempts):
    frame = made(attempts)
    some, every = (matching(frame, f"{fold}(reward < 1)") for fold in ("any", "all"))
    if some == every:
        assert matching(frame, "reward < 1") == some
        return
    with pytest.raises(ConfigError) as info:
        matching(frame, "reward < 1")
    differing = [name for name in some if name not in every]
    assert f"trajectory {differing[0]!r}" in info.value.got
    for reading in ("any(reward < 1)", "all(reward < 1)", "return"):
        assert reading in info.value.hint


@settings(deadline=None, max_examples=examples(10))
@given(rollout_tables())
def test_merging_changes_neither_return_nor_number_of_turns(rows):
    frame = pl.from_arrow(rows)
    returns = trajectory_returns(frame).collect().filter(pl.col("return") > 0)
    turns = frame.group_by("trajectory_id", maintain_order=True).len("turns")
    many = turns.filter(pl.col("turns") > 1)["trajectory_id"].to_list()
    for version in (frame, merge(frame.lazy()).collect()):
        assert matching(version, "return > 0") == returns["trajectory_id"].to_list()
        assert matching(version, "num_turns > 1") == many


def test_a_column_of_the_whole_trajectory_needs_no_fold():
    frame = made([[{"reward": 0.0}] * 2, [{"reward": 1.0}]])
    frame = frame.with_columns(style=pl.col("trajectory_id"))
    assert matching(frame, "style = 'a_0' AND instance_id = 'a'") == ["a_0"]
    assert matching(frame, "'a_1' = style OR 1 = 2") == ["a_1"]
    assert matching(frame, "1 = 1") == ["a_0", "a_1"]


def test_windows_may_stand_in_and_outside_a_fold():
    frame = made([[{"reward": 0.0}, {"reward": 1.0}], [{"reward": 0.5}]])
    top = "reward = max(reward) OVER (PARTITION BY instance_id)"
    assert matching(frame, f"any({top})") == ["a_0"]
    assert matching(frame, f"last({top}) AND last(reward) = 1") == ["a_0"]
    assert matching(frame, "count(reward) OVER (PARTITION BY trajectory_id) = 1") == ["a_1"]


def test_any_of_a_list_still_compares_with_its_elements():
    frame = made([[{"reward": 0.0}] * 2]).with_columns(ids=pl.lit([1, 2]))
    assert matching(frame, "2 = any(ids) AND any(1 = any(ids))") == ["a_0"]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("any(all(reward > 0))", "any contains another such function"),
        ("any()", "any takes one condition"),
        ("all(reward, error)", "all takes one condition"),
        ("any(return > 0)", "return belongs to the trajectory"),
        ("any(agent > 1)", "agent: String"),
        ("any(reward)", "reward: Float64"),
        ("any(rewrd > 0)", "no column 'rewrd' (character 5"),
        ("last(reward)", "expected `Boolean`"),
        ("1", "expected `Boolean`"),
        ("null", "expected `Boolean`"),
        ("any(max(reward) > 0)", "an aggregate over the entire dataset"),
        ("any(reward IN (SELECT 1))", "SELECT"),
        ("any(lpad(agent, 2000000000, 'x') = 'x')", "lpad"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(text, got):
    with pytest.raises(ConfigError) as info:
        matching(made([[{"reward": 0.0, "agent": "main"}]]), text)
    assert got in str(info.value)


def test_a_column_with_the_name_of_a_computed_one_is_refused():
    frame = made([[{"reward": 0.0}]]).with_columns(num_turns=3)
    with refused("condition", got="its own column 'num_turns'", hint="rename"):
        matching(frame, "num_turns = 1")
    assert matching(frame, "return = 0") == ["a_0"]


def test_the_former_option_is_answered_with_the_new_form(tmp_path, capsys):
    assert run(["filter", str(write_example(tmp_path)), "--dry-run", "--where-all", "a"]) == 2
    assert 'write --where "all(CONDITION)"' in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["inspect"], ["filter", "--dry-run"]])
def test_every_verb_refuses_two_readings_and_names_both(shop_dataset, verb, capsys):
    command = [verb[0], str(shop_dataset), *verb[1:], "--where"]
    assert run([*command, "reward < 1"]) == 1
    said = capsys.readouterr().err
    assert "any(reward < 1) if one row suffices, or all(reward < 1)" in said
    assert run([*command, "return < 1"]) == 0


@pytest.mark.parametrize("text", ["sum(return) > 1", "any(max(reward) > 0)"])
def test_a_message_names_the_condition_as_it_was_written(text):
    with pytest.raises(ConfigError) as caught:
        TrajectoryCondition.parse(text)
    assert str(caught.value).startswith(repr(text))
