"""Durable local files and folders, written atomically."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
