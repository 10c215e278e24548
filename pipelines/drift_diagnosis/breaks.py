"""Find steps that do not continue the previous step, and the earlier step to compare each with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.drift_diagnosis.tokens import Steps
from pipelines.merging.prefix_tree import Ancestry, PrefixTree
from rollout_io.dataset.prefix_layout import common_prefix
from schemas.ragged import IntArray

Agents = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Break:
    """A step that does not continue the previous step; steps are identified by table rows.

    Attributes:
        row: Row of the step.
        origin: Row of the earlier step that this step is compared with.
        shared: Number of leading tokens that both steps share.
        resumes: True if `row` continues `origin`, which is not the previous step.
        fork: Row of an earlier step that this step repeats in full but does not continue, because
            another step already does; -1 if there is none.
        is_new_agent: True if no earlier step of the trajectory has the same agent; None if the
            agent is unknown.
    """

    row: int
    origin: int
    shared: int
    resumes: bool = False
    fork: int = -1
    is_new_agent: bool | None = None


def find_breaks(tree: PrefixTree, steps: Steps, continued: IntArray, agents: Agents) -> list[Break]:
    """Find the breaks of a table in row order; a trajectory's first step is never a break.

    A break that resumes no earlier step is compared with its parent in the prefix tree. If the
    parent belongs to another agent, the break is compared with the latest step of the same agent,
    unless it branches off a complete step. Without a parent, it is compared with the previous step.

    Args:
        tree: Prefix tree of the table.
        steps: Tokens of the table, read only where agents differ.
        continued: [N] the row that each row continues; -1 if none (see `continued_rows`).
        agents: [N] agent names; None where unknown.

    Example:
        Prompts [1, 2], [1, 2, 3, 9] and [1, 7], responses [3], [4] and [5], agents unknown:

        >>> find_breaks(tree, steps, np.array([-1, 0, -1]), [None] * 3)
        [Break(row=2, origin=1, shared=1, resumes=False, fork=-1, is_new_agent=None)]
    """
    rows = np.arange(len(tree.parent))
    follows = (rows != tree.start) & (tree.prompt > 0)
    broken = np.flatnonzero(follows & (continued != rows - 1))
    agents_seen, forks = _Agents(agents, tree.start), _forks(tree, broken)
    return [
        _break(row, tree, steps, int(continued[row]), agents_seen, fork)
        for row, fork in zip(broken.tolist(), forks.tolist(), strict=True)
    ]


class _Agents:
    """The agent of each row, and the latest earlier step of the same agent."""

    def __init__(self, agents: Agents, start: IntArray) -> None:
        self.names = agents
        self.previous: list[int] = []
        latest: dict[tuple[int, str | None], int] = {}
        for row, (name, first) in enumerate(zip(agents, start.tolist(), strict=True)):
            self.previous.append(latest.get((first, name), -1))
            latest[first, name] = row


def _break(
    row: int, tree: PrefixTree, steps: Steps, resumed: int, agents: _Agents, fork: int
) -> Break:
    origin, shared = int(tree.parent[row]), int(tree.shared[row])
    name, previous = agents.names[row], agents.previous[row]
    is_new = None if name is None else previous < 0
    if resumed >= 0:
        length = int(tree.prompt[resumed] + tree.response[resumed])
        return Break(row, resumed, length, resumes=True, is_new_agent=is_new)
    broken = Break(row, origin, shared, fork=fork, is_new_agent=is_new)
    if broken.fork >= 0:
        return broken
    if is_new is False and (origin < 0 or agents.names[origin] != name):
        common = common_prefix(steps.content(previous), steps.prompt(row))
        return replace(broken, origin=previous, shared=common)
    return broken if origin >= 0 else replace(broken, origin=row - 1)


def _forks(tree: PrefixTree, rows: IntArray) -> IntArray:
    """[K] For each row, find the last ancestor whose tokens the row repeats in full.

    The result is -1 if there is none. A step that shares only a part of its parent's response has
    changed that response and is not a branch.
    """
    origin, shared = tree.parent[rows], tree.shared[rows]
    length = tree.prompt + tree.response
    changes = (tree.prompt[origin] < shared) & (shared < length[origin])
    ancestor = Ancestry(tree).whole_within(np.maximum(origin, 0), shared)
    return np.where((origin < 0) | changes, -1, ancestor)
