"""Queries for a few ids read only the row groups that contain them, and never miss a row."""

import json

import polars as pl
import pyarrow.parquet as pq
import pytest

from benchmarks.synthetic import short_trajectories
from rollout_io import RolloutWriter, read, scan
from rollout_io.dataset.footer import required_ids, row_groups_with
from rollout_io.dataset.prefix_layout import decode_prefixes
from rollout_io.dataset.reader import footers
from schemas.errors import InputError
from schemas.metadata import DIGEST, ID_FILTERS

TRAJECTORY, INSTANCE = pl.col("trajectory_id"), pl.col("instance_id")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """3,000 trajectories with unsorted ids, in several shards with row groups of about 100 rows."""
    path = tmp_path_factory.mktemp("ids") / "ds"
    with RolloutWriter(path, row_group_rows=100, shard_bytes=500_000) as writer:
        for first in range(0, 3000, 500):
            writer.write(short_trajectories(first, 500))
    assert len(list(path.iterdir())) > 1
    return path


@pytest.fixture(scope="module")
def rows(dataset):
    return pl.from_arrow(read(dataset))


@pytest.fixture
def read_groups(monkeypatch):
    """List the columns of each row group that is read."""
    groups = []
    original = pq.ParquetFile.read_row_group

    def counted(self, index, columns=None, **options):
        groups.append(columns)
        return original(self, index, columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trajectory_id", "instance_id"])
def test_a_filter_on_one_id_reads_the_tokens_of_one_row_group(name, dataset, rows, read_groups):
    # A group of 8 trajectories may span two row groups: take the first id of each group.
    for row in rows.unique("instance_id", maintain_order=True)[::75].iter_rows(named=True):
        read_groups.clear()
        query = scan(dataset).filter(pl.col(name) == row[name])
        expected = rows.filter(pl.col(name) == row[name])
        assert query.collect().equals(expected)
        whole = [columns for columns in read_groups if "response_ids" in columns]
        assert len(whole) <= 1 + (name == "instance_id")
        assert len(read_groups) < 10  # of about 60


def test_prompts_are_decoded_only_for_trajectories_that_the_predicate_keeps(
    dataset, rows, monkeypatch
):
    decoded = []

    def count(table):
        decoded.append(table.num_rows)
        return decode_prefixes(table)

    monkeypatch.setattr("rollout_io.dataset.shard_files.decode_prefixes", count)
    last = rows.filter(pl.col("step_index") == 2)[7]
    condition = (last["trajectory_id"].item() == TRAJECTORY) & (pl.col("step_index") == 2)
    assert scan(dataset).filter(condition).collect().equals(last)
    assert decoded == [3]


@pytest.mark.slow
def test_no_row_is_missed_for_any_id(dataset, rows):
    pairs = footers(dataset)
    sizes = [len(json.loads(found[ID_FILTERS])["trajectory_id"]["num_ids"]) for found in pairs]
    for column, ids in ((TRAJECTORY, rows["trajectory_id"]), (INSTANCE, rows["instance_id"])):
        names = ids.unique(maintain_order=True)[::7]
        for one in names:
            chosen = [
                len(row_groups_with(column == one, found, size))
                for found, size in zip(pairs, sizes, strict=True)
            ]
            assert sum(chosen) >= 1
        few = column.is_in(names[:9].to_list())
        assert scan(dataset).filter(few).collect().equals(rows.filter(few))
        assert scan(dataset).filter(column == "no such id").collect().is_empty()


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (TRAJECTORY == "a", {"a"}),
        (pl.lit("a") == TRAJECTORY, {"a"}),
        (TRAJECTORY.is_in(["a", "b"]), {"a", "b"}),
        (TRAJECTORY.is_in(["a"], nulls_equal=True), {"a"}),
        (TRAJECTORY.is_in(pl.Series(["a", "b"]).implode()), {"a", "b"}),
        ((TRAJECTORY == "a") & (pl.col("reward") > 0), {"a"}),
        (TRAJECTORY.is_in(["a", "b"]) & TRAJECTORY.is_in(["b", "c"]), {"b"}),
        ((TRAJECTORY == "a") | (TRAJECTORY == "b"), {"a", "b"}),
        (pl.sql_expr("trajectory_id = 'a' AND reward > 0"), {"a"}),
        (TRAJECTORY.is_in([]), None),
        ((TRAJECTORY == "a") | (pl.col("reward") > 0), None),
        (TRAJECTORY != "a", None),
        (~(TRAJECTORY == "a"), None),
        (~TRAJECTORY.is_in(["a"]), None),
        (TRAJECTORY > "a", None),
        (TRAJECTORY.eq_missing("a"), None),
        (TRAJECTORY.is_in(["a", None], nulls_equal=True), None),
        (TRAJECTORY == INSTANCE, None),
        (TRAJECTORY.str.to_lowercase() == "a", None),
        ((TRAJECTORY == "a") == (pl.col("reward") > 0), None),
        ((TRAJECTORY == "a") ^ (pl.col("reward") > 0), None),
        (INSTANCE == "a", None),
    ],
)
def test_only_a_predicate_that_limits_the_ids_selects_row_groups(predicate, expected):
    assert required_ids(predicate, "trajectory_id") == expected


def test_a_query_that_uses_the_filters_notices_a_flipped_bit(dataset, rows, tmp_path):
    content, file = next(dataset.iterdir()).read_bytes(), tmp_path / "part-00000.parquet"
    one = rows["trajectory_id"][0]
    starts = [content.index(key) for key in (ID_FILTERS, b"rollout_io_id_filters.trajectory_id")]
    for at in [start + n for start in starts for n in range(0, 300, 9)]:
        damaged = bytearray(content)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="readable_file"):
            scan(file).filter(trajectory_id=one).collect()


def test_a_file_whose_ids_another_program_changed_has_no_filters(dataset, tmp_path):
    file = tmp_path / "part-00000.parquet"
    table = pq.read_table(next(dataset.iterdir())).slice(0, 100)
    assert not {ID_FILTERS, DIGEST} & table.schema.metadata.keys()
    renamed = pl.from_arrow(table["trajectory_id"]).str.replace("task", "TASK").to_arrow()
    index = table.column_names.index("trajectory_id")
    pq.write_table(table.set_column(index, "trajectory_id", renamed), file)
    one = renamed[0].as_py()
    assert len(scan(file).filter(one == TRAJECTORY).select("trajectory_id").collect())


def test_a_shard_without_filters_is_read_whole(dataset):
    pairs = {k: v for k, v in footers(dataset)[0].items() if k != ID_FILTERS}
    assert row_groups_with(TRAJECTORY == "a", pairs, 3).tolist() == [0, 1, 2]
