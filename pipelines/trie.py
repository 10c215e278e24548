"""Tries of token sequences: which tokens of a sequence another one already holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_io.prefix import Tokens, common_prefix


class Node:
    """A run of tokens without a branch; `Node.root()` is an empty trie.

    A place in the trie is a node and a depth, of a token on the way from the root to the node's
    end; it stays right when nodes are split later.

    Attributes:
        begin: Tokens before the node's first one.
        tokens: Its tokens.
        above: The node before it; None for the root.
        below: The nodes after it, by their first token.
    """

    __slots__ = ("above", "begin", "below", "tokens")

    def __init__(self, begin: int, tokens: Tokens, above: Node | None) -> None:
        self.begin, self.tokens, self.above = begin, tokens, above
        self.below: dict[int, Node] = {}

    @classmethod
    def root(cls) -> Node:
        """An empty trie."""
        return cls(0, np.zeros(0, np.int32), None)

    def insert(self, depth: int, tokens: Tokens) -> tuple[Node, int]:
        """Add tokens after the first `depth` of this node's path, in time linear in their number.

        Args:
            depth: At most where this node ends.
            tokens: Of any length; those that are new are copied.

        Returns:
            The node that holds the last token, and how many leading ones were there already.

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
        """Cut this node at a depth inside it; it keeps what comes after. The part before."""
        assert self.above is not None
        at = depth - self.begin
        before = Node(self.begin, self.tokens[:at], self.above)
        self.above.below[int(self.tokens[0])] = before
        self.begin, self.tokens, self.above = depth, self.tokens[at:], before
        before.below[int(self.tokens[0])] = self
        return before


@dataclass(slots=True)
class Group:
    """What of a group is still to come: distinct tokens of its trajectories, and trajectories."""

    num_tokens: int = 0
    num_trajectories: int = 0

    def include(self, other: Group) -> None:
        """Count what is to come in another part of the dataset."""
        self.num_tokens += other.num_tokens
        self.num_trajectories += other.num_trajectories


class OpenTries:
    """The tries of the groups that fit into memory side by side, one pass over a dataset.

    A group is open from its first trajectory to its last one.

    Attributes:
        num_tokens: Tokens of the open groups.
        later: Groups for which there was no room when their first trajectory came.
    """

    def __init__(self, groups: dict[str, Group], max_tokens: int) -> None:
        self._groups, self._max_tokens = groups, max_tokens
        self._open: dict[str, Node] = {}
        self.num_tokens = 0
        self.later: dict[str, Group] = {}

    def next(self, instance: str) -> Node | None:
        """The trie for the next trajectory of a group; None: not in this pass."""
        group = self._groups.get(instance)
        if group is None or instance in self.later:
            return None
        if instance not in self._open:
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
