"""Kill process groups and remove a folder when this process ends for any reason."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Self

_WATCH = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
for folder in sys.argv[1:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Watch:
    """A small process that kills process groups once this process has ended.

    After SIGKILL, this process cannot stop its children itself; but whenever it ends, the operating
    system closes the pipe that the watch reads.

    Args:
        folder: A folder to remove when the groups are killed.

    Attributes:
        folder: The folder to remove.

    Example:
        with Watch() as watch:
            process = subprocess.Popen(command, start_new_session=True)
            watch.add(process.pid)
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        folders = [] if folder is None else [folder]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WATCH, *folders],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, group: int) -> None:
        """Register a process group to be killed when this process ends."""
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Kill all remaining groups, remove the folder, and end the watch."""
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
