"""Locations of dataset files: a directory, a glob or a file, local or on any fsspec filesystem."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import stat
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_io.dataset.filesystems import LocalFiles, RemoteFiles, local_path, settle, settle_new
from rollout_io.dataset.opening import missing_hint
from schemas.errors import InputError, InvariantError, count

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
"""Path of a dataset, or of several datasets that are read as one (`joined`)."""
SHARD_PREFIX = "part-"
SHARD_SUFFIX = ".parquet"
_EXTRAS = {"https": "http", "gs": "gcs"}  # extras of fsspec by protocol
_S3 = ("s3://", "s3a://")
_LISTED_S = 2  # opening a dataset lists its directory several times
# s3fs repeats a read, each of its requests, and Amazon's client each of these: with the defaults, a store
# that never answers is told of after half an hour. Only Amazon's client repeats a HEAD that is busy (503).
_S3_TRIES, _S3_RETRIES = 3, {"retries": {"total_max_attempts": 4, "mode": "standard"}}
_ROOT_MARK = "/./"  # as in rsync: separates the dataset's directory from the path inside it
_PARTITION = re.compile(r"[^._=][^=]*=.*")
PARTITION_HINT = "name the directories COLUMN=VALUE, with the same columns everywhere"
RUN_ROLLOUTS = "rollouts"  # directory in a run of `rollouts rl`: one dataset per iteration
_RUN_FILES = ("config.json", "metrics.jsonl")
STAGING = ".converting"  # directory of an unfinished conversion; readers skip hidden names
_BESIDE = (".blobs", ".rejected.jsonl", ".rewards", ".findings")  # what patterns match, too
_SHOWN_FOLDERS = 3


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a filesystem.

    Attributes:
        root: Directory of the dataset if it is partitioned (`rollout_io.dataset.shard_files`);
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
        if self.fs.exists(self.path) and (partitions := self.partitions()):
            raise occupied(self.path, len(partitions))

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
        fs, inner = fsspec.core.url_to_fs(
            url, listings_expiry_time=_LISTED_S, config_kwargs=_S3_RETRIES
        )
        fs.retries = _S3_TRIES
    else:
        fs, inner = fsspec.core.url_to_fs(url)
    return LocalFiles() if isinstance(fs, LocalFileSystem) else RemoteFiles(fs), inner


def _unknown_filesystem(url: str, error: Exception) -> InputError:
    """Return the error for a URL whose protocol is unknown, or whose package is missing."""
    protocol, finding = url.partition("://")[0], " ".join(str(error).partition("\n")[0].split())
    hint = "check the URL"
    if isinstance(error, ImportError):
        named = re.search(r"[Ii]nstall \W?([a-z0-9_-]+)", finding)
        package = named[1] if named else f"'fsspec[{_EXTRAS.get(protocol, protocol)}]'"
        finding = f"{protocol}:// needs a package that is not installed ({finding})"
        hint = f"pip install {package}"
    return InputError("filesystem", url, finding, "", hint)


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """The Parquet files of one dataset.

    Attributes:
        where: The directory or file, as a path of its filesystem.
        shards: The files, sorted by directory, then by name.
        is_complete: True if these are all files of the directory.
    """

    where: str
    shards: list[Location]
    is_complete: bool


def joined(paths: Paths) -> str:
    r"""Return one path that names several datasets, which are read as one: `{A,B}`.

    Example:
        >>> joined(["runs/a", "s3://bucket/b,c"]), joined("runs/a")
        ('{runs/a,s3://bucket/b\\,c}', 'runs/a')
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    escaped = [re.sub(r"([\\,])", r"\\\1", os.fspath(path)) for path in several]
    return os.fspath(several[0]) if len(several) == 1 else "{" + ",".join(escaped) + "}"


def _several(path: PathLike) -> list[str]:
    text = os.fspath(path)
    if not (text.startswith("{") and text.endswith("}")):
        return [text]
    parts = re.findall(r"((?:[^\\,]|\\.)*)(?:,|$)", text[1:-1], re.DOTALL)
    paths = [re.sub(r"\\(.)", r"\1", part) for part in parts[:-1]]
    return [path for path in paths if not path.rstrip("/").endswith(_BESIDE)] or paths


def find_shards(path: Paths) -> list[Location]:
    """Return the Parquet files of a dataset, in order; see `find_datasets`."""
    return [shard for dataset in find_datasets(path) for shard in dataset.shards]


def find_datasets(path: Paths) -> list[DatasetFiles]:
    """Return the datasets that a path names.

    Args:
        path: A directory of shards, or of directories named `COLUMN=VALUE`; a glob of files or
            directories; one Parquet file; or several of these (`joined`); local or fsspec URLs.

    Raises:
        InputError: `dataset_exists`: a path does not exist, or there are no Parquet files.
        InvariantError: `columns_and_types`: only some of the files are in directories named
            `COLUMN=VALUE`; `unique_trajectory`: two paths name the same file.
    """
    datasets = [dataset for one in _several(joined(path)) for dataset in _datasets(one)]
    seen = set[tuple[LocalFiles | RemoteFiles, str]]()
    shards = [shard for dataset in datasets for shard in dataset.shards]
    for shard in shards if len(datasets) > 1 else ():
        place = shard.fs, os.path.realpath(shard.path) if shard.is_local else shard.path
        if place in seen:
            hint = (
                "pass each dataset once; a pattern may match a path that is also passed by itself"
            )
            raise InvariantError(
                "unique_trajectory", shard.path, "the file is named twice", "", hint
            )
        seen.add(place)
    return datasets


def _datasets(path: str) -> list[DatasetFiles]:
    root, mark, inner = path.rpartition(_ROOT_MARK)
    folders, _, file = inner.rpartition("/")
    if mark and _is_partition(folders.partition("/")[0]) and file.endswith(SHARD_SUFFIX):
        top = Location.of(root)
        shard = Location(top.fs, top.join(inner).path, top.path)
        return [DatasetFiles(shard.path, [shard], is_complete=False)]
    location = Location.of(path)
    if location.fs.isdir(location.path):
        datasets = [_directory(location)]
    elif location.fs.exists(location.path):
        datasets = [DatasetFiles(location.path, [location], is_complete=False)]
    else:
        datasets = list(_matches(location, is_of_folders=path.endswith("/")))
    if datasets := [dataset for dataset in datasets if dataset.shards]:
        return datasets
    raise _no_dataset(path, location)


def _directory(folder: Location) -> DatasetFiles:
    if partitioned := folder.partitions():
        _refuse_unpartitioned(folder)
        shards = [Location(folder.fs, path, folder.path) for path in partitioned]
    else:
        shards = [Location(folder.fs, path) for path in folder.shards()]
    return DatasetFiles(folder.path, shards, is_complete=True)


def _matches(pattern: Location, *, is_of_folders: bool) -> Iterator[DatasetFiles]:
    """Yield the datasets that a glob matches; matching files in one directory are one dataset."""
    files = dict[str, list[Location]]()
    for path in sorted(pattern.fs.glob(pattern.path)):
        match = Location(pattern.fs, path)
        if path.endswith(_BESIDE) or posixpath.basename(path).startswith((".", "_")):
            continue
        if match.fs.exists(match.join(STAGING).path):  # its rows would be left out unsaid
            raise _no_dataset(path, match)
        if match.fs.isdir(path):
            yield _directory(match)
        elif not is_of_folders:
            files.setdefault(posixpath.dirname(path), []).append(match)
    for folder, shards in files.items():
        yield DatasetFiles(folder, shards, is_complete=False)


def _no_dataset(path: str, location: Location) -> InputError:
    hint = "check the path, or create a dataset with `rollouts convert` or `rollouts generate`"
    is_there, inner = location.fs.exists(location.path), list[str]()
    finding = "the directory contains no .parquet files" if is_there else "the path does not exist"
    if location.fs.exists(location.join(STAGING).path):
        hint = "run the interrupted command again to resume"
    elif not is_there and any(mark in path for mark in "*?["):
        finding = "the pattern matches no dataset"
    elif not is_there:
        hint = (location.is_local and missing_hint(path)) or hint
    elif all(location.fs.exists(location.join(name).path) for name in _RUN_FILES):
        finding, hint = "this is a training run, not a dataset", _datasets_of_run(path, location)
    elif inner := _inner_datasets(location):
        names = ", ".join([*inner[:_SHOWN_FOLDERS], *(["..."] if inner[_SHOWN_FOLDERS:] else [])])
        finding = f"this is a folder of {count(len(inner), 'dataset')} ({names}), not a dataset"
        hint = f"read them as one dataset: {shlex.quote(posixpath.join(path, '*/'))}"
    return InputError("dataset_exists", path, finding, "", hint)


def _inner_datasets(folder: Location) -> list[str]:
    """Return the names of the datasets in a directory."""
    inside = [Location(folder.fs, path) for path in sorted(folder.fs.ls(folder.path, detail=False))]
    return [posixpath.basename(one.path.rstrip("/")) for one in inside if one.datasets()]


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
            finding = f"{name} is not in directories named COLUMN=VALUE, but other files are"
            raise InvariantError("columns_and_types", root.path, finding, "", PARTITION_HINT)


def occupied(where: str, num_shards: int) -> InputError:
    """Return the error for an output directory that already contains a dataset."""
    finding = f"the directory already contains a dataset ({count(num_shards, 'shard')})"
    hint = "choose a different --out, or remove the old dataset"
    return InputError("out_is_free", where, finding, "", hint)


def refuse_open(directory: Path) -> None:
    """Check that a directory for secrets is no link, and that only its owner, this user, can read it.

    Raises:
        InputError: `out_is_free`: others can read it, or decide where it is.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        finding = "is a link" if stat.S_ISLNK(status.st_mode) else "is no directory"
    elif status.st_uid != os.geteuid():
        finding = "belongs to another user"
    elif status.st_mode & 0o077:
        finding = f"can be read by others (mode {status.st_mode & 0o777:o})"
    else:
        return
    finding = f"the directory for unredacted rows exists and {finding}"
    raise InputError("out_is_free", str(directory), finding, "", "remove it, and convert again")


def refuse_inside(out: PathLike, dataset: Paths) -> None:
    """Check that `out` is not inside `dataset`: its files would be read as shards of `dataset`.

    Raises:
        InputError: `out_is_free`: `out` is inside `dataset`.
    """
    target = Location.of(out)
    for source in (source for source in find_datasets(dataset) if source.is_complete):
        paths = target.path, source.where
        if target.is_local:
            paths = os.path.realpath(paths[0]), os.path.realpath(paths[1])
        if target.fs == source.shards[0].fs and paths[0].startswith(paths[1].rstrip("/") + "/"):
            finding = f"the output path is inside the input dataset {source.where}"
            raise InputError(
                "out_is_free", os.fspath(out), finding, "", "choose an --out outside of it"
            )


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
        finding = "a different writer has already written this file"
        hint = "pass append=True to writers that share a directory"
        raise InputError("out_is_free", final.path, finding, "", hint)


def move(written: Location, final: Location) -> None:
    """Rename a complete file to its final name, replacing an existing file; see `publish`."""
    if written.is_local:
        settle(Path(written.path), Path(final.path))
    else:
        written.fs.mv(written.path, final.path)
