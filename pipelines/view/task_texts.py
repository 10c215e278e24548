"""The text of a task: the first user message of its first step."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from rollout_io.dataset.trajectory_facts import task_start
from schemas.numpy_arrays import to_frame


def add_starts(table: pa.Table, starts: dict[str, str | None]) -> None:
    """Add the start of the text of each task that a table introduces, on one line.

    Args:
        table: The next rows of a dataset, with `instance_id`; without `messages`, texts are None.
        starts: Starts by instance_id.
    """
    frame = to_frame({"instance_id": table.column("instance_id"), "step": first_steps(table)})
    begun = frame.with_row_index("row").sort("step", maintain_order=True)
    begun = begun.unique("instance_id", keep="first").sort("row")
    messages = table.column("messages") if "messages" in table.column_names else None
    for row, name, _ in begun.rows():
        if name not in starts:
            starts[name] = None if messages is None else task_start(messages[row].as_py())


def first_steps(table: pa.Table) -> pa.ChunkedArray:
    """Return the index of each row's first step: a merged row may stand after one that began later."""
    steps = table.column("step_index")
    if "segments" not in table.column_names:
        return steps
    frame = to_frame({"step": steps, "of": table.column("segments")})
    first = pl.col("of").list.first().struct.field("step_index").fill_null(pl.col("step"))
    return frame.select(first.alias("step")).to_arrow().column("step")
