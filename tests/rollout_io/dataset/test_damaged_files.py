import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

import rollout_io
from rollout_io import RolloutWriter, read, read_metadata, scan
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas import DatasetMetadata, ValidationError, check
from schemas.errors import RolloutError
from schemas.strategies import broken_tables
from tests.helpers.examples import examples
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import STEPS, write_example

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(40)
)


@given(broken_tables("prefix_reference"))
@settings(relaxed, max_examples=examples(20))
def test_a_file_with_broken_prefix_references_is_named_and_never_decoded(table):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-00000.parquet"
        pq.write_table(table.replace_schema_metadata(DatasetMetadata().encode("prefix")), path)
        found = rollout_io.check(path)
        assert set(found["rule"]) == {"prefix_reference"}
        assert set(found["row"]) == set(check(table)["row"])
        with pytest.raises(ValidationError, match="prefix_reference"):
            read(path)


def test_a_truncated_file_is_one_message_with_its_place(tmp_path):
    file = write_example(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    with refused("readable_file", where="part-00000.parquet", hint=" "):
        read(tmp_path / "ds")


def test_any_flipped_bit_in_a_data_page_is_noticed(tmp_path):
    file = write_example(tmp_path)
    good = file.read_bytes()
    wanted = read(file)
    column = pq.ParquetFile(file).metadata.row_group(0).column(5)
    assert column.path_in_schema == "prompt_token_ids.list.element"
    start = column.data_page_offset
    noticed = 0
    for offset in range(start, start + column.total_compressed_size):
        file.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        try:
            assert read(file).equals(wanted), f"a flipped bit at {offset} changed the data silently"
        except RolloutError as error:
            noticed += error.rule == "readable_file"
    assert noticed > column.total_compressed_size // 2


def hostile(**changes):
    encoded = encode_prefixes(pa.table(STEPS))
    for name, values in changes.items():
        kind = encoded.schema.field(name).type
        column = values if isinstance(values, pa.Array) else pa.array(values, kind)
        encoded = encoded.set_column(encoded.column_names.index(name), name, column)
    return encoded


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_step_index": [None, 1]},
        {"parent_step_index": [1, 0]},
        {"parent_step_index": [None, -5]},
        {"prefix_length": [0, 2**31 - 1]},
        {"prefix_length": [0, -1]},
        {"prefix_length": [0, None]},
        {"prefix_length": [1, 3]},
        {"prefix_length": pa.array([0, 3])},
        {"prompt_suffix_ids": [[1, 2], [None]]},
        {"response_ids": [None, [4]]},
        {"trajectory_id": ["a_0", None]},
        {"step_index": [0, 2]},
        {"step_index": [0, 0], "is_last_step": [True, True]},
    ],
)
def test_hostile_prefix_references_are_refused_also_when_only_prompts_are_read(changes, tmp_path):
    file = tmp_path / "hostile.parquet"
    pq.write_table(hostile(**changes), file)
    with pytest.raises(RolloutError, match="row group 0"):
        scan(file).select("prompt_token_ids").collect()
    with pytest.raises(RolloutError, match="row group 0"):
        read(file, ["prompt_token_ids"])
    assert (rollout_io.check(file)["severity"] == "error").any()


def test_a_prefix_file_that_others_cut_inside_a_trajectory_is_refused(tmp_path):
    file = tmp_path / "cut.parquet"
    pq.write_table(encode_prefixes(pa.table(STEPS)), file, row_group_size=1)
    with refused("prefix_reference", got="step 1 as row 0"):
        read(file)


def test_a_column_name_that_was_changed_in_the_footer_is_refused(tmp_path):
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(pa.table(STEPS).append_column("note", pa.array([1, 2])))
    file = tmp_path / "ds" / "part-00000.parquet"
    file.write_bytes(file.read_bytes().replace(b"note", b"nose"))
    with refused("readable_file", got="column names"):
        read(file)


@pytest.mark.parametrize(
    "pair",
    [
        (b"rollout_io.schema_version", b'"one"'),
        (b"rollout_io.made_by", b"5"),
        (b"rollout_io.models", b'"a"'),
        (b"rollout_io.vocab_size", b'"49152"'),
        (b"rollout_io.vocab_size", b"true"),
        (b"rollout_io.tokenizer", b"\xff"),
        (b"rollout_io.\xff", b"1"),
    ],
)
def test_metadata_that_was_changed_is_refused(pair, tmp_path):
    pq.write_table(pa.table(STEPS).replace_schema_metadata([pair]), tmp_path / "odd.parquet")
    with pytest.raises(RolloutError, match="file_metadata"):
        read_metadata(tmp_path / "odd.parquet")
