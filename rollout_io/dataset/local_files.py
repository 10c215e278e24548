"""Local files and folders, written durably and atomically; the local filesystem with fsspec's methods.

Importing fsspec reads the entry points of every installed package and imports fifty modules,
including asyncio and ssl, so it is imported only for remote paths and glob patterns.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import InputError


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
