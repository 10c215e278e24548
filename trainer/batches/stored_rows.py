"""Map the targets of a batch to the dataset rows in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

import rollout_io
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.versions import with_stored_digest
from schemas.ragged import IntArray, offsets_of
from schemas.types import as_table
from trainer.batches.chains import ranked_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Origins:
    """Map from the response tokens of a batch to the dataset rows that store them.

    Attributes:
        rows: [D] rows of the batch's groups as the dataset stores them, in its order:
            instance_id, trajectory_id, step_index (int32), num_tokens (int64: length of
            `response_ids`) and row_digest (int64).
        begin: [S] ascending index, in the batch's concatenated response tokens, of the first token
            of each step.
        row: [S] index of the row of `rows` that contains the step.
        position: [S] position of the step's first token in that row's response.
    """

    rows: pl.DataFrame
    begin: IntArray
    row: IntArray
    position: IntArray

    def of(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Look up each batch token's stored row, and the token's position in that row's response."""
        step = np.searchsorted(self.begin, slots, side="right") - 1
        return self.row[step], self.position[step] + slots - self.begin[step]


def digests_of(dataset: str, groups: Sequence[str]) -> pl.DataFrame:
    """Return `row_digest` of each row of the groups as stored: rewards are not those of a version."""
    rows = rollout_io.scan(dataset).filter(pl.col("instance_id").is_in(list(groups)))
    return with_stored_digest(rows).select("row_digest").collect()


def find_origins(steps: pl.DataFrame, num_response: IntArray, stored: pl.DataFrame) -> Origins:
    """Find the dataset row and the position at which each token of a batch is stored.

    Steps are matched by their index within the trajectory, which merging does not change.

    Args:
        steps: From `place_steps`, of the rows of all processes.
        num_response: [R] response tokens of these rows.
        stored: instance_id, trajectory_id, step_index, response_ids, row_digest, and optionally
            segments, of the same groups' complete trajectories in the order of the dataset.
    """
    places = steps.join(
        place_steps(stored), on=["trajectory_id", "number"], how="left", maintain_order="left"
    )
    begin = offsets_of(num_response)[steps["row"].to_numpy()] + steps["start"].to_numpy()
    order = np.argsort(begin, kind="stable")
    return Origins(
        rows=stored.select(
            "instance_id",
            "trajectory_id",
            pl.col("step_index").cast(pl.Int32),
            "row_digest",
            num_tokens=pl.col("response_ids").list.len().cast(pl.Int64),
        ),
        begin=begin[order],
        row=places["row_right"].to_numpy()[order],
        position=places["start_right"].to_numpy()[order],
    )


def place_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """Find every step of rows that are merged or split in any way.

    Returns:
        trajectory_id, number (of the step in its trajectory), row, start (in the row's response).
    """
    names = [name for name in ("trajectory_id", "segments") if name in rows.columns]
    table = as_table(rows.select(names))
    starts = trajectory_starts(table)
    trajectory = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, table.num_rows)))
    steps, rank = ranked_steps(table, starts, trajectory)
    order = np.argsort(rank)
    row = steps.row[order]
    first = np.searchsorted(trajectory[row], np.arange(len(starts)))
    return pl.DataFrame(
        {
            "trajectory_id": rows["trajectory_id"].gather(row),
            "number": np.arange(len(row)) - first[trajectory[row]],
            "row": row,
            "start": steps.start[order],
        }
    )
