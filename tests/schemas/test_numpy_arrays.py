"""Conversion between Arrow and NumPy: the same values as Arrow's own, without pandas."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.numpy_arrays import empty_table, filled, to_arrow, to_numpy

KINDS = {
    pa.bool_(): st.booleans(),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
}


@st.composite
def columns(draw: st.DrawFn, *, nulls: bool = True) -> pa.ChunkedArray:
    kind = draw(st.sampled_from(list(KINDS)))
    element = st.none() | KINDS[kind] if nulls else KINDS[kind]
    chunks = draw(st.lists(st.lists(element, max_size=20), max_size=3))
    skipped = draw(st.integers(0, 3))
    return pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind).slice(skipped)


@given(columns(nulls=False))
def test_a_column_becomes_the_array_that_arrow_makes_of_it(column):
    found, expected = to_numpy(column), column.to_numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@given(columns())
def test_nulls_are_filled_in_the_type_of_the_column(column):
    value = False if pa.types.is_boolean(column.type) else -1
    found, expected = filled(column, value), column.fill_null(value).to_numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@given(columns(nulls=False), st.randoms(use_true_random=False))
def test_an_array_becomes_the_column_that_arrow_makes_of_it(column, random):
    values = column.to_numpy()
    mask = np.array([random.random() < 0.3 for _ in values], np.bool_)
    assert to_arrow(values).to_pylist() == pytest.approx(
        pa.array(values).to_pylist(), nan_ok=True, abs=0, rel=0
    )
    assert to_arrow(values, mask=mask).is_null().to_pylist() == mask.tolist()


def test_an_array_is_cast_only_if_its_values_fit():
    assert to_arrow(np.array([1, 2]), pa.int32()).equals(pa.array([1, 2], pa.int32()))
    with pytest.raises(pa.ArrowInvalid):
        to_arrow(np.array([2**31]), pa.int32())


def test_strided_arrays_keep_their_values():
    assert to_arrow(np.arange(10)[::3]).to_pylist() == [0, 3, 6, 9]


def test_an_empty_table_has_the_schema():
    schema = pa.schema([pa.field("a", pa.list_(pa.int32()), False)], {"k": "v"})
    assert empty_table(schema).schema.equals(schema, check_metadata=True)


def test_numbers_in_another_byte_order_are_converted():
    assert to_arrow(np.array([1, 2], ">i4")).to_pylist() == [1, 2]
    assert to_arrow(np.array([0.5], ">f8"), pa.float32()).to_pylist() == [0.5]
