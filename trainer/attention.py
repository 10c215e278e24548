"""Attention over a forest without a mask of tokens x tokens.

Of chains side by side each is causal in itself; trees are `trainer.tree_attention`'s. That is how
the attention function here treats a micro-batch, registered with Transformers by
`AttentionInterface`; given anything else, it is Transformers' own SDPA.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.forest import Forest, attention_mask
from trainer.tree_attention import tree_attention

CHAIN_ATTENTION = "rollout_chains"


def _find_varlen() -> Any:
    """PyTorch's attention over packed sequences, where it knows scales, windows and groups."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(kernel).parameters)
    return kernel if known else None


VARLEN_ATTN = _find_varlen()


def use_chain_attention(model: Any) -> None:
    """Make a model that runs SDPA take packed chains without a dense mask, where it can.

    Models that do not dispatch attention through Transformers' interface stay as they are.
    """
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(CHAIN_ATTENTION)


def takes_chains(config: Any) -> bool:
    """Whether a model of this configuration takes packed chains without a dense mask."""
    return bool(config._attn_implementation == CHAIN_ATTENTION)


def forest_mask(config: Any, forest: Forest) -> Tensor:
    """What a model is given as `attention_mask`, four-dimensional, so that it is passed on as is.

    Returns:
        [1, 1, 1, C] int64 on the CPU: tokens of each of C chains, where all trees are chains;
        [1, 1, 2, N] int64: depth and subtree_end of each token, where one branches. For a model
        that takes neither, [1, 1, N, N] bool: see `trainer.forest.attention_mask`.
    """
    if not takes_chains(config):
        return attention_mask(forest.subtree_end)
    lengths = lengths_of_chains(forest.subtree_end.cpu())
    if lengths is None:
        return torch.stack([forest.position_ids, forest.subtree_end])[None, None]
    return lengths[None, None, None]


def lengths_of_chains(subtree_end: Tensor) -> Tensor | None:
    """[C] int64 tokens of each chain; None where a tree branches.

    Example:
        >>> lengths_of_chains(torch.tensor([2, 2, 3])).tolist()
        [2, 1]
        >>> lengths_of_chains(torch.tensor([3, 2, 3]))  # 0 has children 1 and 2
    """
    runs: Any = torch.unique_consecutive
    ends, lengths = runs(subtree_end, return_counts=True)
    return lengths if torch.equal(lengths.cumsum(0), ends) else None


def chain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers' `AttentionInterface` calls it.

    Args:
        module: The attention layer.
        query: [1, heads, N, size].
        key: [1, key heads, N, size]; query heads are a multiple of key heads.
        value: As `key`.
        attention_mask: Integers are those of `forest_mask`. Anything else goes to SDPA as it is.
        dropout: Probability; 0 in evaluation mode.
        scaling: Of the scores; None: one over the root of size.
        settings: `sliding_window`: tokens that a token sees, itself included.

    Returns:
        [1, N, heads, size], and no attention weights.

    Raises:
        ValueError: The layer caps or biases its scores, which SDPA cannot.
    """
    is_forest = attention_mask is not None and attention_mask.dtype == torch.int64
    unknown = [name for name in ("softcap", "position_bias") if settings.get(name) is not None]
    if attention_mask is None or not is_forest or unknown:
        if unknown and is_forest:
            raise ValueError(f"attention scores with {unknown[0]}")
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
        return output, None
    window = settings.get("sliding_window") or getattr(module, "sliding_window", None)
    if attention_mask.size(2) == 2:
        inputs = module, query, key, value, attention_mask, window
        return tree_attention(*inputs, dropout=dropout, scaling=scaling), None
    lengths: list[int] = attention_mask.flatten().tolist()
    if _runs_varlen(query, value, dropout):
        return _varlen(query, key, value, lengths, scaling, window), None
    chains = zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True)
    outputs = [_causal(q, k, v, dropout, scaling, window).transpose(1, 2) for q, k, v in chains]
    return torch.cat(outputs, 1).contiguous(), None


AttentionInterface.register(CHAIN_ATTENTION, chain_attention)
AttentionMaskInterface.register(CHAIN_ATTENTION, sdpa_mask)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One chain of n tokens: memory of order n, or of window squared where it is longer than that.

    A chain longer than its window is cut into blocks of queries, each with the keys in its reach.
    """
    groups, size = query.shape[1] // key.shape[1], query.shape[2]
    in_kernel = query.device.type == "cpu" or _dtype(query) != torch.float32
    if groups > 1 and not in_kernel:  # that would leave PyTorch its kernel of quadratic memory only
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    settings: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    settings["enable_gqa"] = groups > 1 and in_kernel
    if window is None or size <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **settings)
    blocks, at = [], torch.arange(size, device=query.device)
    for start in range(0, size, window):
        stop, first = min(start + window, size), max(0, start - window + 1)
        distance = at[start:stop, None] - at[None, first:stop]
        mask, keys = (distance >= 0) & (distance < window), slice(first, stop)
        inputs = query[:, :, start:stop], key[:, :, keys], value[:, :, keys]
        blocks.append(scaled_dot_product_attention(*inputs, attn_mask=mask, **settings))
    return torch.cat(blocks, 2)


def _dtype(tensor: Tensor) -> torch.dtype:
    """What autocast makes of it."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _runs_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    return (
        VARLEN_ATTN is not None
        and query.is_cuda
        and not dropout
        and _dtype(query) in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """All chains by one kernel: PyTorch's FlashAttention for packed sequences."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
    packed = (tensor[0].transpose(0, 1).to(_dtype(query)) for tensor in (query, key, value))
    output: Tensor = VARLEN_ATTN(
        *packed,
        ends,
        ends,
        max(lengths),
        max(lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return output[None]
