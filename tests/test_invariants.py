import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import RULES, Checker, ValidationError, check, validate
from schemas.strategies import broken_tables, rollout_tables

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=30)


@given(rollout_tables())
@relaxed
def test_valid_tables_have_no_breach_not_even_a_warning(table):
    assert check(table).to_dicts() == []


@pytest.mark.parametrize("rule", RULES)
def test_each_invariant_can_be_broken_alone_and_is_named_with_its_place(rule):
    @given(broken_tables(rule))
    @relaxed
    def holds(table):
        breaches = check(table)
        assert set(breaches["rule"]) == {rule}
        assert breaches["got"].null_count() == breaches["expected"].null_count() == 0
        whole_table = rule in ("mask_trains_something", "columns_and_types")
        for breach in breaches.to_dicts():
            assert whole_table or breach["row"] in range(table.num_rows)
            if breach["row"] is not None and "trajectory_id" in table.column_names:
                at = table.column("trajectory_id")[breach["row"]].as_py()
                assert breach["trajectory_id"] == (
                    at if rule != "columns_and_types" else breach["trajectory_id"]
                )

    holds()


@pytest.mark.parametrize("rule", RULES)
def test_validate_raises_on_errors_and_lets_warnings_pass(rule):
    @given(broken_tables(rule))
    @settings(relaxed, max_examples=5)
    def holds(table):
        if RULES[rule].severity == "warning":
            validate(table)
            return
        with pytest.raises(ValidationError) as caught:
            validate(table)
        assert caught.value.rule == rule
        assert caught.value.hint == RULES[rule].hint

    holds()


@given(rollout_tables(min_trajectories=1), st.data())
@relaxed
def test_checking_in_pieces_finds_what_checking_the_whole_finds(table, data):
    rule = data.draw(st.sampled_from(sorted(set(RULES) - {"columns_and_types"})))
    table = data.draw(broken_tables(rule) | st.just(table))
    checker, found, start = Checker(), [], 0
    ids = table.column("trajectory_id").to_pylist()
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[row - 1]:
            found.append(checker.check(table.slice(start, row - start)))
            start = row
    found.append(checker.finish())
    whole = check(table)
    assert sorted(pl.concat(found).rows(), key=str) == sorted(whole.rows(), key=str)


@given(rollout_tables())
@relaxed
def test_large_and_view_variants_and_polars_frames_are_accepted(table):
    assert check(pl.from_arrow(table)).is_empty()
    assert check(pl.from_arrow(table).to_arrow()).is_empty()


def test_int64_token_ids_are_refused_by_type():
    table = pa.table({"prompt_token_ids": pa.array([[1]], pa.list_(pa.int64()))})
    breach = check(table).filter(pl.col("column") == "prompt_token_ids").row(0, named=True)
    assert (breach["rule"], breach["got"], breach["expected"]) == (
        "columns_and_types",
        "list<item: int64>",
        "list<item: int32>",
    )


def test_token_ids_beyond_the_vocabulary_are_named():
    columns = {
        "instance_id": ["a"],
        "repetition_id": pa.array([0], pa.int32()),
        "trajectory_id": ["a_0"],
        "step_index": pa.array([0], pa.int32()),
        "is_last_step": [True],
        "prompt_token_ids": pa.array([[1, 2]], pa.list_(pa.int32())),
        "response_ids": pa.array([[3, 50, 60]], pa.list_(pa.int32())),
        "loss_mask": [[True, True, True]],
        "token_source": ["engine"],
    }
    breaches = check(pa.table(columns), vocab_size=50)
    assert breaches.select("rule", "row", "column", "got", "expected").rows() == [
        ("token_range", 0, "response_ids", "50 at index 1 and 1 more", "ids in 0..49")
    ]
