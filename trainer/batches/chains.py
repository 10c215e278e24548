"""The trained tokens of a trajectory as one chain, however its steps are split into rows.

Estimators that look ahead need the tokens in temporal order, with their rewards (`make_chains`);
records of tokens need the dataset rows that store them (`find_origins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import rollout_io
from pipelines.merging.segments import Steps, is_joined, steps_of
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.ragged import BoolArray, FloatArray, IntArray, Ragged, offsets_of, ranges
from schemas.types import as_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """N trained tokens in temporal order, trajectory by trajectory, for recursions over time.

    Untrained tokens, including observations, are not part of the chain: they cause no discounting
    and need no value.

    Attributes:
        slots: [N] int64 index of each token in the batch's concatenated response tokens.
        trajectory: [N] int64, non-decreasing.
        rewards: [N] float64 rewards, each at the last trained token at or before it.
    """

    slots: IntArray
    trajectory: IntArray
    rewards: FloatArray


def make_chains(rows: pa.Table, trains: BoolArray) -> Chains:
    """List the trained tokens of complete trajectories in temporal order, with their rewards.

    In a row with `rewards`, each token has a reward. In any other row, the `reward` of a step goes
    to its last token; a merged row stores one reward per step. Steps, merged rows and mixtures of
    both give the same tokens in the same order with the same rewards.

    Args:
        rows: trajectory_id, response_ids, reward, and optionally rewards and segments.
        trains: [T] true for trained tokens among the rows' concatenated response tokens.

    Returns:
        The chains. Unknown rewards are treated as 0: reject them before calling this.

    Example:
        A merged row, response [3, 9, 4], whose steps [3] and [4] earned 0.5 and 1.0:

        >>> first = {"start": 0, "length": 1, "step_index": 0, "joined": True, "reward": 0.5}
        >>> last = {"start": 2, "length": 1, "step_index": 1, "joined": True, "reward": 1.0}
        >>> row = {"response_ids": [[3, 9, 4]], "reward": [1.0], "segments": [[first, last]]}
        >>> rows = pa.table({"trajectory_id": ["shop-1_0"], **row})
        >>> chains = make_chains(rows, np.array([True, False, True]))
        >>> chains.slots.tolist(), chains.rewards.tolist()
        ([0, 2], [0.5, 1.0])
    """
    responses = Ragged.from_arrow(rows.column("response_ids"))
    steps, rank, row_trajectory = _ranked_steps(rows)
    step_starts = responses.offsets[steps.row] + steps.start
    token_rank = rank[np.searchsorted(step_starts, np.arange(len(trains)), side="right") - 1]

    def time(rank: IntArray, slot: IntArray) -> IntArray:
        return rank * (len(trains) + 1) + slot

    slots = np.argsort(token_rank, kind="stable")
    slots = slots[trains[slots]]
    # Rewards per token, and rewards at the end of a step.
    per_token, scalar = _token_rewards(rows), _step_rewards(rows, steps)
    scalar[per_token.valid[steps.row]] = 0.0
    earning = ranges(responses.offsets[:-1], per_token.lengths)
    lengths = np.where(steps.length < 0, responses.lengths[steps.row], steps.length)
    when = np.append(time(token_rank[earning], earning), time(rank, step_starts + lengths - 1))
    owner = row_trajectory[np.append(responses.row_of(earning), steps.row)]
    last = np.searchsorted(time(token_rank[slots], slots), when, side="right") - 1
    trajectory = row_trajectory[responses.row_of(slots)]
    # A reward at an untrained token or step goes to the token that led to it. A reward before the
    # first trained token of its trajectory is dropped: no trained token could have changed it.
    earned = last >= 0
    earned[earned] = trajectory[last[earned]] == owner[earned]
    values = np.append(per_token.values, scalar)[earned]
    rewards = np.bincount(last[earned], values, minlength=len(trajectory)).astype(np.float64)
    return Chains(slots=slots, trajectory=trajectory, rewards=rewards)


def _ranked_steps(rows: pa.Table) -> tuple[Steps, IntArray, IntArray]:
    """List the steps in the given rows, the rank of each in the order of sampling, and rows' trajectories.

    Within a trajectory, rows must be ordered by their last step. If merging interleaved the steps
    of a trajectory, all its rows contain step indices.
    """
    starts = trajectory_starts(rows)
    row_trajectory = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows.num_rows)))
    split = is_joined(rows)
    number = np.arange(rows.num_rows)
    if not split.any():
        zero = np.zeros_like(number)
        return Steps(number, zero, zero - 1, zero - 1), number, row_trajectory
    steps = steps_of(rows, split)
    trajectory, number = row_trajectory[steps.row], np.arange(len(steps.row))
    flat = pc.struct_field(pc.list_flatten(rows.column("segments")), "step_index")
    index = flat.to_numpy()[np.maximum(steps.segment, 0)]
    remembered = np.logical_and.reduceat(split, starts)[trajectory]
    rank = np.empty_like(number)
    rank[np.lexsort((np.where(remembered, index, number), trajectory))] = number
    return steps, rank, row_trajectory


def _step_rewards(rows: pa.Table, steps: Steps) -> FloatArray:
    """Return the scalar reward of each step ([S]; 0 if unknown)."""
    reward = pc.fill_null(rows.column("reward"), 0.0).to_numpy().astype(np.float64)[steps.row]
    split = steps.segment >= 0
    if split.any():
        rewards = pc.struct_field(pc.list_flatten(rows.column("segments")), "reward")
        reward[split] = pc.fill_null(rewards, 0.0).to_numpy()[steps.segment[split]]
    return np.asarray(reward)


def _token_rewards(rows: pa.Table) -> Ragged:
    if "rewards" in rows.column_names:
        return Ragged.from_arrow(rows.column("rewards"))
    none = np.zeros(rows.num_rows, np.bool_)
    return Ragged(np.zeros(0), np.zeros(rows.num_rows + 1, np.int64), none)


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
    steps, rank, trajectory = _ranked_steps(table)
    order = np.argsort(rank)
    row = steps.row[order]
    first = np.searchsorted(trajectory[row], np.unique(trajectory))
    return pl.DataFrame(
        {
            "trajectory_id": rows["trajectory_id"].gather(row),
            "number": np.arange(len(row)) - first[trajectory[row]],
            "row": row,
            "start": steps.start[order],
        }
    )
