"""Which steps do not continue the step before them, and which earlier step they are told from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.diagnosis.tokens import Steps
from pipelines.tree import PrefixTree
from rollout_io.prefix import common_prefix
from schemas.ragged import IntArray

Agents = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Break:
    """A step that does not continue the step before it; rows are those of the table.

    Attributes:
        row: The step.
        origin: The earlier step it is told from.
        shared: Leading tokens that both hold.
        resumes: It continues `origin`, which is not the step before it.
        fork: The earlier step whose tokens it repeats whole though another step continues that
            one; -1: none.
        is_new_agent: No earlier step of the trajectory is its agent's; None: the agent is unknown.
    """

    row: int
    origin: int
    shared: int
    resumes: bool = False
    fork: int = -1
    is_new_agent: bool | None = None


def find_breaks(tree: PrefixTree, steps: Steps, continued: IntArray, agents: Agents) -> list[Break]:
    """The breaks of a table in row order; the first step of a trajectory is none.

    A break that resumes nothing is told from the step's parent in the prefix tree. Where that is
    another agent's, it is told from the latest step of its own agent, unless it branches off a
    whole step; where there is none, from the step before.

    Args:
        tree: The table's prefix tree.
        steps: Its tokens, read only where the agents differ.
        continued: [N] the row that each row continues, -1: none (`continued_rows`).
        agents: N names; None: unknown.

    Example:
        Prompts [1, 2], [1, 2, 3, 9] and [1, 7], responses [3], [4] and [5], agents unknown:

        >>> find_breaks(tree, steps, np.array([-1, 0, -1]), [None] * 3)
        [Break(row=2, origin=1, shared=1, resumes=False, fork=-1, is_new_agent=None)]
    """
    rows = np.arange(len(tree.parent))
    follows = (rows != tree.start) & (tree.prompt > 0)
    broken = np.flatnonzero(follows & (continued != rows - 1))
    known = _Agents(agents, tree.start)
    return [_break(int(row), tree, steps, int(continued[row]), known) for row in broken]


class _Agents:
    """The latest earlier step of each row's agent."""

    def __init__(self, agents: Agents, start: IntArray) -> None:
        self.names = agents
        self.previous: list[int] = []
        latest: dict[tuple[int, str | None], int] = {}
        for row, (name, first) in enumerate(zip(agents, start.tolist(), strict=True)):
            self.previous.append(latest.get((first, name), -1))
            latest[first, name] = row


def _break(row: int, tree: PrefixTree, steps: Steps, resumed: int, agents: _Agents) -> Break:
    origin, shared = int(tree.parent[row]), int(tree.shared[row])
    name, previous = agents.names[row], agents.previous[row]
    is_new = None if name is None else previous < 0
    if resumed >= 0:
        length = int(tree.prompt[resumed] + tree.response[resumed])
        return Break(row, resumed, length, resumes=True, is_new_agent=is_new)
    found = Break(row, origin, shared, fork=_fork(tree, origin, shared), is_new_agent=is_new)
    if found.fork >= 0:
        return found
    if is_new is False and (origin < 0 or agents.names[origin] != name):
        common = common_prefix(steps.content(previous), steps.prompt(row))
        return replace(found, origin=previous, shared=common)
    return found if origin >= 0 else replace(found, origin=row - 1)


def _fork(tree: PrefixTree, origin: int, shared: int) -> int:
    """The last step of the chain to `origin` whose tokens are all among the shared ones.

    A step that goes on into the response of `origin` has changed it: it is no branch beside it.
    """
    length = tree.prompt + tree.response
    if origin < 0 or tree.prompt[origin] < shared < length[origin]:
        return -1
    while origin >= 0 and shared < length[origin]:
        shared = min(shared, int(tree.shared[origin]))
        origin = int(tree.parent[origin])
    return origin
