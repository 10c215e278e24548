"""Replacements for standard streams that were closed before the command started (`>&-`)."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any


def open_standard_streams() -> None:
    """Replace closed standard streams.

    Their descriptors are reserved: the first files that a command opens would get them, and
    messages would then be written into these files. Writing to a closed stdout raises
    `BrokenPipeError`, as if its reader were gone; text for a closed stderr is dropped.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Closed()), encoding="utf-8", write_through=True
        )
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


class _Closed(io.RawIOBase):
    """A stream that nobody reads."""

    def writable(self) -> bool:
        return True

    def write(self, _: Any) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
