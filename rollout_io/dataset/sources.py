"""Detect that a dataset changes while it is read, so that no output mixes two datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollout_io.dataset.filesystems import LocalFiles
from rollout_io.dataset.storage import Location, Paths, find_shards
from schemas.errors import InputError


class Sources:
    """The shards of some datasets, as they are now.

    Args:
        datasets: Paths of the datasets; create this object before reading them.
        may_grow: If true, shards may be added meanwhile: they are not read.

    Raises:
        InputError: `dataset_exists`: a dataset does not exist.
    """

    def __init__(self, *datasets: Paths, may_grow: bool = False) -> None:
        self._datasets, self._may_grow = datasets, may_grow
        self._before = [_versions(dataset) for dataset in datasets]

    def refuse_changed(self) -> None:
        """Check that the datasets still have the same shards; call this before publishing.

        Raises:
            InputError: `input_file`: a shard was replaced, rewritten, removed or added.
        """
        for dataset, before in zip(self._datasets, self._before, strict=True):
            try:
                now = _versions(dataset)
            except InputError as error:
                if error.rule != "dataset_exists":
                    raise
                now = {}
            for path in before | ({} if self._may_grow else now):
                if before.get(path) != now.get(path):
                    verb = "added" if path not in before else "replaced or rewritten"
                    raise changed(path, verb if path in now else "removed")


@contextmanager
def refuse_changed(*datasets: Paths) -> Iterator[None]:
    """Check at the end of a `with` block that these datasets did not change in it; see `Sources`."""
    sources = Sources(*datasets)
    yield
    sources.refuse_changed()


def changed(path: str, verb: str) -> InputError:
    """Return the error for a shard that was changed while its dataset was read."""
    hint = "run the same command again once nothing writes to the dataset"
    return InputError("input_file", path, f"the file was {verb} while it was read", "", hint)


class State(NamedTuple):
    """What identifies the content of a local file.

    Size and modification time can be equal for two files, because programs set them. Only the
    kernel sets the time of the last status change. Some network file systems give a file another
    inode after a while, so the inode alone is not compared.
    """

    num_bytes: int
    modified_ns: int
    status_changed_ns: int
    inode: int

    def may_be(self, other: State) -> bool:
        """True if only the status of the file changed: its mode, or its number of hard links."""
        same = self.num_bytes, self.modified_ns
        if same != (other.num_bytes, other.modified_ns):
            return False
        return self.status_changed_ns == other.status_changed_ns or self.inode == other.inode


def state_of(path: str) -> State | None:
    """Return the state of a local file; None if it is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116 - `Path` is slower, and this runs once a row group
    except OSError:
        return None
    return State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _version(shard: Location) -> Any:
    """Return a value that differs if a shard was replaced or changed; None if it is gone."""
    if isinstance(shard.fs, LocalFiles):
        state = state_of(shard.path)
        return state and state[:3]
    info = shard.fs.info(shard.path)
    names = ("etag", "ETag", "size", "mtime", "LastModified", "last_modified", "updated", "created")
    return tuple(str(info.get(name)) for name in names)


def _versions(dataset: Paths) -> dict[str, Any]:
    return {shard.path: _version(shard) for shard in find_shards(dataset)}
