"""Split steps where the weights that sampled them changed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipelines.merging.merge import unmerge_table
from pipelines.tables import set_column
from schemas.columns import JOINED
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import Ragged, offsets_of

VERSIONS = "policy_versions"


def split_versions(table: pa.Table) -> pa.Table:
    """Split each row into ranges of tokens that one version of the weights sampled.

    A range becomes a row: its prompt is the row's prompt and the tokens before the range, and
    `policy_version` is its version. Rows with `segments`, and rows of one version, are kept.

    Args:
        table: Complete trajectories, one row per step, in the `full` layout.
    """
    if VERSIONS not in table.column_names:
        return table
    column = Ragged.from_arrow(table.column(VERSIONS))
    values = column.values
    row = column.row_of(np.arange(len(values)))
    begins = np.ones(len(values), np.bool_)
    begins[1:] = (np.diff(values) != 0) | (np.diff(row) != 0)
    first = np.flatnonzero(begins)
    of = row[first]
    counts = np.bincount(of, minlength=len(column.lengths))
    if "segments" in table.column_names:
        counts[to_numpy(table.column("segments").is_valid())] = 0
    is_split = counts[of] > 1
    if not is_split.any():
        return table
    length, first, of = (
        np.diff(np.append(first, len(values)))[is_split],
        first[is_split],
        of[is_split],
    )
    counts = np.bincount(of, minlength=len(column.lengths))
    fields = {
        "start": to_arrow(first - column.offsets[of], pa.int32()),
        "length": to_arrow(length, pa.int32()),
        "step_index": table.column("step_index").take(to_arrow(of)).combine_chunks(),
        JOINED: to_arrow(np.ones(len(of), np.bool_)),
        "policy_version": to_arrow(values[first], pa.int32()),
    }
    flat = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    offsets = to_arrow(offsets_of(counts), pa.int32())
    segments = pa.ListArray.from_arrays(offsets, flat, mask=to_arrow(counts == 0))
    return unmerge_table(set_column(table, "segments", segments))
