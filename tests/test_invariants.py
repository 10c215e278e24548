import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import RULES, Checker, ValidationError, arrow_schema, check, validate
from schemas.columns import COLUMN_BY_NAME, REQUIRED_COLUMNS
from schemas.strategies import broken_tables, rollout_tables

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=30)

ROW = {
    "instance_id": "a",
    "repetition_id": 0,
    "trajectory_id": "a_0",
    "step_index": 0,
    "is_last_step": True,
    "prompt_token_ids": [1, 2],
    "response_ids": [3],
    "loss_mask": [True],
    "token_source": "engine",
}


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
        assert caught.value.__notes__ == [f"hint: {RULES[rule].hint}"]

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


ODD_VALUES = {
    "nulls": pa.nulls(2),
    "bytes": pa.array([b"\xff", None]),
    "lists": pa.array([[1], [None]]),
    "structs": pa.array([{"x": 1}, None]),
    "floats": pa.array([float("nan"), None]),
    "views": pa.array([[1], [None]], pa.list_view(pa.int32())),
    "segments": pa.array(
        [[None, {"start": None, "length": -1, "step_index": None}], None],
        COLUMN_BY_NAME["segments"].type,
    ),
}


@pytest.mark.parametrize("odd", ODD_VALUES)
def test_check_of_any_type_in_any_column_reports_and_never_raises(odd):
    table = pa.Table.from_pylist([ROW | {"step_index": i} for i in (0, 1)], arrow_schema(()))
    for name in [*COLUMN_BY_NAME, "parent_step_index", "prefix_length", "prompt_suffix_ids"]:
        columns = {n: table.column(n) for n in table.column_names} | {name: ODD_VALUES[odd]}
        for part in (pa.table(columns), pa.table(columns).slice(1), pa.table(columns).slice(2)):
            assert check(part).columns == ["rule", "severity", *check(part).columns[2:]]
        if name in REQUIRED_COLUMNS:
            assert "columns_and_types" in check(pa.table(columns))["rule"].to_list()


def test_columns_that_share_a_name_or_have_none_are_a_breach():
    table = pa.Table.from_pylist([ROW], arrow_schema(()))
    twice = table.append_column("instance_id", table.column("instance_id"))
    assert check(twice).rows()[0][:1] + check(twice).rows()[0][4:] == (
        *("columns_and_types", "instance_id", "2 columns", "one"),
    )
    unnamed = table.append_column("", pa.array([1]))
    assert check(unnamed)["got"].to_list() == ["a column without a name"]
