"""Balance micro-batches over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from accelerate import Accelerator

from schemas.ragged import IntArray
from trainer.batches.forest import Forest

MicroBatches = Sequence[tuple[int, Forest]]
"""Micro-batches with their numbers, as `own_forests` returns them."""
Watch = Callable[[MicroBatches], Iterable[tuple[int, Forest]]]
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


def cost(forest: Forest) -> float:
    """Estimate a forward pass's time, in tokens: linear cost, plus attention growing with depth."""
    return forest.num_tokens + int(forest.position_ids.sum()) / DEPTH_OF_DOUBLE_COST


def balance(costs: Sequence[float], num_ranks: int) -> IntArray:
    """Assign micro-batches to ranks, with similar costs in each round and similar totals per rank.

    Args:
        costs: Cost of each micro-batch.
        num_ranks: Number of processes.

    Returns:
        [rounds, num_ranks] micro-batch of each rank in each round; -1 if none is left. A single
        rank gets all micro-batches in order.

    Example:
        >>> balance([1.0, 7.0, 3.0, 6.0, 2.0], 2).tolist()  # rank 0: 7, 2 and 1; rank 1: 6 and 3
        [[0, -1], [1, 3], [4, 2]]
    """
    cost = np.asarray(costs, dtype=np.float64)
    order = np.argsort(-cost, kind="stable")
    rounds = np.full((-(-len(cost) // num_ranks), num_ranks), -1, dtype=np.int64)
    load = np.zeros(num_ranks)
    # Each round has neighbours in the order of costs, so that no rank waits long for another; the
    # rank with the least work so far gets the largest.
    for number, dealt in enumerate(rounds):
        picked = order[number * num_ranks :][:num_ranks]
        ranks = np.argsort(load, kind="stable")[: len(picked)]
        dealt[ranks] = picked
        load[ranks] += cost[picked]
    # Rounds run in the order of their first micro-batch; a single rank thus keeps the order.
    first = np.where(rounds < 0, len(cost), rounds).min(axis=1, initial=len(cost))
    return rounds[np.argsort(first)]


def own_forests(accelerator: Accelerator, forests: Sequence[Forest]) -> list[tuple[int, Forest]]:
    """Return this process's micro-batches with their numbers, padded with fillers (number -1).

    Thus all processes forward the same number of micro-batches.
    """
    rounds = balance([cost(forest) for forest in forests], accelerator.num_processes)
    numbers = rounds[:, accelerator.process_index].tolist()
    return [(number, forests[number] if number >= 0 else FILLER) for number in numbers]
