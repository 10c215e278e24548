"""Rows that are read by their position equal those of the whole table."""

from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollout_io import RolloutWriter, read
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.reader import RowReader, iter_tables


@pytest.fixture(params=["prefix", "full", "cut by others"])
def stored(request, shop_dataset, tmp_path):
    """The shop in several shards of small row groups, with its whole table."""
    table = read(shop_dataset)
    out = tmp_path / "ds"
    if request.param == "cut by others":
        out.mkdir()
        plain = table.replace_schema_metadata(None)
        pq.write_table(plain.slice(0, 101), out / "a.parquet", row_group_size=7)
        pq.write_table(plain.slice(101), out / "b.parquet", row_group_size=9)
        return out, table
    with RolloutWriter(out, layout=request.param, row_group_rows=12, shard_bytes=200_000) as writer:
        for part in iter_tables(shop_dataset):
            writer.write(part)
    assert len(list(out.iterdir())) > 1
    return out, table


def test_every_trajectory_is_read_alone(stored):
    path, table = stored
    reader = RowReader(path)
    assert reader.num_rows == table.num_rows
    names = ["step_index", "prompt_token_ids", "response_ids", "style"]
    bounds = [*trajectory_starts(table).tolist(), table.num_rows]
    for begin, end in pairwise(bounds):
        found = reader.rows(begin, end, names)
        assert found.to_pylist() == table.slice(begin, end - begin).select(names).to_pylist()


def test_rows_at_any_positions_are_taken_in_order(stored):
    path, table = stored
    rows = np.array([0, 3, 50, 51, 100, 101, 204])
    names = ["trajectory_id", "rollout_logprobs"]
    found = RowReader(path).take(rows, names)
    assert found.to_pylist() == table.select(names).take(rows.tolist()).to_pylist()
    assert RowReader(path).take(rows[:0], names).num_rows == 0
