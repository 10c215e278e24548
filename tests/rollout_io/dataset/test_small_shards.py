"""Datasets of many small shards are read and checked in larger tables, with the same results."""

import shutil

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rollout_io
from rollout_io import RolloutWriter, check
from rollout_io.dataset import checking
from rollout_io.dataset.reader import iter_tables, stored_tables
from schemas.checker import Checker
from tests.helpers.table_helpers import STEPS

NUM = 20


def trajectory(index):
    """A trajectory of one step."""
    row = {name: column[-1:] for name, column in STEPS.items()}
    named = {"trajectory_id": [f"a_{index}"], "repetition_id": pa.array([index], pa.int32())}
    return pa.table(row | named | {"step_index": pa.array([0], pa.int32())})


def changed(table, name, values):
    field = table.schema.field(name)
    column = pa.array(values, field.type)
    return table.set_column(table.column_names.index(name), field, column)


BROKEN = {
    "nothing": lambda table: table,
    "a length": lambda table: changed(table, "loss_mask", [[True] * 9]),
    "an id": lambda _: trajectory(3),
    "an end": lambda table: changed(table, "is_last_step", [False]),
    "a type": lambda table: table.append_column("mine", pa.array([7])),
    "a column": lambda table: table.drop_columns(["loss_mask"]),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Each shard is written, synced and checked by a writer of its own: made once, and copied."""
    path = tmp_path_factory.mktemp("small") / "ds"
    for index in range(NUM):
        with RolloutWriter(path, layout="full", append=True) as writer:
            writer.write(trajectory(index))
    return path


@pytest.fixture
def dataset(written, tmp_path):
    return shutil.copytree(written, tmp_path / "ds")


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 11, NUM - 1])
@pytest.mark.parametrize("broken", BROKEN)
def test_breaches_are_those_of_shards_that_are_checked_one_by_one(broken, place, dataset):
    shard = sorted(dataset.glob("*.parquet"))[place]
    table = BROKEN[broken](pq.read_table(shard))
    pq.write_table(table.replace_schema_metadata(None), shard)
    checker = Checker()
    apart = [checker.check(table) for table in stored_tables(dataset)]
    expected = pl.concat([*apart, checker.finish()])
    assert check(dataset).equals(expected)
    assert expected.is_empty() == (broken in {"nothing", "a type"})


def test_small_tables_are_checked_and_read_together(dataset, monkeypatch):
    checked = []
    check = Checker.check
    monkeypatch.setattr(
        checking.Checker, "check", lambda self, table: checked.append(table) or check(self, table)
    )
    assert checking.check(dataset).is_empty()
    tables = iter_tables(dataset, ["trajectory_id"])
    for read in (checked, tables):
        assert [table.num_rows for table in read] == [1, 2, 4, 8, 5]
    assert rollout_io.read(dataset).num_rows == NUM


def test_a_shard_that_was_replaced_is_opened_again(dataset):
    first = sorted(dataset.glob("*.parquet"))[0]
    before = rollout_io.scan(dataset).collect()
    table = changed(pq.read_table(first), "token_source", ["retokenized"])
    with RolloutWriter(dataset.parent / "other", layout="full") as writer:
        writer.write(table)
    (dataset.parent / "other" / "part-00000.parquet").replace(first)
    after = rollout_io.scan(dataset).collect()
    assert after["token_source"][0] == "retokenized"
    assert before["token_source"][0] == "engine"
