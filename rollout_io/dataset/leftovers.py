"""Temporary files that a killed writer left in a dataset's directory."""

from __future__ import annotations

import fcntl
import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_io.dataset.storage import Location

_TEMPORARY = re.compile(r"\.part-\d{5,}(-[0-9a-f]{8})?\.parquet\.[0-9a-f]{8}\.tmp")


def mark_alive(file: Any) -> None:
    """Lock an open temporary file until it is closed, so that no other writer removes it."""
    with suppress(OSError):  # some filesystems have no locks
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_leftovers(folder: Location) -> None:
    """Remove the temporary shards in a local directory whose writers have ended.

    Call this while holding the directory's `Destination`. Files with any other name are kept, as are
    files of writers that still run.
    """
    if not folder.is_local or not folder.fs.isdir(folder.path):
        return
    for path in folder.fs.ls(folder.path):
        if _TEMPORARY.fullmatch(posixpath.basename(path)) and not Path(path).is_symlink():
            # An OSError means that the file is being written, is gone, or cannot be locked.
            with suppress(OSError), Path(path).open("rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(path).unlink()
