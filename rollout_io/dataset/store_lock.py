"""A lock in an object store, which has none: an object that its holder writes again every few seconds.

    .DS.lock.1     beside DS; the holder's name, and how often it has written it

The object is created by a conditional put, so one of several writers gets it. A holder that stops
writing has ended: the next one creates the object of the next number, by which a holder that was only
paused learns that it has lost the lock.
"""

from __future__ import annotations

import json
import os
import posixpath
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from rollout_io.dataset.storage import Location
from schemas.errors import InputError

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
