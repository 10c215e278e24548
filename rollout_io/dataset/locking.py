"""File locks, which the operating system releases when the process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def lock(path: Path, wait_s: float = 0.0) -> BaseFileLock | None:
    """Lock a local file until `release()` or the end of the process; create it if necessary.

    Any thread may release the lock.

    Args:
        path: Path of the lock file, which is not deleted on release.
        wait_s: Maximum time to wait for another process that holds the lock, seconds.

    Returns:
        The lock; None if another process holds it.

    Raises:
        OSError: The file cannot be written, or its filesystem does not support locks.
    """
    held = FileLock(path, timeout=wait_s, poll_interval=0.1, thread_local=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held.acquire()
    except Timeout:
        return None
    return held
