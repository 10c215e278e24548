"""Locks, so that only one process at a time writes to a destination, and files that need one.

The operating system releases file locks when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, Timeout

from rollout_io.dataset.atomic_files import whole, writable
from rollout_io.dataset.storage import Location
from rollout_io.dataset.store_lock import StoreLock
from schemas.errors import InputError

if TYPE_CHECKING:
    import polars as pl

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""Errors of filesystems that do not support locks."""

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MOST_NAME_BYTES = 200


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


class Destination:
    """The right to write to one path, held until `release()` or the end of the process.

    A local path is locked with the file `.NAME.lock` beside it, or `.lock` inside it if only the
    directory itself is writable, so that every writer of this library uses the same lock. In an
    object store, it is an object (`rollout_io.dataset.store_lock`).

    Args:
        out: File or directory, local or an fsspec URL.
        wait_s: Maximum time to wait for another process, seconds.
        noun: What `out` is, for messages.

    Raises:
        InputError: `out_is_free`: another process is writing to `out`; `output_file`: the lock
            cannot be created.
    """

    def __init__(
        self, out: str | os.PathLike[str], *, wait_s: float = 0.0, noun: str = "directory"
    ) -> None:
        where, location = os.fspath(out), Location.of(out)
        self._file: BaseFileLock | None = None
        self._path: Path | None = None
        self._stored: StoreLock | None = None
        holder = "another process"
        with writable(where):
            if location.is_local:
                is_mine = self._lock(Path(os.path.realpath(location.path)), wait_s)
            else:
                self._stored = StoreLock(location)
                is_mine, holder = self._stored.is_held, self._stored.holder
        if not is_mine:
            finding = f"{holder} is writing to this {noun}"
            hint = "wait until it ends, or choose a different --out"
            raise InputError("out_is_free", where, finding, "", hint)

    def _lock(self, target: Path, wait_s: float) -> bool:
        for path in (_beside(target), target / ".lock"):
            try:
                self._file, self._path = lock(path, wait_s), path
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return True
                if error.errno not in _NOT_WRITABLE or path.parent == target or not target.is_dir():
                    raise
            else:
                return self._file is not None
        raise AssertionError

    def release(self) -> None:
        """Let others write to the path; calling it again has no effect."""
        if self._file is not None and self._path is not None:
            # Removing a held lock is safe: whoever is waiting for it sees that the file is gone.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.release()
            self._file = None
        if self._stored is not None:
            self._stored.release()
            self._stored = None

    def refuse_lost(self) -> None:
        """Check, before publishing, that the lock is still held; see `StoreLock.refuse_lost`."""
        if self._stored is not None:
            self._stored.refuse_lost()


@contextmanager
def destination(
    out: str | os.PathLike[str], *, wait_s: float = 0.0, noun: str = "directory"
) -> Iterator[Destination]:
    """Hold a `Destination` in a `with` block."""
    held = Destination(out, wait_s=wait_s, noun=noun)
    try:
        yield held
    finally:
        held.release()


def _beside(target: Path) -> Path:
    name = target.name
    if len(os.fsencode(name)) > _MOST_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.with_name(f".{name}.lock") if name else target / ".lock"


def check_table_out(out: str) -> None:
    """Check that a table can be written to a path, before the table is computed.

    Raises:
        InputError: `output_file`: the name does not end in `.parquet`; `out_is_free`: the path
            exists.
    """
    if Path(out).suffix != ".parquet":
        finding, hint = "the file name does not end in .parquet", "choose a name that does"
        raise InputError("output_file", f"--out {out}", finding, hint=hint)
    if os.path.lexists(out):
        finding, hint = "the output path already exists", "choose a different --out, or remove it"
        raise InputError("out_is_free", out, finding, hint=hint)


def write_table(table: pl.DataFrame, out: str) -> None:
    """Write a table atomically to a new Parquet file, and create its parent directories.

    Raises:
        InputError: `out_is_free`: the path exists, or another process is writing to it; `output_file`: it cannot be written.
    """
    with destination(out, noun="path"):
        check_table_out(out)
        with writable(out), whole(Path(out), is_new=True) as partial:
            table.write_parquet(partial)


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
