"""However rows were merged or split, each trained token is found where the dataset stores it."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings

from pipelines.merging.merge import merge_table, unmerge_table
from schemas.ragged import Ragged
from schemas.strategies import rollout_tables
from schemas.types import as_table
from tests.helpers.examples import examples
from trainer.batches.chains import find_origins, place_steps

FORMS = {
    "as it is": lambda table: table,
    "lineage": merge_table,
    "consecutive": lambda table: merge_table(table, "consecutive"),
    "steps": unmerge_table,
}


def frame_of(table):
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


@pytest.mark.slow
@pytest.mark.parametrize("trained", FORMS)
@pytest.mark.parametrize("stored", ["as it is", "lineage", "consecutive"])
@settings(max_examples=examples(15))
@given(table=rollout_tables(min_trajectories=1))
def test_a_sampled_token_is_mapped_to_its_place_in_the_dataset(stored, trained, table):
    dataset = frame_of(FORMS[stored](table)).with_row_index("row_digest")
    # A batch has its groups in an order of its own.
    batch = frame_of(FORMS[trained](as_table(dataset)))
    batch = batch.sort("instance_id", descending=True, maintain_order=True)
    kept, used = (Ragged.from_arrow(rows["response_ids"].to_arrow()) for rows in (dataset, batch))
    slots = np.flatnonzero(Ragged.from_arrow(batch["loss_mask"].to_arrow()).values)
    origins = find_origins(place_steps(batch), used.lengths, dataset)
    row, position = origins.of(slots)
    assert (position < kept.lengths[row]).all()
    at = kept.offsets[row] + position
    assert len(np.unique(at)) == len(slots)
    assert kept.values[at].tolist() == used.values[slots].tolist()
    ids = [
        rows["trajectory_id"].gather(n) for rows, n in ((dataset, row), (batch, used.row_of(slots)))
    ]
    assert ids[0].equals(ids[1])
    masks = Ragged.from_arrow(dataset["loss_mask"].to_arrow()).values
    assert np.array_equal(np.sort(at), np.flatnonzero(masks))
