"""Directories named COLUMN=VALUE are columns of a dataset, for every verb."""

import os
import re
import shutil

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import rollout_io
from pipelines.generation.config import GenerateConfig
from pipelines.generation.run import missing_tasks
from pipelines.record.shards import Shards
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.dataset.checking import validate
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.reader import pieces
from rollout_io.dataset.rewriting import rewrite
from schemas.errors import InvariantError, RolloutError
from schemas.metadata import DatasetMetadata
from tests.helpers.conversion_helpers import SHOP
from tests.helpers.refusals import assert_error, refused
from tests.helpers.table_helpers import STEPS
from tests.helpers.worker_helpers import unchanged
from trainer.run.open_run import refuse_existing_run


def steps(instance, **columns):
    """The worked example as the trajectory of another instance."""
    ids = {"instance_id": [instance] * 2, "trajectory_id": [f"{instance}_0"] * 2}
    return pa.table({**STEPS, **ids, "reward": [0.0, 1.0], **columns})


def write(folder, instance, layout="prefix", **columns):
    with rollout_io.RolloutWriter(folder, layout=layout) as writer:
        writer.write(steps(instance, **columns))


@pytest.fixture(params=["prefix", "full"])
def dataset(tmp_path, request):
    """Runs a and b, two steps each."""
    for name in ("a", "b"):
        write(tmp_path / "DS" / f"run={name}", name, request.param)
    return tmp_path / "DS"


def values(dataset, name):
    return rollout_io.read(dataset).column(name).to_pylist()


def test_the_value_of_a_directory_is_a_column_of_its_rows(dataset):
    table = rollout_io.read(dataset)
    assert table.column_names[-1] == "run"
    assert table.column("run").to_pylist() == ["a", "a", "b", "b"]
    assert table.column("prompt_token_ids").to_pylist() == [[1, 2], [1, 2, 3, 9]] * 2
    kept = rollout_io.scan(dataset).filter(pl.col("run") == "b").select("instance_id", "run")
    assert kept.collect().rows() == [("b", "b")] * 2
    assert rollout_io.scan(dataset).select("run").collect()["run"].to_list() == list("aabb")


def test_other_readers_see_the_same_columns(tmp_path):
    for number in (7, 12):
        write(tmp_path / "DS" / f"seed={number}", f"i{number}", "full")
    expected = rollout_io.read(tmp_path / "DS").sort_by("instance_id")
    assert expected.schema.field("seed").type == pa.int64()
    frame = pl.scan_parquet(tmp_path / "DS", hive_partitioning=True).sort("instance_id").collect()
    assert frame["seed"].to_list() == expected["seed"].to_pylist()
    assert frame["seed"].dtype == pl.Int64
    arrow = ds.dataset(tmp_path / "DS", partitioning="hive").to_table().sort_by("instance_id")
    assert arrow["seed"].to_pylist() == expected["seed"].to_pylist()
    assert set(frame.columns) == set(arrow.column_names) == set(expected.column_names)


@pytest.mark.parametrize(
    ("names", "kind", "expected"),
    [
        (["0", "-3"], pa.int64(), {"0": 0, "-3": -3}),
        (["1", "b"], pa.string(), {"1": "1", "b": "b"}),
        (["007", "8"], pa.string(), {"007": "007", "8": "8"}),
        (["a%20%2Fb", "é"], pa.string(), {"a%20%2Fb": "a /b", "é": "é"}),
        (["1", "__HIVE_DEFAULT_PARTITION__"], pa.int64(), {"1": 1}),
    ],
)
def test_values_are_integers_if_all_are_and_else_text(names, kind, expected, tmp_path):
    for index, name in enumerate(names):
        write(tmp_path / "DS" / f"x={name}", f"i{index}")
    table = rollout_io.read(tmp_path / "DS")
    assert table.schema.field("x").type == kind
    found = dict(zip(table["instance_id"].to_pylist(), table["x"].to_pylist(), strict=True))
    assert found == {f"i{index}": expected.get(name) for index, name in enumerate(names)}
    alone = [rollout_io.read(piece).schema.field("x").type for piece in pieces(tmp_path / "DS")]
    assert alone == [kind] * 2


def test_a_directory_of_a_declared_column_has_its_type(tmp_path):
    folder = tmp_path / "DS"
    for version in (3, 4):
        path = folder / f"policy_version={version}"
        path.mkdir(parents=True)
        pq.write_table(steps(f"i{version}"), path / "x.parquet")
    validate(folder)
    table = rollout_io.read(folder)
    assert table.schema.field("policy_version").type == pa.int32()
    assert table["policy_version"].to_pylist() == [3, 3, 4, 4]
    shutil.move(folder / "policy_version=4", folder / "policy_version=new")
    with refused("columns_and_types", got="policy_version=new", kind=InvariantError):
        rollout_io.read(folder)


@pytest.mark.slow
def test_files_that_polars_partitioned_are_read(shop_dataset, tmp_path):
    frame = rollout_io.scan(shop_dataset).collect()
    frame.write_parquet(tmp_path / "DS", partition_by=["instance_id"])
    validate(tmp_path / "DS")
    order = ["trajectory_id", "step_index"]
    found = rollout_io.scan(tmp_path / "DS").select(frame.columns).collect()
    assert found.sort(order).equals(frame.sort(order))


def test_nested_directories_are_several_columns(tmp_path):
    write(tmp_path / "DS" / "run=a" / "seed=1", "a")
    write(tmp_path / "DS" / "run=b" / "seed=2", "b")
    assert values(tmp_path / "DS", "run") == ["a", "a", "b", "b"]
    assert values(tmp_path / "DS", "seed") == [1, 1, 2, 2]
    write(tmp_path / "DS" / "run=c", "c")
    with refused("columns_and_types", where="run=c", got="run, seed", kind=InvariantError):
        rollout_io.read(tmp_path / "DS")


def test_only_directories_below_the_dataset_are_columns(tmp_path):
    write(tmp_path / "temperature=hot" / "DS", "a")
    write(tmp_path / "temperature=low", "b")
    for path in (tmp_path / "temperature=hot" / "DS", tmp_path / "temperature=low"):
        assert "temperature" not in rollout_io.read(path).column_names
        assert "temperature" not in rollout_io.read(next(path.iterdir())).column_names


def test_a_column_of_the_file_must_agree_with_its_directory(tmp_path):
    write(tmp_path / "DS" / "run=a", "a", run=["a", "a"])
    assert values(tmp_path / "DS", "run") == ["a", "a"]
    write(tmp_path / "DS" / "run=b", "b", run=["b", "c"])
    with refused("columns_and_types", where="run=b", got="run=b", kind=InvariantError):
        rollout_io.read(tmp_path / "DS")


def test_a_missing_shard_of_a_partition_is_named(dataset):
    with rollout_io.RolloutWriter(dataset / "run=c", shard_bytes=1, row_group_rows=1) as writer:
        for name in ("c", "d"):
            writer.write(steps(name))
    first, _ = sorted((dataset / "run=c").iterdir())
    first.unlink()
    with refused("shards_complete", where="run=c", got="the first shard"):
        rollout_io.read(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trajectory_in_two_partitions_is_a_breach(workers, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / "DS" / f"run={name}", "same")
    with pytest.raises(RolloutError) as caught:
        validate(tmp_path / "DS", Workers(workers))
    assert caught.value.rule == "unique_trajectory"


@pytest.mark.slow
def test_every_verb_reads_the_columns_and_writes_them_as_ordinary_ones(dataset, tmp_path, capsys):
    for verb in ("validate", "stats", "inspect", "drift"):
        assert run([verb, str(dataset)]) == 0, capsys.readouterr().err
    for verb, *options in (["merge"], ["filter", "--where", "run = 'b'"], ["merge", "--undo"]):
        out = tmp_path / "-".join([verb, *options[:1]])
        assert run([verb, str(dataset), *options, "--out", str(out)]) == 0, capsys.readouterr().err
        assert all(path.suffix == ".parquet" for path in out.iterdir())
        kept = "b" if verb == "filter" else "ab"
        assert set(values(out, "run")) == set(kept)
    assert run(["export", str(dataset), "--format", "parquet", "-o", str(tmp_path / "p")]) == 0
    assert pl.scan_parquet(tmp_path / "p").collect()["run"].to_list() == list("aabb")


@pytest.mark.slow
def test_pieces_of_a_partitioned_dataset_are_read_by_other_processes(dataset, tmp_path):
    metadata = rollout_io.read_metadata(dataset)
    rewrite(str(dataset), str(tmp_path / "out"), unchanged, metadata, workers=Workers(2))
    assert rollout_io.read(tmp_path / "out").equals(rollout_io.read(dataset))


def test_partitions_are_read_from_other_filesystems():
    for name in ("a", "b"):
        write(f"memory://partitions/DS/run={name}", name)
    assert values("memory://partitions/DS", "run") == ["a", "a", "b", "b"]
    found = [
        rollout_io.read(piece)["run"].to_pylist() for piece in pieces("memory://partitions/DS")
    ]
    assert found == [["a", "a"], ["b", "b"]]


def test_a_partitioned_dataset_is_never_written_into(dataset, capsys):
    before = sorted(dataset.rglob("*"))
    for command in (["merge", str(dataset)], ["filter", str(dataset), "--drop-unknown"]):
        assert run([*command, "--out", str(dataset)]) == 1
        assert "[out_is_free]" in capsys.readouterr().err
    with pytest.raises(RolloutError) as caught:
        convert(SHOP, dataset)
    assert caught.value.rule == "out_is_free"
    with pytest.raises(RolloutError, match="out_is_free"):
        rollout_io.RolloutWriter(dataset, append=True)
    assert sorted(dataset.rglob("*")) == before


def test_generate_record_and_train_refuse_a_partitioned_dataset(dataset):
    tasks = []
    config = GenerateConfig(model="m", tasks="t", out=str(dataset))
    for refuses in (
        lambda: missing_tasks(tasks, config),
        Shards(dataset, DatasetMetadata()).trajectory_ids,
        lambda: refuse_existing_run(dataset),
    ):
        with pytest.raises(RolloutError, match="out_is_free"):
            refuses()


@pytest.mark.parametrize("stray", ["", "other", "run=a/sub", "other/run=c"])
def test_files_outside_of_partitions_are_refused(stray, dataset, tmp_path):
    write(tmp_path / "flat", "c")
    (dataset / stray).mkdir(parents=True, exist_ok=True)
    shutil.copy(next((tmp_path / "flat").iterdir()), dataset / stray / "x.parquet")
    name = f"{stray}/x.parquet".lstrip("/")
    with refused("columns_and_types", got=f"{name} is not in", kind=InvariantError):
        rollout_io.read(dataset)


def test_hidden_files_are_no_part_of_a_partitioned_dataset(dataset):
    (dataset / "_delta_log").mkdir()
    shutil.copy(next((dataset / "run=a").iterdir()), dataset / "_delta_log" / "1.parquet")
    assert values(dataset, "run") == ["a", "a", "b", "b"]


def test_a_pattern_reads_partitioned_and_other_datasets_as_one(dataset):
    write(dataset.parent / "DS2", "c")
    pattern = dataset.parent / "DS*"
    assert values(pattern, "run") == ["a", "a", "b", "b", None, None]
    assert values(pattern, "instance_id") == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_fingerprint", ("x", "y")),
        ("vocab_size", (100, 200)),
        ("logprobs_mode", ("raw", "processed")),
        ("outcome", (None, "sum")),
    ],
)
def test_partitions_with_contradictory_metadata_are_refused(name, values, tmp_path):
    for run_name, value in zip("ab", values, strict=True):
        metadata = DatasetMetadata(**{name: value})
        folder = tmp_path / "DS" / f"run={run_name}"
        with rollout_io.RolloutWriter(folder, metadata=metadata) as writer:
            writer.write(steps(run_name))
    for reads in (rollout_io.read_metadata, rollout_io.scan, validate):
        with pytest.raises(RolloutError) as caught:
            reads(tmp_path / "DS")
        assert_error(caught.value, "file_metadata", got=f"differ in {name}")
        assert re.search("run=a/.* and .*run=b/", caught.value.where)


def test_metadata_of_partitions_are_combined(tmp_path):
    both = [
        DatasetMetadata(models=("m",), logprobs_mode="raw", vocab_size=100),
        DatasetMetadata(models=("n",), outcome="last", vocab_size=100),
    ]
    for name, metadata in zip("ab", both, strict=True):
        folder = tmp_path / "DS" / f"run={name}"
        with rollout_io.RolloutWriter(folder, metadata=metadata.made(name)) as writer:
            writer.write(steps(name))
    found = rollout_io.read_metadata(tmp_path / "DS")
    assert (found.models, found.logprobs_mode, found.vocab_size) == (("m", "n"), None, 100)


@pytest.mark.parametrize("name", ["%FF", os.fsdecode(b"\xff")])
def test_names_of_directories_that_are_not_utf_8_are_refused(name, dataset, capsys):
    shutil.move(dataset / "run=b", dataset / f"run={name}")
    with refused("columns_and_types", got="not UTF-8", kind=InvariantError):
        rollout_io.read(dataset)
    assert run(["validate", str(dataset)]) == 1
    assert "[columns_and_types]" in capsys.readouterr().err


def test_a_dot_in_a_path_is_no_mark_of_a_partition(dataset, tmp_path):
    out = f"{tmp_path}/./run=z"
    assert run(["filter", str(dataset), "--where", "run = 'b'", "--out", out]) == 0
    assert values(out, "run") == ["b", "b"]


@pytest.mark.parametrize(
    "command",
    [
        ["filter", "--where", "run = 'b'"],
        ["merge"],
        ["export", "--format", "hf"],
        ["export", "--format", "parquet"],
    ],
)
def test_no_output_is_written_inside_the_input(command, dataset, capsys):
    verb, *options = command
    before = sorted(dataset.rglob("*"))
    assert run([verb, str(dataset), *options, "--out", str(dataset / "run=c")]) == 1
    assert "inside the input dataset" in capsys.readouterr().err
    assert sorted(dataset.rglob("*")) == before


@pytest.mark.parametrize("name", ["hf", "parquet"])
def test_a_dataset_without_rows_is_not_exported(name, tmp_path, capsys):
    with rollout_io.RolloutWriter(tmp_path / "DS") as writer:
        writer.write(pa.table(STEPS).slice(0, 0))
    out = tmp_path / "out"
    assert run(["export", str(tmp_path / "DS"), "--format", name, "--out", str(out)]) == 1
    assert "[some_rows]" in capsys.readouterr().err
    assert not out.exists()
