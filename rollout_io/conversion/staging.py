"""The hidden directory in which a dataset is built, so that a conversion can be resumed.

    DS/.converting/plan.json            identity of the conversion: files, choices, version
    DS/.converting/lock                 held by the running process (local directories)
    DS/.converting/inputs/              decompressed files, and copies of pipes
    DS/.converting/chunk-00000/         shards of a finished chunk, and report.json
    DS/.converting/chunk-00001.4f.tmp/  unfinished chunk, with its writer's id
    DS.rejected.jsonl                   rejected records, beside the dataset

A local chunk directory is renamed once it is complete. In an object store, the files of a chunk are
moved one by one, and the report is written last. A directory with the final name and a report is
therefore complete. Publishing moves the shards into the dataset, in order; an interrupted
publication can be resumed too.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollout_io.dataset.atomic_files import writable
from rollout_io.dataset.locking import lock
from rollout_io.dataset.storage import SHARD_PREFIX, SHARD_SUFFIX, STAGING, Location, move
from schemas.errors import InputError, RolloutError

REJECTED = ".rejected.jsonl"
_LINE = re.compile(rb'\{"source":"(?:[^"\\]|\\.)*","rule":"')  # start of `rejections.lines`
# After these errors the input is fine, and another attempt can reuse the finished chunks.
_KEEPS_CHUNKS = frozenset({"output_file", "remote_store", "worker"})
_PLAN, _LOCK, _REPORT, _PUBLISHING = "plan.json", "lock", "report.json", "publishing.json"


class Staging:
    """The staging directory of a dataset.

    Args:
        out: The dataset's directory, local or an fsspec URL.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Location.of(out)
        self.where = os.fspath(out)
        self.folder = self.out.join(STAGING)
        fs = self.out.fs
        self._mark = os.urandom(4).hex()
        self._may_remove = not fs.exists(self.out.path) or fs.exists(self.folder.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against a second conversion, and create it if necessary.

        Raises:
            InputError: `out_is_free`: another process is writing to it.
        """
        with writable(self.where):
            self.folder.fs.makedirs(self.folder.path, exist_ok=True)
        if not self.out.is_local:
            yield
            return
        with writable(self.where):
            held = lock(Path(self.folder.join(_LOCK).path))
        if held is None:
            got = "another process is writing to this directory"
            hint = "wait until it ends, or choose a different --out"
            raise InputError("out_is_free", self.where, got, "", hint)
        try:
            yield
        finally:
            held.release()

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Lock the directory; keep finished chunks on an interrupt, but not on invalid input."""
        guarded = False
        try:
            with self.locked():
                try:
                    guarded = True
                    yield
                except RolloutError as error:
                    if error.rule not in _KEEPS_CHUNKS and not self.is_publishing():
                        self.clear()
                    raise
                except BaseException:
                    if not self.holds_chunks():
                        self.clear()
                    raise
        except BaseException:
            if not guarded:  # a signal between creating the directory and locking it
                self._clear_if_free()
            raise

    def _clear_if_free(self) -> None:
        """Remove the staging directory unless it is locked or contains finished chunks."""
        with suppress(RolloutError), self.locked():
            if not self.holds_chunks():
                self.clear()

    def begin(self, identity: dict[str, Any]) -> None:
        """Start or resume the conversion with this identity; remove chunks of other conversions."""
        is_same = _read_json(self.folder.join(_PLAN)) == identity
        for path in _names(self.folder):
            name = path.rsplit("/", 1)[-1]
            if name.startswith("chunk-") and not (is_same and name[6:].isdigit()):
                _remove(Location(self.folder.fs, path))
        if not is_same:
            _write_json(self.folder.join(_PLAN), identity)

    def chunk_path(self, index: int) -> str:
        """Return a new path to write a chunk to."""
        return str(self.out.fs.unstrip_protocol(self._unfinished(index).path))

    def _unfinished(self, index: int) -> Location:
        return self.folder.join(f"chunk-{index:05d}.{self._mark}.tmp")

    def finish_chunk(self, index: int, report: dict[str, Any]) -> None:
        """Mark a chunk as finished.

        Raises:
            InputError: `shared_storage`: the shards of another process are not visible here.
        """
        written = self._unfinished(index)
        if not written.shards():
            got = "the output of a worker process is not visible to this process"
            hint = "write to storage that all nodes share, or use --workers 1"
            raise InputError("shared_storage", self.where, got, "", hint)
        finished = self.folder.join(f"chunk-{index:05d}")
        if self.out.is_local:
            _write_json(written.join(_REPORT), report)
            self.folder.fs.mv(written.path, finished.path, recursive=True)
            return
        # Object stores cannot rename a folder, so the report, which completes the chunk, comes last.
        with writable(self.where):
            _remove(finished)
            for shard in written.shards():
                move(Location(written.fs, shard), finished.join(posixpath.basename(shard)))
        _write_json(finished.join(_REPORT), report)

    def report(self, index: int) -> dict[str, Any] | None:
        """Return the report of a finished chunk; None if it is unfinished."""
        return _read_json(self.folder.join(f"chunk-{index:05d}").join(_REPORT))

    def shards(self, index: int) -> list[Location]:
        """Return the shards of a chunk, in order."""
        chunk = self.folder.join(f"chunk-{index:05d}")
        return [Location(self.out.fs, path) for path in chunk.shards()]

    def publish(self, num_chunks: int) -> None:
        """Move the shards of all chunks, which must be finished, into the dataset."""
        order = self.folder.join(_PUBLISHING)
        names = _read_json(order)
        if names is None:
            paths = [shard.path for i in range(num_chunks) for shard in self.shards(i)]
            finals = (f"{SHARD_PREFIX}{n:05d}{SHARD_SUFFIX}" for n in range(len(paths)))
            names = dict(zip(paths, finals, strict=False))
            _write_json(order, names)
        for path, name in names.items():
            if self.out.fs.exists(path):
                self.out.fs.mv(path, self.out.join(name).path)
        self.clear()

    def clear(self) -> None:
        """Remove the staging directory, and the dataset directory if the conversion created it."""
        _remove(self.folder)
        fs, path = self.out.fs, self.out.path
        if self._may_remove and fs.isdir(path) and not fs.ls(path):
            fs.rmdir(path)

    @property
    def rejected(self) -> Location:
        """Location of the file of rejected records."""
        return Location(self.out.fs, self.out.path.rstrip("/") + REJECTED)

    def is_publishing(self, identity: dict[str, Any] | None = None) -> bool:
        """True if a conversion (with this identity, if given) was interrupted while moving shards."""
        begun = _read_json(self.folder.join(_PUBLISHING)) is not None
        return begun and identity in (None, _read_json(self.folder.join(_PLAN)))

    def holds_chunks(self) -> bool:
        """True if any chunk is finished."""
        done = (name for name in _names(self.folder) if not name.endswith(".tmp"))
        return any(self.folder.fs.exists(f"{name}/{_REPORT}") for name in done)

    def refuse_foreign(self) -> None:
        """Check that an existing file of rejected records was written by a conversion.

        Raises:
            InputError: `out_is_free`: a different file or directory has this name.
        """
        fs, path = self.rejected.fs, self.rejected.path
        if not fs.exists(path) or (fs.isfile(path) and _LINE.match(fs.head(path, 1 << 16))):
            return
        got = "the path is needed for rejected records, but already exists and contains other data"
        hint = "choose a different --out, or rename the existing file"
        raise InputError("out_is_free", path, got, "", hint)

    def write_rejected(self, lines: Iterable[bytes]) -> None:
        """Write the rejected records beside the dataset, atomically."""
        temporary = self.folder.join(REJECTED[1:])
        with writable(self.where):
            with self.out.fs.open(temporary.path, "wb") as file:
                for line in lines:
                    file.write(line)
            move(temporary, self.rejected)

    def remove_rejected(self) -> None:
        """Remove the rejected records of an earlier conversion that produced no dataset."""
        _remove(self.rejected)


def emptied(chunk: str) -> str:
    """Return the path of an unfinished chunk, after removing what an earlier attempt left there.

    Ray runs a task again if its worker or its node dies, even if the task had already written its shards.
    """
    _remove(Location.of(chunk))
    return chunk


def rejected_path(out: str | os.PathLike[str]) -> str:
    """Return the path or URL of the rejected records of a dataset."""
    return os.fspath(out).rstrip("/") + REJECTED


def spool_path(staging: Staging) -> Path | None:
    """Return the staging directory's folder for decompressed logs; None for a remote dataset."""
    return Path(staging.folder.path) / "inputs" if staging.out.is_local else None


def _read_json(location: Location) -> dict[str, Any] | None:
    try:
        with location.fs.open(location.path, "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_json(location: Location, value: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    temporary = Location(location.fs, f"{location.path}.tmp")
    with writable(location.path):
        with location.fs.open(temporary.path, "wb") as file:
            file.write(json.dumps(value).encode())
        move(temporary, location)


def _names(folder: Location) -> list[str]:
    """Return the paths in a folder; object stores have no empty folders."""
    names = folder.fs.ls(folder.path, detail=False) if folder.fs.isdir(folder.path) else []
    return list(names)


def _remove(location: Location) -> None:
    if location.fs.exists(location.path):
        location.fs.rm(location.path, recursive=True)
