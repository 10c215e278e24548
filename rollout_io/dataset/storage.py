"""Locations of dataset files: a directory, a glob or a file, local or on any fsspec filesystem."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from rollout_io.dataset.atomic_files import settle, settle_new
from rollout_io.dataset.local_files import LocalFiles, local_path
from rollout_io.dataset.opening import missing_hint
from rollout_io.dataset.remote_files import RemoteFiles
from schemas.errors import InputError, InvariantError, count

PathLike = str | os.PathLike[str]
SHARD_PREFIX = "part-"
SHARD_SUFFIX = ".parquet"
_EXTRAS = {"https": "http", "gs": "gcs"}  # extras of fsspec by protocol
_S3 = ("s3://", "s3a://")
_LISTED_S = 2  # opening a dataset lists its directory several times
_ROOT_MARK = "/./"  # as in rsync: separates the dataset's directory from the path inside it
_PARTITION = re.compile(r"[^._=][^=]*=.*")
PARTITION_HINT = "name the directories COLUMN=VALUE, with the same columns everywhere"
RUN_ROLLOUTS = "rollouts"  # directory in a run of `rollouts rl`: one dataset per iteration
_RUN_FILES = ("config.json", "metrics.jsonl")
STAGING = ".converting"  # directory of an unfinished conversion; readers skip hidden names


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a filesystem.

    Attributes:
        root: Directory of the dataset if it is partitioned (`rollout_io.dataset.partitions`);
            otherwise None.
    """

    fs: LocalFiles | RemoteFiles
    path: str
    root: str | None = None

    @classmethod
    def of(cls, path: PathLike) -> Location:
        """Resolve a local path or a URL that fsspec supports ("s3://...", "memory://...").

        Raises:
            InputError: `filesystem`: the filesystem is unknown, or its package is missing; `path`:
                the path is empty.
        """
        if not os.fspath(path):
            hint = "check that the shell variable is set"
            raise InputError("path", "''", "the path is empty", "", hint)
        try:
            fs, inner = _resolved(os.fspath(path))
        except Exception as error:  # each filesystem has its own exceptions
            raise _unknown_filesystem(os.fspath(path), error) from None
        return cls(fs, inner)

    @property
    def is_local(self) -> bool:
        """True for the local filesystem."""
        return isinstance(self.fs, LocalFiles)

    def join(self, name: str) -> Location:
        """Return the location of a file inside this directory."""
        return Location(self.fs, posixpath.join(self.path, name))

    def shards(self) -> list[str]:
        """Return the shard paths inside this directory, sorted by name."""
        names = self.fs.ls(self.path, detail=False) if self.fs.isdir(self.path) else []
        shards = [p for p in names if p.endswith(SHARD_SUFFIX)]
        return sorted(p for p in shards if not posixpath.basename(p).startswith((".", "_")))

    def partitions(self) -> list[str]:
        """Return the shard paths inside directories named `COLUMN=VALUE`, at any depth, sorted."""
        names = self.fs.ls(self.path, detail=False) if self.fs.isdir(self.path) else []
        inner = [Location(self.fs, p) for p in sorted(names) if _is_partition(p)]
        return [path for folder in inner for path in (*folder.shards(), *folder.partitions())]

    def refuse_partitions(self) -> None:
        """Check that this directory does not contain a partitioned dataset (no writer can extend it).

        Raises:
            InputError: `out_is_free`: the directory contains a partitioned dataset.
        """
        if self.fs.exists(self.path) and (found := self.partitions()):
            raise occupied(self.path, len(found))

    def datasets(self) -> list[str]:
        """Return the shard paths of the dataset in this directory, partitioned or not."""
        return self.shards() or self.partitions()

    @property
    def url(self) -> str:
        """URL of the file, from which `find_shards` restores this location."""
        path = self.path
        if self.root is not None:
            path = self.root + _ROOT_MARK + path.removeprefix(self.root).lstrip("/")
        return str(self.fs.unstrip_protocol(path))


def _is_partition(path: str) -> bool:
    return _PARTITION.fullmatch(posixpath.basename(path.rstrip("/"))) is not None


def _resolved(url: str) -> tuple[LocalFiles | RemoteFiles, str]:
    if (path := local_path(url)) is not None:
        return LocalFiles(), path
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    if url.startswith(_S3):
        # By default, s3fs caches listings forever, and would miss files of other processes. Because
        # of the option, s3fs also creates an instance that the user's program does not share.
        fs, inner = fsspec.core.url_to_fs(url, listings_expiry_time=_LISTED_S)
        fs.retries = 1  # `remote_files` retries
    else:
        fs, inner = fsspec.core.url_to_fs(url)
    return LocalFiles() if isinstance(fs, LocalFileSystem) else RemoteFiles(fs), inner


def _unknown_filesystem(url: str, error: Exception) -> InputError:
    """Return the error for a URL whose protocol is unknown, or whose package is missing."""
    protocol, got = url.partition("://")[0], " ".join(str(error).partition("\n")[0].split())
    hint = "check the URL"
    if isinstance(error, ImportError):
        named = re.search(r"[Ii]nstall \W?([a-z0-9_-]+)", got)
        package = named[1] if named else f"'fsspec[{_EXTRAS.get(protocol, protocol)}]'"
        got = f"{protocol}:// needs a package that is not installed ({got})"
        hint = f"pip install {package}"
    return InputError("filesystem", url, got, "", hint)


def find_shards(path: PathLike) -> list[Location]:
    """Return the Parquet files of a dataset, sorted by directory, then by name.

    Args:
        path: A directory of shards, or of directories named `COLUMN=VALUE`; a glob of files or
            directories of shards; or one Parquet file; local or an fsspec URL.

    Raises:
        InputError: `dataset_exists`: the path does not exist, or there are no Parquet files.
        InvariantError: `columns_and_types`: only some of the files are in directories named
            `COLUMN=VALUE`.
    """
    root, mark, inner = os.fspath(path).rpartition(_ROOT_MARK)
    folders, _, file = inner.rpartition("/")
    if mark and _is_partition(folders.partition("/")[0]) and file.endswith(SHARD_SUFFIX):
        top = Location.of(root)
        return [Location(top.fs, top.join(inner).path, top.path)]
    location = Location.of(path)
    if location.fs.isdir(location.path):
        if partitioned := location.partitions():
            _refuse_unpartitioned(location)
            return [Location(location.fs, p, location.path) for p in partitioned]
        paths = location.shards()
    elif location.fs.exists(location.path):
        paths = [location.path]
    else:
        found = [Location(location.fs, p) for p in sorted(location.fs.glob(location.path))]
        for folder in found:
            if folder.partitions():
                hint = "pass its directory, or a pattern of its files"
                got = "a pattern cannot match a partitioned dataset"
                raise InvariantError("columns_and_types", folder.path, got, "", hint)
        paths = [p for f in found for p in (f.shards() if f.fs.isdir(f.path) else [f.path])]
    if not paths:
        hint = "check the path, or create a dataset with `rollouts convert` or `rollouts generate`"
        if location.is_local and not location.fs.exists(location.path):
            hint = missing_hint(os.fspath(path)) or hint
        if location.fs.exists(location.join(STAGING).path):
            hint = "run the interrupted command again to resume"
        is_there = location.fs.exists(location.path)
        got = "the directory contains no .parquet files" if is_there else "the path does not exist"
        if all(location.fs.exists(location.join(name).path) for name in _RUN_FILES):
            got, hint = "this is a training run, not a dataset", _datasets_of_run(path, location)
        raise InputError("dataset_exists", os.fspath(path), got, "", hint)
    return [Location(location.fs, p) for p in paths]


def _datasets_of_run(path: PathLike, run: Location) -> str:
    """Return a hint that names the datasets of a training run."""
    if run.fs.isdir(run.join(RUN_ROLLOUTS).path):
        pattern = posixpath.join(os.fspath(path), RUN_ROLLOUTS, "*")
        return f"pass its rollouts: {shlex.quote(pattern)}"
    return "pass the dataset it was trained on (data.dataset in its config.json)"


def _refuse_unpartitioned(root: Location) -> None:
    """Check that all shards of a partitioned dataset are in directories named `COLUMN=VALUE`."""
    deeper = [path.removeprefix(root.path).lstrip("/") for path in root.fs.find(root.path)]
    for name in [*map(posixpath.basename, root.shards()), *deeper]:
        *folders, file = name.split("/")
        is_hidden = any(part.startswith((".", "_")) for part in (*folders, file))
        if is_hidden or not file.endswith(SHARD_SUFFIX):
            continue
        if not folders or not all(map(_is_partition, folders)):
            got = f"{name} is not in directories named COLUMN=VALUE, but other files are"
            raise InvariantError("columns_and_types", root.path, got, "", PARTITION_HINT)


def occupied(where: str, num_shards: int) -> InputError:
    """Return the error for an output directory that already contains a dataset."""
    got = f"the directory already contains a dataset ({count(num_shards, 'shard')})"
    hint = "choose a different --out, or remove the old dataset"
    return InputError("out_is_free", where, got, "", hint)


def refuse_open(directory: Path) -> None:
    """Check that a directory for secrets is no link, and that only its owner, this user, can read it.

    Raises:
        InputError: `out_is_free`: others can read it, or decide where it is.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        got = "is a link" if stat.S_ISLNK(status.st_mode) else "is no directory"
    elif status.st_uid != os.geteuid():
        got = "belongs to another user"
    elif status.st_mode & 0o077:
        got = f"can be read by others (mode {status.st_mode & 0o777:o})"
    else:
        return
    got = f"the directory for unredacted rows exists and {got}"
    raise InputError("out_is_free", str(directory), got, "", "remove it, and convert again")


def refuse_inside(out: PathLike, dataset: PathLike) -> None:
    """Check that `out` is not inside `dataset`: its files would be read as shards of `dataset`.

    Raises:
        InputError: `out_is_free`: `out` is inside `dataset`.
    """
    target, source = (
        os.path.realpath(p.path) if p.is_local else p.path for p in map(Location.of, (out, dataset))
    )
    if target.startswith(source.rstrip("/") + "/"):
        got = f"the output path is inside the input dataset {os.fspath(dataset)}"
        raise InputError("out_is_free", os.fspath(out), got, "", "choose an --out outside of it")


def shard_name(index: int, tag: str = "") -> str:
    """Return the file name of a shard; appended shards have a tag."""
    return f"{SHARD_PREFIX}{index:05d}{tag}{SHARD_SUFFIX}"


def temporary(final: Location) -> Location:
    """Return a temporary path beside `final` that no reader mistakes for a shard."""
    folder, name = posixpath.split(final.path)
    return Location(final.fs, posixpath.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.tmp"))


def publish(written: Location, final: Location) -> None:
    """Rename a complete file to its final name; a local file is synced before and after.

    A local file is never replaced. A store has no such operation: there, a file that another writer
    publishes at the same moment may be replaced.

    Raises:
        InputError: `out_is_free`: another writer has already published a file of this name.
    """
    is_taken = not written.is_local and final.fs.exists(final.path)
    if written.is_local:
        try:
            settle_new(Path(written.path), Path(final.path))
        except FileExistsError:
            is_taken = True
    elif not is_taken:
        written.fs.mv(written.path, final.path)
    if is_taken:
        got = "a different writer has already written this file"
        hint = "pass append=True to writers that share a directory"
        raise InputError("out_is_free", final.path, got, "", hint)


def move(written: Location, final: Location) -> None:
    """Rename a complete file to its final name, replacing an existing file; see `publish`."""
    if written.is_local:
        settle(Path(written.path), Path(final.path))
    else:
        written.fs.mv(written.path, final.path)
