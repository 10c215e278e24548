import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import merge, unmerge
from pipelines.mixing import group_quotas, mix
from schemas import validate
from schemas.errors import RolloutError
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.filter_helpers import ids, one_step, relaxed, table


def groups(name, count, size=1):
    return table(
        *(t for n in range(1, count + 1) for t in one_step(*[0.0] * size, instance=f"{name}{n}"))
    )


def test_trajectories_of_each_dataset_are_spread_evenly_and_keep_their_order():
    rows, counts = mix({"math": groups("m", 2), "code": groups("c", 1)})
    assert rows.select("instance_id").collect().to_series().to_list() == ["m1", "c1", "m2"]
    assert counts.rows() == [("math", 2, 2, 2), ("code", 1, 1, 1)]


def test_shares_are_of_groups_and_as_many_as_there_are():
    assert group_quotas({"math": 60, "code": 100}, {"math": 0.75, "code": 0.25}, None) == {
        "math": 60,
        "code": 20,
    }


@pytest.mark.parametrize(
    ("shares", "num", "quotas"),
    [
        (None, None, [10, 30]),
        (None, 8, [2, 6]),
        ({"a": 1, "b": 1}, 7, [4, 3]),
        ({"a": 70, "b": 30}, 10, [7, 3]),
        ({"a": 0.29, "b": 0.71}, None, [10, 24]),
        ({"b": 3, "a": 1}, None, [10, 30]),
    ],
)
def test_quotas_go_by_the_largest_remainder(shares, num, quotas):
    assert list(group_quotas({"a": 10, "b": 30}, shares, num).values()) == quotas


@pytest.mark.parametrize(
    ("shares", "num", "rule"),
    [
        ({"a": 1, "b": 1}, 30, "enough_groups"),
        (None, 99, "enough_groups"),
        ({"a": 1}, 2, "shares"),
        ({"a": 1, "b": 0}, 2, "shares"),
        ({"a": 1, "b": float("nan")}, 2, "shares"),
        (None, 0, "nothing_left"),
    ],
)
def test_quotas_that_cannot_be_met_are_refused(shares, num, rule):
    with pytest.raises(RolloutError) as info:
        group_quotas({"a": 10, "b": 30}, shares, num)
    assert info.value.rule == rule


def test_a_group_of_two_datasets_is_refused_or_told_apart_by_their_names():
    frames = {"x": groups("g", 2), "y": groups("g", 3)}
    with pytest.raises(
        RolloutError, match=r"x and y: both contain group 'g1'.*\[unique_group\]"
    ) as info:
        mix(frames)
    assert "2)" in info.value.got
    rows, _ = mix(frames, prefix_names=True)
    validate(rows.collect())
    assert ids(rows) == ["y/g1_0", "x/g1_0", "y/g2_0", "x/g2_0", "y/g3_0"]


def test_whole_groups_are_drawn_and_the_seed_decides():
    frames = {"x": groups("x", 9, size=2), "y": groups("y", 9, size=3)}
    rows, counts = mix(frames, num_groups=6, seed=1)
    assert counts.rows() == [("x", 9, 3, 6), ("y", 9, 3, 9)]
    assert len(ids(rows)) == 15
    assert ids(mix(frames, num_groups=6, seed=1)[0]) == ids(rows)
    assert ids(mix(frames, num_groups=6, seed=2)[0]) != ids(rows)


def test_what_is_drawn_of_a_dataset_does_not_depend_on_the_others():
    x, y, z = (groups(name, 6) for name in "xyz")
    drawn = [ids(mix({"x": x, "o": other}, num_groups=4)[0]) for other in (y, z)]
    assert [n for n in drawn[0] if n[0] == "x"] == [n for n in drawn[1] if n[0] == "x"]


def test_a_column_that_one_dataset_lacks_is_null_there_and_one_of_another_type_is_refused():
    a = pl.from_arrow(groups("a", 1)).with_columns(note=pl.lit("mine"))
    b = pl.from_arrow(groups("b", 1))
    rows, _ = mix({"b": b, "a": a})
    assert rows.select("note").collect().to_series().to_list() == [None, "mine"]
    with pytest.raises(RolloutError, match=r"b, column 'note'.*\[columns_and_types\]"):
        mix({"a": a, "b": b.with_columns(note=pl.lit(1))})


def test_merged_rows_mix_with_steps_and_still_come_apart():
    steps = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1, 2]}]
    a, b = table(("a", 0, steps)), table(("b", 0, steps))
    rows = mix({"a": merge(a), "b": b})[0].collect()
    validate(rows)
    assert len(rows) == 3
    assert unmerge(rows).select("trajectory_id").collect().to_series().to_list() == [
        *("a_0", "a_0", "b_0", "b_0")
    ]


@pytest.mark.slow
@given(rollout_tables(min_trajectories=1), rollout_tables(min_trajectories=1), st.booleans())
@settings(relaxed, max_examples=examples(25))
def test_mixtures_are_valid_and_lose_no_row(one, other, merges):
    frames = {"x": merge(one) if merges else one, "y": other}
    rows = mix(frames, prefix_names=True)[0].collect()
    validate(rows)
    assert len(rows) == other.num_rows + (merge(one).collect().height if merges else one.num_rows)
    for name, data in {"x": one, "y": other}.items():
        own = [t for t in ids(rows.lazy()) if t.startswith(f"{name}/")]
        assert own == [f"{name}/{t}" for t in ids(pl.from_arrow(data).lazy())]
