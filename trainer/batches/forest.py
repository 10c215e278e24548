"""A micro-batch: packed tokens whose attention pattern is a forest, and how rows are packed into it.

A forest is a token array in depth-first order. `position_ids` is each token's depth in its tree,
and `subtree_end` the end of the range of tokens below it: position q may attend to k iff
`k <= q < subtree_end[k]`. Independent rows are packed as chains side by side; rows that share
prefixes form branching trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError
from schemas.ragged import BoolArray, IntArray, Ragged, ranges
from trainer.batches.overlap import to_device
from trainer.batches.sampling_support import TargetSets, TeacherSets, target_sets
from trainer.distributed.processes import over_processes
from trainer.models.router_replay import Routes

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """One micro-batch: N tokens to forward, and M targets whose log-probabilities are computed.

    Attributes:
        token_ids: [N] int64.
        position_ids: [N] int64 depth of each token in its tree.
        subtree_end: [N] int64 end (exclusive) of the tokens that may attend to each token.
        target_parent: [M] int64 position whose hidden state predicts each target.
        target_token: [M] int64 id of the predicted token.
        target_slot: [M] int64 index of each target in the batch's concatenated response tokens, for
            gathering values per target.
        routes: [N, layers, topk] int16 experts of each token, -1 where the model's own router
            decides; None: the router decides for all tokens.
        sets: Sets of ids over which the targets are normalised; None: the entire vocabulary.
        teacher: A teacher's most likely ids of the targets; None: no divergence from a teacher.
        chains: Lengths of the chains; None on the CPU, where counting them costs nothing.
        pictures: Pictures that the tokens show; None: there are none.
    """

    token_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    target_parent: Tensor
    target_token: Tensor
    target_slot: Tensor
    routes: Tensor | None = None
    sets: TargetSets | None = None
    teacher: TeacherSets | None = None
    chains: ChainLayout | None = None
    pictures: Pictures | None = None

    @property
    def num_tokens(self) -> int:
        """N, the number of forwarded tokens."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """M, the number of targets."""
        return len(self.target_slot)

    def to(self, device: torch.device) -> Forest:
        """Copy the forest to another device, with one copy for all [N] and [M] arrays.

        A GPU would wait for the lengths of its chains, so they are counted before the copy.
        """
        if device == self.token_ids.device:
            return self
        chains = self.chains or ChainLayout.of(self.subtree_end)
        ends = [] if chains.ends is None else [chains.ends]
        arrays = [getattr(self, name) for name in ARRAYS] + ends
        split: Any = to_device(torch.cat(arrays), device).split
        moved = list(split([len(a) for a in arrays]))
        if ends:
            chains = dataclasses.replace(chains, ends=moved.pop())
        return Forest(
            **dict(zip(ARRAYS, moved, strict=True)),
            routes=None if self.routes is None else to_device(self.routes, device),
            sets=self.sets and self.sets.to(device),
            teacher=self.teacher and self.teacher.to(device),
            chains=chains,
            pictures=self.pictures and self.pictures.to(device),
        )


ARRAYS = (
    "token_ids",
    "position_ids",
    "subtree_end",
    "target_parent",
    "target_token",
    "target_slot",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """D distinct pictures of a micro-batch, and the P tokens whose embeddings their features replace.

    Attributes:
        node: [P] int64 ascending position of each of these tokens in the forest.
        feature: [P] int64 index of its feature among those of the D pictures, one after another.
        ends: [D + 1] int64 cumulative numbers of features of the D pictures, from 0.
        load: Reads the pictures, and returns what the image processor makes of each: D mappings from
            names to tensors.
    """

    node: Tensor
    feature: Tensor
    ends: Tensor
    load: Callable[[], Sequence[Mapping[str, Tensor]]]

    def to(self, device: torch.device) -> Pictures:
        """Copy the indices to another device."""
        node, feature, ends = (to_device(a, device) for a in (self.node, self.feature, self.ends))
        return Pictures(node=node, feature=feature, ends=ends, load=self.load)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """Micro-batches of one optimizer step.

    Attributes:
        forests: Micro-batches, which together contain every target once; all targets of a row are
            in the same micro-batch.
        num_distinct_tokens: Tokens in all trees before trees are cut; None if rows are chains.
        metrics: Metrics that are known before the step: at first those of the packing.
    """

    forests: list[Forest]
    num_distinct_tokens: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayout:
    """Lengths of the trees of a forest, if none of them branches.

    Attributes:
        lengths: Number of tokens of each chain; None if a tree branches.
        ends: [C + 1] int64 cumulative lengths, from 0; None if a tree branches.
        longest: Number of tokens of the longest chain; 0 if a tree branches.
    """

    lengths: list[int] | None = None
    ends: Tensor | None = None
    longest: int = 0

    @staticmethod
    def of(subtree_end: Tensor) -> ChainLayout:
        """Count the tokens of each chain.

        Example:
            >>> ChainLayout.of(torch.tensor([2, 2, 3])).lengths
            [2, 1]
            >>> ChainLayout.of(torch.tensor([3, 2, 3]))  # 0 has children 1 and 2
            ChainLayout(lengths=None, ends=None, longest=0)
        """
        runs: Any = torch.unique_consecutive
        # All tokens of a chain end with it. In a tree that branches, a run of equal ends is shorter
        # than the subtree, so the runs' lengths do not add up to the ends.
        ends, lengths = runs(subtree_end, return_counts=True)
        if not torch.equal(lengths.cumsum(0), ends):
            return ChainLayout()
        return ChainLayout(
            lengths=lengths.tolist(),
            ends=torch.cat([ends.new_zeros(1), ends]),
            longest=int(lengths.max()),
        )


def attention_mask(subtree_end: Tensor, reach: Tensor | None = None) -> Tensor:
    """Return [1, 1, N, N] bool, true where query q (rows) may attend to key k (columns).

    `reach` ([N] int64) is the end of the tokens that each query sees: that of its picture, if the
    tokens of a picture see each other; None: each sees the tokens up to itself.

    Example:
        >>> attention_mask(torch.tensor([3, 2, 3]))[0, 0].int().tolist()  # 0 has children 1 and 2
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    position = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = position[:, None], position[None, :]
    within = key <= query if reach is None else key < reach[:, None]
    return (within & (query < subtree_end[None, :]))[None, None]


def chain_lengths(prompts: Ragged, responses: Ragged, is_target: BoolArray) -> IntArray:
    """Count the tokens to forward in each row ([R]): all tokens before its last target.

    Later tokens predict no target. A row with p prompt tokens and its last target at response
    position t thus has p + t tokens to forward, and a row without targets has none.
    """
    slot = np.flatnonzero(is_target)
    row = responses.row_of(slot)
    last_target = np.full(len(responses.lengths), -1, dtype=np.int64)
    last_target[row] = slot - responses.offsets[row]
    return np.where(last_target < 0, 0, prompts.lengths + last_target)


def chain_forest(
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    rows: IntArray,
    routes: Routes | None = None,
) -> Forest:
    """Pack rows side by side, each as a chain.

    Args:
        prompts: Prompt tokens of R rows; not empty in rows with targets.
        responses: Response tokens of the same R rows, T in total.
        is_target: [T] bool, true for response tokens that are targets.
        rows: Rows to pack, in this order.
        routes: Routes of the R rows, or None.

    Example:
        One row with prompt [7, 8] and response [1, 2, 3], where 1 and 2 are targets:

        >>> prompt = Ragged(np.array([7, 8]), np.array([0, 2]), np.array([True]))
        >>> response = Ragged(np.array([1, 2, 3]), np.array([0, 3]), np.array([True]))
        >>> mask = np.array([True, True, False])
        >>> forest = chain_forest(prompt, response, mask, np.array([0]))
        >>> forest.token_ids.tolist(), forest.target_parent.tolist(), forest.target_slot.tolist()
        ([7, 8, 1], [1, 2], [0, 1])
    """
    num_prompt, num_response = _lengths(prompts, rows), _lengths(responses, rows)
    first = responses.offsets[rows]
    slot = ranges(first, num_response)
    slot_tree = np.repeat(np.arange(len(rows)), num_response)
    slot, slot_tree = slot[is_target[slot]], slot_tree[is_target[slot]]
    offset = slot - first[slot_tree]
    # Assignment in ascending order keeps the last target of each row; -1 stays where there is none.
    last_target = np.full(len(rows), -1, dtype=np.int64)
    last_target[slot_tree] = offset
    lengths = np.where(last_target < 0, 0, num_prompt + last_target)
    starts = np.cumsum(lengths) - lengths
    tree = np.repeat(np.arange(len(rows)), lengths)
    depth = np.arange(len(tree)) - starts[tree]
    # The token before a target predicts it; for the first response token, that is the prompt's last.
    parent = starts[slot_tree] + num_prompt[slot_tree] + offset - 1

    arrays = {
        "token_ids": _chain_tokens(prompts, responses, rows[tree], depth),
        "position_ids": depth,
        "subtree_end": (starts + lengths)[tree],
        "target_parent": parent,
        "target_token": responses.values[slot],
        "target_slot": slot,
    }
    return forest_of(arrays, routes, rows[tree])


def forest_of(arrays: Mapping[str, IntArray], routes: Routes | None, row: IntArray) -> Forest:
    """Build a forest from its arrays; `row` ([N]) is each token's row, to look up its routes."""
    tensors: dict[str, Any] = {
        name: torch.from_numpy(v.astype(np.int64)) for name, v in arrays.items()
    }
    if routes is not None:
        tensors["routes"] = torch.from_numpy(routes.at(row, arrays["position_ids"]))
    return Forest(**tensors)


def with_sets(forests: Sequence[Forest], support: Ragged) -> list[Forest]:
    """Add the sets of ids over which the targets of micro-batches are normalised.

    Args:
        forests: Micro-batches.
        support: See `Batch.support`.
    """
    return [dataclasses.replace(f, sets=target_sets(support, f.target_slot)) for f in forests]


def _lengths(column: Ragged, rows: IntArray) -> IntArray:
    """Return the lengths of the given rows, in time linear in the number of given rows."""
    return column.offsets[rows + 1] - column.offsets[rows]


def _chain_tokens(prompts: Ragged, responses: Ragged, row: IntArray, depth: IntArray) -> IntArray:
    num_prompt = _lengths(prompts, row)
    in_prompt = depth < num_prompt
    tokens = np.empty(len(row), dtype=np.int64)
    at = prompts.offsets[row] + depth
    tokens[in_prompt] = prompts.values[at[in_prompt]]
    at = responses.offsets[row] + depth - num_prompt
    tokens[~in_prompt] = responses.values[at[~in_prompt]]
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimit:
    """Maximum length of a row.

    Attributes:
        num_tokens: Maximum number of tokens in a row.
        reason: Where the limit comes from, for the error message.
        hint: Hint for the error raised if a row is longer.
    """

    num_tokens: int
    reason: str
    hint: str

    def check(self, lengths: IntArray, names: Sequence[str]) -> None:
        """Check that no row exceeds the limit.

        Raises:
            InputError: `row_too_long`: a row is too long (the error names the longest one).
        """
        if lengths.max(initial=0) > self.num_tokens:
            row = int(lengths.argmax())
            raise InputError(
                "row_too_long",
                names[row],
                f"{int(lengths[row])} tokens to forward",
                f"at most {self.num_tokens} ({self.reason})",
                self.hint,
            )


def pack(lengths: IntArray, budget: int) -> list[IntArray]:
    """Pack rows into few bins of at most `budget` tokens, by first-fit decreasing.

    Args:
        lengths: [R] tokens per row; empty rows are left out; a row above the budget gets a
            separate bin.
        budget: Maximum number of tokens per bin.

    Returns:
        Rows of each bin, ascending; bins are ordered by their first row.

    Example:
        >>> [rows.tolist() for rows in pack(np.array([3, 5, 0, 2]), 5)]
        [[0, 3], [1]]
    """
    above = np.flatnonzero(lengths > budget)
    lengths = np.where(lengths > budget, 0, lengths)
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    free = [budget] * (2 * num_leaves)  # segment tree of the largest room below each node
    bins: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not length:
            break
        node = 1
        while node < num_leaves:  # down to the leftmost bin with enough room
            node *= 2
            node += free[node] < length
        bins.setdefault(node, []).append(row)
        free[node] -= length
        while node := node // 2:
            free[node] = max(free[2 * node], free[2 * node + 1])
    packed = [*bins.values(), *([row] for row in above.tolist())]
    return sorted((np.array(sorted(rows)) for rows in packed), key=lambda rows: int(rows[0]))


def chain_forests(
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    rows: IntArray,
    budget: int,
    routes: Routes | None = None,
) -> list[Forest]:
    """Build micro-batches of at most `budget` tokens that together contain each target once.

    A row above the budget forms a separate micro-batch.
    """
    lengths = chain_lengths(prompts, responses, is_target)[rows]
    return [
        chain_forest(prompts, responses, is_target, rows[picked], routes)
        for picked in pack(lengths, budget)
    ]


Watch = Callable[[Sequence[Forest]], Iterable[Forest]]
"""Function that iterates over micro-batches, to observe which ones have been forwarded."""
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


def padded_forests(accelerator: Accelerator, forests: Sequence[Forest]) -> list[Forest]:
    """Return this process's micro-batches, padded with fillers.

    Thus all processes forward the same number of micro-batches.
    """
    (most,) = over_processes(accelerator, [len(forests)], "max").tolist()
    return [*forests, *[FILLER] * (int(most) - len(forests))]
