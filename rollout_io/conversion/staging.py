"""The hidden directory in which a dataset grows, so that a conversion that was stopped goes on.

    DS/.converting/plan.json            what is being converted: files, sizes, times, choices
    DS/.converting/lock                 held by the process at work (local directories)
    DS/.converting/inputs/              what was unpacked, or came from a pipe
    DS/.converting/chunk-00000/         shards of a chunk that is done, and report.json
    DS/.converting/chunk-00001.4f.tmp/  one that is not, with the mark of who writes it
    DS/converted.json                   what was converted, once all is

A chunk's directory is renamed when it is whole; so what is there is whole. Publishing moves the
shards out, in order; it too goes on where it was stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_io.storage import SHARD_PREFIX, SHARD_SUFFIX, STAGING, Location
from schemas.errors import RolloutError

DONE = "converted.json"
REJECTED = "rejected.jsonl"
_KEEPS_CHUNKS = frozenset({"output_file", "worker"})
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
        """Hold the directory against a second conversion; an empty one is removed in the end.

        Raises:
            RolloutError: `out_is_free`: another process converts to it.
        """
        with writable(self.where):
            self.folder.fs.makedirs(self.folder.path, exist_ok=True)
        handle = None
        try:
            if self.out.is_local:
                lock = self.folder.join(_LOCK).path
                with writable(self.where):
                    handle = os.open(lock, os.O_CREAT | os.O_RDWR)
                _lock(handle, Path(lock), self.where)
            yield
        finally:
            if handle is not None:
                os.close(handle)

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Hold the directory; chunks that are done outlive a stop, and no error of the input's."""
        with self.locked():
            try:
                yield
            except RolloutError as error:
                if error.rule not in _KEEPS_CHUNKS and not self.is_publishing():
                    self.clear()
                raise
            except BaseException:
                if not self.holds_chunks():
                    self.clear()
                raise

    def begin(self, identity: dict[str, Any]) -> None:
        """Take up the conversion of this identity; what is there of another one is removed."""
        is_same = _read_json(self.folder.join(_PLAN)) == identity
        for path in self.folder.fs.ls(self.folder.path, detail=False):
            name = path.rsplit("/", 1)[-1]
            if name.startswith("chunk-") and not (is_same and name[6:].isdigit()):
                _remove(Location(self.folder.fs, path))
        if not is_same:
            _write_json(self.folder.join(_PLAN), identity)

    def chunk_path(self, index: int) -> str:
        """Where to write a chunk: a directory that is not there."""
        return str(self.out.fs.unstrip_protocol(self._unfinished(index).path))

    def _unfinished(self, index: int) -> Location:
        return self.folder.join(f"chunk-{index:05d}.{self._mark}.tmp")

    def finish_chunk(self, index: int, report: dict[str, Any]) -> None:
        """Mark a chunk as done.

        Raises:
            RolloutError: `shared_storage`: what another process wrote cannot be seen here.
        """
        written = self._unfinished(index)
        if not written.shards():
            got, expected = "storage that each process has of its own", "one that they share"
            raise RolloutError("shared_storage", self.where, got, expected, "--workers 1")
        _write_json(written.join(_REPORT), report)
        self.folder.fs.mv(written.path, self.folder.join(f"chunk-{index:05d}").path, recursive=True)

    def report(self, index: int) -> dict[str, Any] | None:
        """What `finish_chunk` was told of a chunk; None: it is not done."""
        return _read_json(self.folder.join(f"chunk-{index:05d}").join(_REPORT))

    def shards(self, index: int) -> list[Location]:
        """The shards of a chunk, in order."""
        chunk = self.folder.join(f"chunk-{index:05d}")
        return [Location(self.out.fs, path) for path in chunk.shards()]

    def publish(self, num_chunks: int, record: dict[str, Any] | None = None) -> None:
        """Move all shards into the dataset, then note what it is of.

        Args:
            num_chunks: All of them done.
            record: For `converted.json`; None: there is none.
        """
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
        if record is not None:
            _write_json(self.out.join(DONE), record | {"shards": list(names.values())})
        self.clear()

    def clear(self) -> None:
        """Remove the staging directory, and a dataset directory that was made for it alone."""
        _remove(self.folder)
        fs, path = self.out.fs, self.out.path
        if self._may_remove and fs.isdir(path) and not fs.ls(path):
            fs.rmdir(path)

    def done(self) -> dict[str, Any] | None:
        """The record of a conversion that was published whole, and still is; None: there is none."""
        record = _read_json(self.out.join(DONE)) or {}
        names = [path.rsplit("/", 1)[-1] for path in self.out.shards()]
        return record if names and record.get("shards") == names else None

    def is_publishing(self, identity: dict[str, Any] | None = None) -> bool:
        """Whether a conversion (of this identity) was stopped while its shards were moved."""
        begun = _read_json(self.folder.join(_PUBLISHING)) is not None
        return begun and identity in (None, _read_json(self.folder.join(_PLAN)))

    def holds_chunks(self) -> bool:
        """Whether any chunk is done."""
        fs, path = self.folder.fs, self.folder.path
        names = fs.ls(path, detail=False) if fs.isdir(path) else []
        return any(fs.exists(f"{name}/{_REPORT}") for name in names if not name.endswith(".tmp"))

    def write_rejected(self, lines: Iterable[bytes]) -> None:
        """Write `rejected.jsonl` into the dataset, whole or not at all."""
        temporary = self.folder.join(REJECTED)
        with writable(self.where), self.out.fs.open(temporary.path, "wb") as file:
            for line in lines:
                file.write(line)
        self.out.fs.mv(temporary.path, self.out.join(REJECTED).path)

    def remove_rejected(self) -> None:
        """Remove the `rejected.jsonl` of an earlier conversion, of which nothing could be used."""
        _remove(self.out.join(REJECTED))


def spool_path(staging: Staging) -> Path | None:
    """Where to unpack logs beside a local dataset; None: it is elsewhere."""
    return Path(staging.folder.path) / "inputs" if staging.out.is_local else None


def _lock(handle: int, lock: Path, where: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(handle), lock.stat())  # its last holder may remove it
    except OSError:
        is_there = False
    if not is_there:
        got, hint = "another conversion at work there", "wait for it, or choose another --out"
        raise RolloutError("out_is_free", where, got, "no other writer", hint)


def _read_json(location: Location) -> dict[str, Any] | None:
    try:
        with location.fs.open(location.path, "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_json(location: Location, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = Location(location.fs, f"{location.path}.tmp")
    with writable(location.path):
        with location.fs.open(temporary.path, "wb") as file:
            file.write(json.dumps(value).encode())
            if location.is_local:
                file.flush()
                os.fsync(file.fileno())
        location.fs.mv(temporary.path, location.path)


def _remove(location: Location) -> None:
    if location.fs.exists(location.path):
        location.fs.rm(location.path, recursive=True)


@contextmanager
def writable(where: str) -> Iterator[None]:
    """Turn a place that cannot be written into one message.

    Raises:
        RolloutError: output_file.
    """
    try:
        yield
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        hint = "free some space there, or choose another --out"
        raise RolloutError("output_file", where, got, "a writable place", hint) from None
