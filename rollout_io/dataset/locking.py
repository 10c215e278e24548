"""Locks, so that only one process at a time writes to a destination, and files that need one.

The operating system releases file locks when the process ends. An object store has no locks: there, the
lock is an object that its holder writes again every few seconds.

    .DS.lock.1     beside DS; the holder's name, and how often it has written it

The object is created by a conditional put, so one of several writers gets it. A holder that stops
writing has ended: the next one creates the object of the next number, by which a holder that was only
paused learns that it has lost the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import posixpath
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, Timeout

from rollout_io.dataset.filesystems import whole, writable
from rollout_io.dataset.storage import Location
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
    object store, it is an object (`rollout_io.dataset.locking`).

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


BEAT_S, LEASE_S = 5.0, 20.0
"""Seconds between two writes of a holder, and after which a holder that wrote nothing has ended."""

_POLL_S = 0.5
_PROCESS = os.urandom(8).hex()


class StoreLock:
    """The lock of a directory in an object store, held until `release()`.

    Attributes:
        is_held: False if another writer holds the lock.
        holder: Name of the writer that holds it.
    """

    def __init__(self, directory: Location) -> None:
        folder, name = posixpath.split(directory.path.rstrip("/"))
        self._folder = Location(directory.fs, folder or name)
        self._fs: Any = directory.fs  # has all methods of fsspec
        self._prefix, self._where = f".{name}.lock.", directory.url
        self._stop = threading.Event()
        self._token, self._number = os.urandom(8).hex(), 0
        self.holder = f"process {os.getpid()} on {socket.gethostname()}"
        self.is_held = self._acquire()
        if self.is_held:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="store-lock")
            self._thread.start()

    def _acquire(self) -> bool:
        while True:
            number, content = self._newest()
            if number:
                self.holder, process, _ = _parsed(content)
                if process == _PROCESS or self._is_alive(number, content):
                    return False
            self.holder = f"process {os.getpid()} on {socket.gethostname()}"
            if self._created(number + 1):
                self._number = number + 1
                return True

    def _is_alive(self, number: int, content: bytes) -> bool:
        """Wait until the holder writes again (true), or has ended or released the lock (false)."""
        ends = time.monotonic() + LEASE_S
        while time.monotonic() < ends:
            time.sleep(_POLL_S)
            if (now := self._newest()) != (number, content):
                return now[0] > 0
        return False

    def _newest(self) -> tuple[int, bytes]:
        """Return number and content of the newest lock; 0 and nothing if there is none."""
        fs = self._fs
        with suppress(FileNotFoundError):
            fs.invalidate_cache(self._folder.path)
            names = map(posixpath.basename, fs.ls(self._folder.path, detail=False))
            ends = [
                name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)
            ]
            number = max((int(end) for end in ends if end.isdigit()), default=0)
            if number:
                with fs.open(self._path(number)) as file:
                    return number, bytes(file.read())
        return 0, b""

    def _path(self, number: int) -> str:
        return self._folder.join(f"{self._prefix}{number}").path

    def _content(self, num_written: int) -> bytes:
        return json.dumps([self.holder, _PROCESS, self._token, num_written]).encode()

    def _created(self, number: int) -> bool:
        content = self._content(0)
        try:
            self._fs.pipe_file(self._path(number), content, mode="create")
        except OSError:
            # A client may repeat a request that succeeded, and is then refused by its own object.
            newest = self._newest()
            if not newest[0]:
                raise
            return newest == (number, content)
        return True

    def _beat(self) -> None:
        num_written = 0
        while not self._stop.wait(BEAT_S):
            num_written += 1
            with suppress(Exception):  # a store that is away for longer ends the work itself
                self._fs.pipe_file(self._path(self._number), self._content(num_written))

    def refuse_lost(self) -> None:
        """Check that no other writer took the lock because this process was paused.

        Raises:
            InputError: `out_is_free`: another writer has the lock.
        """
        number, content = self._newest()
        if number != self._number or _parsed(content)[2] != self._token:
            finding = "another process took over, because this one was paused"
            raise InputError("out_is_free", self._where, finding, "", "choose a different --out")

    def release(self) -> None:
        """Let others write."""
        self._stop.set()
        self._thread.join()
        with suppress(FileNotFoundError):
            for number in range(1, self._number + 1):
                self._fs.rm_file(self._path(number))


def _parsed(content: bytes) -> tuple[str, str, str]:
    """Return name, process and token of a holder; the object may hold anything."""
    try:
        holder, process, token, _ = json.loads(content)
    except (ValueError, TypeError):
        return "another process", "", ""
    return str(holder), str(process), str(token)
