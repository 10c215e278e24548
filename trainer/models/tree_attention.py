"""Attention over trees, using only each token's depth and the end of its subtree.

On a CPU it runs piece by piece: the tokens between two forks attend to their ancestors, gathered
into a contiguous range, and causally to each other. On CUDA it uses FlexAttention, whose kernel
skips blocks without attention. Neither allocates a tokens x tokens mask.

The number of tokens differs in every micro-batch, and FlexAttention must be compiled: its fallback
allocates the tokens x tokens scores. Tokens are therefore padded to whole blocks, at least two
of them, and all sizes are symbolic. This leaves one graph per kind of mask (with or without a
window) and gradient mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

SYMBOLIC_SIZES: Any = partial(
    importlib.import_module("torch.fx.experimental._config").patch, use_duck_shape=False
)
"""Context for calls of compiled functions: sizes that are equal at first are not taken for one size.
Otherwise, other sizes would need another graph."""
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


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128
"""Block size of FlexAttention's mask, for queries and keys."""
LEAST = 2 * BLOCK
"""Minimum number of tokens: a single block, or fewer than 128 queries, would need another graph."""


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    window: int | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """Compute `trainer.models.tree_attention.tree_attention` with FlexAttention.

    Under autocast, the result has autocast's dtype.

    Raises:
        ValueError: `dropout` is not 0, which FlexAttention does not support.
    """
    if dropout:
        raise ValueError("the model has attention dropout, which FlexAttention does not support")
    heads, key_heads, size = query.shape[1], key.shape[1], query.shape[2]
    groups = heads // key_heads
    if groups & (groups - 1):  # some kernel versions cannot share keys among 3 or 7 heads
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    # Rotary embeddings leave queries and keys in float32 under autocast, but not values.
    dtype = autocast_dtype(query)
    room = (0, 0, 0, padded_size(size) - size)
    # `pad` by nothing keeps the strides of its input, and other strides need another graph.
    inputs = (pad(tensor.to(dtype), room).contiguous() for tensor in (query, key, value))
    mask = block_mask(tree, window)
    shares = key.shape[1] != heads
    with (
        torch.autocast(query.device.type, enabled=False),  # older versions reject it
        # Otherwise, sizes that are equal in the first forest (16 blocks and 16 heads) count as one
        # size, and a forest in which they differ needs another graph.
        SYMBOLIC_SIZES(),
    ):
        output: Tensor = compiled()(*inputs, block_mask=mask, scale=scaling, enable_gqa=shares)
    return output[:, :, :size].transpose(1, 2).contiguous()


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that autocast uses for a tensor."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


@lru_cache(maxsize=1)
def compiled() -> Any:
    """Return the compiled FlexAttention.

    With `fullgraph`, PyTorch raises an error instead of falling back to the uncompiled function when
    it has compiled too many graphs.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def padded_size(num_tokens: int) -> int:
    """Return the number of tokens that FlexAttention gets.

    Example:
        >>> [padded_size(n) for n in (1, 256, 257)]
        [256, 256, 384]
    """
    return max(LEAST, num_tokens + -num_tokens % BLOCK)


@lru_cache(maxsize=8)
def block_mask(tree: Tensor, window: int | None) -> BlockMask:
    """Build FlexAttention's mask of a forest by comparing blocks of 128 tokens, not single tokens.

    A block of keys is visible to a block of queries if the subtree of any key reaches into the
    query block, and any query sees tokens up to the key block; the mask is evaluated per token unless
    all queries see all keys. Padding tokens see only themselves, because a softmax over no keys is
    undefined.
    """
    num_tokens = tree.shape[-1]
    size = padded_size(num_tokens)
    position = torch.arange(size, device=tree.device)
    depth = pad(tree[0, 0, 0], (0, size - num_tokens))
    end = torch.cat([tree[0, 0, 1], position[num_tokens:] + 1])
    reach = None if tree.shape[2] == 2 else torch.cat([tree[0, 0, 2], position[num_tokens:] + 1])

    mask_mod = _sees(end)
    if window is not None:
        mask_mod = _sees_within(end, depth, depth + window)
    if reach is not None:
        mask_mod = _sees_ahead(end, depth, depth + (size if window is None else window), reach)

    reaches = position + 1 if reach is None else reach
    blocks = [values.view(-1, BLOCK) for values in (position, depth, end, reaches)]
    (first, low, least, near), (last, high, most, far) = (
        [getattr(b, name)(1) for b in blocks] for name in ("amin", "amax")
    )
    # Positions within a block ascend, so its smallest and largest values decide for all its tokens.
    some = (first[None, :] < far[:, None]) & (most[None, :] > first[:, None])
    every = (last[None, :] < near[:, None]) & (least[None, :] > last[:, None])
    if window is not None:
        # `some` stays as it is: more blocks are looked at than needed, but the mask is exact.
        every &= high[:, None] - low[None, :] < window
    partly, wholly = (_numbered(wanted) for wanted in (some & ~every, some & every))
    mask: BlockMask = BlockMask.from_kv_blocks(
        *partly,
        *wholly,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(size, size),
    )
    return mask


def _sees(end: Tensor) -> MaskMod:
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return sees


def _sees_within(end: Tensor, depth: Tensor, limit: Tensor) -> MaskMod:
    """Limit the depth of the queries that see each key.

    The limit is a tensor, because a window passed as a number would be compiled into the graph.
    """

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (depth[query] < limit[key])

    return sees


def _sees_ahead(end: Tensor, depth: Tensor, limit: Tensor, reach: Tensor) -> MaskMod:
    """Let each query see the tokens up to the end of its picture."""

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < reach[query]) & (query < end[key]) & (depth[query] < limit[key])

    return sees


def _numbered(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Count the wanted key blocks of each query block, and list all key blocks, wanted ones first.

    Both results are in the format of `BlockMask.from_kv_blocks`.
    """
    order = wanted.int().argsort(dim=1, descending=True, stable=True)
    return wanted.sum(1)[None, None].int(), order[None, None].int()
