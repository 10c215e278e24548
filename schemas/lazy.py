"""Package exports that load on first use, so that `rollouts --help` loads no heavy library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` (PEP 562) that imports `names[module]` from `module` on first use."""
    module_of = {name: module for module, defined in names.items() for name in defined}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load
