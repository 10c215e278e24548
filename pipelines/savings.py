"""What training would forward, counted before any GPU is booked: tokens and FLOPs per layout.

    step                 every step by itself
    merge_consecutive    the sequences that `merge` makes by either rule: a row that continues
    merge_lineage        another costs only what it adds
    tree_per_trajectory  every distinct prefix of a trajectory once: a shared prefix is forwarded once
    tree_per_group       the same over all trajectories of an instance

Each layout says of each row how many leading tokens are forwarded already; the rest follows from
lengths. In the `prefix` layout these are known without reading a token, except where a prompt adds
nothing to its parent (two answers to one prompt) and between the trajectories of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.lineage import SAME_IN_A_SEQUENCE, continued_rows
from pipelines.segments import is_joined
from pipelines.tree import PrefixTree, prefix_tree
from pipelines.trie import Group, Node, OpenTries
from pipelines.unmerging import unmerge_table
from rollout_io.parallel import Workers
from rollout_io.prefix import decode_prefixes, encode_prefixes, is_encoded
from rollout_io.reader import PathLike, iter_tables, pieces, scan
from schemas.ragged import BoolArray, IntArray, Ragged

LAYOUTS = ("step", "merge_consecutive", "merge_lineage", "tree_per_trajectory", "tree_per_group")
MAX_OPEN_TOKENS = 1 << 26
_STEP_TOKENS = 1 << 22

_TOKENS = ("instance_id", "trajectory_id", "prompt_token_ids", "response_ids", "error")
_JOINS = (
    *(*_TOKENS, "step_index", "is_last_step", "segments"),
    *(*SAME_IN_A_SEQUENCE, "rollout_logprobs", "reward", "rewards"),
)


@dataclass(slots=True)
class Cost:
    """What forwarding a dataset in one layout takes.

    Attributes:
        num_sequences: Rows, merged rows or trees.
        num_tokens: Tokens forwarded.
        num_attended: Keys attended to, summed over these tokens: a token at depth d (from 1)
            attends to d, its own included.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    num_attended: int = 0

    def include(self, other: Cost) -> None:
        """Count what another has counted."""
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.num_attended += other.num_attended

    def add(self, begin: IntArray, end: IntArray) -> None:
        """Count rows of which the tokens begin..end are forwarded, those before being there.

        Args:
            begin: [N] leading tokens that another row forwards.
            end: [N] tokens of prompt + response.
        """
        self.num_sequences += int(((begin == 0) & (end > 0)).sum())
        self.num_tokens += int((end - begin).sum())
        self.num_attended += int((end * (end + 1) // 2 - begin * (begin + 1) // 2).sum())


def dataset_savings(
    path: PathLike, max_open_tokens: int = MAX_OPEN_TOKENS, workers: Workers | None = None
) -> dict[str, Cost]:
    """What a dataset costs to forward, by layout (see `LAYOUTS`); failed trajectories left out.

    Merged rows count as the steps they are made of, so merging a dataset changes no figure. Routing
    is not read: a trajectory of which only some rows have it merges into more sequences than are
    counted here.

    Time grows with the tokens that are distinct within a trajectory (of merged rows: with those of
    their steps), memory with a row group and `max_open_tokens`: a group's tokens are held from its
    first trajectory to its last one, and groups that lie so scattered that the open ones would hold
    more are counted in further passes over the dataset.

    Args:
        path: A dataset.
        max_open_tokens: Tokens of open groups in memory, or of one group that alone has more.
        workers: Who counts what lies inside a shard; groups span shards and are counted here.

    Example:
        Steps of one trajectory, prompts [1, 2] and [1, 2, 3, 9], responses [3] and [4]:

        >>> {name: cost.num_tokens for name, cost in dataset_savings("ds").items()}
        {'step': 8, 'merge_consecutive': 5, 'merge_lineage': 5,
         'tree_per_trajectory': 5, 'tree_per_group': 5}
    """
    costs = {name: Cost() for name in LAYOUTS}
    groups: dict[str, Group] = {}
    for part_costs, part_groups in (workers or Workers()).map_in_order(_count, pieces(path)):
        for name, cost in part_costs.items():
            costs[name].include(cost)
        for instance, group in part_groups.items():
            groups.setdefault(instance, Group()).include(group)
    while groups:
        groups = _count_in_groups(path, groups, costs["tree_per_group"], max_open_tokens)
    return costs


def _count(path: PathLike) -> tuple[dict[str, Cost], dict[str, Group]]:
    """What needs no look beyond a trajectory, and the sizes of the groups."""
    costs: dict[str, Cost] = {}
    groups: dict[str, Group] = {}
    for table in map(_steps, _pieces(path, _JOINS)):
        tree = prefix_tree(table)
        end = tree.prompt + tree.response
        begins = _begins(table, tree)
        for name, begin in begins.items():
            costs.setdefault(name, Cost()).add(begin, end)
        _count_groups(groups, table, tree, end - begins["tree_per_trajectory"])
    return costs, groups


def _pieces(path: PathLike, names: Iterable[str]) -> Iterator[pa.Table]:
    """Whole trajectories that did not fail, with the prefix columns."""
    schema = scan(path).collect_schema()
    for table in iter_tables(path, [n for n in dict.fromkeys(names) if n in schema], decode=False):
        kept = table.filter(pa.array(~_failed(table))) if "error" in table.column_names else table
        if kept.num_rows:
            yield kept if is_encoded(kept) else encode_prefixes(kept)


def _failed(table: pa.Table) -> BoolArray:
    """[N] whether the row is of a trajectory with an error on any row."""
    ids = table.column("trajectory_id")
    with_error = ids.filter(table.column("error").is_valid()).unique()
    return np.asarray(pc.is_in(ids, value_set=with_error))


def _steps(table: pa.Table) -> pa.Table:
    """Merged rows as steps, some trajectories at a time, for their prompts are long."""
    if not is_joined(table).any():
        return table
    tree = prefix_tree(table)
    num_steps = np.asarray(pc.fill_null(pc.list_value_length(table.column("segments")), 1))
    num_tokens = np.cumsum((tree.prompt + tree.response) * num_steps)[tree.starts]
    cuts = tree.starts[np.append(True, np.diff(num_tokens // _STEP_TOKENS) > 0)]
    bounds = pairwise([*cuts.tolist(), table.num_rows])
    parts = (decode_prefixes(table.slice(start, end - start)) for start, end in bounds)
    return pa.concat_tables(encode_prefixes(unmerge_table(part)) for part in parts)


def _begins(table: pa.Table, tree: PrefixTree) -> dict[str, IntArray]:
    """[N] leading tokens of each row that another row forwards, by layout."""
    end = tree.prompt + tree.response
    begins = {"step": np.zeros_like(end)}
    for rule in ("consecutive", "lineage"):
        continued = continued_rows(table, rule, tree)
        begins[f"merge_{rule}"] = np.where(continued < 0, 0, end[continued])
    return begins | {"tree_per_trajectory": _known_in_trajectory(table, tree)}


def _known_in_trajectory(table: pa.Table, tree: PrefixTree) -> IntArray:
    """[N] leading tokens that earlier rows of the trajectory hold.

    What a prompt adds to its parent is new, and what follows it then too. Only where it adds
    nothing the response is compared with those of other rows.
    """
    known = tree.shared.copy()
    adds_nothing = (tree.parent >= 0) & (tree.prompt == tree.shared)
    if adds_nothing.any():
        tokens = _Suffixes(table)
        for start, end in _trajectories(tree):
            if adds_nothing[start:end].any():
                known[start:end] = tokens.insert(Node.root(), tree, start, end)
    return known


class _Suffixes:
    """What each row adds to its parent: the rest of its prompt, and its response."""

    def __init__(self, table: pa.Table) -> None:
        self._prompt = Ragged.from_arrow(table.column("prompt_suffix_ids"))
        self._response = Ragged.from_arrow(table.column("response_ids"))

    def insert(self, root: Node, tree: PrefixTree, start: int, end: int) -> list[int]:
        """Add a trajectory to a trie; how many leading tokens of each row it held before."""
        nodes: list[Node] = []
        known: list[int] = []
        for row in range(start, end):
            parent, depth = int(tree.parent[row]), int(tree.shared[row])
            tokens = np.concatenate([self._prompt.row(row), self._response.row(row)])
            at = root if parent < 0 else nodes[parent - start]
            node, there = at.insert(depth, tokens)
            nodes.append(node)
            known.append(depth + there)
        return known


def _trajectories(tree: PrefixTree) -> Iterator[tuple[int, int]]:
    return pairwise([*tree.starts.tolist(), len(tree.parent)])


def _instances(table: pa.Table, tree: PrefixTree) -> list[str]:
    """[T] the instance of each trajectory."""
    names: list[str] = table.column("instance_id").take(pa.array(tree.starts)).to_pylist()
    return names


def _count_groups(
    groups: dict[str, Group], table: pa.Table, tree: PrefixTree, new: IntArray
) -> None:
    sizes = np.add.reduceat(new, tree.starts).tolist()
    for instance, size in zip(_instances(table, tree), sizes, strict=True):
        group = groups.setdefault(instance, Group())
        group.num_tokens += size
        group.num_trajectories += 1


def _count_in_groups(
    path: PathLike, groups: dict[str, Group], cost: Cost, max_open_tokens: int
) -> dict[str, Group]:
    """Count the groups that fit into memory side by side; those that are left."""
    tries = OpenTries(groups, max_open_tokens)
    for table in _pieces(path, _TOKENS):
        tree, tokens = prefix_tree(table), _Suffixes(table)
        end = tree.prompt + tree.response
        begin = end.copy()
        trajectories = zip(_instances(table, tree), _trajectories(tree), strict=True)
        for instance, (start, stop) in trajectories:
            root = tries.next(instance)
            if root is not None:
                begin[start:stop] = tokens.insert(root, tree, start, stop)
        cost.add(begin, end)
    return tries.later
