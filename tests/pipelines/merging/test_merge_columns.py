import polars as pl
import pyarrow as pa
import pytest

from pipelines import merge, unmerge
from pipelines.merging.merge import merge_table, unmerge_table
from rollout_io import RolloutWriter, read
from schemas import check
from schemas.errors import RolloutError
from schemas.types import as_table
from tests.helpers.refusals import refused
from tests.pipelines.merging.test_merge import STEPS


@pytest.mark.parametrize("name", ["start", "length", "column.start", "parts", "instance"])
def test_a_column_of_the_users_may_have_the_name_of_a_segment_field(name):
    table = as_table(STEPS).append_column(name, pa.array(["x", "y"]))
    merged = merge_table(table)
    assert check(merged).is_empty()
    assert unmerge_table(merged).select(table.column_names).to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(2),
        pa.array([[None], None]),
        pa.array(["x", None], pa.string_view()),
        pa.array([[1], None], pa.list_view(pa.int8())),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    ],
)
def test_columns_of_the_users_come_back_from_a_merged_dataset(column, tmp_path):
    table = as_table(STEPS).append_column("mine", column)
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(merge_table(table))
    back = unmerge_table(read(tmp_path / "ds"))
    assert back.select(table.column_names).to_pylist() == table.to_pylist()


def test_an_enum_of_the_users_stays_one():
    frame = STEPS.with_columns(mine=pl.Series(["x", None], dtype=pl.Enum(["y", "x"])))
    back = unmerge(merge(frame)).drop("segments").collect()
    assert back.equals(frame.collect())
    assert back.schema["mine"] == pl.Enum(["y", "x"])


@pytest.mark.parametrize("name", ["*", "^.*$"])
def test_a_column_of_the_users_may_be_called_as_a_pattern_is(name):
    frame = STEPS.with_columns(pl.Series(name, [1, 2]))
    assert unmerge(merge(frame)).drop("segments").collect().equals(frame.collect())


def test_a_trajectory_whose_rows_lie_apart_is_not_merged():
    table = as_table(STEPS)
    other = table.set_column(2, "trajectory_id", pa.array(["b_0", "b_0"], pa.large_string()))
    scattered = pa.concat_tables([table.slice(0, 1), other, table.slice(1)])
    with refused("contiguous_trajectory", where="trajectory 'a_0'"):
        merge_table(scattered)


def test_a_column_of_a_type_that_arrow_lacks_is_refused():
    frame = STEPS.with_columns(mine=pl.lit(1, pl.Int128))
    with pytest.raises(RolloutError, match="columns_and_types"):
        merge(frame)
