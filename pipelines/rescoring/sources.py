"""The user's own files that a reward function is made of: its module, and what that imports."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

_OURS = frozenset({"pipelines", "rollout_io", "schemas", "trainer"})
_INSTALLED = {
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}


def source_digests(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the SHA-256 of each file that a function is made of, by module.

    These are the files of its module and of the modules that are imported there, anywhere in the
    code, and so on; without installed packages. Nothing is imported or run.

    Args:
        name: The function as `module:name`.
        function: The function.

    Example:
        >>> list(source_digests("checked:brief", brief))
        ['checked', 'limits']
    """
    inner = inspect.unwrap(function)
    roots = {name.partition(":")[0], getattr(inner, "__module__", None) or type(inner).__module__}
    packages = {root.partition(".")[0] for root in roots}
    waiting, digests = [*roots], dict[str, str]()
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        path = _file_of(module)
        top = module.partition(".")[0]
        if path is None or (top not in packages and (top in _OURS or _is_installed(path))):
            continue
        content = path.read_bytes()
        digests[module] = hashlib.sha256(content).hexdigest()
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        new = {one for one in _imports(content, package) if one not in seen}
        waiting, seen = [*waiting, *new], seen | new
    return dict(sorted(digests.items()))


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or any(path.is_relative_to(one) for one in _INSTALLED)


def _file_of(module: str) -> Path | None:
    """Find the source of a module without importing it; None for packages without code."""
    places, spec = None, None
    for end in (i for i, char in enumerate(f"{module}.") if char == "."):
        spec = PathFinder.find_spec(module[:end], places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the modules that a source file may import, with the packages that contain them."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except SyntaxError:  # a module that the function can import only to fail
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = resolve_name(relative, package) if package or not node.level else relative
            names = [f"{base}.{alias.name}" for alias in node.names]  # modules or their attributes
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
