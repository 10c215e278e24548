"""Pictures cannot be scanned: a redacted dataset has none of them, unless it is to keep them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout_io
from pipelines.merging.merge import merge_table, unmerge_table
from rollout_io.cli.main import run
from rollout_io.redaction.tables import without_pictures
from schemas.checker import Checker
from schemas.strategies import rollout_tables
from tests.helpers.conversion_helpers import write
from tests.helpers.picture_models import png, save_family
from tests.rollout_io.conversion.test_picture_spans import call, engine_ids, part_of

ONE, TWO = png(0), png(1, 56, 56)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture
def dataset(tmp_path, model):
    first = call(engine_ids(model, ONE), part_of(ONE))
    longer = engine_ids(model, ONE)[:-1] + engine_ids(model, TWO)
    second = call(longer, part_of(ONE), part_of(TWO))
    log = write(tmp_path / "a.calls.jsonl", first | {"time": 1.0}, second | {"time": 2.0})
    rollout_io.convert([log], tmp_path / "ds", tokenizer=str(model))
    return tmp_path / "ds"


def parts_of(row):
    return [
        part
        for m in json.loads(row["messages"])
        for part in m["content"]
        if part["type"] == "image"
    ]


def redacted(dataset, *options):
    out = dataset.with_name("clean")
    assert run(["redact", str(dataset), "--out", str(out), *options]) == 0
    assert run(["validate", str(out)]) == 0
    return out, rollout_io.read(out).to_pylist()


@pytest.mark.usefixtures("no_rules")
def test_files_are_left_out_and_entries_keep_their_spans(dataset, capsys):
    out, rows = redacted(dataset)
    assert "2 files in DS.blobs left out" in capsys.readouterr().err
    assert not out.with_name("clean.blobs").exists()
    before = rollout_io.read(dataset).to_pylist()
    for old, new in zip(before, rows, strict=True):
        assert [entry["sha256"] for entry in new["pictures"]] == [None] * len(old["pictures"])
        for name in ("start", "length"):
            assert [e[name] for e in new["pictures"]] == [e[name] for e in old["pictures"]]
        assert [part.get("source") for part in parts_of(new)] == [{"type": "redacted"}] * len(
            old["pictures"]
        )
        assert "sha256:" not in new["messages"]


@pytest.mark.usefixtures("no_rules")
def test_merged_rows_refer_to_no_file_either(dataset):
    merged = dataset.with_name("merged")
    assert run(["merge", str(dataset), "--out", str(merged)]) == 0
    _, rows = redacted(merged)
    assert "sha256:" not in json.dumps(rows, default=str)


@pytest.mark.usefixtures("no_rules")
def test_pictures_are_copied_if_they_are_to_be_kept(dataset, capsys):
    out, rows = redacted(dataset, "--keep-pictures")
    assert "2 files in DS.blobs copied without a scan" in capsys.readouterr().err
    assert [row["pictures"] for row in rows] == rollout_io.read(dataset)["pictures"].to_pylist()
    names = {path.name for path in out.with_name("clean.blobs").iterdir()}
    assert names == {path.name for path in dataset.with_name("ds.blobs").iterdir()}


@given(rollout_tables(min_trajectories=1), st.booleans())
def test_any_table_loses_its_digests_alone(table, merges):
    table = merge_table(table) if merges else table
    made = without_pictures(table)
    assert not Checker().check(made).filter(severity="error").height
    assert "sha256:" not in json.dumps(made.to_pylist(), default=str)
    undone = unmerge_table(made)
    assert undone.num_rows == unmerge_table(table).num_rows
    kept = [name for name in table.column_names if name not in {"pictures", "segments", "messages"}]
    assert made.select(kept).equals(table.select(kept))
