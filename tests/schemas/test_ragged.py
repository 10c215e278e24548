"""Operations on ragged arrays give the same results as on Python lists."""

from itertools import chain

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged, zipped

KINDS = [pa.int32(), pa.bool_(), pa.float32(), pa.float64()]


@st.composite
def parts(draw: st.DrawFn) -> list[pa.Array]:
    """Draw up to three list columns of the same length and type."""
    kind = draw(st.sampled_from(KINDS))
    element = st.booleans() if kind == pa.bool_() else st.integers(-9, 9)
    row = st.none() | st.lists(element, max_size=5)
    num_rows = draw(st.integers(0, 6))
    rows = st.lists(row, min_size=num_rows, max_size=num_rows)
    columns = draw(st.lists(rows, min_size=1, max_size=3))
    return [pa.array(column, pa.list_(kind)) for column in columns]


@given(parts())
def test_zipped_rows_are_joined_in_order_without_null_rows(columns):
    found = zipped(*map(Ragged.from_arrow, columns)).to_arrow(columns[0].type.value_type)
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    known = [[part for part in row if part is not None] for row in rows]
    assert found.type == columns[0].type
    assert found.to_pylist() == [list(chain(*row)) if row else None for row in known]


@given(parts(), st.randoms(use_true_random=False))
def test_take_gives_the_same_rows_as_arrow(columns, random):
    column = columns[0]
    rows = [random.randrange(len(column)) for _ in column for _ in range(2)]
    found = Ragged.from_arrow(column).take(np.array(rows, np.int64))
    assert found.to_arrow(column.type.value_type).equals(column.take(pa.array(rows, pa.int64())))


def test_a_null_row_is_skipped_whatever_its_offsets_are():
    part = Ragged(np.array([1, 2, 3]), np.array([0, 2, 3]), np.array([False, True]))
    assert zipped(part, part).values.tolist() == [3, 3]
    assert zipped(part).lengths.tolist() == [0, 1]
