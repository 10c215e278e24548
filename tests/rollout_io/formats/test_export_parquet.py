"""Exported Parquet shows other readers the logical table, with full prompts."""

import tempfile
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings

import rollout_io
from rollout_io.cli.main import run
from schemas.strategies import OPTIONAL_COLUMNS, rollout_tables
from tests.helpers.table_helpers import STEPS


def exported(dataset, out):
    assert run(["export", str(dataset), "--format", "parquet", "--out", str(out)]) == 0
    return out


def rows_in_duckdb(out):
    query = (
        f"SELECT * FROM read_parquet('{out}/*.parquet', file_row_number = true, filename = true)"
    )
    found = duckdb.sql(f"{query} ORDER BY filename, file_row_number").to_arrow_table()
    return found.drop_columns(["file_row_number", "filename"]).to_pylist()


def check(dataset, out):
    expected = rollout_io.read(dataset)
    frame = pl.scan_parquet(out).collect()
    assert frame.columns == expected.column_names
    assert frame.to_arrow().to_pylist() == expected.to_pylist()
    assert rows_in_duckdb(out) == expected.to_pylist()
    assert ds.dataset(out).to_table().to_pylist() == expected.to_pylist()


def test_every_reader_sees_the_full_prompts_of_the_real_rollouts(shop_dataset, tmp_path):
    assert rollout_io.dataset.reader.read_layout(shop_dataset) == "prefix"
    out = exported(shop_dataset, tmp_path / "new" / "out")  # as every dataset: with its parents
    assert all(path.suffix == ".parquet" for path in out.iterdir())
    check(shop_dataset, out)
    assert run(["validate", str(out)]) == 0
    assert rollout_io.read_metadata(out) == rollout_io.read_metadata(shop_dataset)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(rollout_tables(min_trajectories=1, optional=OPTIONAL_COLUMNS, pictures=False))
def test_every_reader_sees_every_column_of_any_table(table):
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "ds"
        with rollout_io.RolloutWriter(dataset) as writer:
            writer.write(table)
        check(dataset, exported(dataset, Path(folder) / "out"))


def test_all_files_get_the_columns_of_all_shards(tmp_path):
    dataset = tmp_path / "ds"
    with rollout_io.RolloutWriter(dataset, append=True) as writer:
        writer.write(pa.table(STEPS))
    other = {**STEPS, "instance_id": ["z"] * len(STEPS["instance_id"])}
    other["trajectory_id"] = [f"z_{n}" for n in STEPS["repetition_id"]]
    with rollout_io.RolloutWriter(dataset, append=True) as writer:
        writer.write(pa.table({**other, "score": [0.5] * len(other["instance_id"])}))
    out = exported(dataset, tmp_path / "out")
    assert len(list(out.iterdir())) == 2
    check(dataset, out)


def test_an_export_is_never_overwritten(shop_dataset, tmp_path, capsys):
    out = exported(shop_dataset, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert run(["export", str(shop_dataset), "--format", "parquet", "--out", str(out)]) == 1
    assert "[out_is_free]" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
