"""Rollout tables as Hugging Face datasets, and back."""

import datasets
import pytest
from hypothesis import given, settings

import rollout_io
from rollout_io import RolloutWriter, from_hf, scan, to_hf
from schemas import check
from schemas.errors import InputError
from schemas.strategies import OPTIONAL_COLUMNS, rollout_tables
from tests.helpers.examples import examples


@settings(deadline=None, max_examples=examples(24))
@given(rollout_tables(min_trajectories=1, optional=OPTIONAL_COLUMNS, pictures=False))
def test_any_table_survives_a_dataset_and_a_stream(table):
    for streaming in (False, True):
        again = from_hf(to_hf(table, streaming=streaming)).collect()
        assert check(again).equals(check(table))
        assert again.to_dicts() == from_hf(to_hf(again)).collect().to_dicts()


def test_a_dataset_survives_both_ways_and_can_be_written_again(shop_dataset, tmp_path):
    steps = scan(shop_dataset).collect()
    for streaming in (False, True):
        assert from_hf(to_hf(shop_dataset, streaming=streaming)).collect().equals(steps)
    with RolloutWriter(tmp_path / "again") as writer:
        writer.write(from_hf(to_hf(shop_dataset)).collect())
    assert scan(tmp_path / "again").collect().equals(steps)


def test_a_stream_reads_only_what_is_taken_and_has_a_shard_per_piece(shop_dataset, tmp_path):
    table = rollout_io.read(shop_dataset)
    ends = [i + 1 for i, last in enumerate(table.column("is_last_step").to_pylist()) if last][:2]
    for name, begin, end in (("a", 0, ends[0]), ("b", ends[0], ends[1])):
        with RolloutWriter(tmp_path / name) as writer:
            writer.write(table.slice(begin, end - begin))
    stream = to_hf([tmp_path / "a", tmp_path / "b"], streaming=True)
    assert stream.num_shards == 2
    assert next(iter(stream))["trajectory_id"] == "shop-0_0"
    assert sum(1 for _ in stream) == ends[1]


def test_lazy_frames_of_streams_read_no_more_than_the_head(shop_dataset):
    numbers = []
    stream = to_hf(shop_dataset, streaming=True)
    counted = stream.map(
        lambda row, i: numbers.append(i) or row, with_indices=True, features=stream.features
    )
    assert from_hf(counted).select("reward").head(1).collect().height == 1
    assert 0 < len(numbers) <= 205


def test_several_splits_are_refused_with_their_names(shop_dataset):
    splits = datasets.DatasetDict(train=to_hf(shop_dataset), test=to_hf(shop_dataset))
    with pytest.raises(InputError, match=r"the splits train, test") as caught:
        from_hf(splits)
    assert "dataset['train']" in (caught.value.hint or "")
