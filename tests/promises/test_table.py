"""The rollout table: what is written is what is read, and nothing broken is written or trained on.

The page: docs/table.md.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

import rollout_io
from schemas import RULES, check
from schemas.errors import RolloutError
from schemas.strategies import broken_tables, rollout_tables
from tests.helpers.examples import examples

ANY = settings(deadline=None, max_examples=examples(20), suppress_health_check=list(HealthCheck))


def written(path, table, **options):
    with rollout_io.RolloutWriter(path, **options) as writer:
        writer.write(table)
    return path


@pytest.mark.parametrize("layout", ["prefix", "full"])
@given(table=rollout_tables(min_trajectories=1))
@ANY
def test_what_is_written_is_what_is_read_in_either_layout(tmp_path_factory, table, layout):
    path = written(tmp_path_factory.mktemp("ds") / "ds", table, layout=layout)
    assert rollout_io.read(path).to_pylist() == table.to_pylist()


@pytest.mark.parametrize("rule", RULES)
def test_each_invariant_that_is_broken_alone_is_named(rule):
    @given(broken_tables(rule))
    @settings(ANY, max_examples=3)
    def holds(table):
        assert set(check(table)["rule"]) == {rule}

    holds()


@given(table=broken_tables("lengths_align"))
@settings(ANY, max_examples=5)
def test_a_broken_table_is_refused_and_nothing_of_it_is_left(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("ds") / "ds"
    with pytest.raises(RolloutError) as caught:
        written(path, table)
    assert caught.value.rule == "lengths_align"
    assert not [*path.glob("*.parquet")]


def test_a_flipped_bit_in_a_file_is_an_error_and_never_other_tokens(tmp_path, shop_dataset):
    (source,) = sorted(shop_dataset.glob("*.parquet"))[:1]
    content = bytearray(source.read_bytes())
    column = pq.ParquetFile(source).metadata.row_group(0)
    names = [column.column(i).path_in_schema for i in range(column.num_columns)]
    at = names.index("response_ids.list.element")
    content[column.column(at).data_page_offset + 60] ^= 1
    path = tmp_path / "ds"
    path.mkdir()
    (path / source.name).write_bytes(content)
    with pytest.raises(RolloutError):
        rollout_io.read(path)


def test_every_parquet_reader_opens_a_dataset_of_full_prompts(tmp_path, shop_dataset):
    table = rollout_io.read(shop_dataset)
    path = written(tmp_path / "ds", table, layout="full")
    plain = pa.concat_tables([pq.read_table(file) for file in sorted(path.glob("*.parquet"))])
    assert plain["prompt_token_ids"].to_pylist() == table["prompt_token_ids"].to_pylist()


def test_columns_of_your_own_pass_through_every_file(tmp_path, shop_dataset):
    table = rollout_io.read(shop_dataset)
    mine = table.append_column("mine", pa.array(range(table.num_rows)))
    assert rollout_io.read(written(tmp_path / "ds", mine))["mine"].to_pylist() == [
        *range(table.num_rows)
    ]
