import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import merge, trajectory_returns
from pipelines.filtering import apply_masks
from pipelines.filters import RAN_OUT_OF_TOKENS, failed, overlong
from schemas import validate
from schemas.strategies import rollout_tables
from tests.helpers.filter_helpers import one_step, relaxed, table
from tests.helpers.refusals import refused


def masked(rows, *filters):
    frame = apply_masks(rows, filters)[0].collect()
    return frame.filter(~pl.col("loss_mask").list.any())["trajectory_id"].unique().sort().to_list()


def stops(*reasons):
    return [{"stop_reason": reason} for reason in reasons]


def test_all_rows_of_an_overlong_trajectory_are_masked_and_its_reward_stays():
    steps = [{"reward": 0.0, "stop_reason": "stop"}, {"reward": 1.0, "stop_reason": "length"}]
    rows, counts = apply_masks(table(("a", 0, steps)), [overlong()])
    data = rows.collect()
    assert data["loss_mask"].to_list() == [[False], [False]]
    assert data["reward"].to_list() == [0.0, 1.0]
    assert counts.rows() == [("overlong", 1, 1, 1, 1)]


@pytest.mark.parametrize("reason", [*RAN_OUT_OF_TOKENS, "LENGTH", "MAX_TOKENS"])
def test_every_word_for_a_cut_off_end_masks(reason):
    assert masked(table(("a", 0, stops(reason))), overlong()) == ["a_0"]


@pytest.mark.parametrize("reasons", [("length", "stop"), ("stop",), (None,), ("length", None)])
def test_a_trajectory_that_went_on_or_ended_by_itself_trains(reasons):
    assert masked(table(("a", 0, stops(*reasons))), overlong()) == []


def test_the_stop_reasons_can_be_others():
    assert masked(table(("a", 0, stops("max_turns"))), overlong(["max_turns"])) == ["a_0"]


def test_one_failure_masks_its_group_or_itself():
    rows = table(*one_step(1.0, "failed"), *one_step(0.0, instance="b"))
    assert masked(rows, failed("group")) == ["a_0", "a_1"]
    assert masked(rows, failed()) == ["a_1"]


def test_an_overlong_group_of_one_may_be_all_there_is():
    rows, _ = apply_masks(table(("a", 0, stops("length"))), [overlong()])
    assert rows.collect()["loss_mask"].to_list() == [[False]]


def test_masking_by_stop_reasons_that_are_not_recorded_is_refused():
    with refused("known_column", where="overlong", got="'stop_reason'"):
        apply_masks(table(*one_step(1.0)), [overlong()])


@st.composite
def masked_tables(draw):
    rows = draw(rollout_tables())
    filters = [failed(), failed("group")]
    filters += [overlong(["stop"])] if "stop_reason" in rows.column_names else []
    return rows, draw(st.permutations(filters))[: draw(st.integers(0, 3))]


@pytest.mark.slow
@given(masked_tables())
@relaxed
def test_masks_change_the_loss_mask_alone_and_twice_is_once(drawn):
    rows, filters = drawn
    frame = pl.from_arrow(rows)
    once, counts = apply_masks(rows, filters)
    data = once.collect()
    validate(data)
    assert data.drop("loss_mask").equals(frame.drop("loss_mask"))
    assert apply_masks(once, filters)[0].collect().equals(data)
    changed = data.filter(data["loss_mask"] != frame["loss_mask"])
    assert changed["trajectory_id"].n_unique() <= counts["num_trajectories_masked"].sum()
    assert trajectory_returns(once).collect().equals(trajectory_returns(rows).collect())


@pytest.mark.slow
@given(masked_tables(), st.sampled_from(["lineage", "consecutive"]))
@relaxed
def test_masking_and_merging_commute(drawn, rule):
    rows, filters = drawn
    a = apply_masks(merge(rows, rule), filters)[0].select("trajectory_id", "loss_mask").collect()
    b = merge(apply_masks(rows, filters)[0], rule).select("trajectory_id", "loss_mask").collect()
    assert a.equals(b)
