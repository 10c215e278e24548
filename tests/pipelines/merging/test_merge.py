import tempfile
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import merge, place_outcomes, place_rewards, trajectory_returns, unmerge
from pipelines.merging.merge import merge_table, part_by_routes_table, unmerge_table
from rollout_io import RolloutWriter, read
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas import check
from schemas.errors import RolloutError
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.examples import examples
from tests.helpers.refusals import refused

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(50)
)

STEPS = pl.DataFrame(
    {
        "instance_id": ["a", "a"],
        "repetition_id": [0, 0],
        "trajectory_id": ["a_0", "a_0"],
        "step_index": [0, 1],
        "is_last_step": [False, True],
        "prompt_token_ids": [[1, 2], [1, 2, 3, 9]],
        "response_ids": [[3], [4]],
        "loss_mask": [[True], [True]],
        "rollout_logprobs": [[-0.5], [-0.25]],
        "reward": [0.5, 1.0],
        "stop_reason": ["tool", "stop"],
        "policy_version": [4, 3],
        "token_source": ["engine", "engine"],
        "note": ["mine", None],
    },
    schema_overrides={
        "repetition_id": pl.Int32,
        "step_index": pl.Int32,
        "prompt_token_ids": pl.List(pl.Int32),
        "response_ids": pl.List(pl.Int32),
        "rollout_logprobs": pl.List(pl.Float32),
        "policy_version": pl.Int32,
    },
).lazy()


def test_the_worked_example_becomes_one_row_with_an_untrained_observation():
    row = merge(STEPS).collect().row(0, named=True)
    assert row["prompt_token_ids"] == [1, 2]
    assert row["response_ids"] == [3, 9, 4]
    assert row["loss_mask"] == [True, False, True]
    assert row["rollout_logprobs"] == [-0.5, 0.0, -0.25]
    assert (row["reward"], row["stop_reason"], row["policy_version"]) == (1.5, "stop", 3)
    assert (row["step_index"], row["is_last_step"], row["note"]) == (0, True, None)
    assert row["segments"] == [
        {
            "start": 0,
            "length": 1,
            "step_index": 0,
            "joined": True,
            "reward": 0.5,
            "stop_reason": "tool",
            "policy_version": 4,
            "note": "mine",
        },
        {
            "start": 2,
            "length": 1,
            "step_index": 1,
            "joined": True,
            "reward": 1.0,
            "stop_reason": "stop",
            "policy_version": 3,
            "note": None,
        },
    ]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("token_source", ["engine", "retokenized"]),
        ("temperature", pl.Series([1.0, 0.5], dtype=pl.Float32)),
        ("reward", [None, 1.0]),
        ("rollout_logprobs", [None, [-1.0]]),
        ("prompt_token_ids", [[1, 2], [1, 2, 4, 9]]),
        ("prompt_token_ids", [[1, 2], [1, 2]]),
    ],
)
def test_steps_that_differ_in_kind_or_break_the_prefix_are_not_joined(column, values):
    dtype = STEPS.collect_schema().get(column)
    frame = STEPS.with_columns(pl.Series(column, values, dtype=dtype))
    assert merge(frame).collect().height == 2


def test_a_prompt_that_equals_the_steps_before_is_continued_without_an_observation():
    prompts = pl.Series([[1, 2], [1, 2, 3]], dtype=pl.List(pl.Int32))
    row = merge(STEPS.with_columns(prompt_token_ids=prompts)).collect().row(0, named=True)
    assert (row["response_ids"], row["loss_mask"]) == ([3, 4], [True, True])


def plain_merge(rows, rule):
    """The same rule on Python lists, one row after the other."""
    alone = {r["trajectory_id"] for r in rows if is_alone(r)}
    merged = []
    for index, row in enumerate(rows):
        consecutive = rule == "consecutive" or row["trajectory_id"] in alone
        open_ones = [m for m in merged if m["id"] == row["trajectory_id"] and continues(m, row)]
        if consecutive:
            open_ones = [m for m in open_ones if m["last"] == index - 1]
        if open_ones:
            best = max(open_ones, key=lambda m: (len(m["prompt"] + m["response"]), m["last"]))
            delta = row["prompt_token_ids"][len(best["prompt"] + best["response"]) :]
            best["response"] += delta + row["response_ids"]
            best["mask"] += [False] * len(delta) + row["loss_mask"]
            best["seen"] = seen(row)
            best["last"] = index
        else:
            merged.append(
                {
                    "id": row["trajectory_id"],
                    "kind": kind(row),
                    "seen": seen(row),
                    "prompt": list(row["prompt_token_ids"]),
                    "response": list(row["response_ids"]),
                    "mask": list(row["loss_mask"]),
                    "last": index,
                }
            )
    return sorted(merged, key=lambda m: m["last"])


def continues(sequence, row):
    start = seen(row)[: len(row["prompt_token_ids"])][: len(sequence["seen"])]
    return sequence["kind"] == kind(row) and start == sequence["seen"]


def seen(row):
    """Each token as the model saw it: its id, and which part of which picture it stands for."""
    ids = row["prompt_token_ids"] + row["response_ids"]
    parts = [(token, None) for token in ids]
    for picture in row.get("pictures") or []:
        if picture["sha256"] is not None and picture["start"] is not None:
            for at in range(picture["length"]):
                where = picture["start"] + at
                parts[where] = (ids[where], (picture["sha256"], picture["length"], at))
    return parts


def is_alone(row):
    return row.get("segments") is not None or not row["response_ids"]


def kind(row):
    if is_alone(row):
        return object()
    names = ("token_source", "temperature", "top_p", "top_k", "sampling_extra", "error")
    nulls = ("rollout_logprobs", "reward", "rewards", "rollout_expert_indices")
    nulls += ("sampling_support", "policy_versions")
    nulls += ("trainer_logprobs", "redacted", "teacher_token_ids", "teacher_logprobs")
    return [row.get(n) for n in names] + [row.get(n) is None for n in nulls]


RULES = st.sampled_from(["lineage", "consecutive"])


@pytest.mark.slow
@given(rollout_tables(max_steps=7), RULES, st.booleans())
@settings(relaxed, max_examples=examples(100))
def test_merging_equals_the_greedy_rule_on_plain_lists(table, rule, encoded):
    wanted = plain_merge(table.to_pylist(), rule)
    rows = merge_table(encode_prefixes(table) if encoded else table, rule).to_pylist()
    got = [(r["prompt_token_ids"], r["response_ids"], r["loss_mask"]) for r in rows]
    assert got == [(w["prompt"], w["response"], w["mask"]) for w in wanted]


def test_a_fork_within_a_response_gets_the_shared_prompt_and_response_tokens():
    prompts = pl.Series([[1, 2], [1, 2, 3, 9]], dtype=pl.List(pl.Int32))
    responses = pl.Series([[3, 4], [5, 6]], dtype=pl.List(pl.Int32))
    pairs = [[True, True]] * 2
    logprobs = pl.Series([[-0.5, -0.25]] * 2, dtype=pl.List(pl.Float32))
    steps = STEPS.with_columns(
        prompt_token_ids=prompts,
        response_ids=responses,
        loss_mask=pl.Series(pairs),
        rollout_logprobs=logprobs,
    )
    stored = encode_prefixes(as_table(steps.collect()))
    assert stored.column("prefix_length").to_pylist() == [0, 3]
    assert merge_table(stored).column("prompt_token_ids").to_pylist() == prompts.to_list()


@given(rollout_tables(max_steps=6))
@relaxed
def test_a_table_merged_by_one_rule_can_be_merged_by_the_other(table):
    again = merge_table(merge_table(table, "consecutive"), "lineage")
    assert again.to_pylist() == merge_table(table, "lineage").to_pylist()


@given(rollout_tables(max_steps=6), RULES)
@relaxed
def test_merged_tables_are_valid(table, rule):
    assert check(merge_table(table, rule)).is_empty()


@given(rollout_tables(max_steps=6), RULES)
@settings(relaxed, max_examples=examples(100))
def test_unmerging_a_merged_table_gives_the_table_back(table, rule):
    back = unmerge_table(merge_table(table, rule))
    if "segments" not in table.column_names:
        assert back.column("segments").null_count == back.num_rows
        back = back.drop_columns(["segments"])
    names = [n for n in table.column_names if n != "segments"]
    assert back.select(names).to_pylist() == table.select(names).to_pylist()
    assert back.select(names).schema.equals(table.select(names).schema)
    if "segments" in table.column_names:
        assert drop_empty(back.column("segments")) == table.column("segments").to_pylist()


def drop_empty(segments):
    core = ("start", "length", "step_index")
    rows = segments.to_pylist()
    return [row and [{k: v for k, v in s.items() if k in core} for s in row] for row in rows]


@given(rollout_tables(max_steps=6), RULES)
@relaxed
def test_merging_twice_changes_nothing(table, rule):
    once = merge_table(table, rule)
    assert merge_table(once, rule).to_pylist() == once.to_pylist()


@given(rollout_tables())
@relaxed
def test_every_trained_token_keeps_its_logprob_mask_and_reward(table):
    def trained(rows):
        found = []
        for r in rows:
            width = len(r["response_ids"])
            logprobs = r.get("rollout_logprobs") or [None] * width
            rewards = r.get("rewards") or [None] * width
            columns = (r["response_ids"], r["loss_mask"], logprobs, rewards)
            found += [(r["trajectory_id"], *v) for v in zip(*columns, strict=True) if v[1]]
        return sorted(found, key=repr)

    merged = merge_table(table)
    assert trained(merged.to_pylist()) == trained(table.to_pylist())


@given(rollout_tables(min_trajectories=1), st.sampled_from(["last", "sum"]))
@relaxed
def test_returns_do_not_depend_on_merging(table, outcome):
    before = trajectory_returns(pl.from_arrow(table).lazy(), outcome).collect()
    after = trajectory_returns(pl.from_arrow(merge_table(table)).lazy(), outcome).collect()
    assert after.equals(before)


@pytest.mark.slow
@given(rollout_tables(min_trajectories=1))
@relaxed
def test_the_polars_transform_equals_the_arrow_one(table):
    frame = pl.from_arrow(table).lazy()
    assert merge(frame).collect().equals(pl.from_arrow(merge_table(table)))
    there_and_back = unmerge(merge(frame)).collect()
    assert there_and_back.equals(pl.from_arrow(unmerge_table(merge_table(table))))


def test_rewards_are_placed_at_the_end_of_the_step_that_earned_them():
    assert place_rewards(merge(STEPS)).collect()["rewards"].to_list() == [[0.5, 0.0, 1.0]]
    assert place_rewards(STEPS).collect()["rewards"].to_list() == [[0.5], [1.0]]


@pytest.mark.slow
@given(rollout_tables(min_trajectories=1, optional=("reward", "error", "stop_reason")))
@relaxed
def test_placing_rewards_and_merging_commute_and_stay_valid(table):
    frame = pl.from_arrow(table).lazy()
    one = place_rewards(merge(frame)).select("trajectory_id", "rewards").collect()
    other = merge(place_rewards(frame)).select("trajectory_id", "rewards").collect()
    assert one.equals(other)
    assert check(place_rewards(merge(frame)).collect()).is_empty()


def test_an_outcome_goes_to_the_last_step_and_a_missing_one_stays_unknown():
    outcomes = pl.LazyFrame({"trajectory_id": ["a_0"], "reward": [2.0]})
    assert place_outcomes(STEPS, outcomes).collect()["reward"].to_list() == [0.0, 2.0]
    none = outcomes.filter(pl.lit(value=False))
    assert place_outcomes(STEPS, none).collect()["reward"].to_list() == [None, None]


INTERLEAVED = {
    "instance_id": ["a"] * 4,
    "repetition_id": pa.array([0] * 4, pa.int32()),
    "trajectory_id": ["a_0"] * 4,
    "step_index": pa.array(range(4), pa.int32()),
    "is_last_step": [False, False, False, True],
    "prompt_token_ids": pa.array([[1], [7], [1, 2, 3], [7, 8, 9]], pa.list_(pa.int32())),
    "response_ids": pa.array([[2], [8], [4], [5]], pa.list_(pa.int32())),
    "loss_mask": [[True]] * 4,
    "token_source": ["engine"] * 4,
    "agent": ["main", "checker", "main", "checker"],
}


def test_a_sub_agent_between_two_turns_breaks_the_consecutive_rule_and_not_the_lineage_rule():
    table = pa.table(INTERLEAVED)
    assert merge_table(table, "consecutive").num_rows == 4
    rows = merge_table(table, "lineage").to_pylist()
    assert [r["prompt_token_ids"] + r["response_ids"] for r in rows] == [[1, 2, 3, 4], [7, 8, 9, 5]]
    assert [[s["step_index"] for s in r["segments"]] for r in rows] == [[0, 2], [1, 3]]
    assert unmerge_table(merge_table(table)).select(table.column_names).equals(table)


def test_a_row_between_the_steps_of_a_lineage_remembers_which_step_it_was():
    rows = merge_table(pa.table(INTERLEAVED).slice(0, 3)).to_pylist()
    assert [[s["step_index"] for s in r["segments"]] for r in rows] == [[1], [0, 2]]


@pytest.mark.parametrize("second", [[9, 2], [1]])
def test_of_two_steps_that_may_continue_one_the_earlier_does(second):
    prompts = pa.array([[1], [1, 2, 3], [1, 2, *second]], pa.list_(pa.int32()))
    table = pa.table(INTERLEAVED).slice(0, 3).set_column(5, "prompt_token_ids", prompts)
    assert merge_table(table).column("response_ids").to_pylist() == [[2, 3, 8], [4]]


ROUTING = pa.list_(pa.list_(pa.list_(pa.int16(), 1), 1))


def routed(*rows):
    return pa.array([[[[expert]] for expert in row] for row in rows], ROUTING)


@pytest.mark.parametrize(
    ("first", "second", "merged", "own"),
    [
        ([5, 6], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [None, None]),
        ([5, 6, 7], [1, 6, 7, 8], [5, 6, 7, 8], [None, [1, 6, 7, 8]]),
        ([5, 6, 7], [5], [5, 6, 7], [None, None]),
    ],
)
def test_routes_are_those_of_the_step_that_sampled_the_token_and_come_back(
    first, second, merged, own
):
    table = as_table(STEPS).append_column("rollout_expert_indices", routed(first, second))
    row = merge_table(table).to_pylist()[0]
    assert row["rollout_expert_indices"] == routed(merged).to_pylist()[0]
    kept = [segment["rollout_expert_indices"] for segment in row["segments"]]
    assert kept == [None if o is None else routed(o).to_pylist()[0] for o in own]
    assert [s["num_routed_tokens"] for s in row["segments"]] == [len(first), len(second)]
    back = unmerge_table(merge_table(table)).column("rollout_expert_indices")
    assert back.to_pylist() == routed(first, second).to_pylist()


@pytest.mark.parametrize(
    ("first", "second", "num_rows"),
    [
        ([5, 6], [5, 6, 7, 8], 1),
        ([5, 6], [5, 1, 7, 8], 2),
        ([5], [5], 1),
        ([5], [5, 6, 7, 8], 2),  # the first step trains on a token after one without a route
        ([5, 6, 7], [5, 6], 2),
    ],
)
def test_with_same_routes_steps_merge_only_if_all_trained_tokens_keep_theirs(
    first, second, num_rows
):
    other = STEPS.with_columns(instance_id=pl.lit("b"), trajectory_id=pl.lit("b_0"))
    steps = as_table(pl.concat([STEPS, other]))
    table = steps.append_column("rollout_expert_indices", routed(first, second, first, second))
    merged = merge_table(table)
    assert merged.num_rows == 2
    parts = [merge_table(table, same_routes=True), part_by_routes_table(merged)]
    assert [part.num_rows for part in parts] == [2 * num_rows] * 2


def test_rows_that_tell_sampled_ranges_of_their_own_are_not_taken_apart():
    ranges = [{"start": 0, "length": 1, "step_index": i} for i in range(2)]
    ranges[1]["start"] = 1
    table = merge_table(as_table(STEPS))
    kind = pa.list_(pa.struct([(n, pa.int32()) for n in ("start", "length", "step_index")]))
    given = table.drop_columns(["segments"]).append_column("segments", pa.array([ranges], kind))
    assert unmerge_table(merge_table(given)).num_rows == 1
    assert trajectory_returns(merge_table(given)).collect()["return"].to_list() == [1.5]


def test_segments_that_a_row_already_has_keep_their_fields_beside_merged_ones():
    own = pl.Struct(dict.fromkeys(("start", "length", "step_index", "turn"), pl.Int32))
    span = {"start": 0, "length": 1, "step_index": 0, "turn": 7}
    other = STEPS.tail(1).with_columns(
        instance_id=pl.lit("b"), trajectory_id=pl.lit("b_0"), step_index=pl.lit(0, pl.Int32)
    )
    spans = pl.Series([None, None, [span]], dtype=pl.List(own))
    rows = pl.concat([STEPS, other]).with_columns(segments=spans)
    merged = merge(rows).collect()["segments"].explode().struct.field("turn")
    assert merged.to_list() == [None, None, 7]


def test_an_empty_table_merges_to_an_empty_table():
    empty = STEPS.filter(pl.lit(value=False))
    assert merge(empty).collect().height == unmerge(merge(empty)).collect().height == 0
    assert isinstance(merge_table(as_table(empty)), pa.Table)


@given(rollout_tables(min_trajectories=1))
@settings(relaxed, max_examples=examples(25))
def test_a_merged_table_survives_the_disk_and_still_comes_apart(table):
    with tempfile.TemporaryDirectory() as folder:
        with RolloutWriter(Path(folder) / "ds") as writer:
            writer.write(merge_table(table))
        back = unmerge_table(read(Path(folder) / "ds"))
    names = [n for n in table.column_names if n != "segments"]
    assert back.select(names).to_pylist() == table.select(names).to_pylist()


def test_outcomes_are_placed_beside_a_column_of_the_users_called_outcome():
    outcomes = pl.LazyFrame({"trajectory_id": ["a_0"], "reward": [1.0]})
    placed = place_outcomes(STEPS.with_columns(outcome=pl.lit(7.0)), outcomes).collect()
    assert placed["reward"].to_list() == [0.0, 1.0]
    assert placed["outcome"].to_list() == [7.0, 7.0]


def test_two_outcomes_of_one_trajectory_are_refused():
    outcomes = pl.LazyFrame({"trajectory_id": ["a_0", "a_0"], "reward": [1.0, 0.0]})
    with refused("unique_outcome", where="outcomes", got="'a_0'"):
        place_outcomes(STEPS, outcomes)


def test_rewards_cannot_be_placed_without_a_reward():
    with pytest.raises(RolloutError, match="no column 'reward'"):
        place_rewards(STEPS.drop("reward")).collect()


@pytest.mark.parametrize("kind", [pl.DataFrame.lazy, pl.DataFrame.clone, pl.DataFrame.to_arrow])
def test_transforms_take_lazy_frames_frames_and_arrow_tables(kind):
    frame = kind(STEPS.collect())
    assert merge(frame).collect().height == 1
    assert trajectory_returns(frame).collect()["return"].to_list() == [1.0]


def test_a_reward_set_on_a_merged_row_beside_those_of_its_steps_is_a_breach():
    shaped = merge(STEPS).with_columns(reward=pl.col("reward") - 0.25)
    found = check(shaped.collect()).row(0, named=True)
    assert found["rule"] == "reward_matches_rewards"
    assert "reward is 1.25 but the rewards of the row's steps sum to 1.5" in found["message"]
    assert check(merge(STEPS.with_columns(reward=pl.col("reward") - 0.25)).collect()).is_empty()


@pytest.mark.parametrize(
    "wanted",
    [
        pl.col("trajectory_id") == "a_0",
        pl.col("instance_id").is_in(["a", "c"]) & (pl.col("reward") > 1),
    ],
)
def test_a_filter_of_ids_after_a_merge_reads_those_trajectories_alone(wanted):
    others = STEPS.with_columns(
        instance_id=pl.lit("b"), trajectory_id=pl.lit("b_0"), loss_mask=pl.lit([True, False])
    )
    both = pl.concat([STEPS, others])
    assert merge(both).filter(wanted).collect().equals(merge(STEPS).collect())
    with refused("lengths_align"):  # what is not filtered is read, and checked
        merge(both).filter(pl.col("reward") > 1).collect()
