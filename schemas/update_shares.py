"""The table of the rows' shares of an update, which `rollouts blame` writes.

It has one row for each row of the update. `dataset`, `trajectory_id` and `step_index` identify the
row of the dataset, as in token records; `token_sum` shows whether the row has changed since. The
table may have further numeric columns, which the viewer also shows.
"""

from __future__ import annotations

import pyarrow as pa

from schemas.columns import Column, Length

BLAME = "blame"
"""Directory of these tables in a run: `RUN/blame/*.parquet`."""

UPDATE_SHARE_COLUMNS: tuple[Column, ...] = (
    Column(name="run", type=pa.string(), meaning="directory of the run, as specified"),
    Column(name="global_step", type=pa.int32(), meaning="number of the update"),
    Column(name="dataset", type=pa.string(), meaning="path of the dataset, as configured"),
    Column(name="instance_id", type=pa.string(), meaning="group of the row"),
    Column(name="trajectory_id", type=pa.string(), meaning="trajectory of the row"),
    Column(name="step_index", type=pa.int32(), meaning="index of the row in its trajectory"),
    Column(name="token_sum", type=pa.int64(), meaning="sum of the row's `response_ids`"),
    Column(
        name="share",
        type=pa.float64(),
        meaning="the row's share of the update; the shares of all rows sum to 1, and a row that pulls"
        " against the step has a negative share",
    ),
    Column(
        name="token_shares",
        type=pa.list_(pa.float32()),
        nullable=True,
        length=Length.RESPONSE,
        meaning="each response token's share of the update, null where the token is not a target;"
        " sums to `share`",
    ),
)
"""Columns of such a table, declared like the columns of the rollout table."""
