import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import RULES, ValidationError, arrow_schema, check, validate
from schemas.checker import Checker
from schemas.columns import COLUMN_BY_NAME, REQUIRED_COLUMNS
from schemas.strategies import broken_tables, rollout_tables
from tests.helpers.examples import examples

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(30)
)

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
        assert caught.value.__notes__ == [f"Hint: {RULES[rule].hint}"]

    holds()


@pytest.mark.slow
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
        ("token_range", 0, "response_ids", "50 at index 1 (and 1 more)", "ids in 0..49")
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


@pytest.mark.slow
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
    assert check(twice).select("rule", "column", "got", "expected", "message").rows()[0] == (
        *("columns_and_types", "instance_id", "2 columns", "one"),
        "2 columns are named 'instance_id'",
    )
    unnamed = table.append_column("", pa.array([1]))
    assert check(unnamed)["got"].to_list() == ["a column without a name"]


ANSWER = list(range(20, 36))
HEADER = [1, 9, 8]


def answered(prompt, response=ANSWER, step=0, last=True, **fields):
    tokens = {"prompt_token_ids": prompt, "response_ids": response}
    place = {"step_index": step, "is_last_step": last, "loss_mask": [True] * len(response)}
    return ROW | tokens | place | fields


def rows_with_their_answer(*rows):
    breaches = check(pa.Table.from_pylist(list(rows), arrow_schema(("segments",))))
    assert set(breaches["rule"]) <= {"response_in_prompt", "mask_trains_something"}
    return breaches.filter(rule="response_in_prompt")["row"].to_list()


RECORDED_AFTER = [*HEADER, 5, *HEADER, *ANSWER, 2, 6, 7, *HEADER]


@pytest.mark.parametrize(
    ("row", "is_breach"),
    [
        (answered(RECORDED_AFTER), True),
        (answered(RECORDED_AFTER, [*ANSWER, 2]), True),
        (answered(RECORDED_AFTER, [*ANSWER, 3]), False),
        (answered(RECORDED_AFTER, ANSWER[:15]), False),
        (answered(RECORDED_AFTER, loss_mask=[False] * 16), False),
        (answered([*HEADER, 5, *ANSWER, 2, *HEADER]), False),
        (answered([*HEADER, *ANSWER, 2, *HEADER, 3, 2, *HEADER]), False),
        (answered([*HEADER, *ANSWER[:15], *HEADER, *ANSWER[:1]]), False),
        (answered([*HEADER, *ANSWER]), False),
    ],
)
def test_an_answer_in_its_own_prompt_is_one_whole_last_assistant_message(row, is_breach):
    assert rows_with_their_answer(row) == [0] * is_breach


def test_an_answer_that_an_earlier_step_gave_is_a_repetition():
    first = answered([5, *HEADER], last=False)
    again = [answered([5, *HEADER, *ANSWER, 2, 6, *HEADER], step=n) for n in (1, 0)]
    other = again[1] | {"trajectory_id": "a_1", "repetition_id": 1}
    assert rows_with_their_answer(first, again[0], other) == [2]


def test_the_answer_of_a_row_of_several_is_its_first_segment():
    spans = [{"start": 0, "length": 16, "step_index": 0}, {"start": 18, "length": 16}]
    spans[1]["step_index"] = 1
    both = [*ANSWER, 2, 6, *ANSWER[::-1]]
    assert rows_with_their_answer(answered(RECORDED_AFTER, both, segments=spans)) == [0]
    assert rows_with_their_answer(answered(RECORDED_AFTER, both)) == []


def test_prompts_that_end_in_different_headers_are_looked_at_each_by_its_own():
    rows = [
        answered(RECORDED_AFTER, last=False),
        answered([4, 4, *ANSWER, 3, 4, 4], [*ANSWER, 3], step=1, last=False),
        answered([4, 4, *ANSWER[1:], 3, 4, 4], step=2),
    ]
    assert rows_with_their_answer(*rows) == [0, 1]


@pytest.mark.parametrize(
    ("oldest", "versions", "is_breach"),
    [
        (3, [3, 5], False),
        (3, [0, 3, 5], False),  # the first token was not sampled
        (0, [0, 2], False),
        (None, [7, 8], False),
        (3, [9, 9], True),
        (5, [5, 3], True),
        (0, [2, 3], True),
        (3, [3, -1], True),
    ],
)
def test_the_oldest_version_of_the_tokens_is_that_of_the_row(oldest, versions, is_breach):
    row = answered([1], [2] * len(versions), policy_version=oldest, policy_versions=versions)
    table = pa.Table.from_pylist([row], arrow_schema(("policy_version", "policy_versions")))
    found = check(table)["rule"].to_list()
    assert found == (["versions_of_tokens"] if is_breach else [])
