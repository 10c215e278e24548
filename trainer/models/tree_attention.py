"""Attention over trees, using only each token's depth and the end of its subtree.

On a CPU it runs piece by piece: the tokens between two forks attend to their ancestors, gathered
into a contiguous range, and causally to each other. On CUDA it uses FlexAttention
(`trainer.models.flex_tree`), whose kernel skips blocks without attention. Neither allocates a
tokens x tokens mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.models.flex_tree import attend_by_blocks

QUERIES = 1024
"""Maximum number of queries processed at once, which bounds the size of masks."""


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    window: int | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """Compute attention in a forest: every token attends to itself and its ancestors.

    Args:
        query: [1, heads, N, size].
        key: [1, key heads, N, size]; query heads are a multiple of key heads.
        value: Same shape as `key`.
        tree: [1, 1, 2, N] int64: depth and `subtree_end` of each token; [1, 1, 3, N] with the end of
            the tokens that each sees, if some see later ones on their way. Pass the same object in
            every layer, because derived masks are cached per object.
        window: Number of tokens that a token attends to towards the root, including itself; None:
            all.
        dropout: Probability.
        scaling: Factor of the scores; None: 1 / sqrt(size).

    Returns:
        [1, N, heads, size].
    """
    if uses_blocks(query):
        inputs = query, key, value, tree, window
        return attend_by_blocks(*inputs, dropout=dropout, scaling=scaling)
    return attend_by_pieces(query, key, value, tree, window, dropout=dropout, scaling=scaling)


def uses_blocks(query: Tensor) -> bool:
    """Whether FlexAttention computes the attention; on a CPU it has no gradient."""
    return query.is_cuda


def attend_by_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    window: int | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """Compute `tree_attention` with PyTorch's SDPA only, on any device."""
    attend = partial(
        scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] > key.shape[1],
    )
    output = _by_pieces(query, key, value, pieces(tree), window, attend, _ahead(tree))
    return output.transpose(1, 2).contiguous()  # some models take a view of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive tokens without a fork.

    Attributes:
        size: Number of tokens.
        depth: Depth of the first token.
        above: Index of the piece that ends with the parent of the first token; None at a root.
    """

    size: int
    depth: int
    above: int | None


@lru_cache(maxsize=8)
def pieces(tree: Tensor) -> list[Piece]:
    """List the pieces of a forest, in order of their tokens.

    Example:
        >>> pieces(torch.tensor([[[[0, 1, 1], [3, 2, 3]]]]))  # 0 has children 1 and 2
        [Piece(size=1, depth=0, above=None), Piece(size=1, depth=1, above=0), Piece(size=1, depth=1, above=0)]
    """
    depth, subtree_end = tree[0, 0, :2].cpu()
    runs: Any = torch.unique_consecutive
    ends, sizes = runs(subtree_end, return_counts=True)
    begins = (sizes.cumsum(0) - sizes).tolist()
    # Tokens with the same end are a run without a fork: below a fork, subtrees end earlier.
    listed: list[Piece] = []
    way: list[tuple[int, int]] = []  # path from the root: each piece and the end of its subtree
    for number, (begin, end, size) in enumerate(
        zip(begins, ends.tolist(), sizes.tolist(), strict=True)
    ):
        while way and way[-1][1] <= begin:
            way.pop()
        listed.append(Piece(size, int(depth[begin]), way[-1][0] if way else None))
        way.append((number, end))
    return listed


@lru_cache(maxsize=8)
def _ahead(tree: Tensor) -> Tensor | None:
    """Return how many later tokens each token sees ([N]); None if there are none."""
    if tree.shape[2] == 2:
        return None
    reach = tree[0, 0, 2]
    return reach - torch.arange(1, len(reach) + 1, device=tree.device)


def _by_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: list[Piece],
    window: int | None,
    attend: Callable[..., Tensor],
    ahead: Tensor | None,
) -> Tensor:
    sizes = [piece.size for piece in listed]
    number = 0
    queries, *parts = (torch.split(tensor, sizes, 2) for tensor in (query, key, value))
    ways: list[list[Tensor]] = []  # keys and values from the root to each piece's end
    outputs = []
    for piece, part, *way in zip(listed, queries, *parts, strict=True):
        if piece.above is not None:
            # Ancestors become contiguous with the piece, so that a causal mask is all it needs. The
            # copies are as long as the depth; a mask of tokens x tokens is what they save.
            way = [torch.cat(pair, 2) for pair in zip(ways[piece.above], way, strict=True)]
        ways.append(way)
        for start in range(0, piece.size, QUERIES):
            stop = min(start + QUERIES, piece.size)
            # With a window, keys before the first query's window are in no query's window.
            first = 0 if window is None else max(0, piece.depth + start - window + 1)
            # A picture whose tokens see each other is in one piece.
            last = piece.depth + (stop if ahead is None else piece.size)
            seen = [tensor[:, :, first:last] for tensor in way]
            at = torch.arange(piece.depth + start, piece.depth + stop, device=query.device)
            here = None if ahead is None else ahead[number + start : number + stop]
            mask = _mask(at - first, last - first, window, here)
            outputs.append(attend(part[:, :, start:stop], *seen, attn_mask=mask))
        number += piece.size
    return torch.cat(outputs, 2)


def _mask(at: Tensor, num_keys: int, window: int | None, ahead: Tensor | None) -> Tensor:
    """Build the mask ([queries, keys] bool) of queries at the given positions among the keys."""
    query, key = at[:, None], torch.arange(num_keys, device=at.device)
    mask = key <= (query if ahead is None else query + ahead[:, None])
    return mask if window is None else mask & (key > query - window)
