"""Which process forwards which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator

from schemas.ragged import IntArray
from trainer.forest import Forest

DEPTH_OF_DOUBLE_COST = 16_384
"""Depth at which a token's attention costs as much as all else: 6 x hidden_size in a usual layer."""
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
"""What a process forwards that has no micro-batch while others have one: a token without targets.

Every parameter takes part in its loss of 0, with a gradient of 0, as wrappers that reduce gradients
or gather parameters expect.
"""


def cost(forest: Forest) -> float:
    """Time of a forward, in tokens: what all tokens cost alike, and attention by their depth."""
    return forest.num_tokens + int(forest.position_ids.sum()) / DEPTH_OF_DOUBLE_COST


def deal(costs: Sequence[float], num_ranks: int) -> IntArray:
    """Deal micro-batches of similar cost to all ranks in each round, and alike totals over all.

    Args:
        costs: Of each micro-batch.
        num_ranks: Processes that share them.

    Returns:
        [rounds, num_ranks] the micro-batch of each rank in each round; -1: none is left for it.
        With one rank, all of them in their order.

    Example:
        >>> deal([1.0, 7.0, 3.0, 6.0, 2.0], 2).tolist()  # rank 0: 7, 2 and 1; rank 1: 6 and 3
        [[0, -1], [1, 3], [4, 2]]
    """
    cost = np.asarray(costs, dtype=np.float64)
    order = np.argsort(-cost, kind="stable")
    rounds = np.full((-(-len(cost) // num_ranks), num_ranks), -1, dtype=np.int64)
    load = np.zeros(num_ranks)
    for number, dealt in enumerate(rounds):
        picked = order[number * num_ranks :][:num_ranks]
        ranks = np.argsort(load, kind="stable")[: len(picked)]
        dealt[ranks] = picked
        load[ranks] += cost[picked]
    first = np.where(rounds < 0, len(cost), rounds).min(axis=1, initial=len(cost))
    return rounds[np.argsort(first)]


def own_forests(accelerator: Accelerator, forests: Sequence[Forest]) -> list[tuple[int, Forest]]:
    """The numbered share of this process, as many as any other's; -1 numbers a filler."""
    rounds = deal([cost(forest) for forest in forests], accelerator.num_processes)
    numbers = rounds[:, accelerator.process_index].tolist()
    return [(number, forests[number] if number >= 0 else FILLER) for number in numbers]
