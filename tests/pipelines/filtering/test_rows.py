import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import merge, trajectory_returns, unmerge
from pipelines.filtering import keep_rows
from schemas import validate
from schemas.errors import RolloutError
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.filter_helpers import relaxed, table
from tests.helpers.refusals import refused

AGENTS = table(
    (
        "a",
        0,
        [
            {"agent": "main", "reward": 0.0},
            {"agent": "checker", "reward": 0.0},
            {"agent": "main", "reward": 1.0},
        ],
    )
)


def test_the_rows_that_stay_are_numbered_anew_and_the_final_one_is_last():
    rows, counts = keep_rows(AGENTS, "agent = 'main'")
    columns = ("step_index", "is_last_step", "reward", "response_ids")
    assert rows.select(columns).collect().rows() == [(0, False, 0.0, [2]), (1, True, 1.0, [4])]
    assert counts == {
        "num_rows_before": 3,
        "num_rows_dropped": 1,
        "num_trajectories_before": 1,
        "num_trajectories_dropped": 0,
        "num_groups_before": 1,
        "num_groups_dropped": 0,
    }


def test_dropping_the_row_that_holds_the_outcome_is_refused_unless_it_may_move():
    with pytest.raises(RolloutError, match=r"return from 1\.0 to 0\.0") as info:
        keep_rows(AGENTS, "step_index < 2")
    assert (info.value.rule, info.value.where) == ("return_unchanged", "trajectory 'a_0'")
    rows, _ = keep_rows(AGENTS, "step_index < 2", move_outcome=True)
    assert rows.select("reward", "is_last_step").collect().rows() == [(0.0, False), (1.0, True)]


def test_a_reward_on_an_inner_row_counts_where_the_return_is_the_sum():
    rows = table(("a", 0, [{"reward": 0.5}, {"reward": 1.0}]))
    assert keep_rows(rows, "step_index = 1")[0].collect()["reward"].to_list() == [1.0]
    with pytest.raises(RolloutError, match=r"return from 1\.5 to 1\.0"):
        keep_rows(rows, "step_index = 1", outcome="sum")


def test_an_unknown_return_does_not_become_a_known_one():
    rows = table(("a", 0, [{"reward": 0.5}, {"reward": None}]))
    with pytest.raises(RolloutError, match=r"return from None to 0\.5"):
        keep_rows(rows, "step_index = 0")
    moved, _ = keep_rows(rows, "step_index = 0", move_outcome=True)
    assert moved.collect()["reward"].to_list() == [None]


def test_a_trajectory_without_a_kept_row_goes_and_a_failed_one_has_no_return_to_lose():
    failed = ("b", 0, [{"agent": "main"}, {"agent": "checker"}], "timeout")
    only = ("c", 0, [{"agent": "checker", "reward": 1.0}])
    rows, counts = keep_rows(table(failed, only), "agent = 'main'")
    assert rows.select("trajectory_id", "is_last_step").collect().rows() == [("b_0", True)]
    assert (counts["num_trajectories_dropped"], counts["num_groups_dropped"]) == (1, 1)


def test_keeping_no_row_is_refused():
    with pytest.raises(RolloutError, match="nothing_left"):
        keep_rows(AGENTS, "agent = 'nobody'")


def test_a_table_with_a_step_twice_is_refused():
    with refused("step_index_sequence", where="trajectory 'a_0'", got="step 0 occurs twice"):
        keep_rows(pl.concat([pl.from_arrow(AGENTS)] * 2), "step_index >= 0")


def test_a_moved_outcome_reaches_the_step_that_ends_a_merged_row():
    steps = [
        {"response_ids": [2], "reward": 0.0},
        {"prompt_token_ids": [1, 2, 3], "response_ids": [4], "reward": 0.0},
        {"prompt_token_ids": [9], "reward": 1.0},
    ]
    merged = merge(table(("a", 0, [{"prompt_token_ids": [1]} | steps[0], *steps[1:]]))).collect()
    assert merged.height == 2
    rows, _ = keep_rows(merged, "step_index = 0", move_outcome=True)
    assert trajectory_returns(rows).collect()["return"].to_list() == [1.0]
    assert [s["reward"] for s in rows.collect()["segments"].item()] == [0.0, 1.0]


@pytest.mark.slow
@given(rollout_tables(), st.data(), st.booleans(), st.booleans())
@relaxed
def test_any_choice_of_rows_leaves_a_valid_table_with_the_same_returns(rows, data, merges, moves):
    frame = merge(rows).collect() if merges else pl.from_arrow(rows)
    flags = data.draw(st.lists(st.booleans(), min_size=len(frame), max_size=len(frame)))
    frame = frame.with_columns(flag=pl.Series(flags, dtype=pl.Boolean))
    try:
        kept, counts = keep_rows(frame, pl.col("flag"), move_outcome=moves)
    except RolloutError as error:
        wanted = "return_unchanged" if any(flags) and not moves else "nothing_left"
        assert error.rule == wanted  # noqa: PT017
        return
    left = kept.collect()
    validate(left)
    validate(unmerge(left))
    assert len(left) == sum(flags) == counts["num_rows_before"] - counts["num_rows_dropped"]
    assert left["response_ids"].equals(frame.filter("flag")["response_ids"])
    before = trajectory_returns(frame).collect()
    after = trajectory_returns(left).collect()
    assert after.equals(
        before.filter(pl.col("trajectory_id").is_in(after["trajectory_id"].implode()))
    )


@pytest.mark.slow
@given(rollout_tables())
@relaxed
def test_keeping_all_rows_changes_nothing(rows):
    kept, _ = keep_rows(rows, pl.lit(value=True))
    assert as_table(kept).to_pylist() == rows.to_pylist()
