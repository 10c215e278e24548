"""Steps before libraries are imported: detect files that hide our packages, leave out large libraries."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_LEFT_OUT: set[str] = set()


def keep_pandas_out_of_arrow() -> None:
    """Stop `pa.array` from importing pandas on its first call, which takes as long as all our imports.

    pyarrow imports pandas once, if it is installed, to recognise pandas objects. We pass none, so
    the import is blocked during a first call; afterwards pandas can be imported as usual. Only the
    command line and worker processes may call this: a library must not block imports of the program
    that uses it.
    """
    if "pandas" in sys.modules:
        return
    without_pandas = _WithoutPandas()
    sys.meta_path.insert(0, without_pandas)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(without_pandas)


class _WithoutPandas(MetaPathFinder):
    """Import hook that reports pandas as not installed."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def keep_torch_out_of_transformers() -> None:
    """Make `importing_transformers` hide PyTorch for the rest of this process.

    Transformers imports PyTorch and the code of models if PyTorch is installed, though a tokenizer
    needs neither: loading one takes 2 s in place of 8 s. Afterwards, Transformers cannot load models
    in this process, so only commands that run none, and their worker processes, may call this.
    """
    _LEFT_OUT.add("torch")


def keeps_torch_out_of_transformers() -> bool:
    """Return True if `keep_torch_out_of_transformers` was called in this process."""
    return "torch" in _LEFT_OUT


@contextmanager
def importing_transformers() -> Iterator[None]:
    """Hide PyTorch while Transformers is imported, if it is to be kept out and is not yet imported."""
    if not keeps_torch_out_of_transformers() or "torch" in sys.modules:
        yield
        return
    advises = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"  # or it prints that models are not available
    sys.modules["torch"] = None  # type: ignore[assignment]  # "not installed" to all imports
    try:
        yield
    finally:
        del sys.modules["torch"]
        if advises is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = advises


PACKAGES = ("schemas", "rollout_io", "pipelines", "trainer")


class HiddenPackageError(ImportError):
    """A file on the search path hides one of our packages."""


def require_ours(*packages: str) -> None:
    """Check that importing these names would load our packages, without importing any.

    Args:
        packages: Names in `PACKAGES`; other names are not checked.

    Raises:
        HiddenPackageError: A file hides a package; the message explains how to avoid it.
    """
    for name in packages:
        ours = Path(__file__).parents[1] / name
        place = _find(name) if name in PACKAGES else None
        if place is None or place.resolve() == ours.resolve():
            continue
        file = place / "__init__.py" if place.is_dir() else place
        raise HiddenPackageError(
            f"{file} hides the package `{name}` of rollout-io ({ours}). Rename it, "
            "or keep its directory off the search path by running `rollouts` or `python -P`",
            name=__package__,  # `python -m rollout_io` then prints one line and no traceback
        )


def _find(name: str) -> Path | None:
    """Return the package folder or module file that `import name` would load."""
    module = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if module is None else module.__spec__
    if spec is None or spec.origin is None:  # missing, or a folder without `__init__.py`
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations is not None else file
