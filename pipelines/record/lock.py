"""One recorder at a time for a dataset."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from pipelines.record.journal import FOLDER
from rollout_io.storage import Location
from schemas.errors import RolloutError

_WAIT_S = 5.0


class Lock:
    """The lock file in a dataset's journal.

    Args:
        out: The dataset's directory.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._where = os.fspath(out)
        self._path = Path(out) / FOLDER / "lock"
        self._handle: int | None = None

    def take(self) -> None:
        """Hold it.

        Raises:
            RolloutError: out_is_free: another recorder holds it; output_file: it is no local place,
                or cannot be written.
        """
        if not Location.of(self._where).is_local:
            hint = "record to a disk, and copy the shards"
            raise RolloutError("output_file", self._where, "a remote place", "a local one", hint)
        deadline = time.monotonic() + _WAIT_S
        while not self._try():
            if time.monotonic() > deadline:
                got, hint = "another recorder at work there", "stop it, or choose another --out"
                raise RolloutError("out_is_free", self._where, got, "no other writer", hint)
            time.sleep(0.1)

    def _try(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            got = (error.strerror or str(error)).lower()
            hint = "choose another --out"
            raise RolloutError("output_file", self._where, got, "a writable place", hint) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        """Let others have it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
