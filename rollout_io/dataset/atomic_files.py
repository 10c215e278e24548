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
def whole(final: Path, mark: str = "partial") -> Iterator[Path]:
    """Yield a temporary path beside `final`; rename it afterwards, or remove it after an error.

    Args:
        final: Path of the file or folder; an existing file or empty folder is replaced.
        mark: Distinguishes processes that may write to `final` at the same time. Leftovers of a
            killed process with the same mark are removed.
    """
    partial = final.with_name(f".{final.name}.{mark}")
    _remove(partial)
    try:
        yield partial
        settle(partial, final)
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
        got = (error.strerror or str(error)).lower()
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        hint = hint or ("free some space there, or " * is_full + "choose a different --out")
        message = f"cannot write {where}: {got}"
        raise InputError("output_file", where, got, "", hint, message=message) from None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()
