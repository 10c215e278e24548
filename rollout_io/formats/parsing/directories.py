"""Search for the files of a log that is a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rollout_io.formats.base import Input
from rollout_io.formats.parsing.naming import natural_key

_DEPTH, _MOST_FILES = 5, 20_000  # detection must be fast for any directory that a user passes
_RECORDS = (".jsonl", ".json", ".gz", ".zst", ".pt", ".eval", ".parquet", ".traj", ".pkl")


def logs_of(
    given: Input, is_log: Callable[[str], bool], is_beside: Callable[[str], bool]
) -> list[Input]:
    """Return the logs in a directory, or a file itself; see `logs_below` for the arguments."""
    if not given.path.is_dir():
        return [given]
    return [Input(str(path), path) for path in logs_below(given.path, is_log, is_beside)]


def logs_below(
    directory: Path, is_log: Callable[[str], bool], is_beside: Callable[[str], bool]
) -> list[Path]:
    """Return the logs in a directory, in natural order; none if it may have other records.

    Hidden directories and files are ignored. The result is also empty for a directory with more
    than 20,000 files or five levels, whose logs must be passed individually.

    Args:
        directory: Directory to search.
        is_log: Returns true for the file name of a log.
        is_beside: Returns true for the name of a file that accompanies the logs and has no records.
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
