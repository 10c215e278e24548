"""Balance the rows of a batch over processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from accelerate import Accelerator

from schemas.ragged import FloatArray, IntArray
from trainer.batches.forest import Forest
from trainer.distributed.processes import over_processes

Watch = Callable[[Sequence[Forest]], Iterable[Forest]]
"""Function that iterates over micro-batches, to observe which ones have been forwarded."""
DEPTH_OF_DOUBLE_COST = 16_384
"""Depth at which a token's attention costs as much as its other operations: about 6 x hidden_size."""
ONE = torch.zeros(1, dtype=torch.int64)
NONE = torch.zeros(0, dtype=torch.int64)
FILLER = Forest(
    token_ids=ONE,
    position_ids=ONE,
    subtree_end=ONE + 1,
    target_parent=NONE,
    target_token=NONE,
    target_slot=NONE,
)
"""A token without targets, for a process that has no micro-batch left while other processes have one.

Its loss is 0 but depends on every parameter (with gradient 0), because wrappers that reduce
gradients or gather parameters wait for every process.
"""


def cost(lengths: IntArray) -> FloatArray:
    """Estimate the time to forward each row, in tokens: linear cost, plus attention with depth."""
    return lengths + lengths * (lengths - 1) / (2 * DEPTH_OF_DOUBLE_COST)


def balance(costs: FloatArray, units: IntArray, num_ranks: int) -> IntArray:
    """Assign the rows of a mini-batch to processes, so that all have about the same cost.

    Args:
        costs: [R] cost of each row.
        units: [R] rows with the same number go to the same process.
        num_ranks: Number of processes.

    Returns:
        [R] process of each row; -1 for rows of a unit without a cost, which no process needs.

    Example:
        >>> costs = np.array([1.0, 7.0, 3.0, 6.0, 2.0])
        >>> balance(costs, np.arange(5), 2).tolist()  # 7, 2 and 1; 6 and 3
        [0, 0, 1, 1, 0]
        >>> balance(costs, np.array([0, 0, 1, 1, 1]), 2).tolist()
        [1, 1, 0, 0, 0]
    """
    _, unit = np.unique(units, return_inverse=True)
    sums = np.bincount(unit, costs)
    rank_of = np.full(len(sums), -1, np.int64)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for number in np.argsort(-sums, kind="stable").tolist():
        if sums[number] > 0:
            load, rank = loads[0]
            rank_of[number] = rank
            heapq.heapreplace(loads, (load + float(sums[number]), rank))
    return rank_of[unit]


def local_forests(accelerator: Accelerator, forests: Sequence[Forest]) -> list[Forest]:
    """Return this process's micro-batches, padded with fillers.

    Thus all processes forward the same number of micro-batches.
    """
    (most,) = over_processes(accelerator, [len(forests)], "max").tolist()
    return [*forests, *[FILLER] * (int(most) - len(forests))]
