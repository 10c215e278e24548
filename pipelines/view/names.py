"""Short names of paths for menus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence


def absolute(path: str) -> str:
    """Return a local path as an absolute path, and a URL as it is."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100


def short_name(path: str) -> str:
    """Return the last part of a path."""
    return path.rstrip("/").rpartition("/")[2] or path


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other path has.

    Example:
        >>> distinct_names(["runs/a/merged", "runs/b/merged", "shop/"])
        ['a/merged', 'b/merged', 'shop']
    """
    parts = [absolute(path.rstrip("/")).split("/") for path in paths]
    sizes = [1] * len(parts)
    while True:
        names = ["/".join(segments[-size:]) for segments, size in zip(parts, sizes, strict=True)]
        counts = Counter(names)
        longer = [
            min(size + (counts[name] > 1), len(segments))
            for segments, size, name in zip(parts, sizes, names, strict=True)
        ]
        if longer == sizes:
            return [name or path for name, path in zip(names, paths, strict=True)]
        sizes = longer
