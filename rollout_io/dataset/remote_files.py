"""Remote filesystems that retry reads if a store is busy or a connection breaks.

Reads are retried only here. Amazon's client below retries single requests too, but retries in s3fs
are disabled, because they would multiply the number of attempts.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

from schemas.errors import InputError, RolloutError, count

R = TypeVar("R")

MAX_ATTEMPTS = 6
FIRST_PAUSE_S = 0.5
"""Pause after the first failure; each following pause is twice as long."""
LONGEST_S = 60.0
"""No attempt begins more than this many seconds after the first attempt began."""

_QUESTIONS = frozenset({"find", "glob", "head", "info", "isfile", "ls", "size"})
_CHANGES = frozenset({"makedirs", "mv", "pipe_file", "rm", "rm_file", "rmdir"})
# Exceptions that are valid answers, not failures; `_is_answer` handles `FileNotFoundError`.
_ANSWERS = (RolloutError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CLIENTS = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs",
                      "google", "requests", "s3fs", "urllib3"})  # fmt: skip
_GONE = (404, 410)


class RemoteFiles:
    """A remote fsspec filesystem that retries reads, and reports reads that keep failing.

    All attributes are forwarded to the filesystem. Queries, and reads of files opened with `open`,
    raise an `InputError` (`remote_store`) if all attempts fail; the answer that a file does not
    exist is not a failure. Changes are not retried here: if they fail, they raise an `OSError`, as
    on a local disk.

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
        return repeated(partial(function, path, *args, **options), self._url(path))

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
        """Open a file for reading, with retries, or for writing."""
        if mode != "rb":
            return _WrittenFile(_as_os_errors(self._files.open)(path, mode, **options))
        return _PatientFile(partial(self._files.open, path, mode, **options), self._url(path))


class _PatientFile(io.RawIOBase):
    """A file that is reopened at the same position if a read fails.

    Args:
        opened: Opens the file.
        url: URL of the file, for messages.
    """

    def __init__(self, opened: Callable[[], Any], url: str) -> None:
        super().__init__()
        self._opened, self._url = opened, url
        self._file = repeated(opened, url)
        self._size: int | None = getattr(self._file, "size", None)
        self._version = _version_of(self._file)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._at

    def size(self) -> int | None:
        """Size in bytes, for Arrow; None if the server does not report it."""
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._size is None:
            raise io.UnsupportedOperation("seek")
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = max(0, starts[whence] + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        if self._size is None:
            # Such a stream cannot be resumed in the middle, but it can be restarted.
            read = partial(self._file.read, -1 if size is None else size)
            data = _reported(read, self._url) if self._at else self._repeated(self._streamed, size)
        else:
            num_left = max(0, self._size - self._at)
            num = num_left if size is None or size < 0 else min(size, num_left)
            data = self._repeated(self._whole, num) if num else b""
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            _close(self._file)
        super().close()

    def _repeated(self, read: Callable[[Any], bytes], size: Any) -> bytes:
        return repeated(partial(read, size), self._url, self._open_again)

    def _streamed(self, size: int | None) -> bytes:
        data: bytes = self._file.read(-1 if size is None else size)
        return data

    def _whole(self, num: int) -> bytes:
        """Read exactly `num` bytes; raise if the store, or a proxy in front of it, returns fewer."""
        self._file.seek(self._at)
        data: bytes = self._file.read(num)
        if len(data) != num:
            raise EOFError(f"the store returned {len(data):,} of {count(num, 'byte')}")
        return data

    def _open_again(self) -> None:
        _close(self._file)
        self._file = self._opened()
        if (self._version, self._size) != (_version_of(self._file), self._file.size):
            finding, hint = "the file changed while it was being read", "run the same command again"
            raise InputError("remote_store", self._url, finding, "", hint)


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


def repeated(read: Callable[[], R], url: str, before_next: Callable[[], None] = lambda: None) -> R:
    """Return the result of `read`; retry it after temporary failures.

    Args:
        read: Function without side effects.
        url: URL that it reads, for messages.
        before_next: Called before each retry; its errors count as errors of that attempt.

    Raises:
        FileNotFoundError: The store does not have the path.
        InputError: `remote_store`: the store refused the request, or failed `MAX_ATTEMPTS` times or
            for `LONGEST_S` seconds.
    """
    began = time.monotonic()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            if attempt > 1:
                before_next()
            return read()
        except Exception as error:
            if _is_answer(error):
                raise
            pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
            is_late = time.monotonic() - began + pause_s > LONGEST_S
            if not may_pass(error) or is_late or attempt == MAX_ATTEMPTS:
                raise _unreadable(url, error, attempt) from error
        time.sleep(pause_s)
    raise AssertionError  # the last attempt returns or raises


def _reported(read: Callable[[], R], url: str) -> R:
    """Return the result of `read`, which cannot be retried; report its errors."""
    try:
        return read()
    except Exception as error:
        if _is_answer(error):
            raise
        raise _unreadable(url, error, 1) from error


def _unreadable(url: str, error: Exception, num_attempts: int) -> InputError:
    finding = " ".join((getattr(error, "strerror", None) or str(error) or repr(error)).split())
    tried = f" ({num_attempts} attempts)" if num_attempts > 1 else ""
    hint = "check the URL, your credentials and the network, and run the same command again"
    message = f"cannot read {url}: {finding}{tried}"
    return InputError("remote_store", url, finding, "", hint, message=message)


def may_pass(error: BaseException) -> bool:
    """True if the same request may succeed later: a busy store, a broken connection, a timeout."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return False
    return isinstance(error, (OSError, EOFError)) or _is_of_client(error)


def _is_of_client(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _is_answer(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError):
        # fsspec's HTTP client raises it for every URL that it cannot query.
        status = getattr(error.__cause__, "status", None)
        is_http = type(error.__cause__).__module__.startswith("aiohttp")
        return not is_http or status in _GONE
    return isinstance(error, _ANSWERS)


def _version_of(file: Any) -> Any:
    details = getattr(file, "details", None)
    return details.get("ETag") if isinstance(details, dict) else None


def _close(file: Any) -> None:
    with suppress(Exception):
        file.close()
