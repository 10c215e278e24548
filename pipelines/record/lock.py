"""One recorder at a time for a dataset."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import BaseFileLock

from pipelines.record.journal import FOLDER
from rollout_io.dataset.atomic_files import writable
from rollout_io.dataset.locking import lock
from rollout_io.dataset.storage import Location
from schemas.errors import RolloutError

_WAIT_S = 5.0


def lock_dataset(out: str | os.PathLike[str]) -> BaseFileLock:
    """Lock the journal of a dataset's directory, until `release()` or the exit.

    Raises:
        RolloutError: out_is_free: another recorder holds it; output_file: it is no local place, or
            cannot be written.
    """
    where = os.fspath(out)
    if not Location.of(where).is_local:
        hint = "record to a disk, and copy the shards"
        raise RolloutError("output_file", where, "a remote place", "a local one", hint)
    with writable(where, "choose another --out"):
        held = lock(Path(out) / FOLDER / "lock", _WAIT_S)
    if held is None:
        got, hint = "another recorder at work there", "stop it, or choose another --out"
        raise RolloutError("out_is_free", where, got, "no other writer", hint)
    return held
