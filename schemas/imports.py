"""Imports that may fail, because they need an extra of `rollout-io`, or that wait for their first use."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from schemas.errors import MissingExtra

_OURS = {"schemas", "rollout_io", "pipelines", "trainer"}


@contextmanager
def requires_extra(extra: str, where: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Args:
        extra: Name of the extra in `pyproject.toml`, or several names separated by commas.
        where: Command or setting that needs the package: "rollouts plot", "lora_rank".

    Raises:
        MissingExtra: `extra_installed`: a package of the extra is not installed.

    Example:
        >>> try:
        ...     with requires_extra("plot", "rollouts plot"):
        ...         raise ModuleNotFoundError(name="matplotlib")
        ... except MissingExtra as error:
        ...     print(error.hint)
        pip install "rollout-io[plot]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise explained(error, extra, where) from None


def explained(error: ImportError, extra: str, where: str) -> ImportError | MissingExtra:
    """Return the error that `requires_extra` raises for a failed import.

    The original error is returned if one of our own modules is missing, or if an installed package
    fails to import.
    """
    package = (error.name or "").partition(".")[0]
    if package in _OURS or not isinstance(error, ModuleNotFoundError):
        return error
    return MissingExtra(
        "extra_installed",
        where,
        f"no package {package}",
        f"the packages of rollout-io[{extra}]",
        f'pip install "rollout-io[{extra}]"',
        message=f"{where} needs the package {package}, which is not installed",
    )


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

    @cache
    def module_of() -> dict[str, str]:
        blocks = ast.parse(Path(file).read_text(encoding="utf-8")).body
        lines = [line for block in blocks if isinstance(block, ast.If) for line in block.body]
        imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
        return {n.name: line.module or "" for line in imports for n in line.names}

    def load(name: str) -> Any:
        if name not in names or name not in module_of():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of()[name]), name)

    return load, lambda: names
