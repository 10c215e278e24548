"""Several paths, or a pattern, are one dataset for every reader and verb."""

import json
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rollout_io
from rollout_io.cli.main import run
from rollout_io.dataset.checking import validate
from rollout_io.dataset.reader import RowReader, pieces, read_metadata
from rollout_io.dataset.storage import Location, find_shards, joined
from schemas.columns import arrow_schema
from schemas.errors import InputError, InvariantError
from schemas.metadata import DatasetMetadata
from tests.helpers.refusals import refused
from tests.helpers.trainer_helpers import group_rows, save_tiny_model

RETURNS = (1.0, 0.0)


def write(path, name, metadata=None):
    """Write two groups, whose names begin with `name`."""
    rows = group_rows(2, RETURNS)
    for row in rows:
        row["instance_id"] = name + row["instance_id"]
        row["trajectory_id"] = f"{row['instance_id']}_{row['repetition_id']}"
    schema = arrow_schema(tuple({key for row in rows for key in row}))
    with rollout_io.RolloutWriter(path, metadata=metadata) as writer:
        writer.write(pa.Table.from_pylist(rows, schema=schema))
    return str(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two datasets, with what other verbs write beside them, both as one dataset, and a model."""
    folder = tmp_path_factory.mktemp("made")
    for name in "ab":
        write(folder / "runs" / name, name)
    for beside in ("a.blobs", "b.rewards", "empty"):
        (folder / "runs" / beside).mkdir()
    for beside in ("a.rejected.jsonl", ".a.lock"):
        (folder / "runs" / beside).touch()
    tables = [rollout_io.read(folder / "runs" / name) for name in "ab"]
    with rollout_io.RolloutWriter(folder / "both") as writer:
        writer.write(pa.concat_tables(tables))
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture
def runs(written, tmp_path, monkeypatch):
    """A copy of them as the working directory, and the rows of both datasets."""
    monkeypatch.chdir(shutil.copytree(written, tmp_path / "made"))
    return rollout_io.read("both").replace_schema_metadata(None)


NAMED = {
    "list": (["runs/a", "runs/b"], ["runs/a", "runs/b"]),
    "shell": (["runs/a", "runs/a.blobs", "runs/b"], ["runs/a", "runs/a.blobs/", "runs/b"]),
    "pattern": ("runs/*", ["runs/*"]),
    "folders": ("runs/*/", ["runs/*/"]),
    "braces": ("{runs/a,runs/b}", ["{runs/a,runs/b}"]),
}


@pytest.mark.parametrize("name", NAMED)
def test_several_paths_are_read_as_one_dataset(name, runs):
    paths, _ = NAMED[name]
    assert rollout_io.read(paths).replace_schema_metadata(None).equals(runs)
    assert rollout_io.scan(paths).select(pl.len()).collect().item() == len(runs)
    assert len(pieces(paths)) == 2
    assert RowReader(paths).num_rows == len(runs)
    assert rollout_io.check(paths).is_empty()
    validate(paths)


VERBS = {
    "validate": [],
    "inspect": ["--json", "--limit", "3"],
    "stats": ["--json"],
    "drift": ["--json"],
    "filter": ["--where", "return > 0", "--dry-run"],
    "merge": ["--out", "OUT"],
    "merge --undo": ["--out", "OUT"],
    "export": ["--format", "parquet", "--out", "OUT"],
    "train": ["--model", "model", "--dry-run", "--json"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_several_paths_as_one_dataset(verb, capsys):
    printed, written = [], []
    for paths in (["both"], *(NAMED[name][1] for name in ("shell", "pattern"))):
        assert run([*verb.split(), *paths, *VERBS[verb]]) == 0, capsys.readouterr().err
        shown = capsys.readouterr().out
        for path in ("both", joined(paths)):
            shown = shown.replace(json.dumps(path)[1:-1], "DS")
        printed.append(shown.split())
        if "OUT" in VERBS[verb]:
            written.append(pl.read_parquet("OUT/*.parquet"))
            shutil.rmtree("OUT")
    if verb in ("validate", "inspect", "stats", "drift", "filter"):
        assert printed[0] == printed[1] == printed[2]
    assert len({len(table) for table in written}) <= 1


@example(["s3://bucket/b,c", "a\\\\"])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_joined_paths_are_read_back_one_by_one(paths):
    from rollout_io.dataset.storage import _several

    if len(paths) == 1 or any(path.rstrip("/").endswith((".blobs", ".rewards")) for path in paths):
        return
    assert _several(joined(paths)) == paths


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("verb", ["validate", "stats", "inspect", "merge", "train"])
def test_a_trajectory_in_two_datasets_is_refused_with_its_name_and_theirs(verb, capsys):
    shutil.copytree("runs/b", "copy")
    arguments = [verb, "runs/a", "runs/b", "copy", *VERBS[verb]]
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert "runs/b and " in error
    assert "/copy both contain trajectory 'bg0_0' (the first of 4)" in error
    assert "[unique_trajectory]" in error
    with refused("unique_trajectory", got="trajectory 'bg0_0'", kind=InvariantError):
        rollout_io.scan(["runs/b", "copy"]).collect()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("paths", [["runs/a", "runs/a"], ["runs/*", "runs/b"], ["runs/a", "link"]])
def test_a_dataset_that_is_named_twice_is_refused(paths):
    Path("link").symlink_to("runs/a")
    with refused("unique_trajectory", got="named twice", kind=InvariantError):
        rollout_io.scan(paths)


@pytest.mark.usefixtures("runs")
def test_a_folder_of_datasets_says_so_and_how_to_read_it(capsys):
    assert run(["stats", "runs"]) == 1
    error = capsys.readouterr().err
    assert "this is a folder of 2 datasets (a, b), not a dataset. [dataset_exists]" in error
    assert "'runs/*/'" in error


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("path", ["none/*", "{runs/a,none}"])
def test_a_path_that_names_no_dataset_is_refused(path):
    with refused("dataset_exists", kind=InputError):
        rollout_io.scan(path)


@pytest.mark.usefixtures("runs")
def test_a_missing_shard_of_one_of_several_datasets_is_refused():
    table = rollout_io.read("runs/a")
    shutil.rmtree("runs/a")
    with rollout_io.RolloutWriter("runs/a", row_group_rows=2, shard_bytes=1) as writer:
        writer.write(table)
    find_shards("runs/a")[1].fs.rm(find_shards("runs/a")[1].path)
    for path in ("runs/*", ["runs/b", "runs/a"]):
        with refused("shards_complete", kind=InputError):
            rollout_io.scan(path)


def test_datasets_of_two_tokenizers_are_refused_and_unknown_ones_combined(tmp_path):
    for name, known in (("a", "x"), ("b", "y"), ("c", None)):
        write(tmp_path / name, name, DatasetMetadata(tokenizer_fingerprint=known))
    with refused("file_metadata", got="tokenizer_fingerprint", kind=InputError):
        rollout_io.scan([tmp_path / "a", tmp_path / "b"])
    assert read_metadata([tmp_path / "a", tmp_path / "c"]).tokenizer_fingerprint is None


def test_several_datasets_may_be_on_several_filesystems(tmp_path):
    local, remote = write(tmp_path / "a", "a"), write("memory://several/b", "b")
    table = rollout_io.read([local, remote])
    assert set(table.column("instance_id").to_pylist()) == {"ag0", "ag1", "bg0", "bg1"}
    with refused("dataset_exists", got="a folder of 1 dataset (b)", kind=InputError):
        rollout_io.read("memory://several")
    Location.of(remote).fs.rm("/several", recursive=True)


def test_a_pattern_does_not_leave_out_an_interrupted_conversion(tmp_path):
    write(tmp_path / "a", "a")
    (tmp_path / "b" / ".converting").mkdir(parents=True)
    with refused("dataset_exists", where="b", hint="run the interrupted command again"):
        rollout_io.scan(f"{tmp_path}/*/")
