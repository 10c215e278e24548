"""Steps that show another picture at the same token ids are not one another's continuation."""

import polars as pl
import pyarrow as pa
import pytest

import rollout_io
from pipelines.drift_diagnosis import diagnose
from pipelines.filtering import judge
from pipelines.filters import duplicates
from pipelines.merging.merge import merge, unmerge
from pipelines.similarity import near_duplicates
from pipelines.statistics.attempts import broken_prefixes
from pipelines.statistics.savings import dataset_savings
from rollout_io.cli.trajectory_text import view_trajectory
from rollout_io.dataset.checking import mixed_groups
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas import check
from schemas.columns import PICTURES_TYPE

ONE, TWO = (f"sha256:{digit * 64}" for digit in "1a")
PAD = 9


def entry(sha256, start, length=2):
    return {"sha256": sha256, "start": start, "length": length}


def trajectory(name, *steps):
    """Rows of (prompt, response, pictures)."""
    instance, _, repetition = name.partition("_")
    return [
        {
            "instance_id": instance,
            "repetition_id": int(repetition),
            "trajectory_id": name,
            "step_index": index,
            "is_last_step": index == len(steps) - 1,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [True] * len(response),
            "token_source": "engine",
            "pictures": pictures,
        }
        for index, (prompt, response, pictures) in enumerate(steps)
    ]


def table_of(*rows):
    ids = pa.list_(pa.int32())
    kinds = {"repetition_id": pa.int32(), "step_index": pa.int32(), "pictures": PICTURES_TYPE}
    kinds |= {"prompt_token_ids": ids, "response_ids": ids}
    table = pa.table({name: pa.array([r[name] for r in rows], kinds.get(name)) for name in rows[0]})
    assert check(table).is_empty()
    return table


FIRST = [1, PAD, PAD, 2]
SECOND = [*FIRST, 3, 4, PAD, PAD, 5]
CONTINUED = trajectory("a_0", (FIRST, [3], [entry(ONE, 1)]),
                       (SECOND, [6], [entry(ONE, 1), entry(TWO, 6)]))  # fmt: skip
CHANGED = trajectory("a_0", (FIRST, [3], [entry(ONE, 1)]),
                     (SECOND, [6], [entry(TWO, 1), entry(TWO, 6)]))  # fmt: skip


def stored(table, layout):
    return encode_prefixes(table) if layout == "prefix" else table


@pytest.fixture(params=["prefix", "full"])
def layout(request):
    return request.param


@pytest.fixture
def written(tmp_path, layout):
    """Write a dataset; the files of its pictures do not matter here."""

    def write(table):
        with rollout_io.RolloutWriter(tmp_path / "ds", layout=layout) as writer:
            writer.write(table)
        return tmp_path / "ds"

    return write


def test_the_prefix_of_a_row_ends_before_a_picture_that_changed():
    parents = ["parent_step_index", "prefix_length"]
    assert encode_prefixes(table_of(*CHANGED)).select(parents).to_pylist()[1] == {
        "parent_step_index": 0,
        "prefix_length": 1,
    }
    assert encode_prefixes(table_of(*CONTINUED)).select(parents).to_pylist()[1] == {
        "parent_step_index": 0,
        "prefix_length": 5,
    }


def test_a_merge_joins_the_steps_of_one_picture_and_keeps_all_spans(layout):
    table = table_of(*CONTINUED)
    merged = merge(stored(table, layout)).collect().to_arrow()
    (row,) = merged.to_pylist()
    assert row["prompt_token_ids"] + row["response_ids"] == [*SECOND, 6]
    assert row["pictures"] == [entry(ONE, 1), entry(TWO, 6)]
    assert check(merged).is_empty()
    undone = unmerge(merged).collect().to_arrow()
    assert undone.select(table.column_names).to_pylist() == table.to_pylist()


@pytest.mark.parametrize("rule", ["lineage", "consecutive"])
def test_a_merge_does_not_join_steps_whose_picture_changed(rule, layout):
    merged = merge(stored(table_of(*CHANGED), layout), rule).collect()
    assert merged["pictures"].to_list() == [row["pictures"] for row in CHANGED]


def test_a_merge_tells_pictures_apart_where_prompts_add_nothing(layout):
    """Two answers to the same ids: each row continues the step with its own picture."""
    rows = trajectory("a_0", (FIRST, [3], [entry(ONE, 1)]), (FIRST, [3], [entry(TWO, 1)]),
                      ([*FIRST, 3], [7], [entry(ONE, 1)]))  # fmt: skip
    merged = merge(stored(table_of(*rows), layout)).collect().sort("prompt_token_ids")
    assert sorted(merged["response_ids"].to_list()) == [[3], [3, 7]]
    whole = merged.filter(merged["response_ids"].list.len() == 2)
    assert whole["pictures"].to_list() == [[entry(ONE, 1)]]


def test_an_unknown_picture_is_compared_by_its_token_ids():
    """A table whose pictures were dropped merges as it did before."""
    hidden = [
        row | {"pictures": [one | {"sha256": None} for one in row["pictures"]]} for row in CONTINUED
    ]
    assert merge(table_of(*hidden)).collect().height == 1


def test_savings_count_the_tokens_of_each_picture_once(written):
    other = trajectory("a_1", (FIRST, [3], [entry(TWO, 1)]))
    costs = dataset_savings(written(table_of(*CONTINUED, *other)))
    lengths = {name: cost.num_tokens for name, cost in costs.items()}
    assert lengths["tree_per_trajectory"] == len(SECOND) + 1 + len(FIRST) + 1
    assert lengths["tree_per_group"] == len(SECOND) + 1 + len(FIRST)
    assert lengths["merge_lineage"] == lengths["tree_per_trajectory"]


def test_attempts_that_show_different_pictures_are_no_duplicates():
    same = trajectory("a_1", *[(r["prompt_token_ids"], r["response_ids"], r["pictures"])
                               for r in CONTINUED])  # fmt: skip
    other = trajectory("a_2", *[(r["prompt_token_ids"], r["response_ids"], r["pictures"])
                                for r in CHANGED])  # fmt: skip
    table = table_of(*CONTINUED, *same, *other)
    for rule in (duplicates(), near_duplicates(0.99)):
        for frame in (table, merge(table)):
            kept = judge(frame, rule).filter(pl.col("reason").is_null())["trajectory_id"].to_list()
            assert kept == ["a_0", "a_2"]


def test_attempts_with_different_first_pictures_are_a_mixed_group(written):
    other = trajectory("a_1", (FIRST, [3], [entry(TWO, 1)]))
    same = trajectory("b_0", (FIRST, [3], [entry(TWO, 1)]))
    again = trajectory("b_1", (FIRST, [4], [entry(TWO, 1)]))
    assert mixed_groups(written(table_of(*CONTINUED, *other, *same, *again)))[0] == ["a"]


def test_drift_names_a_picture_that_changed(layout):
    (found,) = diagnose(stored(table_of(*CHANGED), layout)).breaks.to_dicts()
    assert (found["cause"], found["token_index"]) == ("picture", 1)
    assert found["lost_ids"] == found["now_ids"] == [PAD, PAD]
    assert diagnose(stored(table_of(*CONTINUED), layout)).breaks.is_empty()


def test_a_changed_picture_is_counted_as_a_broken_prefix(written):
    counts = broken_prefixes(written(table_of(*CHANGED)))
    assert counts["broken prefixes"].to_list() == [1]


def test_another_agent_that_shows_another_picture_is_no_drift():
    agents = pa.array(["main", "checker"])
    table = table_of(*CHANGED).append_column("agent", agents)
    (found,) = diagnose(table).breaks.to_dicts()
    assert found["cause"] == "new_agent"


def test_a_second_branch_with_another_picture_is_an_overlap():
    rows = trajectory("a_0", (FIRST, [3], [entry(ONE, 1)]),
                      (SECOND, [6], [entry(ONE, 1), entry(ONE, 6)]),
                      (SECOND, [6], [entry(ONE, 1), entry(TWO, 6)]))  # fmt: skip
    (found,) = diagnose(table_of(*rows)).breaks.to_dicts()
    assert (found["cause"], found["token_index"]) == ("overlap", 6)


def test_a_view_of_a_trajectory_counts_the_tokens_after_a_changed_picture_as_new():
    changed, continued = (view_trajectory(rows).steps[1] for rows in (CHANGED, CONTINUED))
    assert (changed.num_shared_tokens, continued.num_shared_tokens) == (1, 5)
