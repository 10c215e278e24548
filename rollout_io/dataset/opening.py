"""Functions that open input files, and tell whether one was changed while it was read.

Only regular files and pipes inherited by this process are accepted; anything else could block or
never end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
from contextvars import ContextVar
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple

from schemas.errors import InputError

MAX_DOCUMENT_BYTES = 4 << 30
"""Size limit of an input that is read into memory entirely."""

_BUFFER_BYTES = 1 << 20
_READ_BYTES = 8 << 20
_HASHED_BYTES = 8 << 20  # large, because a thread waits for the GIL after each block
_OPEN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)|/dev/stdin")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe, which may block forever",
    stat.S_IFCHR: "a character device, which may never end",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


OPENED: ContextVar[set[str] | None] = ContextVar("OPENED", default=None)
"""Paths of the regular files that were opened, if a caller wants to know them."""


class Version(NamedTuple):
    """What differs if a file was replaced or changed: the key of anything cached by path.

    Attributes:
        device: Device of the file.
        inode: Inode of the file; a file that replaces another one has a different one.
        num_bytes: Size.
        modified_ns: Time of the last change.
    """

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Version:
        """Return the version of an existing file; raises `OSError` if there is none."""
        status = Path(path).stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a pipe that this process inherited (`<(...)`, `/dev/fd/63`).

    Raises:
        InputError: `input_file`: the input cannot be read, or is neither a file nor such a pipe.
    """
    where = os.fspath(path)
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            if (opened := OPENED.get()) is not None:
                opened.add(str(Path(where).absolute()))
            return BufferedReader(FileIO(descriptor), _BUFFER_BYTES)
        os.close(descriptor)
        is_given = _OPEN_DESCRIPTOR.fullmatch(where)
        if is_given and stat.S_ISFIFO(mode):
            return BufferedReader(FileIO(os.dup(int(is_given[1] or 0))), _BUFFER_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        finding = (getattr(error, "strerror", None) or str(error)).lower()
        hint = missing_hint(where) if isinstance(error, FileNotFoundError) else None
        hint = hint or f"check the path: ls {Path(where).parent}"
        message = f"cannot read {where}: {finding}"
        raise InputError("input_file", where, finding, "", hint, message=message) from None
    raise _irregular(where, mode)


def missing_hint(missing: str) -> str | None:
    """Name the target of a broken link, or a path with a similar name; None if there is neither."""
    from difflib import get_close_matches  # imported here because only errors need it

    path = Path(missing)
    try:
        if path.is_symlink():
            return f"the link points to {path.readlink()}, which does not exist"
        names = [child.name for child in path.parent.iterdir() if child.exists()]
    except (OSError, ValueError):  # ValueError: a NUL byte in the name
        return None
    # Compare without suffixes: a common suffix would make unrelated names similar.
    stems = get_close_matches(path.stem, {Path(name).stem for name in names}, 1)
    named = [name for name in names if Path(name).stem in stems]
    near = get_close_matches(path.name, named, 1, cutoff=0)
    return f"did you mean {path.parent / near[0]}?" if near else None


def too_many_open_files(error: OSError, where: str) -> InputError | None:
    """Return the error to report if the limit of open files was reached; None for other errors."""
    if error.errno not in {errno.EMFILE, errno.ENFILE}:
        return None
    finding, hint = "too many open files", "raise the limit: ulimit -n 1024"
    return InputError("open_files", where, finding, "", hint)


def standard_input() -> BufferedReader:
    """Return standard input, unless it is a device.

    Raises:
        InputError: `input_file`: standard input is a device, or closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        hint = "pass a file, or pipe data into the command"
        message = "cannot read -: standard input is closed"
        raise InputError("input_file", "-", "closed", "", hint, message=message)
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise _irregular("-", mode)
    assert isinstance(sys.stdin.buffer, BufferedReader)
    return sys.stdin.buffer


def refuse_irregular(path: str | os.PathLike[str]) -> None:
    """Check that a path is a regular file, before a library opens it.

    Raises:
        InputError: `input_file`: see `open_input`.
    """
    with open_input(path) as file:
        mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        raise _irregular(os.fspath(path), mode)


def read_input(path: str | os.PathLike[str], max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read an entire input into memory.

    Raises:
        InputError: `input_file`: see `open_input`; or the input is larger than `max_bytes`.
    """
    blocks: list[bytes] = []
    num_bytes = 0
    with open_input(path) as file:
        # Block by block: one read of max_bytes would reserve as much memory for any file.
        while num_bytes <= max_bytes and (block := file.read(_READ_BYTES)):
            blocks.append(block)
            num_bytes += len(block)
    content = b"".join(blocks)
    if num_bytes > max_bytes:
        finding, hint = f"the file is larger than {max_bytes:,} bytes", "check the path"
        raise InputError("input_file", os.fspath(path), finding, "", hint)
    return content


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content as hexadecimal.

    Size and modification time do not identify content: they can be equal for different files.

    Raises:
        InputError: `input_file`: see `open_input`.
    """
    digest = hashlib.sha256()
    with open_input(path) as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()


def changed(path: str, verb: str) -> InputError:
    """Return the error for a shard that was changed while its dataset was read."""
    hint = "run the same command again once nothing writes to the dataset"
    return InputError("input_file", path, f"the file was {verb} while it was read", "", hint)


class State(NamedTuple):
    """What identifies the content of a local file.

    Size and modification time can be equal for two files, because programs set them. Only the
    kernel sets the time of the last status change. Some network file systems give a file another
    inode after a while, so the inode alone is not compared.
    """

    num_bytes: int
    modified_ns: int
    status_changed_ns: int
    inode: int

    def may_be(self, other: State) -> bool:
        """True if only the status of the file changed: its mode, or its number of hard links."""
        same = self.num_bytes, self.modified_ns
        if same != (other.num_bytes, other.modified_ns):
            return False
        return self.status_changed_ns == other.status_changed_ns or self.inode == other.inode


def state_of(path: str) -> State | None:
    """Return the state of a local file; None if it is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116 - `Path` is slower, and this runs once a row group
    except OSError:
        return None
    return State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _irregular(where: str, mode: int) -> InputError:
    finding = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
    hint = "pass a file" if stat.S_ISDIR(mode) else "save its content to a file first"
    message = f"cannot read {where}: it is {finding}"
    return InputError("input_file", where, finding, "", hint, message=message)
