from itertools import pairwise

import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipelines import merge, trajectory_returns
from pipelines.filtering import apply_filters, judge, keep, keep_rows, report
from pipelines.filters import (
    duplicates,
    dynamic_sampling,
    failed,
    first_groups,
    overlong,
    pass_rate_range,
    reward_range,
    sample_groups,
    stale,
    step_range,
    token_range,
    unknown_return,
    where,
    zero_variance,
)
from schemas import validate
from schemas.errors import RolloutError
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.configs import train_config
from tests.helpers.filter_helpers import ids, one_step, relaxed, table
from tests.helpers.refusals import refused
from trainer.batches.plan import make_plan


def kept(rows, *filters, outcome="last"):
    return ids(apply_filters(rows, filters, outcome)[0])


def reasons(rows, *filters):
    return judge(rows, filters)["reason"].to_list()


def test_a_verdict_names_the_filter_that_drops_a_trajectory():
    rows = table(*one_step(1.0, 0.0))
    verdicts = judge(rows, [reward_range(minimum=0.5)])
    assert verdicts.columns == ["instance_id", "trajectory_id", "return", "error", "reason"]
    assert verdicts.select("trajectory_id", "reason").rows() == [
        ("a_0", None),
        ("a_1", "reward >= 0.5"),
    ]


def test_the_report_counts_trajectories_and_groups_before_and_dropped():
    rows = table(*one_step(1.0, 1.0), *one_step(1.0, 0.0, 2.0, instance="b"))
    _, counts = apply_filters(rows, [zero_variance(), reward_range(maximum=1.0)])
    assert counts.rows() == [("zero variance", 5, 2, 2, 1), ("reward <= 1.0", 3, 1, 1, 0)]


def test_dropping_everything_is_refused_and_says_why():
    rows = table(*one_step(1.0, 1.0))
    with refused("nothing_left", got="(zero variance: 2 dropped"):
        apply_filters(rows, dynamic_sampling())


def test_an_empty_table_stays_empty():
    rows, counts = apply_filters(table(), [zero_variance()])
    assert rows.collect().is_empty()
    assert counts.rows() == [("zero variance", 0, 0, 0, 0)]


def test_two_filters_of_one_name_could_not_be_told_apart_in_the_report():
    with pytest.raises(RolloutError, match="unique_filter"):
        judge(table(*one_step(1.0)), [failed(), failed()])


# --- zero variance ---------------------------------------------------------------------------


def test_variance_is_judged_on_trajectories_where_the_reference_sees_rows():
    steps = [{"reward": 0.0}, {"reward": 1.0}]
    rows = table(("a", 0, steps), ("a", 1, steps), *one_step(1.0, 0.0, instance="b"))
    assert kept(rows, zero_variance()) == ["b_0", "b_1"]


@pytest.mark.parametrize(
    ("returns", "stays"),
    [
        ((1.0,), True),
        ((0.0, 0.0), False),
        ((0.0, 1e-9), True),
        ((1.0, "failed"), True),
        ((1.0, 1.0, "failed"), False),
        ((1.0, None), True),
        ((1.0, 1.0, None), False),
        ((None, None), True),
        (("failed", "failed"), True),
    ],
)
def test_a_group_goes_where_two_known_returns_are_equal_and_none_differs(returns, stays):
    rows = table(*one_step(*returns), *one_step(0.0, 1.0, instance="other"))
    verdicts = judge(rows, [zero_variance()]).filter(instance_id="a")
    assert (verdicts["reason"].null_count() == len(verdicts)) == stays


def test_variance_is_that_of_the_outcome_asked_for():
    a = ("a", 0, [{"reward": 0.5}, {"reward": 1.0}])
    b = ("a", 1, [{"reward": 0.0}, {"reward": 1.0}])
    rows = table(a, b)
    assert judge(rows, [zero_variance()], "last")["reason"].null_count() == 0
    assert judge(rows, [zero_variance()], "sum")["reason"].null_count() == 2


def test_dynamic_sampling_keeps_the_first_groups_that_teach_something():
    groups = [one_step(*r, instance=i) for i, r in {"a": (1, 1), "b": (0, 1), "c": (1, 0)}.items()]
    rows = table(*groups[0], *groups[2], *groups[1])
    assert kept(rows, *dynamic_sampling(1)) == ["c_0", "c_1"]
    assert kept(rows, *dynamic_sampling(9)) == ["c_0", "c_1", "b_0", "b_1"]


# --- failed, unknown, ranges ------------------------------------------------------------------


def test_failed_trajectories_go_alone_or_with_their_group():
    rows = table(*one_step(1.0, "failed"), *one_step(0.0, instance="b"))
    assert kept(rows, failed()) == ["a_0", "b_0"]
    assert kept(rows, failed("group")) == ["b_0"]


def test_an_unknown_return_is_not_a_failure():
    rows = table(*one_step(1.0, None, "failed"))
    assert kept(rows, unknown_return()) == ["a_0", "a_2"]


def test_a_bound_includes_what_differs_from_it_by_rounding():
    rows = table(*one_step(0.1 + 0.2, 0.7 - 0.4, 0.3, 0.2, 0.4))
    assert kept(rows, reward_range(0.3, 0.3)) == ["a_0", "a_1", "a_2"]
    passes = table(*one_step(0.3 - 0.2 - 0.1, 1.0))
    assert kept(passes, pass_rate_range(0.5, 0.5)) == ["a_0", "a_1"]


def test_a_null_return_lies_in_no_reward_range():
    rows = table(*one_step(0.5, None, "failed", 1.0, -1.0))
    assert kept(rows, reward_range(0.5, 1.0)) == ["a_0", "a_3"]
    assert kept(rows, reward_range(maximum=2.0)) == ["a_0", "a_3", "a_4"]


def test_tokens_are_those_of_the_longest_sequence():
    rows = table(("a", 0, [{}, {}, {}]), ("a", 1, [{"reward": 1.0}]))
    assert kept(rows, token_range(maximum=3)) == ["a_1"]
    assert kept(rows, token_range(minimum=4)) == ["a_0"]


def test_a_merged_row_counts_as_all_of_its_steps():
    rows = table(("a", 0, [{}, {}, {}]), ("a", 1, [{}]))
    assert merge(rows).collect().height == 2
    for frame in (rows, merge(rows)):
        assert kept(frame, step_range(minimum=3)) == ["a_0"]
        assert kept(frame, step_range(maximum=2)) == ["a_1"]


# --- staleness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "stays"),
    [((7, 8), True), ((6, 8), False), ((None, 8), True), ((None, 6), False), ((None, None), False)],
)
def test_one_row_that_is_too_old_drops_its_trajectory(versions, stays):
    steps = [{"policy_version": version} for version in versions]
    rows = table(("a", 0, steps), ("b", 0, [{"policy_version": 10}]))
    for frame in (rows, merge(rows)):
        assert ("a_0" in kept(frame, stale(10, 3))) == stays


def test_a_failed_trajectory_of_unknown_version_stays():
    rows = table(("a", 0, [{"policy_version": None}], "timeout"), ("b", 0, [{"policy_version": 1}]))
    assert kept(rows, stale(1, 0)) == ["a_0", "b_0"]


def test_staleness_without_versions_is_refused():
    with refused("known_column", where="staleness <= 0", got="'policy_version'"):
        judge(table(*one_step(1.0)), [stale(1, 0)])


# --- duplicates -------------------------------------------------------------------------------


def test_repeats_go_whatever_their_reward_and_the_first_stays():
    other = {"response_ids": [9]}
    rows = table(
        ("a", 0, [{"reward": 0.0}]), ("a", 1, [{"reward": 1.0}]), ("a", 2, [other]), ("b", 0, [{}])
    )
    assert kept(rows, duplicates()) == ["a_0", "a_2", "b_0"]
    assert kept(rows, duplicates("dataset")) == ["a_0", "a_2"]


def test_a_failed_trajectory_is_no_repeat_and_has_none():
    rows = table(*one_step("failed", "failed", 1.0, 1.0))
    assert kept(rows, duplicates()) == ["a_0", "a_1", "a_2"]


def test_where_the_prompt_ends_matters():
    split = {"prompt_token_ids": [1, 2], "response_ids": [3]}
    other = {"prompt_token_ids": [1], "response_ids": [2, 3]}
    rows = table(("a", 0, [split]), ("a", 1, [other]))
    assert kept(rows, duplicates()) == ["a_0", "a_1"]


@pytest.mark.slow
@given(rollout_tables(min_trajectories=1, errors=False), st.booleans())
@relaxed
def test_a_copy_of_a_table_is_all_repeats_also_when_merged(rows, merges):
    frame = pl.from_arrow(rows)
    copy = frame.with_columns(
        repetition_id=pl.col("repetition_id") + 10,
        trajectory_id=pl.format("{}_{}", "instance_id", pl.col("repetition_id") + 10),
    )
    copy = merge(copy).collect() if merges else copy
    both = pl.concat([frame, copy], how="diagonal_relaxed")
    verdicts = judge(both, [duplicates()])
    assert (
        verdicts.filter(pl.col("trajectory_id").is_in(copy["trajectory_id"].implode()))[
            "reason"
        ].null_count()
        == 0
    )


# --- where ------------------------------------------------------------------------------------


def test_a_condition_holds_for_any_or_for_all_rows():
    rows = table(
        ("a", 0, [{"agent": "main"}, {"agent": "checker"}]), ("a", 1, [{"agent": "main"}] * 2)
    )
    assert kept(rows, where("any(agent = 'checker')")) == ["a_0"]
    assert kept(rows, where("all(agent = 'main')")) == ["a_1"]
    is_main = pl.col("agent") == "main"
    assert kept(rows, where(is_main.any().over("trajectory_id"))) == ["a_0", "a_1"]
    assert kept(rows, where(is_main.all().over("trajectory_id"))) == ["a_1"]


def test_null_does_not_match():
    rows = table(*one_step(None, 1.0))
    assert kept(rows, where("reward < 2")) == ["a_1"]


def test_an_optional_column_that_is_not_there_is_null_in_a_condition():
    rows = table(*one_step(0.0, 1.0)).drop_columns(["error"])
    assert kept(rows, where("error IS NULL AND reward > 0")) == ["a_1"]
    assert kept(rows, where("reward > 0 OR error IS NOT NULL")) == ["a_1"]
    left, _ = keep_rows(rows, "error IS NULL")
    assert left.collect().columns == rows.column_names


@pytest.mark.parametrize(
    ("condition", "rule"),
    [
        ("reward >", "condition"),
        ("rewrad > 0", "known_column"),
        ("instance_id > 0", "condition"),
        ("reward", "condition"),
        ("CAST(instance_id AS INT) > 0", "condition"),
    ],
)
def test_a_condition_that_does_not_apply_is_an_error_without_a_traceback(condition, rule):
    with pytest.raises(RolloutError) as info:
        judge(table(*one_step(1.0)), [where(condition)])
    assert info.value.rule == rule


# --- sampling ---------------------------------------------------------------------------------


def groups(count):
    return table(*(line for n in range(count) for line in one_step(0.0, 1.0, instance=f"g{n}")))


def test_sampling_takes_whole_groups_and_the_seed_decides():
    rows = groups(20)
    drawn = kept(rows, sample_groups(5, seed=1))
    assert len(drawn) == 10
    assert {f"{name[:-2]}_{n}" for name in drawn for n in (0, 1)} == set(drawn)
    assert kept(rows, sample_groups(5, seed=1)) == drawn
    assert kept(rows, sample_groups(5, seed=2)) != drawn


def test_a_smaller_sample_is_a_part_of_the_larger_one():
    rows = groups(20)
    assert set(kept(rows, sample_groups(3))) < set(kept(rows, sample_groups(9)))


def test_the_lots_of_a_seed_never_change():
    assert kept(groups(6), sample_groups(2, seed=7)) == ["g1_0", "g1_1", "g4_0", "g4_1"]


# --- all filters ------------------------------------------------------------------------------


def filters_for(rows):
    """Filters that depend on steps, not on rows, as far as the table has their columns."""
    found = [
        zero_variance(), failed(), failed("group"), unknown_return(), duplicates(),
        duplicates("dataset"), reward_range(-1.0, 1.0), token_range(2, 12), step_range(1, 3),
        sample_groups(1), first_groups(1),
    ]  # fmt: skip
    found += [stale(3, 1)] if "policy_version" in rows.column_names else []
    return found + ([overlong(["stop"])] if "stop_reason" in rows.column_names else [])


@st.composite
def judged_tables(draw):
    rows = draw(rollout_tables())
    count = st.integers(0, 3)
    return rows, draw(st.permutations(filters_for(rows)))[: draw(count)]


@pytest.mark.slow
@given(judged_tables(), st.sampled_from(["last", "sum"]))
@relaxed
def test_what_is_kept_is_valid_whole_and_in_order(drawn, outcome):
    rows, filters = drawn
    verdicts = judge(rows, filters, outcome)
    left = keep(rows, verdicts).collect()
    validate(left)
    stays = verdicts.filter(pl.col("reason").is_null())["trajectory_id"].to_list()
    wanted = [row for row in rows.to_pylist() if row["trajectory_id"] in stays]
    assert as_table(left).select(rows.column_names).to_pylist() == wanted


@pytest.mark.slow
@given(judged_tables(), st.sampled_from(["last", "sum"]))
@relaxed
def test_counts_add_up(drawn, outcome):
    rows, filters = drawn
    verdicts = judge(rows, filters, outcome)
    counts = report(verdicts, filters)
    left = verdicts.filter(pl.col("reason").is_null())
    for name, column in {"trajectories": "trajectory_id", "groups": "instance_id"}.items():
        before = [*counts[f"num_{name}_before"], left[column].n_unique()]
        assert before[0] == verdicts[column].n_unique()
        dropped = counts[f"num_{name}_dropped"].to_list()
        assert dropped == [a - b for a, b in pairwise(before)]


@pytest.mark.slow
@given(
    judged_tables(), st.sampled_from(["last", "sum"]), st.sampled_from(["lineage", "consecutive"])
)
@relaxed
def test_merged_rows_get_the_same_verdicts(drawn, outcome, rule):
    rows, filters = drawn
    assert judge(merge(rows, rule), filters, outcome).equals(judge(rows, filters, outcome))


@given(rollout_tables(), st.data(), st.sampled_from(["last", "sum"]))
@relaxed
def test_a_filter_that_is_applied_again_changes_nothing(rows, data, outcome):
    filters = [data.draw(st.sampled_from(filters_for(rows)))]
    left = keep(rows, judge(rows, filters, outcome)).collect()
    again = judge(left, filters, outcome)
    assert again["reason"].null_count() == len(again)


def test_a_filter_of_returns_is_refused_where_none_is_known():
    rows = pl.from_arrow(groups(4)).with_columns(reward=pl.lit(None, pl.Float64))
    with refused("unknown_return", where="zero variance"):
        apply_filters(rows, zero_variance())


def test_filters_compose_lazily_and_read_no_row_twice_before_they_are_used():
    rows = pl.from_arrow(groups(4)).lazy()
    first, _ = apply_filters(rows, [reward_range(minimum=0.5)])
    second, _ = apply_filters(first, [first_groups(2)])
    assert isinstance(second, pl.LazyFrame)
    assert ids(second) == ["g0_1", "g1_1"]


@pytest.mark.slow
@given(rollout_tables(optional=("reward", "error")), st.sampled_from(["group", "trajectory"]))
@relaxed
def test_the_trainer_masks_and_leaves_out_the_same(rows, masks):
    verdicts = judge(rows, [unknown_return(), zero_variance()])
    assume(verdicts["reason"].null_count())
    known = keep(rows, judge(rows, [unknown_return()])).collect()
    config = train_config(
        dataset="ds",
        model="m",
        out="run",
        failed=masks,
        drop_zero_variance_groups=True,
        partial_groups="train",
    )
    plan = make_plan(trajectory_returns(known).collect(), config).trajectories
    verdicts = judge(known, [failed(masks), zero_variance()])
    dropped = verdicts.filter(reason="zero variance")["trajectory_id"].to_list()
    left_out = verdicts.join(plan, on="trajectory_id", how="anti")
    trains = verdicts.filter(pl.col("reason").is_null())["trajectory_id"].to_list()
    assert plan.filter("trains")["trajectory_id"].to_list() == trains
    healthy = left_out.filter(pl.col("error").is_null())
    assert healthy["trajectory_id"].to_list() == dropped


@pytest.mark.parametrize("condition", ["sum(reward) > 3", "step_index = max(step_index)", pl.len()])
def test_an_aggregate_over_the_whole_dataset_is_refused_with_the_way_to_say_it(condition):
    with refused("condition", got="an aggregate", hint="(PARTITION BY trajectory_id)"):
        where(condition)


def test_an_aggregate_over_a_trajectory_is_a_condition_on_rows():
    rows = table(("a", 0, [{}, {}]), ("a", 1, [{}]))
    last = "step_index = max(step_index) over (partition by trajectory_id)"
    assert ids(apply_filters(rows, [where(f"any({last} and step_index > 0)")])[0]) == ["a_0"]


@pytest.mark.parametrize("returns", [(0.3, 0.1 + 0.2), (3e8, 3e8 + 1), (0.1 + 0.2 - 0.3, 0.0)])
def test_returns_that_differ_by_rounding_have_no_variance(returns):
    frame = table(*one_step(*returns), ("b", 0, [{"reward": 0.0}]))
    assert ids(apply_filters(frame, [zero_variance()])[0]) == ["b_0"]


def test_groups_of_a_chosen_pass_rate_are_kept_and_failed_attempts_do_not_count():
    groups = [*one_step(1.0, 0.0, 0.0, "failed"), *one_step(0.5, 1.0, instance="b")]
    groups += one_step("failed", instance="c")
    verdicts = judge(table(*groups), [pass_rate_range(0.3, 0.4)])
    kept = verdicts.filter(pl.col("reason").is_null())["instance_id"].unique().to_list()
    assert kept == ["a"]
    assert verdicts["reason"].drop_nulls().unique().to_list() == [
        "pass rate >= 0.3, pass rate <= 0.4"
    ]
