"""Preference pairs are steps that attempts of a group sampled after the same tokens."""

import tempfile
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
import rollout_io
from schemas.errors import InputError
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.pair_helpers import attempts, exported, write

IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


def ids_of(samples):
    return [tuple(sample[name] for name in IDS) for sample in samples]


def ids_after(tmp_path, *given, select="forks"):
    return ids_of(exported(write(tmp_path / "ds", attempts(*given)), "dpo_tokens", select)[1])


def test_another_observation_is_no_fork(tmp_path):
    win = ("a", 1.0, [([1, 2], [3]), ([1, 2, 3, 9], [4])])
    loss = ("a", 0.0, [([1, 2], [3]), ([1, 2, 3, 8], [5])])
    with pytest.raises(InputError, match="2 at no fork of their group") as error:
        ids_after(tmp_path, win, loss)
    assert error.value.rule == "some_rows"


def test_the_value_of_a_branch_is_the_mean_return_of_its_attempts(tmp_path):
    given = [("a", 1.0, [([1], [3])]), ("a", 0.0, [([1], [3])]), ("a", 0.0, [([1], [3])])]
    done, (pair,) = exported(
        write(tmp_path / "ds", attempts(*given, ("a", 0.5, [([1], [4])]))), "dpo_tokens"
    )
    assert ids_of([pair]) == [([1], [4], [3])]
    assert pair["chosen_return"] == 0.5
    assert pair["rejected_return"] == pytest.approx(1 / 3)
    assert (pair["chosen_trajectory_id"], pair["rejected_trajectory_id"]) == ("a_3", "a_0")
    assert done.num_samples == 1


def test_best_worst_gives_one_pair_where_the_two_attempts_part(tmp_path):
    middle = ("a", 0.5, [([1], [2]), ([1, 2, 9], [7])])
    best = ("a", 1.0, [([1], [2]), ([1, 2, 9], [4]), ([1, 2, 9, 4, 9], [5])])
    worst = ("a", 0.0, [([1], [2]), ([1, 2, 9], [6])])
    other = [("b", 0.0, [([1], [8])]), ("b", 1.0, [([1], [9])])]
    found = ids_after(tmp_path, middle, best, worst, *other, select="best_worst")
    assert found == [([1, 2, 9], [4], [6]), ([1], [9], [8])]


def test_best_worst_parts_where_the_attempts_part_not_where_their_sub_agents_do(tmp_path):
    best = ("g", 1.0, [([1, 2], [5]), ([9], [1]), ([1, 2, 5, 7], [3])])
    worst = ("g", 0.0, [([1, 2], [6]), ([9], [2]), ([1, 2, 6, 7], [3])])
    assert ids_after(tmp_path, best, worst, select="best_worst") == [([1, 2], [5], [6])]


def test_best_worst_takes_the_fork_that_the_best_attempt_meets_first(tmp_path):
    best = ("g", 1.0, [([1, 2], [5]), ([9], [1])])
    worst = ("g", 0.0, [([9], [2]), ([1, 2], [6])])
    assert ids_after(tmp_path, best, worst, select="best_worst") == [([1, 2], [5], [6])]


def test_pairs_and_labels_count_tokens_and_answers_that_were_cut_off(tmp_path):
    given = [("a", 1.0, [([1], [2, 3, 4])]), ("a", 0.0, [([1], [5])])]
    table = attempts(*given, stop_reason=["length", "stop"])
    done, _ = exported(write(tmp_path / "ds", table), "dpo_tokens")
    assert (done.counts["num_chosen_tokens"], done.counts["num_rejected_tokens"]) == (3, 1)
    assert (done.counts["num_chosen_cut_off"], done.counts["num_rejected_cut_off"]) == (1, 0)
    assert "chosen: 3.0 tokens on average, 100% cut off" in done.remarks
    done, _ = exported(tmp_path / "ds", "kto_tokens")
    assert done.counts == {
        "num_desirable": 1,
        "num_desirable_tokens": 3,
        "num_undesirable": 1,
        "num_undesirable_tokens": 1,
    }


def test_equal_and_unknown_returns_prefer_nothing(tmp_path):
    equal = [("a", 0.1 + 0.2, [([1], [2])]), ("a", 0.3, [([1], [3])])]
    unknown = [("b", None, [([1], [2])]), ("b", 1.0, [([1], [3])])]
    with pytest.raises(
        InputError, match="1 with an unknown return, 1 at no fork of their group, 2 at f"
    ):
        ids_after(tmp_path, *equal, *unknown)


def test_an_attempt_that_took_both_branches_is_ignored_there(tmp_path):
    both = ("a", 1.0, [([1], [2]), ([1], [3])])
    others = [("a", 0.0, [([1], [2])]), *(("a", 0.25, [([1], [3])]) for _ in range(3))]
    assert ids_after(tmp_path, both, *others) == [([1], [3], [2])]  # with it: 0.5 and 0.44


def test_a_step_with_tokens_that_do_not_train_is_in_no_pair(tmp_path):
    given = [("a", 1.0, [([1], [2, 3], [True, False])]), ("a", 0.0, [([1], [4])])]
    given += [("b", 1.0, [([1], [5])]), ("b", 0.0, [([1], [6])])]
    done, found = exported(write(tmp_path / "ds", attempts(*given)), "dpo_tokens")
    assert ids_of(found) == [([1], [5], [6])]
    assert "1 step with tokens that do not train, in no pair" in done.remarks


def test_groups_that_are_scattered_over_shards_give_the_same_pairs(tmp_path):
    one = attempts(("a", 0.0, [([1], [2])]), ("b", 1.0, [([1], [3])]))
    two = attempts(("a", 0.0, [([0], [0])]), ("a", 1.0, [([1], [4])]), ("b", 0.0, [([1], [5])]))
    later = two.slice(1)
    renamed = later.set_column(1, "repetition_id", pa.array([1, 1], pa.int32()))
    renamed = renamed.set_column(2, "trajectory_id", pa.array(["a_1", "b_1"]))
    dataset = write(tmp_path / "ds", one, renamed)
    assert ids_of(exported(dataset, "dpo_tokens")[1]) == [([1], [4], [2]), ([1], [3], [5])]


def test_failed_attempts_are_in_no_pair_and_counted(tmp_path):
    given = [("a", 1.0, [([1], [2])]), ("a", 0.0, [([1], [3])]), ("a", None, [([1], [4])])]
    table = attempts(*given, error=pa.array([None, None, "timeout"]))
    dataset = write(tmp_path / "ds", table)
    done, found = exported(dataset, "dpo_tokens")
    assert ids_of(found) == [([1], [2], [3])]
    assert done.left_out == {"from failed trajectories": 1}
    with pytest.raises(InputError, match="every group has a failed trajectory"):
        exported(dataset, "dpo_tokens", failed="group")


def brute_force(rows):
    """Pairs of a table of steps, from the definition."""
    returns, steps = {}, {}
    for row in rows:
        returns[row["trajectory_id"]] = row["reward"]
    for row in rows:
        key = row["instance_id"], tuple(row["prompt_token_ids"])
        if returns[row["trajectory_id"]] is not None and all(row["loss_mask"]):
            branch = steps.setdefault(key, {}).setdefault(tuple(row["response_ids"]), set())
            branch.add(row["trajectory_id"])
    found = set()
    for (instance, prompt), branches in steps.items():
        took = [name for names in branches.values() for name in names]
        values = {}
        for response, names in branches.items():
            once = [returns[name] for name in names if took.count(name) == 1]
            if once:
                values[response] = sum(once) / len(once)
        if values and max(values.values()) - min(values.values()) > 1e-6:
            found.add((instance, prompt, max(values.values()), min(values.values())))
    return found


@settings(deadline=None, max_examples=examples(40))
@given(
    rollout_tables(min_trajectories=2, optional=("reward",), errors=False, user_column=False),
    st.sampled_from(["prefix", "full"]),
    st.booleans(),
)
def test_pairs_are_those_of_the_definition_with_identical_prompts(table, layout, is_merged):
    rows = table.to_pylist()
    if is_merged:
        table = pipelines.merge(table).collect().to_arrow()
    expected, found = brute_force(rows), []
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder) / "ds", table, layout=layout)
        if expected:
            done, found = exported(dataset, "dpo_tokens")
            assert done.num_rows_read == done.num_rows_written + sum(done.left_out.values())
        else:
            with pytest.raises(InputError, match="some_rows"):
                exported(dataset, "dpo_tokens")
    assert expected == {
        (s["instance_id"], tuple(s["prompt_ids"]), s["chosen_return"], s["rejected_return"])
        for s in found
    }
    assert len(found) == len(expected)
    steps = {
        (r["trajectory_id"], *map(tuple, (r["prompt_token_ids"], r["response_ids"]))) for r in rows
    }
    for sample in found:
        for side in ("chosen", "rejected"):
            ids = tuple(sample["prompt_ids"]), tuple(sample[f"{side}_ids"])
            assert (sample[f"{side}_trajectory_id"], *ids) in steps


@pytest.mark.parametrize("select", ["forks", "best_worst"])
def test_the_shop_has_seven_pairs_in_messages_and_in_ids(select, shop_dataset, tmp_path):
    dataset = tmp_path / "shop"
    dataset.symlink_to(shop_dataset)
    done, ids = exported(dataset, "dpo_tokens", select)
    _, texts = exported(dataset, "dpo", select)
    assert done.num_samples == len(ids) == len(texts) == 7
    names = [(s["chosen_trajectory_id"], s["rejected_trajectory_id"]) for s in ids]
    assert names == [(s["chosen_trajectory_id"], s["rejected_trajectory_id"]) for s in texts]
    said = rollout_io.read(shop_dataset, ["trajectory_id", "prompt_token_ids", "response_text"])
    answers = {
        key: {row["response_text"] for row in rows}
        for key, rows in groupby(said.to_pylist(), lambda r: r["trajectory_id"])
    }
    for sample in texts:
        assert sample["prompt"][-1]["role"] == "user"
        (answer,) = sample["chosen"]
        assert answer["content"] in answers[sample["chosen_trajectory_id"]]
        assert sample["chosen"] != sample["rejected"]


def test_steps_of_unknown_return_are_counted_as_such(tmp_path):
    with pytest.raises(InputError, match="2 with an unknown return") as error:
        ids_after(tmp_path, ("a", None, [([1], [2])]), ("a", None, [([1], [3])]))
    assert "no fork" not in str(error.value)
