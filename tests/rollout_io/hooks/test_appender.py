"""Batches of a training process, appended to a dataset."""

import logging
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.dataset.checking import check
from rollout_io.hooks.appender import RolloutAppender
from tests.helpers.examples import examples

NAMES = st.sampled_from(["a", "b", "a@2", "a@3", "a_0"])
GROUPS = st.lists(st.tuples(NAMES, st.integers(1, 3)), min_size=1, max_size=4)


def batch(groups, **fields):
    """Each (task, size) is a group of attempts with one row each."""
    ids = [f"{name}_{i}" for name, size in groups for i in range(size)]
    n = len(ids)
    output = {"trajectory_ids": ids, "prompt_token_ids": [[1, 2]] * n, "response_ids": [[3]] * n}
    return output | {"rewards": [1.0] * n, "loss_masks": [[1]] * n} | fields


def rows(path):
    return rollout_io.read(path).to_pylist()


@settings(deadline=None, max_examples=examples(8))
@given(batches=st.lists(GROUPS, min_size=2, max_size=4), restarts=st.integers(1, 3))
def test_groups_of_a_task_stay_apart_over_batches_and_restarts(batches, restarts, tmp_path_factory):
    path = tmp_path_factory.mktemp("hook") / "ds"
    appender = RolloutAppender(path)
    for i, groups in enumerate(batches):
        if i == restarts:
            appender = RolloutAppender(path)
        appender.append(batch(groups))
    assert appender.num_refused == 0
    assert check(str(path)).is_empty()
    sizes = {}
    for row in rows(path):
        key = row["instance_id"], row["task_instance_id"]
        sizes[key] = sizes.get(key, 0) + 1
    expected = sorted(group for groups in batches for group in groups)
    assert sorted((task, size) for (_, task), size in sizes.items()) == expected


def test_the_first_group_has_the_name_of_its_task(tmp_path):
    appender = RolloutAppender(tmp_path / "ds")
    for _ in range(3):
        appender.append(batch([("a", 1)]))
    assert [row["instance_id"] for row in rows(tmp_path / "ds")] == ["a", "a@2", "a@3"]


def test_steps_of_a_trajectory_share_its_name(tmp_path):
    appender = RolloutAppender(tmp_path / "ds")
    fields = {"trajectory_ids": ["a_0", "a_0"], "is_last_step": [False, True]}
    for _ in range(2):
        appender.append(batch([("a", 2)], **fields))
    found = [(row["trajectory_id"], row["step_index"]) for row in rows(tmp_path / "ds")]
    assert found == [("a_0", 0), ("a_0", 1), ("a@2_0", 0), ("a@2_0", 1)]


def test_a_batch_that_cannot_be_written_is_said_and_the_next_is_kept(tmp_path, caplog):
    appender = RolloutAppender(tmp_path / "ds")
    with caplog.at_level(logging.ERROR):
        appender.append(batch([("a", 2)], rollout_logprobs=[[0.0, -1.0], [-1.0]]))
    assert (appender.num_rows, appender.num_refused) == (0, 2)
    assert "2 rows not appended" in caplog.text
    assert "[lengths_align]" in caplog.text or "[fields_align]" in caplog.text
    appender.append(batch([("a", 2)]))
    assert (appender.num_rows, len(rows(tmp_path / "ds"))) == (2, 2)


def test_the_dataset_stays_in_place_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    appender = RolloutAppender("ds")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    appender.append(batch([("a", 1)]))
    assert len(rows(tmp_path / "ds")) == 1


@pytest.mark.parametrize("text", ["a", "a_", "a_ 0", "a_01", "a_x", "a_²", "a_2147483648"])
def test_a_joined_id_without_a_whole_repetition_is_refused(text):
    with pytest.raises(rollout_io.RolloutError, match="trajectory_id"):
        rollout_io.from_generator_output(batch([("a", 1)], trajectory_ids=[text]))


@given(name=st.text(string.printable, min_size=1), number=st.integers(0, 2**31 - 1))
def test_joined_ids_are_read(name, number):
    found = rollout_io.from_generator_output(batch([("a", 1)], trajectory_ids=[f"{name}_{number}"]))
    assert found.select(["instance_id", "repetition_id"]).to_pylist() == [
        {"instance_id": name, "repetition_id": number}
    ]
