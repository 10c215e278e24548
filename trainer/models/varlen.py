"""PyTorch's attention within packed rows by one kernel: FlashAttention 2, or 3 where it works."""

from __future__ import annotations

import importlib
import inspect
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import attention as switches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trainer.batches.forest import ChainLayout
from trainer.models.tree_attention import autocast_dtype

LONG_CHAIN = 2048
"""Mean number of tokens from which a call of SDPA for each chain is faster than FlashAttention 2: cuDNN's kernel
is twice as fast (H100: 3.35 ms against 4.51 at 4,096 tokens, 3.8 against 2.5 at 1,024)."""
TOLERANCE = 0.03
"""Tolerated error of a kernel in bfloat16, relative to the norm. Rounding causes less than 0.01."""


def _find_varlen() -> Any:
    """Return PyTorch's variable-length attention, or None if it lacks options needed here."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    parameters = inspect.signature(kernel).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    # torch 2.11 shares keys among heads without being told to.
    return partial(kernel, enable_gqa=True) if "enable_gqa" in parameters else kernel


VARLEN_ATTN = _find_varlen()


@cache
def flash_attention_3(device: torch.device) -> str:
    """Let `varlen_attn` run FlashAttention 3 in this process, if it works on a device.

    PyTorch replaces its kernels by those of the package `flash_attn_interface`. Outputs and gradients
    of a few tokens are compared with SDPA's first; if they differ, PyTorch's kernels stay.

    Returns:
        Why FlashAttention 3 does not run; empty if it runs.
    """
    if not _is_hopper(device):
        return "FlashAttention 3 needs compute capability 9.0"
    try:
        switches.activate_flash_attention_impl("FA3")
        with unset_fake_temporarily():
            error = _error_of_varlen(device)
        finding = f"differs from SDPA by {error:.2g} of the norm"
        if error < TOLERANCE:
            return ""
    except Exception as exception:  # whatever a foreign package raises, training goes on without it
        reason = str(exception).partition("\n")[0]
        finding = f"does not run: {type(exception).__name__}: {reason}"
    if switches.current_flash_attention_impl():
        switches.restore_flash_attention_impl()
    return f"FlashAttention 3 {finding}"


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@torch.inference_mode(mode=False)  # gradients are needed wherever the first forward pass is
def _error_of_varlen(device: torch.device) -> float:
    """Return the largest error of outputs and gradients in bfloat16, relative to their norm."""
    random, lengths, errors = torch.Generator().manual_seed(0), [5, 130, 61], []
    row = torch.arange(3).repeat_interleave(torch.tensor(lengths)).to(device)
    at = torch.arange(len(row), device=device)
    ends = torch.tensor([0, 5, 135, 196], dtype=torch.int32, device=device)
    chains = ChainLayout(lengths=lengths, ends=ends, longest=max(lengths))
    for size, window in product((64, 128, 256), (None, 4)):
        shapes = [(1, heads, len(row), size) for heads in (4, 2, 2)]
        inputs = [torch.randn(s, generator=random).to(device, torch.bfloat16) for s in shapes]
        # The same attention with a dense mask: within a row, backwards, and no farther than the window.
        distance = at[:, None] - at
        mask = (row[:, None] == row) & (distance >= 0) & (distance < (window or len(row)))
        sdpa = partial(scaled_dot_product_attention, attn_mask=mask, scale=0.1, enable_gqa=True)
        exact = _with_gradients(sdpa, [tensor.float() for tensor in inputs])
        kernel = partial(varlen, chains=chains, scaling=0.1, window=window)
        packed = _with_gradients(lambda *qkv, kernel=kernel: kernel(*qkv).transpose(1, 2), inputs)
        for right, other in zip(exact, packed, strict=True):
            errors.append((right - other).norm() / right.norm())
    return float(torch.stack(errors).max())


def _with_gradients(attend: Any, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with torch.autocast(leaves[0].device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        output = attend(*leaves)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    return [tensor.detach().float() for tensor in (output, *gradients)]


def packed_attention(device: torch.device, dtype: str) -> str:
    """Say which attention packed rows without branches use on a device, and why if it is slow.

    Example:
        >>> packed_attention(torch.device("cpu"), "float32")
        'one call of SDPA per row'
    """
    slow = "one call of SDPA per row"
    if device.type != "cuda":
        return slow
    if VARLEN_ATTN is None:
        return f"{slow}, because torch {torch.__version__} has no varlen_attn with windows"
    if dtype == "float32":
        return f"{slow}, because FlashAttention does not support float32"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{slow}, because FlashAttention needs compute capability 8.0"
    if not (reason := flash_attention_3(device)):
        return "FlashAttention 3 (varlen_attn)"
    others = f"SDPA for rows of {LONG_CHAIN:,} tokens and more"
    return f"FlashAttention 2 (varlen_attn), or {others}, because {reason}"


def prefers_one_kernel(ends: Tensor, num_tokens: int) -> bool:
    """True if one kernel for all chains is faster than a call of SDPA for each chain.

    Args:
        ends: [C + 1] cumulative lengths of the chains, from 0.
        num_tokens: Sum of the lengths.
    """
    has_fast_kernel = not flash_attention_3(ends.device)
    return has_fast_kernel or num_tokens < LONG_CHAIN * (len(ends) - 1)


def runs_varlen(query: Tensor, value: Tensor, dropout: float, chains: ChainLayout) -> bool:
    """True if one kernel for all chains supports these inputs ([1, heads, N, size])."""
    return (
        VARLEN_ATTN is not None
        and query.is_cuda
        and chains.ends is not None
        and not dropout
        and autocast_dtype(query) in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chains: ChainLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within all chains with one kernel: PyTorch's FlashAttention for packed sequences.

    Args:
        query: [1, heads, N, size]; other dtypes are cast to autocast's, as for `key` and `value`.
        key: [1, key heads, N, size].
        value: Same shape as `key`.
        chains: Chains of N tokens in total; `ends` as int32.
        scaling: Factor of the scores; None: 1 / sqrt(size).
        window: Number of tokens that a token sees, including itself; None: all.

    Returns:
        [1, N, heads, size].
    """
    packed = (tensor[0].transpose(0, 1).to(autocast_dtype(query)) for tensor in (query, key, value))
    output: Tensor = VARLEN_ATTN(
        *packed,
        chains.ends,
        chains.ends,
        chains.longest,
        chains.longest,
        scale=scaling,
        # FlashAttention counts the tokens before, a window counts the token itself too.
        window_size=(-1 if window is None else window - 1, 0),
    )
    return output[None]
