"""The filesystems of datasets: local files, written durably and atomically, and remote stores.

Local files have the fsspec methods that datasets use: importing fsspec reads the entry points of every
installed package and imports fifty modules, including asyncio and ssl, so it is imported only for remote
paths and glob patterns. Errors of remote filesystems are those of this library; retries are those of the
store's client.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import InputError, RolloutError, count


@contextmanager
def whole(final: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `final`; rename it afterwards, or remove it after an error.

    The leftovers of a killed process are removed, so hold a lock if several processes may write to
    `final` (`rollout_io.dataset.locking`).

    Args:
        final: Path of the file or folder; an existing file or empty folder is replaced.
        is_new: If true, an existing file is not replaced.

    Raises:
        FileExistsError: `is_new` is true, and the file exists.
    """
    partial = final.with_name(f".{final.name}.partial")
    _remove(partial)
    try:
        yield partial
        (settle_new if is_new and partial.is_file() else settle)(partial, final)
    except BaseException:
        with suppress(OSError):
            _remove(partial)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write or replace a UTF-8 file atomically."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def settle(partial: Path, final: Path) -> None:
    """Sync a file or folder to disk, then rename it."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.replace(final)
    sync(final.parent)  # the rename is durable only once the directory is synced


def settle_new(partial: Path, final: Path) -> None:
    """Sync a file to disk, then give it a new name.

    Raises:
        FileExistsError: The name is taken, even if another process took it just now.
    """
    sync(partial)
    try:
        os.link(partial, final)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # some filesystems have no hard links
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        partial.replace(final)
    else:
        partial.unlink()
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writable(where: str, hint: str | None = None) -> Iterator[None]:
    """Convert an OSError raised while a path is written to an `InputError`.

    Args:
        where: The path.
        hint: Hint of the error; None suggests a different --out and, if the disk is full, freeing
            space.

    Raises:
        InputError: `output_file`: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        finding = (error.strerror or str(error)).lower()
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        hint = hint or ("free some space there, or " * is_full + "choose a different --out")
        message = f"cannot write {where}: {finding}"
        raise InputError("output_file", where, finding, "", hint, message=message) from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()


_URL = "file://"


@dataclass(frozen=True)
class LocalFiles:
    """Files on this machine. All paths are absolute, as `local_path` returns them."""

    def exists(self, path: str) -> bool:
        """True if the path exists; false for a broken link."""
        return Path(path).exists()

    def isfile(self, path: str) -> bool:
        """True for a file, or a link to one."""
        return Path(path).is_file()

    def isdir(self, path: str) -> bool:
        """True for a directory, or a link to one."""
        return Path(path).is_dir()

    def size(self, path: str) -> int:
        """Return the size of a file, bytes."""
        return Path(path).stat().st_size

    def ls(self, path: str, detail: bool = False) -> list[str]:  # noqa: ARG002, FBT001 - as in fsspec
        """Return the paths in a directory, in any order; for a file, its own path."""
        if not Path(path).is_dir():
            Path(path).stat()  # raises for a missing path
            return [path]
        with os.scandir(path) as entries:
            return [entry.path for entry in entries]

    def find(self, path: str) -> list[str]:
        """Return the paths of all files in a directory, at any depth."""
        return _fsspec().find(path)  # type: ignore[no-any-return]

    def glob(self, path: str, *, detail: bool = False) -> Any:
        """Return the paths that match a pattern; if `detail`, with fsspec's details of each."""
        return _fsspec().glob(path, detail=detail)

    def open(self, path: str, mode: str = "rb", **_: object) -> Any:
        """Open a file; options such as `block_size` matter only for remote files."""
        return Path(path).open(mode)

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a file."""
        with self.open(path) as file:
            return file.read(size)  # type: ignore[no-any-return]

    def makedirs(self, path: str, *, exist_ok: bool = False) -> None:
        """Create a directory and its parents."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def mv(self, source: str, target: str, *, recursive: bool = True) -> None:  # noqa: ARG002 - as in fsspec
        """Move a file or directory."""
        shutil.move(source, target)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        Path(path).unlink()

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        Path(path).rmdir()

    def rm(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or, if `recursive`, a directory."""
        if recursive and Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path)
        else:
            Path(path).unlink()

    def unstrip_protocol(self, path: str) -> str:
        """Return the URL of a path."""
        return _URL + path


def local_path(url: str) -> str | None:
    """Return the absolute path of a local path or `file://` URL, as fsspec resolves it.

    Returns:
        The path, without a final "/"; None if fsspec must interpret the URL.
    """
    path = url.removeprefix(_URL)
    if "://" in path or "::" in path or path.startswith(("data:", "file:", "local:")):
        return None
    if path.startswith("~"):
        path = os.path.expanduser(path)  # noqa: PTH111 - `Path` would raise for an unknown user
    elif not path.startswith("/"):
        path = f"{os.getcwd()}/{'' if path == '.' else path.removeprefix('./')}"  # noqa: PTH109
    return path.rstrip("/") or "/"


def _fsspec() -> Any:
    import fsspec

    return fsspec.filesystem("file")


R = TypeVar("R")

_QUESTIONS = frozenset({"find", "glob", "head", "info", "isfile", "ls", "size"})
_CHANGES = frozenset({"makedirs", "mv", "pipe_file", "rm", "rm_file", "rmdir"})
# Exceptions that are valid answers, not failures; `_is_answer` handles `FileNotFoundError`.
_ANSWERS = (RolloutError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CLIENTS = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs",
                      "google", "requests", "s3fs", "urllib3"})  # fmt: skip
_GONE = (404, 410)


class RemoteFiles:
    """A remote fsspec filesystem that reports what fails.

    All attributes are forwarded to the filesystem. Queries, and reads of files opened with `open`,
    raise an `InputError` (`remote_store`) if they fail; the answer that a file does not exist is not a
    failure. Changes that fail raise an `OSError`, as on a local disk.

    Example:
        >>> RemoteFiles(fsspec.filesystem("s3")).ls("bucket/rollouts", detail=False)
        ['bucket/rollouts/part-00000.parquet']
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        if name == "_files":  # while being unpickled
            raise AttributeError(name)
        value = getattr(self._files, name)
        if name in _QUESTIONS:
            return partial(self._asked, value)
        return _as_os_errors(value) if name in _CHANGES else value

    def __eq__(self, other: object) -> bool:
        return bool(self._files == (other._files if isinstance(other, RemoteFiles) else other))

    def __hash__(self) -> int:
        return hash(self._files)

    def _asked(self, function: Callable[..., R], path: str, *args: Any, **options: Any) -> R:
        return _reported(partial(function, path, *args, **options), self._url(path))

    def _url(self, path: str) -> str:
        return str(self._files.unstrip_protocol(path))

    def exists(self, path: str) -> bool:
        """True if the path exists; unlike in fsspec, an unreachable store is an error."""
        with suppress(FileNotFoundError):
            self.info(path)
            return True
        return False

    def isdir(self, path: str) -> bool:
        """True if the path is a directory (see `exists`)."""
        if self._asked(self._files.isdir, path):
            return True
        with suppress(FileNotFoundError):
            return bool(self.info(path)["type"] == "directory")
        return False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file for reading or writing."""
        if mode != "rb":
            return _WrittenFile(_as_os_errors(self._files.open)(path, mode, **options))
        file = self._asked(self._files.open, path, mode, **options)
        return _ReadFile(file, self._url(path))


class _ReadFile(io.RawIOBase):
    """A file open for reading, whose reads return all bytes that were asked for, or fail.

    Args:
        file: The file.
        url: Its URL, for messages.
    """

    def __init__(self, file: Any, url: str) -> None:
        super().__init__()
        self._file, self._url = file, url
        self._size: int | None = getattr(file, "size", None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return int(self._file.tell())

    def size(self) -> int | None:
        """Size in bytes, for Arrow; None if the server does not report it."""
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._size is None:
            raise io.UnsupportedOperation("seek")
        return int(self._file.seek(offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        return _reported(partial(self._read, -1 if size is None else size), self._url)

    def _read(self, size: int) -> bytes:
        if self._size is None:
            return bytes(self._file.read(size))
        num_left = max(0, self._size - self.tell())
        num = num_left if size < 0 else min(size, num_left)
        data = bytes(self._file.read(num))
        # fsspec takes a short answer, of a store or of a proxy in front of it, for the end of the file.
        if len(data) != num:
            raise EOFError(f"the store returned {len(data):,} of {count(num, 'byte')}")
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        with suppress(Exception):
            self._file.close()
        super().close()


class _WrittenFile(io.RawIOBase):
    """A file open for writing, which raises the same errors as a local file."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def write(self, data: Any) -> int:
        return int(_as_os_errors(self._file.write)(data))

    def close(self) -> None:
        if not self.closed:
            try:
                _as_os_errors(self._file.close)()
            finally:
                super().close()


def _as_os_errors(function: Callable[..., R]) -> Callable[..., R]:
    """Wrap a function so that all errors of a store's client are raised as an `OSError`."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> R:
        try:
            return function(*args, **options)
        except Exception as error:
            if isinstance(error, OSError) or not _is_of_client(error):
                raise
            raise OSError(errno.EIO, " ".join(str(error).split())) from error

    return called


def _reported(read: Callable[[], R], url: str) -> R:
    """Return the result of `read`; report its errors.

    Raises:
        FileNotFoundError: The store does not have the path.
        InputError: `remote_store`: the store, or its client, failed.
    """
    try:
        return read()
    except Exception as error:
        if _is_answer(error):
            raise
        finding = " ".join((getattr(error, "strerror", None) or str(error) or repr(error)).split())
        hint = "check the URL, your credentials and the network, and run the same command again"
        message = f"cannot read {url}: {finding}"
        raise InputError("remote_store", url, finding, "", hint, message=message) from error


def _is_of_client(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _is_answer(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError):
        # fsspec's HTTP client raises it for every URL that it cannot query.
        status = getattr(error.__cause__, "status", None)
        is_http = type(error.__cause__).__module__.startswith("aiohttp")
        return not is_http or status in _GONE
    return isinstance(error, _ANSWERS)
