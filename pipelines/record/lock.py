"""Allow only one recorder per dataset at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock

from pipelines.record.journal import FOLDER
from rollout_io.dataset.atomic_files import writable
from rollout_io.dataset.leftovers import remove_leftovers
from rollout_io.dataset.locking import Destination, lock
from rollout_io.dataset.storage import Location
from schemas.errors import InputError

_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """The locks of a running recorder: of its journal, and of its dataset."""

    journal: BaseFileLock
    dataset: Destination

    def release(self) -> None:
        """Release both locks."""
        self.dataset.release()
        self.journal.release()


def lock_dataset(out: str | os.PathLike[str]) -> Held:
    """Lock a dataset and its journal until `release()` is called or the process ends.

    Raises:
        InputError: `out_is_free`: another recorder, or any other writer, is writing to the dataset; `output_file`: the directory is
            not local or not writable.
    """
    where = os.fspath(out)
    if not Location.of(where).is_local:
        hint = "record to a local directory and copy the shards"
        raise InputError("output_file", where, "the recorder needs a local directory", hint=hint)
    with writable(where, "choose a different --out"):
        held = lock(Path(out) / FOLDER / "lock", _WAIT_S)
    if held is None:
        hint = "stop the other recorder, or choose a different --out"
        raise InputError("out_is_free", where, "another recorder is writing to it", hint=hint)
    try:
        every = Destination(where, wait_s=_WAIT_S)
    except BaseException:
        held.release()
        raise
    remove_leftovers(Location.of(where))
    return Held(held, every)
