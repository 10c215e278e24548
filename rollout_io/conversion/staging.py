"""The hidden directory in which a dataset is built, so that a conversion can be resumed.

    DS/.converting/plan.json            identity of the conversion: files, choices, version
    DS/.converting/inputs/              decompressed files, and copies of pipes
    DS/.converting/blobs/               pictures of the logs, each once
    DS/.converting/chunk-00000/         shards of a finished chunk, and report.json
    DS/.converting/chunk-00001.4f.tmp/  unfinished chunk, with its writer's id
    DS.rejected.jsonl                   rejected records, beside the dataset
    DS.blobs/                           pictures that the rows refer to, beside the dataset

A local chunk directory is renamed once it is complete. In an object store, the files of a chunk are
moved one by one, and the report is written last. A directory with the final name and a report is
therefore complete. Publishing moves the pictures and then the shards, in order; an interrupted
publication can be resumed too.

No file here says what to move where. Each shard's footer says which shard of which conversion it is
(`rollout_io.dataset.footer`), and a shard that is not the expected one of this conversion is neither
moved nor replaced. Symbolic links are never followed.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollout_io.dataset.atomic_files import writable
from rollout_io.dataset.blobs import Blobs, names_in_files, stores_of
from rollout_io.dataset.footer import Part, Place
from rollout_io.dataset.locking import destination
from rollout_io.dataset.reader import footers
from rollout_io.dataset.storage import STAGING, Location, move, occupied, publish, shard_name
from schemas.errors import InputError, RolloutError

REJECTED = ".rejected.jsonl"
_LINE = re.compile(rb'\{"source":"(?:[^"\\]|\\.)*","rule":"')  # start of `rejections.lines`
_MOST_SHARDS = 1 << 20  # more than any chunk has: a report is only a file, and may say anything
# After these errors the input is fine, and another attempt can reuse the finished chunks.
_KEEPS_CHUNKS = frozenset({"output_file", "remote_store", "worker"})
_PLAN, _REPORT, _BLOBS = "plan.json", "report.json", "blobs"
_CHUNK = re.compile(r"chunk-(\d{5,})(\.[0-9a-f]{8}\.tmp)?")
_OURS = frozenset(
    {_PLAN, f"{_PLAN}.tmp", "inputs", _BLOBS, REJECTED[1:]}
)  # names in the staging directory


class Staging:
    """The staging directory of a dataset."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Location.of(out)
        self.where = os.fspath(out)
        self.folder = self.out.join(STAGING)
        fs = self.out.fs
        self._mark = os.urandom(4).hex()
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
                    if error.rule not in _KEEPS_CHUNKS and not self._is_publishing():
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

    def begin(self, identity: dict[str, Any]) -> None:
        """Start or resume the conversion with this identity; remove chunks of other conversions."""
        is_same = _read_json(self.folder.join(_PLAN)) == identity
        for chunk, _, is_unfinished in self._chunks():
            if is_unfinished or not is_same:
                _remove(chunk)
        if not is_same:
            _remove(self.blobs.folder)
            _write_json(self.folder.join(_PLAN), identity)

    def resume(self, whole: Part) -> dict[int, dict[str, Any]]:
        """Return the reports of the finished chunks by index, and remove all other chunks."""
        entries = self._entries()
        complete = entries.keys() == set(range(whole.num_parts))
        sound, published = dict[int, dict[str, Any]](), set[str]()
        first, folder = 0, self.out.path.rstrip("/")
        for index, (num_shards, report) in sorted(entries.items()):
            shards = self._places_of(index, num_shards, first if complete else None)
            if _are_of(shards, whole, index, num_shards):
                sound[index] = report
                published |= {s.path for s in shards if posixpath.dirname(s.path) == folder}
            first += num_shards
        there = self.out.datasets()
        if set(there) != published:
            raise occupied(self.where, len(there))
        for chunk, index, is_unfinished in self._chunks():
            if not is_unfinished and index not in sound:
                _remove(chunk)
        return sound

    def _entries(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """Return the number of shards and the report of each chunk that has a valid report."""
        entries = {}
        for chunk, index, _ in self._chunks():
            is_sound = chunk.path == self._finished(index).path and not _is_link(chunk)
            if is_sound and (read := _read_json(chunk.join(_REPORT))):
                number, report = read.get("num_shards"), read.get("report")
                if isinstance(number, int) and number > 0 and isinstance(report, dict):
                    entries[index] = number, report
        return entries

    def _chunks(self) -> Iterator[tuple[Location, int, bool]]:
        """Yield the directory and the index of each chunk, and whether it is unfinished."""
        for path in _names(self.folder):
            if match := _CHUNK.fullmatch(posixpath.basename(path)):
                yield Location(self.folder.fs, path), int(match[1]), match[2] is not None

    def _places_of(self, index: int, num_shards: int, first: int | None) -> list[Location]:
        """Return where the shards of a chunk are: still in the chunk, or already in the dataset."""
        chunk, places = self._finished(index), list[Location]()
        staged = {shard.path: shard for shard in self.shards(index)}
        for number in range(min(num_shards, _MOST_SHARDS)):
            shard = staged.pop(chunk.join(shard_name(number)).path, None)
            final = None if first is None else self.out.join(shard_name(first + number))
            if shard is None or (final is not None and _is_same(shard, final)):
                shard = final
            if shard is not None and shard.fs.exists(shard.path) and not _is_link(shard):
                places.append(shard)
        return [] if staged else places

    def chunk_path(self, index: int) -> str:
        """Return a new path to write a chunk to."""
        return str(self.out.fs.unstrip_protocol(self._unfinished(index).path))

    def _unfinished(self, index: int) -> Location:
        return self.folder.join(f"chunk-{index:05d}.{self._mark}.tmp")

    def finish_chunk(self, index: int, report: dict[str, Any]) -> None:
        """Mark a chunk as finished."""
        written = self._unfinished(index)
        if not written.shards():
            finding = "the output of a worker process is not visible to this process"
            hint = "write to storage that all nodes share, or use --workers 1"
            raise InputError("shared_storage", self.where, finding, "", hint)
        finished = self._finished(index)
        entry = {"num_shards": len(written.shards()), "report": report}
        if self.out.is_local:
            _write_json(written.join(_REPORT), entry)
            self.folder.fs.mv(written.path, finished.path, recursive=True)
            return
        # Object stores cannot rename a folder, so the report, which completes the chunk, comes last.
        with writable(self.where):
            _remove(finished)
            for shard in written.shards():
                move(Location(written.fs, shard), finished.join(posixpath.basename(shard)))
        _write_json(finished.join(_REPORT), entry)

    def _finished(self, index: int) -> Location:
        return self.folder.join(f"chunk-{index:05d}")

    def shards(self, index: int) -> list[Location]:
        """Return the shards of a chunk, in order."""
        return [Location(self.out.fs, path) for path in self._finished(index).shards()]

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
        self._publish_blobs(parents)
        self._held.refuse_lost()
        first = 0
        for index, (num_shards, _) in sorted(self._entries().items()):
            for number in range(num_shards):
                shard = self._finished(index).join(shard_name(number))
                final = self.out.join(shard_name(first + number))
                if _is_same(shard, final):  # killed while publishing it
                    shard.fs.rm_file(shard.path)
                elif shard.fs.exists(shard.path):
                    publish(shard, final)
            first += num_shards
        self.clear()

    def _publish_blobs(self, parents: Sequence[str]) -> None:
        shards = [shard.url for index in self._entries() for shard in self.shards(index)]
        stores = [self.blobs, *(store for parent in parents for store in stores_of(parent))]
        target = Blobs.of(self.where)
        for name in sorted(names_in_files(shards)):
            target.take(name, stores)

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

    def may_be_publishing(self, identity: dict[str, Any]) -> bool:
        """True if this conversion seems to have been interrupted while moving shards; see `resume`."""
        return self._is_publishing() and _read_json(self.folder.join(_PLAN)) == identity

    def _is_publishing(self) -> bool:
        """True if shards of a finished chunk are no longer in it."""
        return any(len(self.shards(i)) < number for i, (number, _) in self._entries().items())

    def holds_chunks(self) -> bool:
        """True if any chunk is finished."""
        return bool(self._entries())

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
            decoded = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return decoded if isinstance(decoded, dict) else None


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
    if _is_link(location) or location.fs.exists(location.path):
        location.fs.rm(location.path, recursive=True)


def _is_ours(path: str) -> bool:
    """True for the name of a file or directory that a conversion creates in its staging directory."""
    name = posixpath.basename(path.rstrip("/"))
    return name in _OURS or _CHUNK.fullmatch(name) is not None


def _is_link(location: Location) -> bool:
    return location.is_local and Path(location.path).is_symlink()


def _is_same(one: Location, other: Location) -> bool:
    """True if two local paths are the same file."""
    try:
        return one.is_local and Path(one.path).samefile(other.path)
    except OSError:
        return False


def _are_of(shards: list[Location], whole: Part, index: int, num_shards: int) -> bool:
    """True if the footers say that these are all shards of one part of a dataset, in order."""
    if len(shards) != num_shards:
        return False
    try:
        places = [Place.decode(footers(shard.url)[0]) for shard in shards]
    except (RolloutError, ValueError, TypeError, KeyError):
        return False
    return all(
        place is not None
        and (place.writing, place.num_parts) == (whole.writing, whole.num_parts)
        and (place.part, place.index, place.is_last) == (index, number, number == num_shards - 1)
        for number, place in enumerate(places)
    )
