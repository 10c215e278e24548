"""The trained tokens of a trajectory as one chain, whatever rows its steps are in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.segments import Steps, is_joined, steps_of
from rollout_io.prefix import trajectory_starts
from schemas.ragged import BoolArray, IntArray, Ragged, ranges

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """What recursions over time run on: N trained tokens, trajectory after trajectory.

    Inside a trajectory they are in the order of its steps. Tokens that do not train, observations
    among them, are no links: nothing is discounted there and no value is asked for.

    Attributes:
        slots: [N] int64 index of each token in the batch's response tokens laid end to end.
        trajectory: [N] int64, not decreasing.
        rewards: [N] float64 what each token earned: see `credit`.
    """

    slots: IntArray
    trajectory: IntArray
    rewards: FloatArray


def make_chains(rows: pa.Table, trains: BoolArray) -> Chains:
    """Chain the trained tokens of whole trajectories.

    A row with `rewards` earned them token by token; any other its `reward`, and a merged row each
    step's, at the end of the step. Steps, merged rows, and whatever lies between give the same
    tokens in the same order with the same rewards.

    Args:
        rows: trajectory_id, response_ids, reward, and where the dataset has them rewards and
            segments.
        trains: [T] which of the rows' response tokens, laid end to end, train.

    Returns:
        The chains. A reward that is not known counts 0: refuse it before.

    Example:
        A merged row, response [3, 9, 4], whose steps [3] and [4] earned 0.5 and 1.0:

        >>> chains = make_chains(row, np.array([True, False, True]))
        >>> chains.slots.tolist(), chains.rewards.tolist()
        ([0, 2], [0.5, 1.0])
    """
    responses = Ragged.from_arrow(rows.column("response_ids"))
    starts = trajectory_starts(rows)
    row_trajectory = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows.num_rows)))
    steps, order = _steps_in_order(rows, starts, row_trajectory)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    step_starts = responses.offsets[steps.row] + steps.start
    rank_of_token = rank[np.searchsorted(step_starts, np.arange(len(trains)), side="right") - 1]

    slots = np.argsort(rank_of_token, kind="stable")
    slots = slots[trains[slots]]
    per_token = _token_rewards(rows)
    scalar = _step_rewards(rows, steps)
    scalar[per_token.valid[steps.row]] = 0.0
    spread = np.zeros(len(trains))
    spread[ranges(responses.offsets[:-1], per_token.lengths)] = per_token.values
    rewarded = np.flatnonzero(spread)
    # One time line: a token is at (step, its slot), a step's own reward after all its tokens.
    time = np.append(rank_of_token[rewarded], rank)
    late = np.append(rewarded, np.full(len(rank), len(trains)))
    earned = np.append(spread[rewarded], scalar)
    trajectory = row_trajectory[responses.row_of(slots)]
    last = _last_before(rank_of_token[slots], slots, time, late, len(trains) + 1)
    of = np.append(row_trajectory[responses.row_of(rewarded)], row_trajectory[steps.row])
    return Chains(
        slots=slots,
        trajectory=trajectory,
        rewards=credit(trajectory, last, earned, of),
    )


def credit(
    trajectory: IntArray, last: IntArray, rewards: FloatArray, reward_trajectory: IntArray
) -> FloatArray:
    """Give each reward to the last trained token that came before it.

    So a reward whose own token or step does not train is still earned by what led to it. One that
    came before every trained token of its trajectory is nobody's, and left out: no choice that is
    trained could have changed it.

    Args:
        trajectory: [N] of each trained token.
        last: [K] index of the last trained token not after each reward; -1 for none.
        rewards: [K].
        reward_trajectory: [K] of each reward.

    Returns:
        [N] float64.

    Example:
        Two tokens of trajectory 0 and one of trajectory 1, whose first reward came too early:

        >>> last, of = np.array([1, 1, 1, 2]), np.array([0, 0, 1, 1])
        >>> credit(np.array([0, 0, 1]), last, np.array([1.0, 2.0, 4.0, 8.0]), of).tolist()
        [0.0, 3.0, 8.0]
    """
    earned = last >= 0
    earned[earned] = trajectory[last[earned]] == reward_trajectory[earned]
    sums = np.bincount(last[earned], rewards[earned], minlength=len(trajectory))
    return np.asarray(sums, np.float64)


def _last_before(
    token_step: IntArray, slots: IntArray, step: IntArray, slot: IntArray, size: int
) -> IntArray:
    return np.searchsorted(token_step * size + slots, step * size + slot, side="right") - 1


def _steps_in_order(
    rows: pa.Table, starts: IntArray, row_trajectory: IntArray
) -> tuple[Steps, IntArray]:
    """Steps of the rows as they lie there, and the order in which they were taken.

    Rows follow each other as their last steps do; where a merge interleaved the steps of a
    trajectory, every row of it remembers which they were.
    """
    split = is_joined(rows)
    number = np.arange(rows.num_rows)
    if not split.any():
        zero = np.zeros_like(number)
        return Steps(number, zero, zero - 1, zero - 1), number
    steps = steps_of(rows, split)
    remembered = np.logical_and.reduceat(split, starts)[row_trajectory[steps.row]]
    flat = pc.struct_field(pc.list_flatten(rows.column("segments")), "step_index")
    index = flat.to_numpy()[np.maximum(steps.segment, 0)]
    key = np.where(remembered, index, np.arange(len(steps.row)))
    return steps, np.lexsort((key, row_trajectory[steps.row]))


def _step_rewards(rows: pa.Table, steps: Steps) -> FloatArray:
    """[S] the scalar reward of each step, 0 where it is not known."""
    reward = pc.fill_null(rows.column("reward"), 0.0).to_numpy().astype(np.float64)[steps.row]
    split = steps.segment >= 0
    if split.any():
        kept = pc.struct_field(pc.list_flatten(rows.column("segments")), "reward")
        reward[split] = pc.fill_null(kept, 0.0).to_numpy()[steps.segment[split]]
    return np.asarray(reward)


def _token_rewards(rows: pa.Table) -> Ragged:
    if "rewards" in rows.column_names:
        return Ragged.from_arrow(rows.column("rewards"))
    none = np.zeros(rows.num_rows, np.bool_)
    return Ragged(np.zeros(0), np.zeros(rows.num_rows + 1, np.int64), none)
