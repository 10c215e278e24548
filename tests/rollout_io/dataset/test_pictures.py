"""Datasets with pictures on disk: those of this version, and those whose column was `images`."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rollout_io
from pipelines.merging.merge import merge_table
from rollout_io.cli.main import run
from rollout_io.dataset.blobs import Blobs, names_in_files
from schemas.columns import PICTURES_TYPE
from tests.helpers.table_helpers import STEPS

CONTENT = b"\x89PNG\r\n\x1a\n" + bytes(100)
NAME = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
ENTRY = {"sha256": NAME, "start": 1, "length": 1}
DOCUMENT = {"sha256": None, "start": None, "length": None}
OLD_TYPE = pa.list_(pa.struct([("blob", pa.string()), ("position", pa.int32())]))


def table_of(*rows):
    return pa.table(STEPS).append_column("pictures", pa.array(rows, PICTURES_TYPE))


def as_version_1(file):
    """Write a file as before schema version 2: `images`, in rows and in the steps of merged rows."""
    table = pq.read_table(file)
    pairs = {k: v for k, v in table.schema.metadata.items() if k != b"rollout_io.digest"}
    old = [
        [{"blob": e["sha256"], "position": e["start"]} for e in row] if row is not None else None
        for row in table.column("pictures").to_pylist()
    ]
    index = table.column_names.index("pictures")
    table = table.set_column(index, "images", pa.array(old, OLD_TYPE))
    if "segments" in table.column_names:
        steps = table.schema.field("segments").type.value_type
        kind = [
            pa.field("images", OLD_TYPE) if field.name == "pictures" else field for field in steps
        ]
        renamed = [
            [
                {k: v for k, v in step.items() if k != "pictures"}
                | {
                    "images": [
                        {"blob": e["sha256"], "position": e["start"]} for e in step["pictures"]
                    ]
                }
                for step in row
            ]
            for row in table.column("segments").to_pylist()
        ]
        at = table.column_names.index("segments")
        table = table.set_column(at, "segments", pa.array(renamed, pa.list_(pa.struct(kind))))
    pq.write_table(
        table.replace_schema_metadata({**pairs, b"rollout_io.schema_version": b"1"}), file
    )


@pytest.fixture(params=["prefix", "full"])
def written(tmp_path, request):
    """Write a dataset of one shard; return its directory and its file."""

    def write(table):
        Blobs.of(tmp_path / "ds").add(CONTENT)
        with rollout_io.RolloutWriter(
            tmp_path / "ds", layout=request.param, parents=[tmp_path / "ds"]
        ) as writer:
            writer.write(table)
        return tmp_path / "ds", tmp_path / "ds" / "part-00000.parquet"

    return write


def test_pictures_are_read_as_they_were_written(written):
    dataset, _ = written(table_of([ENTRY], [ENTRY, DOCUMENT]))
    assert rollout_io.read(dataset)["pictures"].to_pylist() == [[ENTRY], [ENTRY, DOCUMENT]]
    assert rollout_io.check(dataset).is_empty()


def test_a_dataset_of_version_1_has_pictures_with_a_start(written):
    dataset, file = written(table_of([ENTRY], [ENTRY, DOCUMENT]))
    as_version_1(file)
    old = ENTRY | {"length": None}
    for names in (None, ["pictures"], ["trajectory_id", "pictures"]):
        assert rollout_io.read(dataset, names)["pictures"].to_pylist() == [[old], [old, DOCUMENT]]
    frame = rollout_io.scan(dataset)
    assert "images" not in frame.collect_schema()
    assert frame.select("pictures").collect().to_series().to_list() == [[old], [old, DOCUMENT]]
    assert rollout_io.check(dataset).is_empty()
    assert names_in_files([dataset]) == {NAME}


def test_verbs_write_a_dataset_of_version_1_again_with_its_files(written):
    dataset, file = written(table_of([ENTRY], [ENTRY, DOCUMENT]))
    as_version_1(file)
    out = dataset.with_name("merged")
    assert run(["merge", str(dataset), "--out", str(out)]) == 0
    assert run(["validate", str(out)]) == 0
    old = ENTRY | {"length": None}
    assert rollout_io.read(out)["pictures"].to_pylist() == [[old, DOCUMENT]]
    assert Blobs.of(out).files.keys() == {NAME}
    assert (
        json.loads(
            pq.read_schema(out / "part-00000.parquet").metadata[b"rollout_io.schema_version"]
        )
        == 2
    )


def test_merged_rows_of_version_1_have_the_pictures_of_their_steps(written):
    dataset, file = written(merge_table(table_of([ENTRY], [ENTRY, DOCUMENT])))
    as_version_1(file)
    out = dataset.with_name("steps")
    assert run(["merge", "--undo", str(dataset), "--out", str(out)]) == 0
    old = ENTRY | {"length": None}
    assert rollout_io.read(out)["pictures"].to_pylist() == [[old], [old, DOCUMENT]]
