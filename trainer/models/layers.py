"""Recompute and compile the layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from schemas.errors import ConfigError
from trainer.models.attention import KEPT, TANGENTS
from trainer.models.router_replay import same_routes

MOST_GRAPHS = 32
"""Graphs of all layers of a model before PyTorch stops compiling; 8 is its own limit. Windows, trees,
adapters and replayed experts each double their number, and passes without gradients."""
PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


def recompute_layers(model: Any) -> None:
    """Recompute the layers' activations in the backward pass.

    Transformers does this only in training mode, which would also enable dropout.

    Raises:
        ConfigError: The model has no layers that support recomputation.
    """
    for layer in layers_of(model, "gradient_checkpointing", "recompute"):
        layer.forward = partial(_recomputed, layer)


def compile_layers(model: Any, *, recomputes: bool = False) -> None:
    """Compile the layers: one graph for each kind of layer, so that a GPU reads memory less often.

    Layers of one kind, such as all with a sliding window, share a graph for all shapes; passes
    with and without gradients have one each. Attention is an operation in the graph.

    Args:
        model: A Transformers model whose attention is `trainer.models.attention.chain_attention`.
        recomputes: Recompute activations in the backward pass, as `recompute_layers` does, but
            keep the output of attention ([N, heads * size] per layer), which costs the most to
            recompute.

    Raises:
        ConfigError: The model has no layers of the usual kind.
    """
    layers = layers_of(model, "compile_layers", "compile")
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    # It would warn about layers that change a tensor in place, if they are recomputed.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    compiled = torch.compile(_selectively_recomputed if recomputes else _plain, dynamic=True)
    for layer in layers:
        layer.forward = partial(_compiled, compiled, layer)


def layers_of(model: Any, key: str, verb: str) -> list[Any]:
    """Return the layers of a model.

    Raises:
        ConfigError: The model has no layers of the usual kind, so `key` cannot be used.
    """
    if not num_layers(model):
        finding = f"Transformers cannot {verb} the layers of {model.config.model_type}"
        raise ConfigError(key, "model", finding, hint=f"pass --set model.{key}=false")
    return _layers(model)


def layer_classes(model: Any) -> list[str]:
    """Return the names of the classes that a model keeps in one piece, and of which it has modules."""
    present = {type(module).__name__ for module in model.modules()}
    return sorted(present.intersection(model._no_split_modules or ()))


def num_layers(model: Any) -> int:
    """Count the layers of the usual kind; a model of another kind has none."""
    return len(_layers(model))


def _layers(model: Any) -> list[Any]:
    # The model itself if it cannot have one; None if it is configured without, as Gemma 4 can be.
    encoder = model.get_encoder(modality="image")
    frozen = set() if encoder is None or encoder is model else set(encoder.modules())
    return [
        m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m not in frozen
    ]


@contextmanager
def plain_layers() -> Iterator[None]:
    """Run layers neither compiled nor recomputed in this context."""
    token = PLAIN.set(True)
    try:
        yield
    finally:
        PLAIN.reset(token)


def _plain(layer: Any, *inputs: Any, **settings: Any) -> Any:
    return type(layer).forward(layer, *inputs, **settings)


def _recomputed(layer: Any, *inputs: Any, **settings: Any) -> Any:
    # PyTorch 2.11 has no derivatives in forward mode here, which runs without a gradient.
    if PLAIN.get() or not torch.is_grad_enabled():
        return _plain(layer, *inputs, **settings)
    routes = partial(same_routes, layer)
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": routes}
    return checkpoint(_plain, layer, *inputs, **how, **settings)


def _selectively_recomputed(layer: Any, *inputs: Any, **settings: Any) -> Any:
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": _keep_attention}
    return checkpoint(_plain, layer, *inputs, **how, **settings)


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled(compiled: Any, layer: Any, *inputs: Any, **settings: Any) -> Any:
    # A compiled function has no derivatives in forward mode.
    run = _plain if PLAIN.get() or TANGENTS.get() else compiled
    return run(layer, *inputs, **settings)
