"""Detect that a dataset changes while it is read, so that no output mixes two datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_io.dataset.local_files import LocalFiles
from rollout_io.dataset.opening import Version
from rollout_io.dataset.storage import Location, find_shards
from schemas.errors import InputError

PathLike = str | os.PathLike[str]


class Sources:
    """The shards of some datasets, as they are now.

    Args:
        datasets: Paths of the datasets; create this object before reading them.
        may_grow: If true, shards may be added meanwhile: they are not read.

    Raises:
        InputError: `dataset_exists`: a dataset does not exist.
    """

    def __init__(self, *datasets: PathLike, may_grow: bool = False) -> None:
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
def refuse_changed(*datasets: PathLike) -> Iterator[None]:
    """Check at the end of a `with` block that these datasets did not change in it; see `Sources`."""
    sources = Sources(*datasets)
    yield
    sources.refuse_changed()


def changed(path: str, verb: str) -> InputError:
    """Return the error for a shard that was changed while its dataset was read."""
    hint = "run the same command again once nothing writes to the dataset"
    return InputError("input_file", path, f"the file was {verb} while it was read", "", hint)


def state_of(shard: Location) -> Any:
    """Return a value that differs if a shard was replaced or changed; None if it is gone.

    Some network file systems give a file another inode after a while, so the inode is not compared.
    """
    if isinstance(shard.fs, LocalFiles):
        try:
            return Version.of(shard.path)[2:]
        except OSError:
            return None
    info = shard.fs.info(shard.path)
    names = ("etag", "ETag", "size", "mtime", "LastModified", "last_modified", "updated", "created")
    return tuple(str(info.get(name)) for name in names)


def _versions(dataset: PathLike) -> dict[str, Any]:
    return {shard.path: state_of(shard) for shard in find_shards(dataset)}
