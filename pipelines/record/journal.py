"""Durable logs of calls and outcomes, which `rollouts convert` can read too.

    DS/.recording/00000/calls.jsonl     one call per line: the `calls` format
    DS/.recording/00000/rewards.jsonl   one ended session per line: the rewards file
    DS/.recording/00000/lost.jsonl      open sessions with calls missing from the log
    DS/.recording/00000/written.jsonl   sessions that are in shards

All lines of a session are in one numbered folder, which is deleted once all its sessions are in
shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from pipelines.record.sessions import Session
from rollout_io.conversion.rewards import parse_outcome
from rollout_io.dataset.filesystems import sync
from rollout_io.formats.base import Input, Place, Rejected, Run
from rollout_io.formats.calls import find_sessions
from rollout_io.formats.parsing.jsonl import decode_line, read_lines
from schemas.errors import InputError

FOLDER = ".recording"
FOLDER_BYTES = 256 << 20

File = Literal["calls", "rewards", "lost", "written"]
_FILES: tuple[File, ...] = ("calls", "rewards", "lost", "written")
_RECORD = msgspec.json.Decoder(dict[str, Any])
_NUMBER = re.compile(r"[0-9]{5}|[1-9][0-9]{5,}")
_TIME = re.compile(rb'"time":([0-9.]+)')


class _Entry(NamedTuple):
    path: Path
    content: bytes
    done: asyncio.Future[Place]


class Journal:
    """The logs of one dataset's recorder.

    Lines that are waiting at the same time are written together, with a single sync.

    Args:
        out: Local directory of the dataset.

    Attributes:
        problem: Reason why the last write failed; None if it succeeded.
        last_time_s: Time of the latest call that `recover` found, in seconds since 1970.
        folder: Number of the folder for new sessions.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._root = Path(out) / FOLDER
        self._waiting: list[_Entry] = []
        self._sizes: dict[Path, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._failed_bytes = 0  # length of the longest line of the last write, if that failed
        self.problem: str | None = None
        self.last_time_s = 0.0
        self.folder = 0

    def recover(self) -> dict[str, Session]:
        """Load the sessions of an earlier recorder, except sessions known to be in a shard.

        An incomplete last line is removed; its write was never confirmed to a client.
        """
        sessions: dict[str, Session] = {}
        self._refuse_links()
        for gone in self._root.glob("*.done"):
            if _NUMBER.fullmatch(gone.stem):
                shutil.rmtree(gone, ignore_errors=True)
        for number in self.folders():
            for path in (self._path(number, file) for file in _FILES):
                self._sizes[path] = _cut_to_lines(path)
            self.last_time_s = max(self.last_time_s, _last_time(self._path(number, "calls")))
            written = {n for r in self._records(number, "written") for n in r["sessions"]}
            sessions |= {n: s for n, s in self._sessions(number) if n not in written}
            self.folder = number + 1
        return sessions

    def _refuse_links(self) -> None:
        """Check that the logs are no links: lines are cut off and appended here."""
        logs = [self._path(n, file) for n in self.folders() for file in _FILES]
        for path in (self._root, *(log.parent for log in logs), *logs):
            if path.is_symlink():
                raise InputError("journal", str(path), "a symbolic link", "a file", "remove it")

    def _sessions(self, number: int) -> Iterator[tuple[str, Session]]:
        sessions: dict[str, Session] = {}
        path = self._path(number, "calls")
        inputs = [Input(str(path), path)] if path.exists() else []
        for item in find_sessions(inputs, lambda _: None):
            if isinstance(item, Rejected):
                raise item.error
            if isinstance(item, Run):
                name = f"{item.instance_id}/{item.repetition_id}"
                # Named as by `_write_all`: a repeated rejection must be the same line.
                places = [replace(p, where=f"{path.name}@{p.offset}") for p in item.places]
                sessions[name] = Session(name=name, folder=number, places=places)
        for record in self._records(number, "rewards"):
            (instance, repetition), outcome = parse_outcome(record, str(path))
            name = f"{instance}/{repetition}"
            sessions.setdefault(name, Session(name=name, folder=number)).outcome = outcome
        for record in self._records(number, "lost"):
            name, losses = record["session"], (record["unrecorded"], record["lost"])
            session = sessions.setdefault(name, Session(name=name, folder=number))
            session.num_unrecorded, session.num_lost = session.losses_kept = losses
        yield from sessions.items()

    def _records(self, number: int, name: File) -> Iterator[dict[str, Any]]:
        path = self._path(number, name)
        if path.exists():
            with path.open("rb") as file:
                for line in read_lines(file):
                    yield decode_line(_RECORD, line.content, f"{path}:{line.number}")

    async def append(self, folder: int, name: File, record: Mapping[str, Any]) -> Place:
        """Write one line; it is on disk when this returns.

        Raises:
            InputError: `journal`: the line could not be written; the log is then unchanged.
        """
        content = msgspec.json.encode(record).replace(b"\n", b" ").replace(b"\r", b" ")
        return await self._write(self._path(folder, name), content + b"\n")

    async def probe(self) -> None:
        """After a failed write, test writing as many bytes again: blank lines, which readers skip.

        Raises:
            InputError: As for `append`.
        """
        if self.problem is not None:
            await self._write(self._path(self.folder, "calls"), b"\n" * self._failed_bytes)

    def next_folder(self) -> int:
        """Return the folder for a new session; start a new one when the current one is full."""
        if self._sizes.get(self._path(self.folder, "calls"), 0) > FOLDER_BYTES:
            self.folder += 1
        return self.folder

    async def remove(self, folder: int) -> None:
        """Delete a folder whose sessions are all in shards."""
        await asyncio.to_thread(self._remove, folder)
        for name in _FILES:
            self._sizes.pop(self._path(folder, name), None)

    def _remove(self, folder: int) -> None:
        """Delete a folder, renaming it first so that a numbered folder is always complete."""
        gone = self._root / f"{folder:05d}.done"
        with contextlib.suppress(OSError):
            self._path(folder, "calls").parent.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    async def _write(self, path: Path, content: bytes) -> Place:
        done: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Entry(path, content, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._commit())
        return await asyncio.shield(done)

    async def _commit(self) -> None:
        while self._waiting:
            entries, self._waiting = self._waiting, []
            try:
                places = await asyncio.to_thread(self._write_all, entries)
            except OSError as error:
                self.problem = (error.strerror or str(error)).lower()
                self._failed_bytes = max(len(entry.content) for entry in entries)
                for entry in entries:
                    _fail(entry, self.problem)
            else:
                self.problem = None
                for entry, place in zip(entries, places, strict=True):
                    if not entry.done.done():
                        entry.done.set_result(place)

    def _write_all(self, entries: Sequence[_Entry]) -> list[Place]:
        """Append lines, file by file; either all are written or none."""
        places: dict[int, Place] = {}
        before: dict[Path, int] = {}
        try:
            for path in dict.fromkeys(entry.path for entry in entries):
                before[path] = offset = self._sizes.get(path, 0)
                chosen = [(i, e.content) for i, e in enumerate(entries) if e.path == path]
                _append(path, offset, b"".join(content for _, content in chosen))
                for i, content in chosen:
                    places[i] = Place(path, f"{path.name}@{offset}", offset, len(content))
                    offset += len(content)
                self._sizes[path] = offset
        except OSError:
            for path, size in before.items():
                self._sizes[path] = size
                if path.exists():
                    os.truncate(path, size)
            raise
        return [places[i] for i in range(len(entries))]

    def folders(self) -> list[int]:
        """List the numbers of the existing folders."""
        if not self._root.is_dir():
            return []
        return sorted(int(p.name) for p in self._root.iterdir() if _NUMBER.fullmatch(p.name))

    def files(self) -> list[Path]:
        """List the existing logs."""
        self._refuse_links()
        paths = [self._path(number, file) for number in self.folders() for file in _FILES]
        return [path for path in paths if path.exists()]

    def _path(self, folder: int, name: File) -> Path:
        return self._root / f"{folder:05d}/{name}.jsonl"


def _append(path: Path, offset: int, content: bytes) -> None:
    is_new = not path.exists()
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while content:
            num_bytes = os.pwrite(handle, content, offset)
            content, offset = content[num_bytes:], offset + num_bytes
        os.fdatasync(handle)
    finally:
        os.close(handle)
    if is_new:
        for folder in (path.parent, path.parent.parent):
            sync(folder)


def _cut_to_lines(path: Path) -> int:
    """Remove an incomplete last line; return the resulting size."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = _last_end(file, size)
        if end < size:
            file.truncate(end)
    return end


def _last_end(file: Any, size: int) -> int:
    end = size
    while end > 0:
        start = max(end - (1 << 20), 0)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return int(start + at + 1)
        end = start
    return 0


def _last_time(path: Path) -> float:
    times: Iterable[bytes] = ()
    if path.exists():
        with path.open("rb") as file:
            times = [match[1] for line in file if (match := _TIME.search(line[:4096]))]
    return max(map(float, times), default=0.0)


def _fail(entry: _Entry, problem: str) -> None:
    if not entry.done.done():
        hint = "free disk space, or make the directory writable"
        error = InputError("journal", str(entry.path), f"cannot write: {problem}", hint=hint)
        entry.done.set_exception(error)
        entry.done.exception()
