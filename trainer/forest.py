"""The batch type of the trainer: packed tokens whose attention is a forest.

A forest is a token array in depth-first order. `position_ids` is a token's depth in its tree,
`subtree_end` the end of the range of tokens below it: position q may attend to k iff
`k <= q < subtree_end[k]`. Chains side by side are a forest without sharing, which is what packing
independent rows comes to; whatever shares prefixes fits the same type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.errors import RolloutError
from schemas.ragged import BoolArray, IntArray, Ragged, gather


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """One micro-batch: N tokens to forward, M targets whose log-probabilities are asked for.

    Attributes:
        token_ids: [N] int64.
        position_ids: [N] int64 depth of the token in its tree.
        subtree_end: [N] int64, end (exclusive) of the tokens that may attend to this one.
        target_parent: [M] int64 position whose hidden state predicts the target.
        target_token: [M] int64 token id that is predicted.
        target_slot: [M] int64 which (row, response position) the target is: its index in the
            batch's response tokens laid end to end. Values per target are gathered with it.
    """

    token_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    target_parent: Tensor
    target_token: Tensor
    target_slot: Tensor

    @property
    def num_tokens(self) -> int:
        """N, the tokens that are forwarded."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """M."""
        return len(self.target_slot)

    def to(self, device: torch.device) -> Forest:
        """The same forest on another device."""
        names = (field.name for field in dataclasses.fields(self))
        return Forest(**{name: getattr(self, name).to(device) for name in names})


def attention_mask(subtree_end: Tensor) -> Tensor:
    """[1, 1, N, N] bool; true where query q (rows) may attend to key k (columns).

    Example:
        >>> attention_mask(torch.tensor([3, 2, 3]))[0, 0].int().tolist()  # 0 has children 1 and 2
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    position = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = position[:, None], position[None, :]
    return ((key <= query) & (query < subtree_end[None, :]))[None, None]


def chain_lengths(prompts: Ragged, responses: Ragged, is_target: BoolArray) -> IntArray:
    """[R] tokens of each row that must be forwarded: up to the parent of its last target.

    What follows predicts nothing, so a row of p prompt tokens whose last target is response
    position t costs p + t; a row without targets costs nothing.
    """
    slot = np.flatnonzero(is_target)
    row = responses.row_of(slot)
    last_target = np.full(len(responses.lengths), -1, dtype=np.int64)
    last_target[row] = slot - responses.offsets[row]
    return np.where(last_target < 0, 0, prompts.lengths + last_target)


def chain_forest(
    prompts: Ragged, responses: Ragged, is_target: BoolArray, rows: IntArray
) -> Forest:
    """Pack rows side by side, each as a chain.

    Args:
        prompts: Prompt tokens of R rows; not empty where the row has targets.
        responses: Response tokens of the same R rows, T in all.
        is_target: [T] bool, which response tokens are targets.
        rows: Rows to pack, in this order.

    Example:
        One row of prompt [7, 8] and response [1, 2, 3], of which 1 and 2 are targets:

        >>> prompt = Ragged(np.array([7, 8]), np.array([0, 2]), np.array([True]))
        >>> response = Ragged(np.array([1, 2, 3]), np.array([0, 3]), np.array([True]))
        >>> mask = np.array([True, True, False])
        >>> forest = chain_forest(prompt, response, mask, np.array([0]))
        >>> forest.token_ids.tolist(), forest.target_parent.tolist(), forest.target_slot.tolist()
        ([7, 8, 1], [1, 2], [0, 1])
    """
    lengths = chain_lengths(prompts, responses, is_target)[rows]
    starts = np.cumsum(lengths) - lengths
    tree = np.repeat(np.arange(len(rows)), lengths)
    depth = np.arange(len(tree)) - starts[tree]

    slot = gather(
        np.arange(len(is_target)), responses.offsets[rows], responses.lengths[rows]
    ).astype(np.int64)
    slot_tree = np.repeat(np.arange(len(rows)), responses.lengths[rows])
    slot, slot_tree = slot[is_target[slot]], slot_tree[is_target[slot]]
    offset = slot - responses.offsets[rows[slot_tree]]
    parent = starts[slot_tree] + prompts.lengths[rows[slot_tree]] + offset - 1

    arrays = {
        "token_ids": _chain_tokens(prompts, responses, rows[tree], depth),
        "position_ids": depth,
        "subtree_end": (starts + lengths)[tree],
        "target_parent": parent,
        "target_token": responses.values[slot],
        "target_slot": slot,
    }
    return Forest(**{k: torch.from_numpy(v.astype(np.int64)) for k, v in arrays.items()})


def _chain_tokens(prompts: Ragged, responses: Ragged, row: IntArray, depth: IntArray) -> IntArray:
    in_prompt = depth < prompts.lengths[row]
    tokens = np.empty(len(row), dtype=np.int64)
    at = prompts.offsets[row] + depth
    tokens[in_prompt] = prompts.values[at[in_prompt]]
    at = responses.offsets[row] + depth - prompts.lengths[row]
    tokens[~in_prompt] = responses.values[at[~in_prompt]]
    return tokens


def pack(lengths: IntArray, budget: int) -> list[IntArray]:
    """First-fit decreasing: few bins of rows, each of at most `budget` tokens.

    Args:
        lengths: [R] tokens per row, at most `budget`; rows of 0 are left out.
        budget: Tokens per bin.

    Returns:
        Rows of each bin, ascending; bins by their first row.

    Example:
        >>> [rows.tolist() for rows in pack(np.array([3, 5, 0, 2]), 5)]
        [[0, 3], [1]]
    """
    assert lengths.max(initial=0) <= budget
    bins: list[list[int]] = []
    free: list[int] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not length:
            break
        fits = next((i for i, room in enumerate(free) if room >= length), None)
        if fits is None:
            fits = len(bins)
            bins.append([])
            free.append(budget)
        bins[fits].append(row)
        free[fits] -= length
    return sorted((np.array(sorted(rows)) for rows in bins), key=lambda rows: int(rows[0]))


def spread(bins: Sequence[IntArray], lengths: IntArray, num_ranks: int) -> list[IntArray]:
    """Split bins of rows until their number is a multiple of the ranks', if they can be split.

    Args:
        bins: Rows of each bin.
        lengths: [R] tokens of each row.
        num_ranks: Processes that share the bins.

    Returns:
        Rows of each bin, ascending; bins by their first row.

    Example:
        >>> bins = [np.array([0, 2, 3]), np.array([1])]
        >>> [rows.tolist() for rows in spread(bins, np.array([5, 9, 4, 1]), 3)]
        [[0, 3], [1], [2]]
    """
    found = list(bins)
    while len(found) % num_ranks and any(len(rows) > 1 for rows in found):
        costs = [int(lengths[rows].sum()) if len(rows) > 1 else -1 for rows in found]
        rows = found.pop(int(np.argmax(costs)))
        by_length = rows[np.argsort(-lengths[rows], kind="stable")]
        found += [np.sort(by_length[::2]), np.sort(by_length[1::2])]
    return sorted(found, key=lambda rows: int(rows[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimit:
    """The longest row that can be forwarded.

    Attributes:
        num_tokens: Most tokens in one row.
        reason: What sets the limit, for the message.
        hint: What to do about a longer row.
    """

    num_tokens: int
    reason: str
    hint: str

    def check(self, lengths: IntArray, names: Sequence[str]) -> None:
        """Refuse rows above the limit.

        Raises:
            RolloutError: Names the longest row, its length and the limit.
        """
        if lengths.max(initial=0) > self.num_tokens:
            row = int(lengths.argmax())
            raise RolloutError(
                "row_too_long",
                names[row],
                f"{int(lengths[row])} tokens to forward",
                f"at most {self.num_tokens} ({self.reason})",
                self.hint,
            )


def chain_forests(
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    rows: IntArray,
    budget: int,
    num_ranks: int = 1,
) -> list[Forest]:
    """Micro-batches of at most `budget` tokens that hold the targets of `rows`, each once.

    Their number is a multiple of `num_ranks`, the processes that share them, if there are as many
    rows.
    """
    lengths = chain_lengths(prompts, responses, is_target)[rows]
    return [
        chain_forest(prompts, responses, is_target, rows[picked])
        for picked in spread(pack(lengths, budget), lengths, num_ranks)
    ]
