"""Freeze parameters that a policy's outputs do not depend on, such as a vision tower's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.self_check import probe


def freeze_unused(policy: nn.Module) -> None:
    """Freeze the parameters that get no gradient from text.

    Examples are the encoders of images and audio, and correction biases of routers. Several
    processes wait for each trained parameter's gradient, and adapters there would learn nothing.
    Experts that are modules of their own are not frozen: they depend on the tokens.
    """
    model: Any = policy.model
    with torch.enable_grad():
        forest = probe(model)
        found, _ = policy(forest, torch.ones(forest.num_targets, device=forest.token_ids.device))
        used = _leaves(found)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in used and not _is_expert(name):
            parameter.requires_grad_(requires_grad=False)


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the parameters in the graph of a tensor."""
    found, seen = set[int](), set[Any]()
    waiting = [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


def _is_expert(name: str) -> bool:
    """True for a parameter of one of several expert modules.

    Example:
        >>> _is_expert("layers.0.mlp.experts.3.up.weight"), _is_expert("layers.0.mlp.experts.up")
        (True, False)
    """
    parts = name.split(".")
    places = [at for at, part in enumerate(parts[:-1]) if "experts" in part]
    return any(parts[at + 1].isdecimal() for at in places)
