"""Count the tokens that training would forward in each layout, without a GPU.

    step                 every step separately
    merge_consecutive    the sequences that `merge` builds with rule `consecutive`
    merge_lineage        the sequences that `merge` builds with rule `lineage`
    tree_per_trajectory  every distinct prefix of a trajectory once
    tree_per_group       every distinct prefix of an instance's trajectories once

A layout determines how many leading tokens of each row are forwarded with another row; the rest
follows from lengths. In the `prefix` layout, tokens are read only if a prompt adds nothing to
its parent (two responses to one prompt), and to compare the trajectories of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.merging.lineage import (
    SAME_IN_A_SEQUENCE,
    SAME_NULLNESS,
    PrefixTree,
    continued_rows,
    prefix_tree,
)
from pipelines.merging.merge import unmerge_table
from pipelines.merging.segments import is_joined
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.prefix_layout import (
    Tokens,
    common_prefix,
    decode_prefixes,
    encode_prefixes,
    is_encoded,
)
from rollout_io.dataset.reader import iter_tables, pieces, scan
from rollout_io.dataset.storage import PathLike
from schemas.columns import PICTURES
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.pictures import identity_ids, pictures_of
from schemas.ragged import BoolArray, IntArray, Ragged

LAYOUTS = ("step", "merge_consecutive", "merge_lineage", "tree_per_trajectory", "tree_per_group")
# 2**26 int32 tokens are 256 MiB. _STEP_TOKENS bounds the prompts decoded at a time to 16 MiB.
MAX_OPEN_TOKENS = 1 << 26
_STEP_TOKENS = 1 << 22

_TOKENS = (
    *("instance_id", "trajectory_id", "prompt_token_ids", "response_ids", "error"),
    PICTURES,
)
_JOINS = (
    *(*_TOKENS, "step_index", "is_last_step", "segments"),
    *(*SAME_IN_A_SEQUENCE, *(n for n in SAME_NULLNESS if n != "rollout_expert_indices"), "rewards"),
)


@dataclass(slots=True)
class Cost:
    """Cost of forwarding a dataset in one layout.

    Attributes:
        num_sequences: Number of rows, merged rows or trees.
        num_tokens: Number of tokens forwarded.
        num_attended: Number of attended keys, summed over these tokens: a token at depth d (from 1)
            attends to d keys, itself included.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    num_attended: int = 0

    def include(self, other: Cost) -> None:
        """Add the counts of another cost."""
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.num_attended += other.num_attended

    def add(self, begin: IntArray, end: IntArray) -> None:
        """Add rows, counting only their tokens from `begin` to `end`.

        Args:
            begin: [N] number of leading tokens of each row that are forwarded with another row.
            end: [N] number of tokens in each row's prompt + response.
        """
        self.num_sequences += int(((begin == 0) & (end > 0)).sum())
        self.num_tokens += int((end - begin).sum())
        self.num_attended += int((end * (end + 1) // 2 - begin * (begin + 1) // 2).sum())


def dataset_savings(
    path: PathLike, max_open_tokens: int = MAX_OPEN_TOKENS, workers: Workers | None = None
) -> dict[str, Cost]:
    """Compute the cost of a dataset in each of `LAYOUTS`; failed trajectories are excluded.

    Merged rows are counted as the steps that they were merged from, so merging a dataset changes no
    result. Routing is not read: a trajectory with routing in only some rows merges into more
    sequences than are counted here.

    Time is linear in the distinct tokens of each trajectory (for merged rows, in all tokens of the
    steps); memory is bounded by a row group and `max_open_tokens`. A group is open, with its tokens
    in memory, from its first trajectory to its last. If groups are so scattered that the open ones
    would exceed the bound, the rest are counted in further passes over the dataset.

    Args:
        path: A dataset.
        max_open_tokens: Maximum number of tokens in open groups; a group that is larger is
            counted by itself.
        workers: Processes that count within shards in parallel. Groups can span shards, so they are
            counted in this process.

    Example:
        Steps of one trajectory, prompts [1, 2] and [1, 2, 3, 9], responses [3] and [4]:

        >>> {name: cost.num_tokens for name, cost in dataset_savings("ds").items()}
        {'step': 8, 'merge_consecutive': 5, 'merge_lineage': 5,
         'tree_per_trajectory': 5, 'tree_per_group': 5}
    """
    costs = {name: Cost() for name in LAYOUTS}
    groups: dict[str, Group] = {}
    workers = workers or Workers()
    parts = [path] if workers == Workers() else pieces(path)  # each piece has a fixed cost
    for part_costs, part_groups in workers.map_in_order(_count, parts):
        for name, cost in part_costs.items():
            costs[name].include(cost)
        for instance, group in part_groups.items():
            groups.setdefault(instance, Group()).include(group)
    while groups:
        groups = _count_in_groups(path, groups, costs["tree_per_group"], max_open_tokens)
    return costs


def _count(path: PathLike) -> tuple[dict[str, Cost], dict[str, Group]]:
    """Compute the cost of every layout except `tree_per_group`, and the sizes of the groups."""
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
    """Yield complete trajectories that did not fail, with prefix columns."""
    schema = scan(path).collect_schema()
    for table in iter_tables(path, [n for n in dict.fromkeys(names) if n in schema], decode=False):
        kept = table.filter(to_arrow(~_failed(table))) if "error" in table.column_names else table
        if kept.num_rows:
            yield kept if is_encoded(kept) else encode_prefixes(kept)


def _failed(table: pa.Table) -> BoolArray:
    """[N] True if any row of the row's trajectory has an error."""
    ids = table.column("trajectory_id")
    with_error = ids.filter(table.column("error").is_valid()).unique()
    return to_numpy(pc.is_in(ids, value_set=with_error))


def _steps(table: pa.Table) -> pa.Table:
    """Split merged rows into steps, a few trajectories at a time because prompts are long."""
    if not is_joined(table).any():
        return table
    tree = prefix_tree(table)
    num_steps = filled(pc.list_value_length(table.column("segments")), 1)
    num_tokens = np.cumsum((tree.prompt + tree.response) * num_steps)[tree.starts]
    cuts = tree.starts[np.append(True, np.diff(num_tokens // _STEP_TOKENS) > 0)]
    bounds = pairwise([*cuts.tolist(), table.num_rows])
    parts = (decode_prefixes(table.slice(start, end - start)) for start, end in bounds)
    return pa.concat_tables(encode_prefixes(unmerge_table(part)) for part in parts)


def _begins(table: pa.Table, tree: PrefixTree) -> dict[str, IntArray]:
    """[N] For each layout and row, count the leading tokens that are forwarded with another row."""
    end = tree.prompt + tree.response
    begins = {"step": np.zeros_like(end)}
    for rule in ("consecutive", "lineage"):
        continued = continued_rows(table, rule, tree)
        begins[f"merge_{rule}"] = np.where(continued < 0, 0, end[continued])
    return begins | {"tree_per_trajectory": _known_in_trajectory(table, tree)}


def _known_in_trajectory(table: pa.Table, tree: PrefixTree) -> IntArray:
    """[N] Count each row's leading tokens that earlier rows of its trajectory already contain.

    Tokens that a prompt adds to its parent are new, as are all tokens after them. A response
    has to be compared with other responses only if its prompt adds no tokens.
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
    """Tokens that each row adds to its parent: the rest of its prompt, and its response."""

    def __init__(self, table: pa.Table) -> None:
        suffix = Ragged.from_arrow(table.column("prompt_suffix_ids"))
        response = Ragged.from_arrow(table.column("response_ids"))
        shared = to_numpy(table.column("prefix_length")).astype(np.int64)
        pictures = pictures_of(table)
        self._prompt = identity_ids(suffix, shared, pictures)
        self._response = identity_ids(response, shared + suffix.lengths, pictures)

    def insert(self, root: Node, tree: PrefixTree, start: int, end: int) -> list[int]:
        """Insert a trajectory; return how many leading tokens of each row the trie already had."""
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
    """[T] Return the instance_id of each trajectory."""
    names: list[str] = table.column("instance_id").take(to_arrow(tree.starts)).to_pylist()
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
    """Count as many groups as fit into memory together; return the rest for a later pass."""
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


class Node:
    """A run of tokens without a branch; `Node.root()` creates an empty trie.

    A position in the trie is given by a node, and the depth of a token on the path from the root to
    the node's end. The position remains valid when nodes are split later.

    Attributes:
        begin: Number of tokens before the node's first token.
        tokens: The node's tokens.
        above: Parent node; None for the root.
        below: Child nodes, by first token.
    """

    __slots__ = ("above", "begin", "below", "tokens")

    def __init__(self, begin: int, tokens: Tokens, above: Node | None) -> None:
        self.begin, self.tokens, self.above = begin, tokens, above
        self.below: dict[int, Node] = {}

    @classmethod
    def root(cls) -> Node:
        """Create an empty trie."""
        return cls(0, np.zeros(0, np.int32), None)

    def insert(self, depth: int, tokens: Tokens) -> tuple[Node, int]:
        """Add tokens after the first `depth` tokens of this node's path, in linear time.

        Args:
            depth: Number of tokens on the path; at most the depth of this node's end.
            tokens: Tokens to add; new ones are copied.

        Returns:
            The node that contains the last token, and how many leading tokens the trie already had.

        Example:
            >>> root = Node.root()
            >>> node, _ = root.insert(0, np.array([1, 2, 3], np.int32))
            >>> node.insert(2, np.array([3, 4], np.int32))[1]
            1
        """
        node = self._at(depth)
        known = 0
        while True:
            rest = node.tokens[depth + known - node.begin :]
            common = common_prefix(rest, tokens[known:])
            known += common
            if known == len(tokens):
                return node, known
            if common < len(rest):
                node = node._split(depth + known)
            first = int(tokens[known])
            if first not in node.below:
                node.below[first] = Node(depth + known, tokens[known:].copy(), node)
                return node.below[first], known
            node = node.below[first]

    def _at(self, depth: int) -> Node:
        node = self
        while node.above is not None and depth <= node.begin:
            node = node.above
        return node

    def _split(self, depth: int) -> Node:
        """Cut this node at a depth inside it; keep the end, and return a new node for the start."""
        assert self.above is not None
        at = depth - self.begin
        before = Node(self.begin, self.tokens[:at], self.above)
        self.above.below[int(self.tokens[0])] = before
        self.begin, self.tokens, self.above = depth, self.tokens[at:], before
        before.below[int(self.tokens[0])] = self
        return before


@dataclass(slots=True)
class Group:
    """Number of distinct tokens in a group, and number of its trajectories still to be read."""

    num_tokens: int = 0
    num_trajectories: int = 0

    def include(self, other: Group) -> None:
        """Add the same group's counts from another part of the dataset."""
        self.num_tokens += other.num_tokens
        self.num_trajectories += other.num_trajectories


class OpenTries:
    """Tries of the groups that fit into memory together during one pass over a dataset.

    A group is open from its first trajectory to its last.

    Attributes:
        num_tokens: Number of tokens in the open groups.
        later: Groups that did not fit when their first trajectory was read.
    """

    def __init__(self, groups: dict[str, Group], max_tokens: int) -> None:
        self._groups, self._max_tokens = groups, max_tokens
        self._open: dict[str, Node] = {}
        self.num_tokens = 0
        self.later: dict[str, Group] = {}

    def next(self, instance: str) -> Node | None:
        """Return the trie for a group's next trajectory; None if this pass excludes the group."""
        group = self._groups.get(instance)
        if group is None or instance in self.later:
            return None
        if instance not in self._open:
            # A group that exceeds the bound on its own is opened when no other group is open,
            # because it would never fit otherwise.
            if self.num_tokens and self.num_tokens + group.num_tokens > self._max_tokens:
                self.later[instance] = group
                return None
            self._open[instance] = Node.root()
            self.num_tokens += group.num_tokens
        root = self._open[instance]
        group.num_trajectories -= 1
        if group.num_trajectories == 0:
            del self._open[instance]
            self.num_tokens -= group.num_tokens
        return root
