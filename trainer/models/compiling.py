"""Compile functions once for all sizes."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

SYMBOLIC_SIZES: Any = partial(
    importlib.import_module("torch.fx.experimental._config").patch, use_duck_shape=False
)
"""Context for calls of compiled functions: sizes that are equal at first are not taken for one size.
Otherwise, other sizes would need another graph."""


def compiled(function: Any) -> Any:
    """Compile a function with symbolic sizes; a part that cannot be compiled is an error."""
    return torch.compile(function, dynamic=True, fullgraph=True)
