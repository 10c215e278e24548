"""Attention over a forest without a tokens x tokens mask, and rotary frequencies fixed for it.

Packed chains attend causally, each only to itself; `trainer.models.tree_attention` handles
trees. A model asks Transformers for its masks, and Transformers calls the mask function registered
here. Inside `forest_mask`, this function returns the forest and the requested window, and the
attention function registered here uses them; outside, both behave like Transformers' SDPA.

For LongRoPE and dynamic NTK, Transformers bases rotary frequencies on the largest position in a
forward pass, so one long row would affect all other rows in it. vLLM chooses the frequencies once,
for the longest row that it may serve. `fix_frequencies` does the same, so that log-probabilities
are comparable.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.batches.forest import ChainLayout, Forest, attention_mask
from trainer.models.pictures import reach_of
from trainer.models.tree_attention import attend_by_pieces, autocast_dtype, tree_attention
from trainer.models.varlen import VARLEN_ATTN, prefers_one_kernel, runs_varlen, varlen

CHAIN_ATTENTION = "rollout_chains"
UNKNOWN = ("softcap", "position_bias", "s_aux", "sinks", "indices", "block_indices")
"""Attention arguments that SDPA does not support."""


# Not frozen: torch 2.11 would compile a graph for each value of a frozen record.
@dataclass(eq=False, slots=True)
class ForestMask:
    """The `attention_mask` that a layer receives.

    Attributes:
        chains: Lengths of the chains, if no tree branches and no token sees later ones.
        tree: [1, 1, 2, N] int64: depth and `subtree_end` of each token; [1, 1, 3, N] with the end of
            the tokens that each sees, where the tokens of a picture see each other.
        window: Number of tokens that a token sees towards the root, including itself; None: all.
        ends: [C + 1] int64 on the CPU: cumulative lengths of the chains, from 0; [0, 0] if a tree
            branches or tokens see later ones, so that compiled layers have the same inputs.
    """

    chains: ChainLayout
    tree: Tensor
    window: int | None = None
    ends: Tensor | None = None


FOREST: ContextVar[ForestMask | None] = ContextVar("forest", default=None)
TANGENTS: ContextVar[bool] = ContextVar("tangents", default=False)


def use_chain_attention(model: Any) -> None:
    """Make an SDPA model attend to packed chains without a dense mask, if possible.

    Models that do not dispatch attention through Transformers' interface are unchanged.
    """
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(CHAIN_ATTENTION)


@contextmanager
def forward_mode_attention() -> Iterator[None]:
    """Use attention that supports forward-mode differentiation, in this context.

    PyTorch's fused kernels have no forward-mode derivatives. Scores are computed for blocks of
    queries, so that memory is linear in the number of tokens.
    """
    token = TANGENTS.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        TANGENTS.reset(token)


@contextmanager
def forest_mask(config: Any, forest: Forest) -> Iterator[Tensor | None]:
    """Set the forest for a model's forward pass inside this context.

    Yields:
        The model's `attention_mask`: None for a model with chain attention, which asks for its
        masks during the forward pass; otherwise [1, 1, N, N] bool: see
        `trainer.batches.forest.attention_mask`.
    """
    reach = reach_of(config, forest, forest.pictures) if forest.pictures else None
    if config._attn_implementation != CHAIN_ATTENTION:
        yield attention_mask(forest.subtree_end, reach)
        return
    chains, rows = forest.chains, [forest.position_ids, forest.subtree_end]
    if reach is not None:  # chains attend causally
        chains, rows = ChainLayout(), [*rows, reach]
    chains = chains or ChainLayout.of(forest.subtree_end)
    if chains.ends is not None:
        ends = chains.ends.int() if prefers_one_kernel(chains.ends, forest.num_tokens) else None
        chains = dataclasses.replace(chains, ends=ends)
    # Not a view: autograd would return another object for it, whose derived masks are not cached.
    tree = torch.stack(rows)[None, None].clone()
    ends = torch.tensor([0, *accumulate(chains.lengths or [0])])
    token = FOREST.set(ForestMask(chains, tree, ends=ends))
    try:
        yield None
    finally:
        FOREST.reset(token)


def mask_of_layers(
    *, local_size: int | None = None, use_vmap: bool = False, **settings: Any
) -> Any:
    """Return the mask for layers of one kind, as Transformers' `AttentionMaskInterface` expects.

    Args:
        local_size: Window of the layers; None: they attend to all previous tokens.
        use_vmap: Whether the model adds its own conditions to the causal mask.
        settings: Further arguments of `sdpa_mask`.

    Raises:
        ValueError: The model adds its own conditions.
    """
    forest = FOREST.get()
    if forest is None:
        return sdpa_mask(local_size=local_size, use_vmap=use_vmap, **settings)
    if use_vmap:
        raise ValueError("the model has a mask that is neither causal nor a sliding window")
    return dataclasses.replace(forest, window=local_size)


def chain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ForestMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention as Transformers' `AttentionInterface` expects.

    The window comes from the mask. The `sliding_window` of layers is meant for kernels that build
    their own masks, and some models with a window pass None or omit it.

    Args:
        module: The attention layer.
        query: [1, heads, N, size].
        key: [1, key heads, N, size]; query heads are a multiple of key heads.
        value: Same shape as `key`.
        attention_mask: From `mask_of_layers`. Anything else is passed to SDPA.
        dropout: Probability; 0 in evaluation mode.
        scaling: Factor of the scores; None: 1 / sqrt(size).
        settings: Further arguments of the model.

    Returns:
        [1, N, heads, size], and no attention weights.

    Raises:
        ValueError: The layer caps or biases its scores, which SDPA does not support; or its mask
            does not come from Transformers and therefore ignores the forest.
    """
    if not isinstance(attention_mask, ForestMask):
        if FOREST.get() is not None:
            raise ValueError("the model builds its attention mask without Transformers")
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
        return output, None
    for name in UNKNOWN:
        if settings.get(name) is not None:
            raise ValueError(f"the model's attention uses {name}, which SDPA does not support")
    window, chains = attention_mask.window, attention_mask.chains
    compiles = torch.compiler.is_compiling()
    if not compiles and TANGENTS.get():
        branches = attention_mask.tree, window
        return attend_by_pieces(
            query, key, value, *branches, dropout=dropout, scaling=scaling
        ), None
    if runs_varlen(query, value, dropout, chains):
        return varlen(query, key, value, chains, scaling, window), None
    settings = {"window": window, "dropout": dropout, "scaling": scaling}
    tree = attention_mask.tree
    if compiles:  # `attend` runs without autocast
        inputs = (tensor.to(autocast_dtype(query)) for tensor in (query, key, value))
        return attend(*inputs, tree, attention_mask.ends, **settings), None
    return _attend(query, key, value, tree, chains.lengths, **settings), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    lengths: list[int] | None,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    if lengths is None:
        inputs = query, key, value, tree, window
        return tree_attention(*inputs, dropout=dropout, scaling=scaling)
    parts = zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True)
    outputs = [_causal(q, k, v, dropout, scaling, window).transpose(1, 2) for q, k, v in parts]
    return torch.cat(outputs, 1).contiguous()


@torch.library.custom_op("rollout_io::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    ends: Tensor,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attend as one operation of a compiled graph, which depends on neither lengths nor trees.

    The backward pass computes the attention again. See `chain_attention` and `ForestMask`.
    """
    return _attend(query, key, value, tree, _lengths(ends), window, dropout, scaling)


def _lengths(ends: Tensor) -> list[int] | None:
    return ends.diff().tolist() if ends[-1] else None


@attend.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, num_tokens, _size = query.shape
    return query.new_empty(batch, num_tokens, heads, value.shape[-1])


@torch.library.custom_op("rollout_io::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    ends: Tensor,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the query, key and value of `attend`."""
    leaves: Any = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    autograd: Any = torch._C
    keys = (autograd.DispatchKey.AutogradFunctionality, autograd.DispatchKey.ADInplaceOrView)
    # An operation runs below autograd, which is needed here.
    with ExitStack() as stack:
        for one in keys:
            stack.enter_context(autograd._SetExcludeDispatchKeyGuard(one, False))
        stack.enter_context(torch.enable_grad())
        settings = tree, _lengths(ends), window, dropout, scaling
        output = _attend(leaves[0], leaves[1], leaves[2], *settings)
        gradients = torch.autograd.grad(output, leaves, gradient)
    first, second, third = (one.contiguous() for one in gradients)
    return first, second, third


@attend_backward.register_fake
def _(_gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs = *ctx.saved_tensors, *ctx.settings
    return *attend_backward(gradient.contiguous(), *inputs), *(None,) * 5


attend.register_autograd(_gradients, setup_context=_keep_inputs)
KEPT = {torch.ops.rollout_io.attend.default}
"""Operations whose outputs are kept where layers are recomputed."""
if VARLEN_ATTN is not None:
    KEPT.add(torch.ops.torch_attn._varlen_attn.default)
AttentionInterface.register(CHAIN_ATTENTION, chain_attention)
AttentionMaskInterface.register(CHAIN_ATTENTION, mask_of_layers)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within a chain of n tokens in O(n) memory, plus O(window^2) if n exceeds the window.

    A chain longer than its window is cut into blocks of queries, each with the keys in its window.
    """
    groups, size = query.shape[1] // key.shape[1], query.shape[2]
    in_kernel = query.device.type == "cpu" or autocast_dtype(query) != torch.float32
    if groups > 1 and not in_kernel:  # PyTorch would fall back to its kernel with quadratic memory
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


def fix_frequencies(model: Any) -> None:
    """Fix the frequencies of a model's rotary modules at the values for its longest possible row.

    - LongRoPE: the long factors if `max_position_embeddings` (vLLM's default `max_model_len`) is
      above `original_max_position_embeddings`, else the short ones.
    - Dynamic NTK with a factor: the base for `max_position_embeddings * factor` positions.
    """
    for module in model.modules():
        longest = longest_row(module)
        if longest is not None:
            _see_position(module, longest - 1)


def longest_row(module: nn.Module) -> int | None:
    """Return the row length that determines a module's frequencies, or None if they are fixed."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "rope_type"):
        return None
    rope = config.rope_parameters or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]
    factors = [factor for kind in kinds if (factor := _stretch(kind))]
    return int(config.max_position_embeddings * max(factors)) if factors else None


def _stretch(kind: Mapping[str, Any]) -> float | None:
    """Return the longest row's length as a multiple of `max_position_embeddings`.

    Returns None if the frequencies do not depend on the length.
    """
    if kind["rope_type"] == "longrope":
        return 1.0
    if kind["rope_type"] == "dynamic" and not kind.get("alpha"):  # alpha fixes the base
        return float(kind["factor"])
    return None


def _see_position(module: nn.Module, position: int) -> None:
    """Hook a rotary module: append `position` to its inputs, and drop the extra output."""
    signature = inspect.signature(module.forward)

    def more(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        ids: Tensor = bound.arguments["position_ids"]
        far = torch.full_like(ids[..., :1], position)
        bound.arguments["position_ids"] = torch.cat([ids, far], -1)
        return bound.args, bound.kwargs

    def less(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(part[..., :-1, :] for part in output)

    module.register_forward_pre_hook(more, with_kwargs=True)
    module.register_forward_hook(less)
