"""Where a dataset's files are: a directory, a glob or one file, local or on any fsspec filesystem."""

from __future__ import annotations

import os
import posixpath
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rollout_io.files import sync
from schemas.errors import RolloutError

SHARD_PREFIX = "part-"
SHARD_SUFFIX = ".parquet"
STAGING = ".converting"  # the directory in which a conversion is under way


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a filesystem."""

    fs: Any
    path: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Location:
        """Resolve a local path or a URL that fsspec knows ("s3://...", "memory://...").

        Raises:
            RolloutError: No such filesystem, or its package is not installed; no path at all.
        """
        if not os.fspath(path):
            hint = "a variable of the shell that is not set?"
            raise RolloutError("path", "''", "an empty path", "a path", hint)
        try:
            fs, inner = fsspec.core.url_to_fs(os.fspath(path))
        except (ImportError, ValueError) as error:
            hint = "pip install the fsspec package of that filesystem, or check the URL"
            expected = "a path or URL that fsspec knows"
            raise RolloutError("filesystem", os.fspath(path), str(error), expected, hint) from None
        return cls(fs, inner)

    @property
    def is_local(self) -> bool:
        """Whether this is the machine's own filesystem."""
        return isinstance(self.fs, LocalFileSystem)

    def join(self, name: str) -> Location:
        """A file inside this directory."""
        return Location(self.fs, posixpath.join(self.path, name))

    def shards(self) -> list[str]:
        """Shard paths inside this directory, sorted by name."""
        names = self.fs.ls(self.path, detail=False) if self.fs.isdir(self.path) else []
        shards = [p for p in names if p.endswith(SHARD_SUFFIX)]
        return sorted(p for p in shards if not posixpath.basename(p).startswith((".", "_")))


def find_shards(path: str | os.PathLike[str]) -> list[Location]:
    """The Parquet files of a dataset, sorted by name; those of several directories by directory.

    Args:
        path: A directory of shards, a glob of files or such directories, or one Parquet file; local
            or an fsspec URL.

    Raises:
        RolloutError: Nothing is there.
    """
    location = Location.of(path)
    if location.fs.isdir(location.path):
        paths = location.shards()
    elif location.fs.exists(location.path):
        paths = [location.path]
    else:
        found = [Location(location.fs, p) for p in sorted(location.fs.glob(location.path))]
        paths = [p for f in found for p in (f.shards() if f.fs.isdir(f.path) else [f.path])]
    if not paths:
        hint = "check the path; `rollouts convert` or `rollouts generate` makes a dataset"
        if location.fs.exists(location.join(STAGING).path):
            hint = "a conversion to it was stopped: give its command again, and it goes on"
        got = (
            "a directory without .parquet files" if location.fs.exists(location.path) else "nothing"
        )
        raise RolloutError("dataset_exists", os.fspath(path), got, "a rollout dataset", hint)
    return [Location(location.fs, p) for p in paths]


def occupied(where: str, num_shards: int) -> RolloutError:
    """The refusal to write a dataset where there is another."""
    got = f"{num_shards} shard{'s' * (num_shards != 1)}"
    hint = "choose another --out, or remove the old dataset"
    return RolloutError("out_is_free", where, got, "no dataset yet", hint)


def temporary(final: Location) -> Location:
    """A name beside `final` that no reader takes for a shard."""
    folder, name = posixpath.split(final.path)
    return Location(final.fs, posixpath.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.tmp"))


def publish(written: Location, final: Location) -> None:
    """Give a complete file its final name; on a local disk both reach the disk, in this order.

    Raises:
        RolloutError: Another writer was there first.
    """
    if final.fs.exists(final.path):
        got, hint = "a shard of another writer", "writers that share a directory need append=True"
        raise RolloutError("out_is_free", final.path, got, "no such file yet", hint)
    if not written.is_local:
        written.fs.mv(written.path, final.path)
        return
    sync(Path(written.path))
    os.replace(written.path, final.path)  # noqa: PTH105
    sync(Path(final.path).parent)
