import os
import tempfile
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_io import RolloutWriter, check, iter_tables, read, read_metadata, scan, to_hf
from rollout_io.cli.main import run
from rollout_io.dataset.prefix_layout import decode_prefixes, encode_prefixes
from schemas import RULES, DatasetMetadata, ValidationError, upgrade
from schemas.errors import RolloutError
from schemas.ragged import ragged_array
from schemas.strategies import broken_tables, rollout_tables
from schemas.types import cast_table
from tests.helpers.examples import examples
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import STEPS, write_example

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(40)
)


def cut(table, data):
    """The table in chunks and slices at random places."""
    num_cuts = data.draw(st.integers(0, 4))
    cuts = sorted(data.draw(st.integers(0, table.num_rows)) for _ in range(num_cuts))
    bounds = [0, *cuts, table.num_rows]
    return [table.slice(a, b - a) for a, b in pairwise(bounds)]


def test_prefix_columns_of_the_worked_example():
    encoded = encode_prefixes(pa.table(STEPS))
    assert encoded["parent_step_index"].to_pylist() == [None, 0]
    assert encoded["prefix_length"].to_pylist() == [0, 3]
    assert encoded["prompt_suffix_ids"].to_pylist() == [[1, 2], [9]]


@pytest.mark.parametrize("kind", ["arrays", "numpy", "both"])
def test_a_list_column_is_the_same_from_arrays_of_either_kind(kind):
    values = [[-0.5, -1e300], None, [], [-0.1]]
    made = [row if row is None else array("f", row) for row in values]
    with np.errstate(over="ignore"):
        numpy = [row if row is None else np.array(row, np.float32) for row in values]
    rows = {"arrays": made, "numpy": numpy, "both": [*made[:2], *numpy[2:]]}[kind]
    column = ragged_array(rows, pa.list_(pa.float32()))
    assert column.equals(pa.array(values, pa.list_(pa.float32())))


def test_scalar_columns_have_statistics_and_lists_have_none(tmp_path):
    group = pq.ParquetFile(write_example(tmp_path)).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    known = {c.path_in_schema for c in columns if c.is_stats_set}
    assert known == {c.path_in_schema for c in columns if ".list." not in c.path_in_schema}
    assert "step_index" in known


def test_lists_of_numbers_are_stored_without_null_elements_and_read_as_declared(tmp_path):
    users = pa.array([[1, None], [2]], pa.list_(pa.int32()))
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(pa.table(STEPS).append_column("notes", users))
    stored = pq.read_schema(tmp_path / "ds" / "part-00000.parquet")
    for name in ("prompt_suffix_ids", "response_ids", "loss_mask"):
        assert not stored.field(name).type.value_field.nullable
    assert stored.field("notes").type.value_field.nullable
    table = read(tmp_path / "ds")
    assert table.schema.field("response_ids").type == pa.list_(pa.int32())
    assert table["notes"].to_pylist() == [[1, None], [2]]


@pytest.mark.parametrize("is_old_first", [True, False])
def test_shards_with_nullable_and_non_nullable_elements_form_one_dataset(is_old_first, tmp_path):
    file = write_example(tmp_path)
    table, other = read(file), tmp_path / f"ds/part-{'!' if is_old_first else '1'}.parquet"
    renamed = table.set_column(2, "trajectory_id", pa.array(["b_0", "b_0"]))
    renamed = renamed.set_column(0, "instance_id", pa.array(["b", "b"]))
    pq.write_table(renamed.replace_schema_metadata(None), other)
    both = [table, renamed] if not is_old_first else [renamed, table]
    expected = pl.concat([pl.from_arrow(one) for one in both])
    assert pl.from_arrow(read(tmp_path / "ds")).equals(expected)
    assert pl.read_parquet(tmp_path / "ds").equals(expected)
    assert ds.dataset(tmp_path / "ds").to_table().num_rows == 4
    assert not check(tmp_path / "ds").filter(severity="error").height


@given(rollout_tables())
@relaxed
def test_decoding_the_prefix_columns_gives_the_prompts_back(table):
    assert decode_prefixes(encode_prefixes(table)).equals(table)


@pytest.mark.slow
@given(rollout_tables(pictures=False), st.data())
@settings(relaxed, max_examples=examples(25))
def test_write_then_read_is_the_identity(table, data):
    layout = data.draw(st.sampled_from(["prefix", "full"]))
    rows = data.draw(st.integers(1, 9))
    shard_bytes = data.draw(st.sampled_from([1, 2000, 1 << 30]))
    pieces = cut(table, data)
    if data.draw(st.booleans()):
        pieces = [pa.concat_tables(pieces)]
    elif data.draw(st.booleans()):
        pieces = [pl.from_arrow(piece) for piece in pieces]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        with RolloutWriter(
            path, layout=layout, row_group_rows=rows, shard_bytes=shard_bytes
        ) as writer:
            for piece in pieces:
                writer.write(piece)
        assert writer.num_rows == table.num_rows
        assert writer.num_trajectories == len(set(table["trajectory_id"].to_pylist()))
        back = read(path)
        assert not [file for file in path.iterdir() if not file.name.startswith("part-")]
        assert check(path).is_empty()
        lazily = scan(path).collect()
    if table.num_rows == 0:
        assert back.num_rows == 0
        return
    assert back.cast(table.schema).to_pylist() == table.to_pylist()
    assert back.schema.equals(cast_table(table).schema)
    assert lazily.equals(pl.from_arrow(back))


@pytest.mark.slow
@given(
    rollout_tables(min_trajectories=2), rollout_tables(min_trajectories=1, optional=()), st.data()
)
@relaxed
def test_tables_with_other_optional_columns_may_follow_each_other(first, second, data):
    taken = set(first["trajectory_id"].to_pylist())
    if taken & set(second["trajectory_id"].to_pylist()):
        return
    order = data.draw(st.permutations([first, second]))
    with tempfile.TemporaryDirectory() as folder:
        with RolloutWriter(Path(folder) / "ds", row_group_rows=1) as writer:
            for table in order:
                writer.write(table)
        back = read(Path(folder) / "ds")
    rows = [row for table in order for row in table.to_pylist()]
    wanted = [{name: row.get(name) for name in back.column_names} for row in rows]
    assert back.to_pylist() == wanted


# A writer computes the prefix columns itself; files that break prefix_reference are read below.
REFUSED = [r for r in RULES if RULES[r].severity == "error" and r != "prefix_reference"]


@pytest.mark.parametrize("rule", REFUSED)
def test_the_writer_refuses_each_broken_invariant_and_leaves_nothing(rule):
    @given(broken_tables(rule))
    @settings(relaxed, max_examples=examples(15))
    def holds(table):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ds"
            with pytest.raises(ValidationError) as caught, RolloutWriter(path) as writer:
                writer.write(table)
            assert caught.value.rule == rule
            assert not path.exists()

    holds()


def test_a_scan_decodes_and_reads_only_the_columns_it_is_asked_for(tmp_path, monkeypatch):
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(pa.table(STEPS))
    monkeypatch.setattr("rollout_io.dataset.shard_files.decode_prefixes", pytest.fail)
    frame = scan(tmp_path / "ds").filter(pl.col("step_index") > 0).select("response_ids").collect()
    assert frame.to_dicts() == [{"response_ids": [4]}]


def test_a_scan_decodes_only_row_groups_that_hold_a_row_the_predicate_keeps(tmp_path, monkeypatch):
    other = dict(STEPS, instance_id=["b", "b"], trajectory_id=["b_0", "b_0"])
    with RolloutWriter(tmp_path / "ds", row_group_rows=2) as writer:
        writer.write(pa.table(STEPS))
        writer.write(pa.table(other))
    decoded = []

    def count(table):
        decoded.append(table.num_rows)
        return decode_prefixes(table)

    monkeypatch.setattr("rollout_io.dataset.shard_files.decode_prefixes", count)
    frame = scan(tmp_path / "ds").filter(pl.col("instance_id").is_in(["b"])).collect()
    assert frame["prompt_token_ids"].to_list() == [[1, 2], [1, 2, 3, 9]]
    assert decoded == [2]


def test_scan_honours_predicate_projection_and_limit_together(tmp_path):
    with RolloutWriter(tmp_path / "ds", row_group_rows=1) as writer:
        writer.write(pa.table(STEPS))
    lazy = scan(tmp_path / "ds")
    assert lazy.filter(pl.col("prompt_token_ids").list.len() > 2).select("step_index").collect()[
        "step_index"
    ].to_list() == [1]
    assert lazy.head(1).collect().height == 1
    assert lazy.select(pl.len()).collect().item() == 2


@pytest.mark.parametrize("layout", ["prefix", "full"])
def test_to_hf_gives_the_logical_table(tmp_path, layout):
    table = pa.table(
        STEPS | {"metrics": pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float64()))}
    )
    with RolloutWriter(tmp_path / "ds", layout=layout) as writer:
        writer.write(table)
    dataset = to_hf(tmp_path / "ds")
    assert dataset["prompt_token_ids"][:] == [[1, 2], [1, 2, 3, 9]]
    assert dataset[0]["metrics"] == [{"key": "k", "value": 1.0}]


def test_datasets_live_on_any_fsspec_filesystem_under_a_glob_or_as_one_file():
    url = "memory://bucket/run"
    with RolloutWriter(url) as writer:
        writer.write(pa.table(STEPS))
    for path in (url, url + "/*.parquet", url + "/part-00000.parquet"):
        assert read(path).num_rows == 2


def test_metadata_is_kept_and_a_second_dataset_in_the_same_place_is_refused(tmp_path):
    known = DatasetMetadata(tokenizer="m", vocab_size=49_152, models=("a", "b"))
    metadata = known.replace(logprobs_mode="raw").made("convert", format="calls")
    with RolloutWriter(tmp_path / "ds", metadata=metadata) as writer:
        writer.write(pa.table(STEPS))
    assert read_metadata(tmp_path / "ds") == metadata
    with RolloutWriter(tmp_path / "copy") as writer:
        writer.write(read(tmp_path / "ds"))
    assert read_metadata(tmp_path / "copy") == metadata
    with refused("out_is_free", where=str(tmp_path / "ds"), got="(1 shard)"):
        RolloutWriter(tmp_path / "ds")


def test_several_writers_can_share_a_directory(tmp_path):
    other = dict(STEPS, instance_id=["b", "b"], trajectory_id=["b_0", "b_0"])
    (tmp_path / "ds").mkdir()
    first, second = (RolloutWriter(tmp_path / "ds", append=True) for _ in range(2))
    first.write(pa.table(STEPS))
    second.write(pa.table(other))
    second.close()
    first.close()
    assert sorted(read(tmp_path / "ds")["instance_id"].to_pylist()) == ["a", "a", "b", "b"]


def test_an_exception_while_writing_leaves_no_dataset(tmp_path):
    def interrupted():
        with RolloutWriter(tmp_path / "ds", shard_bytes=1) as writer:
            writer.write(pa.table(STEPS))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert not (tmp_path / "ds").exists()


def test_files_of_others_are_recut_at_trajectory_boundaries(tmp_path):
    pq.write_table(pa.table(STEPS), tmp_path / "other.parquet", row_group_size=1)
    assert [t.num_rows for t in iter_tables(tmp_path / "other.parquet")] == [2]
    assert check(tmp_path / "other.parquet").is_empty()


def test_an_unknown_column_is_named(tmp_path):
    write_example(tmp_path)
    with refused("known_column", got="'response_id'", hint="did you mean response_ids?"):
        read(tmp_path / "ds", ["response_id"])


def test_older_schema_versions_are_upgraded_step_by_step_and_newer_ones_refused():
    table = pa.table({"reply_ids": [[1]]})
    upgrades = {
        1: lambda t: t.rename_columns(["completion_ids"]),
        2: lambda t: t.rename_columns(["response_ids"]),
    }
    assert upgrade(table, 1, upgrades=upgrades, current=3).column_names == ["response_ids"]
    with refused("schema_version", where="0", got="to version 3"):
        upgrade(table, 0, upgrades=upgrades, current=3)
    with refused("schema_version", hint="upgrade"):
        upgrade(table, 4, upgrades=upgrades, current=3)


def test_a_slice_is_taken_before_the_filter_that_follows_it(tmp_path):
    write_example(tmp_path)
    frame = scan(tmp_path / "ds")
    assert frame.head(1).filter(pl.col("step_index") == 1).collect().height == 0
    assert frame.filter(pl.col("step_index") == 1).head(1).collect().height == 1


@pytest.mark.parametrize("kind", [pa.list_view, pa.large_list, pa.large_list_view])
def test_list_variants_are_cast_to_the_declared_type(kind, tmp_path):
    names = ("prompt_token_ids", "response_ids")
    variants = {n: pa.array(STEPS[n].to_pylist(), kind(pa.int32())) for n in names}
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(pa.table(STEPS | variants))
    assert read(tmp_path / "ds").to_pylist() == pa.table(STEPS).to_pylist()


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(2),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([{"x": b"\xff", "y": [None]}, None]),
        pa.array(["x", None], pa.string_view()),
    ],
)
def test_columns_of_the_users_keep_their_values(column, tmp_path):
    table = pa.table(STEPS).append_column("mine", column)
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    assert read(tmp_path / "ds").to_pylist() == table.to_pylist()


def test_a_type_that_parquet_lacks_is_refused_and_leaves_nothing(tmp_path):
    table = pa.table(STEPS).append_column("mine", pa.array([{}, {}], pa.struct([])))
    with (
        pytest.raises(RolloutError, match="columns_and_types"),
        RolloutWriter(tmp_path / "ds") as w,
    ):
        w.write(table)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_failed_refuses_to_go_on_and_leaves_nothing(tmp_path):
    writer = RolloutWriter(tmp_path / "ds", row_group_rows=1)
    writer.write(pa.table(STEPS))
    with pytest.raises(ValidationError):
        writer.write(pa.table(STEPS))
    with pytest.raises(RolloutError, match="writer_is_open"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_table_without_rows_keeps_its_columns(tmp_path):
    table = pa.table(STEPS).append_column("mine", pa.array([1, 2])).slice(0, 0)
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    assert read(tmp_path / "ds").column_names == table.column_names


def test_a_directory_name_may_hold_glob_characters(tmp_path):
    with RolloutWriter(tmp_path / "a[b]*?") as writer:
        writer.write(pa.table(STEPS))
    assert read(tmp_path / "a[b]*?").num_rows == 2


@pytest.mark.parametrize("use", [scan, read, RolloutWriter])
def test_an_empty_path_is_not_the_current_directory(use):
    with refused("path", where="''"):
        use("")


def test_no_rows_of_a_scan_are_an_empty_frame_with_all_columns(shop_dataset):
    none = scan(shop_dataset).head(0).collect()
    assert (none.height, none.columns) == (0, scan(shop_dataset).collect_schema().names())


def test_a_shard_reaches_the_disk_before_its_name_and_its_name_after(tmp_path, monkeypatch):
    happened = []
    fsync, link = os.fsync, os.link

    def spied_fsync(handle):
        happened.append(os.fstat(handle).st_ino)
        fsync(handle)

    def spied_link(source, target):
        happened.append("named")
        link(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "link", spied_link)
    shard = write_example(tmp_path)
    assert happened == [shard.stat().st_ino, "named", shard.parent.stat().st_ino]


@pytest.mark.parametrize("verb", ["stats", "convert"])
def test_a_broken_link_is_named_with_its_target(verb, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    out = ["--out", str(tmp_path / "out")] if verb == "convert" else []
    assert run([verb, str(tmp_path / "link"), *out]) == 1
    printed = capsys.readouterr().err
    assert f"Hint: the link points to {tmp_path / 'gone'}, which does not exist" in printed
