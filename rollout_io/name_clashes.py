"""Detection of user files that hide one of our packages.

`python FILE` and `python -m MODULE` search the directory of the file, or the working directory,
before the installed packages. A `schemas.py` or `trainer/` there is imported instead of ours.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

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
        found = _find(name) if name in PACKAGES else None
        if found is None or found.resolve() == ours.resolve():
            continue
        file = found / "__init__.py" if found.is_dir() else found
        raise HiddenPackageError(
            f"{file} hides the package `{name}` of rollout-io ({ours}). Rename it, "
            "or keep its directory off the search path by running `rollouts` or `python -P`",
            name=__package__,  # `python -m rollout_io` then prints one line and no traceback
        )


def _find(name: str) -> Path | None:
    """Return the package folder or module file that `import name` would load."""
    known = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if known is None else known.__spec__
    if spec is None or spec.origin is None:  # missing, or a folder without `__init__.py`
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations is not None else file
