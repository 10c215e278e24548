"""The chain of a trajectory is the same whatever rows its steps are in."""

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipelines
from schemas.columns import arrow_schema
from schemas.ragged import Ragged
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import step
from trainer.batches.chains import make_chains

REWARDED = ("reward", "rewards")
relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(75)
)


def table(*rows):
    import pyarrow as pa

    names = tuple({name for row in rows for name in row})
    made = pl.from_arrow(pa.Table.from_pylist(list(rows), schema=arrow_schema(names)))
    assert isinstance(made, pl.DataFrame)
    return made


def chains_of(rows):
    arrow = as_table(rows)
    return make_chains(arrow, Ragged.from_arrow(arrow.column("loss_mask")).values.astype(bool))


def links(rows):
    """Trajectory, token and reward of each link."""
    chains = chains_of(rows)
    tokens = Ragged.from_arrow(as_table(rows).column("response_ids")).values[chains.slots]
    return chains.trajectory.tolist(), tokens.tolist(), chains.rewards.tolist()


TWO = (
    step("a", 0, 0, [1, 2], [3], reward=0.5),
    step("a", 0, 1, [1, 2, 3, 9], [4], reward=1.0, is_last_step=True),
)


def test_the_documented_example():
    chains = chains_of(pipelines.merge(table(*TWO)).collect())
    assert (chains.slots.tolist(), chains.rewards.tolist()) == ([0, 2], [0.5, 1.0])


def test_a_reward_whose_own_tokens_do_not_train_is_earned_by_what_led_to_it():
    rows = table(
        step("a", 0, 0, [1], [3, 4], reward=0.5, loss_mask=[True, False]),
        step("a", 0, 1, [1], [5], reward=2.0, loss_mask=[False], is_last_step=True),
        step("b", 0, 0, [1], [6], reward=4.0, is_last_step=True),
    )
    assert links(rows) == ([0, 1], [3, 6], [2.5, 4.0])


def test_a_reward_before_every_trained_token_is_nobodys():
    rows = table(
        step("b", 0, 0, [1], [6], reward=4.0, is_last_step=True),
        step("a", 0, 0, [1], [3], reward=0.5, loss_mask=[False]),
        step("a", 0, 1, [1], [5], reward=2.0, is_last_step=True),
    )
    assert links(rows) == ([0, 1], [6, 5], [4.0, 2.0])


def test_a_step_that_sampled_nothing_passes_its_reward_on():
    rows = table(
        step("a", 0, 0, [1], [3], reward=0.5),
        step("a", 0, 1, [1], [], reward=2.0, is_last_step=True),
    )
    assert links(rows) == ([0], [3], [2.5])


def test_rewards_per_token_win_over_the_scalar():
    rows = table(
        step("a", 0, 0, [1], [3, 4, 5], reward=3.0, rewards=[1.0, 0.0, 2.0]),
        step("a", 0, 1, [1], [6, 7], reward=4.0, rewards=None, is_last_step=True),
    )
    assert links(rows)[2] == [1.0, 0.0, 2.0, 0.0, 4.0]


def test_interleaved_steps_are_in_the_order_they_were_taken():
    rows = table(
        step("a", 0, 0, [1], [3], reward=1.0),
        step("a", 0, 1, [2], [4], reward=2.0),
        step("a", 0, 2, [2, 4, 9], [6], reward=4.0),
        step("a", 0, 3, [1, 3, 9], [5], reward=8.0, is_last_step=True),
    )
    merged = pipelines.merge(rows).collect()
    assert len(merged) == 2
    expected = ([0] * 4, [3, 4, 6, 5], [1.0, 2.0, 4.0, 8.0])
    assert links(merged) == links(rows) == expected


def test_an_observation_that_a_later_filter_trains_belongs_to_the_step_before_it():
    merged = pipelines.merge(table(*TWO)).collect()
    trained = merged.with_columns(loss_mask=pl.lit([True] * 3))
    assert links(trained) == ([0, 0, 0], [3, 9, 4], [0.5, 0.0, 1.0])


def literal_links(rows):
    """Step by step, token by token: rewards wait for nobody but fall to the last trained token."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(rows["trajectory_id"]))}
    trajectory = []
    tokens = []
    earned = []
    for row in rows.to_dicts():
        own = numbers[row["trajectory_id"]]

        def pay(reward, own=own):
            if trajectory and trajectory[-1] == own:
                earned[-1] += reward

        rewards = row.get("rewards")
        for t, token in enumerate(row["response_ids"]):
            if row["loss_mask"][t]:
                trajectory.append(own)
                tokens.append(token)
                earned.append(0.0)
            pay(0.0 if rewards is None else rewards[t])
        pay(0.0 if rewards is not None else row["reward"] or 0.0)
    return trajectory, tokens, earned


@pytest.mark.slow
@relaxed
@given(st.data())
@pytest.mark.parametrize("rule", ["lineage", "consecutive"])
def test_steps_and_merged_rows_make_the_same_chains(rule, data):
    optional = REWARDED[: data.draw(st.integers(0, 2))]
    arrow = data.draw(
        rollout_tables(min_trajectories=1, optional=optional, errors=False, user_column=False)
    )
    steps = pl.from_arrow(arrow)
    assert isinstance(steps, pl.DataFrame)
    if "reward" not in steps.columns:
        steps = steps.with_columns(reward=pl.lit(None, pl.Float64))
    merged = pipelines.merge(steps, rule).collect()
    expected = literal_links(steps)
    for rows in (steps, merged, pipelines.unmerge(merged).collect()):
        found = links(rows)
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2])
