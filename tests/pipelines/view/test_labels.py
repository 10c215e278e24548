"""Labels are a column in a copy of a dataset; nothing else in it changes."""

import dataclasses

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.view.dataset import write_labels
from pipelines.view.sources import Sources
from rollout_io import RolloutWriter, read_metadata, scan
from rollout_io.cli.main import run as main
from rollout_io.dataset.reader import read_layout
from schemas.errors import RolloutError

VALUES = {
    "shop-0_1": "good",
    "shop-3_0": "",
    "shop-3_3": 'ünïcode "<b>" \U0001f600',
    "shop-1_2": None,
}
TASKS = ["shop-0", "shop-1", "shop-2", "shop-3"]
ODD = (float("nan"), -0.0, float("inf"), 5e-324, 0.1)


@pytest.fixture(params=["full", "prefix", "partitioned", "merged"])
def dataset(request, shop, merged_shop, tmp_path):
    """The shop example with columns of our own, in several row groups and shards."""
    rows = scan(merged_shop if request.param == "merged" else shop).collect()
    rows = rows.filter(pl.col("instance_id").is_in(TASKS))
    rows = rows.with_columns(
        score=pl.Series(np.resize(ODD, len(rows))), note=pl.lit(None, pl.String), old=pl.lit(1.5)
    )
    path = tmp_path / "ds"
    settings = {"metadata": read_metadata(shop), "row_group_rows": 24, "shard_bytes": 40_000}
    if request.param != "partitioned":
        layout = "full" if request.param == "full" else "prefix"
        with RolloutWriter(path, layout=layout, **settings) as writer:
            writer.write(rows)
    else:
        is_first = rows["instance_id"].is_in(TASKS[:2])
        for name, part in (("run=a", rows.filter(is_first)), ("run=b", rows.filter(~is_first))):
            with RolloutWriter(path / name, **settings) as writer:
                writer.write(part)
    return path


def labelled(path, column, values, out):
    (dataset,) = Sources.open([str(path)]).datasets.values()
    return write_labels(dataset, column, values, str(out))


def bits(column):
    """What a column holds: nulls, and the bits of numbers."""
    kind = column.type
    values = column.to_pylist()
    if pa.types.is_floating(kind):
        values = [None if v is None else np.float64(v).tobytes() for v in values]
    if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
        values = [None if v is None else np.array(v, np.float64).tobytes() for v in values]
    return kind, values


def stored(path):
    """The columns as the files store them, shared prefixes included, in the order of shards."""
    shards = sorted(path.rglob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(shard).read() for shard in shards])


@pytest.mark.slow
def test_a_copy_has_the_labels_and_nothing_else_new(dataset, tmp_path):
    out = tmp_path / "copy"
    rows = scan(dataset).collect()
    assert labelled(dataset, "verdict", VALUES, out) == {"path": str(out), "num_rows": len(rows)}
    assert main(["validate", str(out)]) == 0
    copy = scan(out).collect()
    for name, value in copy.select("trajectory_id", "verdict").rows():
        assert value == VALUES.get(name)
    assert copy["verdict"].null_count() == (~rows["trajectory_id"].is_in([*VALUES][:3])).sum()
    assert copy.columns == [*rows.columns, "verdict"]
    for name in rows.columns:
        assert bits(copy[name].to_arrow()) == bits(rows[name].to_arrow()), name
    before, after = stored(dataset), stored(out)
    for name in set(before.column_names) - {"run"}:
        assert bits(after.column(name)) == bits(before.column(name)), name
    assert read_layout(out) == read_layout(dataset)
    own, kept = read_metadata(dataset), read_metadata(out)
    made = kept.made_by[-1]
    assert (made["verb"], made["column"], made["parent"]) == ("view", "verdict", str(dataset))
    assert dataclasses.replace(kept, made_by=own.made_by) == own
    assert kept.made_by[: len(own.made_by)] == own.made_by


@pytest.mark.slow
def test_labels_replace_a_column_of_the_users_own(dataset, tmp_path):
    rows = scan(dataset).collect()
    labelled(dataset, "old", {"shop-2_2": 3, "shop-2_3": -0.5}, tmp_path / "copy")
    copy = scan(tmp_path / "copy").collect()
    assert sorted(copy.columns) == sorted(rows.columns)
    assert dict(copy.select("trajectory_id", "old").drop_nulls().rows()) == {
        "shop-2_2": 3.0,
        "shop-2_3": -0.5,
    }
    for name in set(rows.columns) - {"old"}:
        assert bits(copy[name].to_arrow()) == bits(rows[name].to_arrow()), name
    again = labelled(tmp_path / "copy", "verdict", {"shop-0_0": "x"}, tmp_path / "twice")
    assert again["num_rows"] == len(rows)
    assert len(read_metadata(tmp_path / "twice").made_by) == len(read_metadata(dataset).made_by) + 2


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    [
        ("reward", {"shop-0_0": 1}, "view_query"),
        ("", {"shop-0_0": 1}, "view_query"),
        ("x", {"shop-0_0": 1, "shop-0_1": "a"}, "view_query"),
        ("return", {"shop-0_0": 1}, "view_query"),
        ("x", {"shop-0_0": 2**53 + 1}, "view_query"),
        ("x", {"shop-0_0": True}, "view_query"),
        ("x", {"shop-0_0": ["a"]}, "view_query"),
        ("x", {"none": "a"}, "known_trajectory"),
    ],
)
def test_what_cannot_be_a_label_writes_nothing(shop, tmp_path, column, values, rule):
    with pytest.raises(RolloutError, match=rule):
        labelled(shop, column, values, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
