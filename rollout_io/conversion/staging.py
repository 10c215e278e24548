"""The hidden directory in which a dataset is built, so that a conversion can be resumed.

    DS/.converting/inputs/               decompressed files, and copies of pipes
    DS/.converting/blobs/                pictures of the logs, each once
    DS/.converting/chunk-00000.4f.../    shards of a chunk; report.json once it is finished
    DS.rejected.jsonl                    rejected records, beside the dataset
    DS.blobs/                            pictures that the rows refer to, beside the dataset

No file here says what to move where, or what the chunks are chunks of. Each shard's footer says which
shard of which conversion of which inputs it is (`rollout_io.dataset.footer`): a chunk of another one is
removed, and a shard of another one is neither moved nor replaced. Publishing moves the pictures and then
the shards, in order; an interrupted publication goes on, because the shards that are already in the
dataset name their places too. Symbolic links are never followed.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rollout_io.dataset.blobs import Blobs, names_in_files, stores_of
from rollout_io.dataset.filesystems import writable
from rollout_io.dataset.footer import Part, Place
from rollout_io.dataset.locking import destination
from rollout_io.dataset.reader import footers
from rollout_io.dataset.storage import STAGING, Location, move, occupied, publish, shard_name
from schemas.errors import InputError, RolloutError

REJECTED = ".rejected.jsonl"
_LINE = re.compile(rb'\{"source":"(?:[^"\\]|\\.)*","rule":"')  # start of `rejections.lines`
# After these errors the input is fine, and another attempt can reuse the finished chunks.
_KEEPS_CHUNKS = frozenset({"output_file", "remote_store", "worker"})
_INPUTS, _REPORT, _BLOBS = "inputs", "report.json", "blobs"
# Names in the staging directory; those of earlier releases are only removed.
_CHUNK = re.compile(r"chunk-(\d{5,})(\.[0-9a-f]{8}(\.tmp)?)?")
_OURS = frozenset({_INPUTS, _BLOBS, REJECTED[1:], "plan.json"})


class _Shard(NamedTuple):
    location: Location
    is_last: bool


class Staging:
    """The staging directory of a dataset."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Location.of(out)
        self.where = os.fspath(out)
        self.folder = self.out.join(STAGING)
        fs = self.out.fs
        # Chunks of an interrupted run may still be written, by a worker on another machine.
        self._mark = os.urandom(4).hex()
        self._chunk_of = dict[int, Location]()
        self._shards_of = dict[int, list[Location]]()
        self._may_remove = not fs.exists(self.out.path) or fs.exists(self.folder.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against a second conversion, and create it if necessary."""
        with destination(self.where) as self._held:
            if _is_link(self.folder):
                finding, hint = "the staging directory is a symbolic link", "remove the link"
                raise InputError("out_is_free", self.folder.path, finding, "", hint)
            with writable(self.where):
                self.folder.fs.makedirs(self.folder.path, exist_ok=True)
            for path in _names(self.folder):
                if _is_link(Location(self.folder.fs, path)) and _is_ours(path):
                    self.folder.fs.rm(path)
            yield

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
                    is_publishing = self.holds_chunks() and self.out.datasets()
                    if error.rule not in _KEEPS_CHUNKS and not is_publishing:
                        self.clear()
                    raise
                except BaseException:
                    if not self.holds_chunks():
                        self.clear()
                    raise
        except BaseException as error:
            # A signal may arrive between locking the directory, creating it and entering the block.
            if not guarded and not isinstance(error, RolloutError):
                self._clear_if_free()
            raise

    def _clear_if_free(self) -> None:
        """Remove the staging directory unless it is locked or contains finished chunks."""
        with suppress(RolloutError), self.locked():
            if not self.holds_chunks():
                self.clear()

    def refuse_occupied(self) -> None:
        """Check that there is no dataset, or one whose publication may have been interrupted; see `resume`.

        Raises:
            InputError: `out_is_free`: the directory contains a dataset.
        """
        if (shards := self.out.datasets()) and not self.holds_chunks():
            raise occupied(self.where, len(shards))

    def resume(self, whole: Part) -> dict[int, dict[str, Any]]:
        """Return the reports of the finished chunks by index, and remove all other chunks.

        Raises:
            InputError: `out_is_free`: the directory contains a shard that this conversion has not
                published.
        """
        reports, others = dict[int, dict[str, Any]](), list[Location]()
        there, published = self.out.datasets(), _shards_in(self.out, whole)
        self._shards_of = {}
        for chunk, index in self._chunks():
            staged, report = _shards_in(chunk, whole), _read_json(chunk.join(_REPORT))
            # A shard is in both directories if its publication was killed; the dataset's is the one.
            shards = None if staged is None else _of_part(staged | (published or {}), index)
            if report is None or shards is None or index in reports:
                others.append(chunk)
                continue
            reports[index], self._chunk_of[index] = report, chunk
            self._shards_of[index] = shards
        in_place = {shard.path for shard, final in self._moves() if shard.path == final.path}
        if set(there) != in_place or (there and len(reports) != whole.num_parts):
            raise occupied(self.where, len(there))
        for chunk in others:
            _remove(chunk)
        return reports

    def _moves(self) -> Iterator[tuple[Location, Location]]:
        """Yield each shard of the finished chunks, and its place in the dataset."""
        shards = (shard for _, shards in sorted(self._shards_of.items()) for shard in shards)
        for number, shard in enumerate(shards):
            yield shard, self.out.join(shard_name(number))

    def _chunks(self) -> Iterator[tuple[Location, int]]:
        """Yield the directory and the index of each chunk, finished or not."""
        for path in _names(self.folder):
            if match := _CHUNK.fullmatch(posixpath.basename(path.rstrip("/"))):
                yield Location(self.folder.fs, path), int(match[1])

    def chunk_path(self, index: int) -> str:
        """Return a new path to write a chunk to."""
        chunk = self.folder.join(f"chunk-{index:05d}.{self._mark}")
        self._chunk_of[index] = chunk
        return str(self.out.fs.unstrip_protocol(chunk.path))

    def finish_chunk(self, index: int, report: dict[str, Any]) -> None:
        """Mark a chunk as finished."""
        if not self.shards(index):
            finding = "the output of a worker process is not visible to this process"
            hint = "write to storage that all nodes share, or use --workers 1"
            raise InputError("shared_storage", self.where, finding, "", hint)
        _write(self._chunk_of[index].join(_REPORT), [json.dumps(report).encode()])

    def shards(self, index: int) -> list[Location]:
        """Return the shards of a chunk that are not yet published, in order."""
        return [Location(self.out.fs, path) for path in self._chunk_of[index].shards()]

    @property
    def blobs(self) -> Blobs:
        """Store for the pictures of the logs until the dataset is published."""
        return Blobs(self.folder.join(_BLOBS))

    def publish(self, whole: Part, parents: Sequence[str] = ()) -> None:
        """Move the shards of all chunks, which must be finished, into the dataset.

        The pictures that the rows refer to become part of the dataset's store before the first shard;
        `parents` are datasets that rows come from, which have stores of their own.

        Raises:
            InvariantError: `image_reference`: a picture is missing or was changed.
            InputError: `out_is_free`: a chunk is not of this conversion, or another writer has
                published a shard.
        """
        if self.resume(whole).keys() != set(range(whole.num_parts)):
            finding, hint = "the staging directory was changed", "run the same command again"
            raise InputError("out_is_free", self.folder.path, finding, "", hint)
        shards = [shard.url for shards in self._shards_of.values() for shard in shards]
        stores = [self.blobs, *(store for parent in parents for store in stores_of(parent))]
        blobs = Blobs.of(self.where)
        for name in sorted(names_in_files(shards)):
            blobs.take(name, stores)
        self._held.refuse_lost()
        for shard, final in self._moves():
            if shard.path != final.path:
                publish(shard, final)
        self.clear()

    def clear(self) -> None:
        """Remove the staging directory, and the dataset directory if the conversion created it."""
        for path in _names(self.folder):
            if _is_ours(path):
                _remove(Location(self.folder.fs, path))
        fs, path = self.out.fs, self.out.path
        for folder in (self.folder.path, *([path] if self._may_remove else [])):
            if fs.isdir(folder) and not fs.ls(folder):
                fs.rmdir(folder)

    @property
    def rejected(self) -> Location:
        """Location of the file of rejected records."""
        return Location(self.out.fs, self.out.path.rstrip("/") + REJECTED)

    def holds_chunks(self) -> bool:
        """True if any chunk is finished."""
        return any(_read_json(chunk.join(_REPORT)) is not None for chunk, _ in self._chunks())

    def refuse_foreign(self) -> None:
        """Check that an existing file of rejected records was written by a conversion."""
        fs, path = self.rejected.fs, self.rejected.path
        is_ours = fs.isfile(path) and _LINE.match(fs.head(path, 1 << 16))
        if not _is_link(self.rejected) and (is_ours or not fs.exists(path)):
            return
        finding = (
            "the path is needed for rejected records, but already exists and contains other data"
        )
        hint = "choose a different --out, or rename the existing file"
        raise InputError("out_is_free", path, finding, "", hint)

    def write_rejected(self, lines: Iterable[bytes]) -> None:
        """Write the rejected records beside the dataset, atomically."""
        _write(self.rejected, lines, self.folder.join(REJECTED[1:]))

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
    return Path(staging.folder.path) / _INPUTS if staging.out.is_local else None


def _read_json(location: Location) -> dict[str, Any] | None:
    try:
        with location.fs.open(location.path, "rb") as file:
            decoded = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return decoded if isinstance(decoded, dict) else None


def _write(location: Location, lines: Iterable[bytes], temporary: Location | None = None) -> None:
    """Write a file atomically."""
    partial = temporary or Location(location.fs, f"{location.path}.tmp")
    with writable(location.path):
        with location.fs.open(partial.path, "wb") as file:
            for line in lines:
                file.write(line)
        move(partial, location)


def _names(folder: Location) -> list[str]:
    """Return the paths in a folder; object stores have no empty folders."""
    names = folder.fs.ls(folder.path, detail=False) if folder.fs.isdir(folder.path) else []
    return list(names)


def _remove(location: Location) -> None:
    if _is_link(location) or location.fs.exists(location.path):
        location.fs.rm(location.path, recursive=True)


def _is_ours(path: str) -> bool:
    """True for the name of a file or directory that a conversion creates in its staging directory."""
    name = posixpath.basename(path.rstrip("/"))
    return name in _OURS or _CHUNK.fullmatch(name) is not None


def _is_link(location: Location) -> bool:
    return location.is_local and Path(location.path).is_symlink()


def _shards_in(folder: Location, whole: Part) -> dict[tuple[int, int], _Shard] | None:
    """Return the shards in a directory by part and number; None if one is not of this conversion."""
    shards = dict[tuple[int, int], _Shard]()
    for path in folder.datasets():
        shard, place = Location(folder.fs, path), None
        with suppress(RolloutError, ValueError, TypeError, KeyError):
            place = None if _is_link(shard) else Place.decode(footers(shard.url)[0])
        if place is None or (place.writing, place.num_parts) != (whole.writing, whole.num_parts):
            return None
        shards[place.part, place.index] = _Shard(shard, place.is_last)
    return shards


def _of_part(shards: Mapping[tuple[int, int], _Shard], index: int) -> list[Location] | None:
    """Return the shards of a part, in order; None if one is missing."""
    numbers = sorted(number for part, number in shards if part == index)
    of_part = [shards[index, number] for number in numbers]
    ends = [shard.is_last for shard in of_part]
    is_whole = numbers == [*range(len(numbers))] and ends == [False] * (len(ends) - 1) + [True]
    return [shard.location for shard in of_part] if is_whole else None
