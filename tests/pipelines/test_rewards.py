import math

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import merge, place_outcomes, place_rewards, trajectory_returns, unmerge
from pipelines.rewards import is_above, is_rounding, mean_of, place_token_rewards
from schemas import validate
from schemas.errors import RolloutError
from schemas.strategies import rollout_tables
from tests.helpers.filter_helpers import one_step, relaxed, table

CHAIN = table(
    (
        "a",
        0,
        [
            {"prompt_token_ids": [1], "response_ids": [3], "reward": 0.5},
            {"prompt_token_ids": [1, 3, 9], "response_ids": [4], "reward": 1.0},
        ],
    )
)


def outcomes_of(frame, value):
    return frame.select("trajectory_id").unique().collect().with_columns(reward=pl.lit(value))


def test_rewards_given_per_token_are_summed_into_the_rows():
    row = merge(CHAIN).with_columns(rewards=pl.lit([0.5, 0.0, 2.0]))
    data = place_token_rewards(row).collect()
    assert data["reward"].item() == 2.5
    assert [s["reward"] for s in data["segments"].item()] == [0.5, 2.0]
    assert trajectory_returns(data).collect()["return"].item() == 2.0


def test_a_reward_on_an_observation_belongs_to_the_step_that_ends_after_it():
    row = merge(CHAIN).with_columns(rewards=pl.lit([0.5, 0.25, 2.0]))
    data = place_token_rewards(row).collect()
    assert [s["reward"] for s in data["segments"].item()] == [0.5, 2.25]


def test_null_token_rewards_make_the_reward_unknown():
    rows = pl.from_arrow(table(*one_step(1.0, 2.0))).with_columns(
        mine=pl.Series([[3], None], dtype=pl.List(pl.Int64))
    )
    data = place_token_rewards(rows, "mine").collect()
    assert data["reward"].to_list() == [3.0, None]
    assert data["rewards"].to_list() == [[3.0], None]


def test_the_reward_of_an_empty_response_is_on_no_token():
    rows = pl.from_arrow(table(*one_step(1.0, 2.0)))
    empty = rows["response_ids"].dtype
    rows = rows.with_columns(response_ids=pl.Series([[3, 4], []], dtype=empty))
    assert place_rewards(rows).collect()["rewards"].to_list() == [[0.0, 1.0], None]


def test_token_rewards_that_are_not_there_are_refused():
    with pytest.raises(RolloutError, match="no column 'rewards'"):
        place_token_rewards(table(*one_step(1.0)))


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"trajectory_id": ["a"], "score": [1.0]}, "score; expected a column 'reward'"),
        ({"id": ["a"], "reward": [1.0]}, "id, reward; expected a column 'trajectory_id'"),
        ({"trajectory_id": ["a"], "reward": ["high"]}, "expected numbers in the column 'reward'"),
    ],
)
def test_outcomes_with_a_wrong_column_are_refused_with_a_sentence(columns, found):
    with pytest.raises(RolloutError, match=r"^outcomes: found .*\[columns_and_types\]$") as error:
        place_outcomes(table(*one_step(1.0)), pl.DataFrame(columns))
    assert found in str(error.value)


def test_a_new_outcome_leaves_no_old_token_rewards_behind():
    rows = place_outcomes(place_rewards(CHAIN), outcomes_of(pl.from_arrow(CHAIN).lazy(), 7.0))
    data = rows.collect()
    assert "rewards" not in data.columns
    assert data["reward"].to_list() == [0.0, 7.0]


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1.0, 4.0], 2.5),
        ([1e308, 1e308], 1e308),
        ([-1e308, -1e308, 0.0, 0.0], -5e307),
        ([math.inf, 1.0], math.inf),
        ([], None),
    ],
)
def test_a_mean_exists_where_the_sum_overflows(values, mean):
    assert mean_of(pl.Series(values, dtype=pl.Float64)) == mean


def test_a_difference_of_1e_12_is_one_of_rounding_and_an_infinite_one_is_not():
    assert is_rounding(1e-12, 0.0)
    assert not is_rounding(1.1e-12, 0.0)
    assert not is_rounding(math.inf, math.inf)


def test_a_value_is_above_a_bar_by_more_than_a_rounding_error():
    frame = pl.DataFrame({"value": [0.1 + 0.2, 0.3001, 0.29, None]})
    for bar in (0.3, pl.lit(0.3)):
        assert frame.select(is_above(pl.col("value"), bar))["value"].to_list() == [
            False,
            True,
            False,
            None,
        ]


@pytest.mark.slow
@given(rollout_tables(), st.sampled_from(["lineage", "consecutive"]))
@relaxed
def test_placing_outcomes_and_merging_commute(rows, rule):
    frame = pl.from_arrow(rows).lazy().drop("rewards", strict=False)
    known = frame.with_columns(reward=pl.lit(0.0))
    outcomes = outcomes_of(frame, 2.0)
    a = place_outcomes(merge(known, rule), outcomes).collect()
    validate(a)
    wanted = place_outcomes(known, outcomes)
    got = unmerge(a).select("trajectory_id", "reward").collect()
    assert got.equals(wanted.select("trajectory_id", "reward").collect())


@pytest.mark.slow
@given(rollout_tables(errors=False), st.sampled_from(["lineage", "consecutive"]))
@relaxed
def test_placing_token_rewards_and_merging_commute(rows, rule):
    lengths = pl.col("response_ids").list.len()
    given_ = pl.int_ranges(lengths).cast(pl.List(pl.Float64))
    frame = pl.from_arrow(rows).lazy().with_columns(rewards=given_, reward=given_.list.sum())
    merged = place_token_rewards(merge(frame, rule))
    validate(merged.collect())
    columns = ("trajectory_id", "reward", "rewards")
    got = unmerge(merged).select(columns).collect()
    assert got.equals(frame.select(columns).collect())


@given(rollout_tables())
@relaxed
def test_placing_rewards_streams_and_spreads_each_row_by_itself(rows):
    if "reward" not in rows.column_names:
        return
    frame = pl.from_arrow(rows).lazy()
    whole = place_rewards(frame).collect()
    validate(whole)
    assert whole.equals(place_rewards(frame).collect(engine="streaming"))
    parts = [place_rewards(part).collect() for part in frame.collect().iter_slices(1)]
    if parts:
        assert pl.concat(parts).select("rewards").equals(whole.select("rewards"))
