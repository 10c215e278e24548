"""Directories that are one log: their files, where they hold no other records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rollout_io.logs.naming import natural_key

_DEPTH, _MOST_FILES = 5, 20_000
_RECORDS = (".jsonl", ".json", ".gz", ".zst", ".pt", ".eval", ".parquet", ".traj", ".pkl")


def logs_below(
    directory: Path, is_log: Callable[[str], bool], is_beside: Callable[[str], bool]
) -> list[Path]:
    """The logs in a directory, in natural order; none where other records may be there too.

    Hidden directories and files are passed over. One of more than 20,000 files, or more than five
    levels deep, is no log: what is in it has to be named.

    Args:
        directory: Where to look.
        is_log: Whether a file of this name is one.
        is_beside: Whether a file of this name goes with the logs, and is no record.
    """
    found: list[Path] = []
    num_files = 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = [name for name in names if not name.startswith(".")]
        logs = [name for name in shown if is_log(name)]
        others = [name for name in shown if name.endswith(_RECORDS) and name not in logs]
        depth = len(Path(folder).relative_to(directory).parts)
        num_files += len(names)
        if num_files > _MOST_FILES or depth > _DEPTH or not all(map(is_beside, others)):
            return []
        found += [Path(folder) / name for name in logs]
    return sorted(found, key=lambda path: natural_key(str(path)))
