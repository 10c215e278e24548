"""Identity ids: equal exactly where the model saw the same tokens and the same pictures."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.columns import PICTURES_TYPE
from schemas.metadata import upgrade
from schemas.pictures import identities, identity_ids
from schemas.ragged import Ragged
from schemas.strategies import rollout_tables
from tests.helpers.table_helpers import seen_tokens

DIGESTS = [f"sha256:{digit * 64}" for digit in "0f"]


def entry(sha256, start, length):
    return {"sha256": sha256, "start": start, "length": length}


def ids_of(tokens, *entries, begin=0):
    rows = Ragged.from_arrow(pa.array([tokens], pa.list_(pa.int32())))
    pictures = pa.chunked_array([pa.array([list(entries)], PICTURES_TYPE)])
    return identity_ids(rows, np.array([begin]), pictures).row(0).tolist()


@given(rollout_tables(optional=("pictures",), min_trajectories=1))
def test_identity_ids_are_equal_exactly_where_the_model_saw_the_same(table):
    prompts, responses = identities(table)
    ids, views = [], []
    for index, row in enumerate(table.to_pylist()):
        ids += [*prompts.row(index).tolist(), *responses.row(index).tolist()]
        views += seen_tokens(row)
    assert len(set(zip(ids, views, strict=True))) == len(set(ids)) == len(set(views))
    assert all((id_ < 0) == (len(view) > 1) for id_, view in zip(ids, views, strict=True))
    assert all(id_ == view[0] for id_, view in zip(ids, views, strict=True) if id_ >= 0)


@given(st.data())
def test_a_part_of_a_row_has_the_identity_ids_of_the_row(data):
    size = data.draw(st.integers(1, 9))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    start = data.draw(st.integers(0, size - 1))
    picture = entry(DIGESTS[0], start, data.draw(st.integers(1, size - start)))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    whole = ids_of(tokens, picture)
    assert ids_of(tokens[begin:end], picture, begin=begin) == whole[begin:end]


def test_another_length_of_a_span_changes_its_ids_from_the_first_token_on():
    two, three = (ids_of([9] * 4, entry(DIGESTS[0], 0, length)) for length in (2, 3))
    assert two[0] != three[0]


@pytest.mark.parametrize(
    "unplaced", [entry(None, 0, 2), entry(DIGESTS[0], None, None), entry(DIGESTS[0], 0, None)]
)
def test_a_picture_without_digest_or_span_changes_no_id(unplaced):
    assert ids_of([9, 9], unplaced) == [9, 9]


def test_tokens_of_a_table_without_spans_are_not_copied():
    rows = Ragged.from_arrow(pa.array([[1, 2]], pa.list_(pa.int32())))
    empty = pa.chunked_array([pa.array([None], PICTURES_TYPE)])
    assert identity_ids(rows, np.zeros(1, np.int64), empty) is rows
    assert identity_ids(rows, np.zeros(1, np.int64), None) is rows


def test_images_of_version_1_become_pictures_with_a_start_in_rows_and_in_steps():
    kind = pa.list_(pa.struct([("blob", pa.string()), ("position", pa.int32())]))
    images = [{"blob": DIGESTS[0], "position": 3}, {"blob": None, "position": None}]
    segment = {"start": 0, "length": 1, "step_index": 0, "images": images}
    segments = pa.list_(
        pa.struct(
            [(name, pa.int32()) for name in ("start", "length", "step_index")] + [("images", kind)]
        )
    )
    old = pa.table(
        {
            "response_ids": pa.array([[1], [2], [3]]),
            "images": pa.array([images, None, []], kind),
            "segments": pa.array([[segment], None, []], segments),
        }
    )
    new = upgrade(old.slice(0), 1)
    wanted = [entry(DIGESTS[0], 3, None), entry(None, None, None)]
    assert new.column_names == ["response_ids", "pictures", "segments"]
    assert new.schema.field("pictures").type == PICTURES_TYPE
    assert new.column("pictures").to_pylist() == [wanted, None, []]
    renamed = {key: value for key, value in segment.items() if key != "images"}
    assert new.column("segments").to_pylist() == [[renamed | {"pictures": wanted}], None, []]
    assert upgrade(old.slice(1), 1).column("segments").to_pylist() == [None, []]


@pytest.mark.parametrize(
    "invalid", [entry("a.png", 0, 2), entry("", 1, 9), entry(DIGESTS[0], -3, 4)]
)
def test_entries_that_the_invariants_refuse_have_identity_ids_too(invalid):
    """Tables that are not checked yet are compared, as the viewer and `drift` do."""
    ids = ids_of([9, 9, 9], invalid)
    assert len(ids) == 3
    assert min(ids) < 0
