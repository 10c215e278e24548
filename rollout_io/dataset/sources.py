"""Detect that a dataset changes while it is read, so that no output mixes two datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_io.dataset.filesystems import LocalFiles
from rollout_io.dataset.opening import changed, state_of
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
