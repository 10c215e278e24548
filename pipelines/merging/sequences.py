"""Assignment of steps to sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelines.merging.prefix_tree import PrefixTree, followed
from schemas.ragged import BoolArray, IntArray, Ragged


@dataclass(frozen=True, slots=True)
class Sequences:
    """N steps grouped into M sequences, in the order of their last steps.

    Attributes:
        order: [N] the steps, sequence by sequence.
        first: [M] position in `order` of each sequence's first step.
        head: [M] first step of each sequence.
        last: [M] last step of each sequence.
        of: [N] sequence of each step.
        start: [N] start of the step's response in the response of its sequence.
        known: [N] number of leading tokens of the step's prompt that earlier steps of its sequence
            contain.
    """

    order: IntArray
    first: IntArray
    head: IntArray
    last: IntArray
    of: IntArray
    start: IntArray
    known: IntArray

    @classmethod
    def of_steps(cls, tree: PrefixTree, continued: IntArray) -> Sequences:
        """Build sequences from the row that each row continues (see `continued_rows`).

        Example:
            >>> Sequences.of_steps(tree, np.array([-1, -1, 0])).order.tolist()
            [1, 0, 2]
        """
        order, first = _ordered(continued)
        count = np.diff(np.append(first, len(order)))
        head, last = order[first], order[first + count - 1]
        of = np.empty(len(order), np.int64)
        of[order] = np.repeat(np.arange(len(first)), count)
        length = tree.prompt + tree.response
        # A step knows all of the step that it continues, which in turn begins with all that it continues.
        num_known = np.where(continued < 0, 0, length[continued])
        # A sequence's prompt is that of its first step; all after it is response, so a step's response starts
        # where its prompt is longer than the first one.
        start = tree.prompt - tree.prompt[head][of]
        return cls(order, first, head, last, of, start, num_known)

    @property
    def count(self) -> IntArray:
        """[M] Number of steps in each sequence."""
        return np.diff(np.append(self.first, len(self.order)))

    def joined(self, steps: Ragged) -> Ragged:
        """[M] Concatenate the rows of each sequence's steps; null if its first step's row is null.

        Args:
            steps: [N] a row for each step.
        """
        if (self.order[1:] < self.order[:-1]).any():
            steps = steps.take(self.order)
        ends = np.append(self.first, len(self.order))
        return Ragged(steps.values, steps.offsets[ends], steps.valid[self.first])

    def interleaved(self, tree: PrefixTree) -> BoolArray:
        """[M] True for every sequence of a trajectory whose sequences are interleaved."""
        # Steps that moved are counted at the first row of their trajectory: one that moved marks them all.
        moved = np.zeros(len(self.order), np.bool_)
        moved[tree.start[self.order != np.arange(len(self.order))]] = True
        return moved[tree.start[self.head]]


def _ordered(continued: IntArray) -> tuple[IntArray, IntArray]:
    rows = np.arange(len(continued))
    # The last row of a chain (rows ascend, so the last one written wins) is where its sequence stands
    # among the sequences; the sort is stable, so its steps stay in order.
    root = followed(np.where(continued < 0, rows, continued))
    last = np.zeros(len(rows), np.int64)
    last[root] = rows
    order = np.argsort(last[root], kind="stable")
    starts = np.append(True, np.diff(last[root][order]) != 0)[: len(rows)]
    return order, np.flatnonzero(starts)
