"""Package exports that load on first use, so that `rollouts --help` loads no heavy library."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(
    package: str, file: str, names: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` (PEP 562) that imports each of `names` on first use, and a `__dir__`.

    The modules are those of the imports under `if TYPE_CHECKING:` in the package's own source, where
    type checkers look too, so that a name is written down in one place.

    Args:
        package: Name of the package.
        file: Its `__file__`.
        names: Its `__all__`.
    """
    module_of: dict[str, str] = {}

    def read() -> dict[str, str]:
        if not module_of:
            for block in ast.parse(Path(file).read_text(encoding="utf-8")).body:
                if isinstance(block, ast.If):
                    for line in block.body:
                        assert isinstance(line, ast.ImportFrom)
                        assert line.module is not None
                        module_of.update(dict.fromkeys((n.name for n in line.names), line.module))
        return module_of

    def load(name: str) -> Any:
        if name not in names or name not in read():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: names
