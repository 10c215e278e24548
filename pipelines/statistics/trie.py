"""Tries of token sequences: find the leading tokens that a sequence shares with earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_io.dataset.prefix_layout import Tokens, common_prefix


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
