"""Remote filesystems whose errors are those of this library; retries are those of the store's client."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

from schemas.errors import InputError, RolloutError, count

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
