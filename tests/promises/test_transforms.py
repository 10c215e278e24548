"""Transforms: merging loses nothing, and rewards and filters keep trajectories whole.

The pages: docs/merging.md, docs/filters.md.
"""

from collections import Counter

import polars as pl
from hypothesis import HealthCheck, given, settings

import pipelines
import rollout_io
from schemas import check
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.examples import examples

ANY = settings(deadline=None, max_examples=examples(30), suppress_health_check=list(HealthCheck))


def frame_of(table):
    return pl.from_arrow(table).lazy()


def trained(table):
    """(trajectory, id, log-probability) of each token that trains, in any order."""
    tokens = Counter()
    for row in table.to_pylist():
        logprobs = row.get("rollout_logprobs") or [None] * len(row["response_ids"])
        columns = row["response_ids"], logprobs, row["loss_mask"]
        for token, logprob, trains in zip(*columns, strict=True):
            tokens[row["trajectory_id"], token, logprob] += trains
    return +tokens


@given(rollout_tables(min_trajectories=1))
@ANY
def test_a_merge_keeps_every_trained_token_with_its_logprob(table):
    merged = pipelines.merge_table(table)
    assert merged.num_rows <= table.num_rows
    assert trained(merged) == trained(table)


@given(rollout_tables(min_trajectories=1))
@ANY
def test_a_merge_can_be_taken_back(table):
    merged = pipelines.merge_table(table)
    back = pipelines.unmerge_table(merged)
    names = [name for name in table.column_names if name != "segments"]
    assert back.select(names).to_pylist() == table.select(names).to_pylist()


@given(rollout_tables(min_trajectories=1))
@ANY
def test_a_merge_changes_no_return(table):
    merged = as_table(pipelines.merge(frame_of(table)).collect())
    for outcome in ("last", "sum"):
        before, after = (
            pipelines.trajectory_returns(frame_of(each), outcome).collect().sort("trajectory_id")
            for each in (table, merged)
        )
        assert after.equals(before)


@given(rollout_tables(min_trajectories=1))
@ANY
def test_what_a_transform_returns_is_a_valid_table(table):
    results = [
        pipelines.merge(frame_of(table)),
        pipelines.unmerge(pipelines.merge(frame_of(table))),
    ]
    for result in results:
        breaches = check(as_table(result.collect()))
        assert breaches.filter(pl.col("severity") == "error").is_empty()


def test_a_filter_keeps_or_drops_whole_trajectories(shop_dataset):
    rows = rollout_io.scan(shop_dataset)
    filtered, _ = pipelines.apply_filters(rows, [pipelines.where("return > 0.5")])
    num_rows = dict(rows.group_by("trajectory_id").len().collect().iter_rows())
    num_left = dict(filtered.group_by("trajectory_id").len().collect().iter_rows())
    assert 0 < len(num_left) < len(num_rows)
    assert all(num_rows[name] == number for name, number in num_left.items())


def test_a_reward_is_placed_on_the_last_token_of_its_step(shop_dataset):
    rows = pipelines.place_rewards(rollout_io.scan(shop_dataset)).collect()
    for reward, rewards in rows.select("reward", "rewards").iter_rows():
        assert rewards[-1] == reward
        assert not any(rewards[:-1])


def test_a_group_without_variance_is_told_from_one_with(shop_dataset):
    rows = rollout_io.scan(shop_dataset)
    filtered, _ = pipelines.apply_filters(rows, [pipelines.zero_variance()])
    returns = pipelines.trajectory_returns(filtered).collect()
    spread = returns.group_by("instance_id").agg(pl.col("return").n_unique().alias("num"))
    assert (spread["num"] > 1).all()


def test_statistics_of_merged_rows_count_the_same_groups_and_trajectories(shop_dataset):
    merged = pipelines.merge(rollout_io.scan(shop_dataset))
    before = pipelines.dataset_statistics(rollout_io.scan(shop_dataset))
    after = pipelines.dataset_statistics(merged)
    assert all(after[name] == before[name] for name in ("num_trajectories", "num_groups"))
