"""Logs as tables, without a conversion: for reading them, with or without token ids.

The files are opened, their runs found and read as in a conversion, with one difference: text stays
text unless there is a tokenizer. A file or a run that a conversion rejects is reported, and the
others are read. Nothing is written beside the logs, and no file outside the given path is read.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.conversion.chunk import (
    Reader,
    RunRows,
    Settings,
    cut,
    sound,
    tabulated,
    without_collector,
)
from rollout_io.conversion.inputs import odd_name
from rollout_io.conversion.opened_logs import AUTO, Opened, open_log
from rollout_io.conversion.plan import plan_logs
from rollout_io.conversion.rows import Settled
from rollout_io.conversion.text import Untokenized
from rollout_io.dataset.blobs import PREFIX, Blobs
from rollout_io.formats.base import Place, Rejected, Run, Step
from rollout_io.formats.detect import Tell
from rollout_io.formats.parsing.media import storing
from rollout_io.formats.parsing.records import INCOMPLETE
from schemas.errors import InputError, RolloutError
from schemas.ragged import list_lengths

BATCH_BYTES = 8 << 20
"""Size of the log records of one table."""

LINK = "outside_link"
CHANGED, AGAIN = "the log changed since it was read", "open it again in a moment"


class LogFile(NamedTuple):
    """A file below a path, found without opening it."""

    path: Path
    num_bytes: int
    modified: float


@dataclass
class Listing:
    """The files of a log or of a directory of logs, without hidden ones; `root` is without links.

    Refused are links to files outside the path, directories that cannot be listed, and names that are
    not UTF-8.
    """

    path: Path
    root: Path
    files: list[LogFile] = field(default_factory=list)
    refused: dict[Path, InputError] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Listing:
        """List a path."""
        listing = cls(path, Path(os.path.realpath(path)))
        if path.is_dir():

            def unlisted(error: OSError) -> None:
                listing._refuse(Path(error.filename), error, "cannot be listed: ")

            for folder, folders, names in os.walk(path, onerror=unlisted):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for name in (*names, *folders):
                    listing._add(Path(folder) / name)
            if not listing.files and not listing.refused:
                raise InputError("input_file", str(path), "the directory contains no files")
        else:
            listing._add(path)
        return listing

    def was_replaced(self, path: Path) -> bool:
        """True if a listed file is shorter, or was written without growing, since it was listed."""
        listed = self._known.get(path)
        if listed is None or not path.is_file():
            return False
        status = path.stat()
        is_same = (status.st_size, status.st_mtime) == (listed.num_bytes, listed.modified)
        return status.st_size <= listed.num_bytes and not is_same

    @cached_property
    def _known(self) -> dict[Path, LogFile]:
        return {file.path: file for file in self.files}

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)

    def holds(self, path: Path) -> bool:
        """True if a path, after resolving its links, is the given one or inside it."""
        return Path(os.path.realpath(path)).is_relative_to(self.root)

    def _add(self, path: Path) -> None:
        if path.name.startswith(".") and path != self.path:
            return
        if (odd := odd_name(path)) is not None:
            self.refused[path] = odd
            return
        if path.is_symlink() and not self.holds(path):
            finding = "the link leaves the directory, so it is not followed"
            self.refused[path] = InputError(LINK, str(path), finding, "", "pass its target")
            return
        try:
            facts = path.stat()
        except OSError as error:
            self._refuse(path, error)
            return
        if path.is_file():
            self.files.append(LogFile(path, facts.st_size, facts.st_mtime))

    def _refuse(self, path: Path, error: OSError, what: str = "") -> None:
        finding = what + (error.strerror or str(error)).lower()
        self.refused[path] = InputError("input_file", str(path), finding)


def files_of(path: str) -> set[LogFile] | None:
    """Return the files of a log as they are now; None if it cannot be listed."""
    try:
        return {*Listing.of(Path(path)).files}
    except RolloutError:
        return None


class Read(NamedTuple):
    """Runs of one format by trajectory_id (a run of a table has several), and their rows."""

    format: str
    runs: Mapping[str, Run]
    table: pa.Table
    rejected: Sequence[Rejected]
    notes: Mapping[str, int]


def open_listed(
    listing: Listing, spool: Path, format_name: str = AUTO, tell: Tell | None = None
) -> Opened:
    """Open the listed files as a conversion does, without those that cannot be read."""
    refuse = tell or (lambda _name, _error: None)
    # Links to directories are never followed; ignoring one would ignore all that its target holds.
    ignored = [str(path) for path in listing.refused if not (path.is_symlink() and path.is_dir())]
    for error in listing.refused.values():
        refuse(error.where, error)  # unlike a path, always UTF-8
    named = [str(listing.path)]
    opened = open_log(named, format_name, spool, ignored, skips=True, tell=refuse)
    for log in opened.logs:
        for entry in [entry for entry in log.inputs if entry.path.is_dir()]:
            links = [path for path in listing.refused if path.is_relative_to(entry.path)]
            if links:  # an adapter would read them
                refuse(entry.name, listing.refused[links[0]].at(entry.name))
                log.inputs.remove(entry)
    return opened._replace(logs=[log for log in opened.logs if log.inputs])


class _Digests:
    """A store that keeps no bytes, for counting pictures."""

    def add(self, content: bytes) -> str:
        return PREFIX + hashlib.sha256(content).hexdigest()

    def read(self, name: str) -> None:
        """Return None: no content is kept."""


@contextmanager
def _reading(listing: Listing, blobs: Blobs | None) -> Iterator[None]:
    """Read logs in this block: pictures go to a store, and no file outside the path is read."""
    folder = listing.root if listing.root.is_dir() else listing.root.parent
    with without_collector(), storing(blobs or _Digests(), folder):
        yield


def read_opened(
    opened: Opened,
    listing: Listing,
    spool: Path,
    progress: Callable[[str, int, int], object],
) -> Iterator[Read]:
    """Yield the runs of opened logs as tables of text, in the order of a conversion.

    The first element has the rejected records that belong to no run. `progress` is called with what is
    being done (`find` or `read`), the number of bytes or runs done, and the number of all.
    """
    done = 0
    total = listing.num_bytes

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("find", min(done, total), total)

    with _reading(listing, None):
        items = (log.find(advance, spool) for log in opened.logs)
        plans = plan_logs(items, {})[0] if opened.logs else []
    rejected = [one for planned in plans for one in planned.rejected]
    yield Read("", {}, pa.table({}), [*opened.unused, *rejected], {})
    num_runs, num_read = sum(planned.num_runs for planned in plans), 0
    for log, planned in zip(opened.logs, plans, strict=True):
        settings = Settings(adapter=log.adapter, format=log.format, retokenizer=Untokenized())
        for runs in cut(planned.runs, BATCH_BYTES):
            with _reading(listing, None):
                yield from read_runs(runs, settings)
            num_read += len(runs)
            progress("read", num_read, num_runs)


def read_runs(runs: Sequence[Run], settings: Settings) -> Iterator[Read]:
    """Yield runs as tables; with token ids where the log, or the tokenizer of the settings, has them."""
    reader = Reader(settings, {})
    for part in reader.parts(runs):
        table = _sound(part, reader.rejected)
        yield Read(settings.format, _by_id(part), table, reader.rejected, _sum(reader.notes))
        reader.rejected, reader.notes = [], {}
    if reader.rejected:
        yield Read(settings.format, {}, pa.table({}), reader.rejected, _sum(reader.notes))


def reread(
    run: Run, trajectory_id: str, settings: Settings, listing: Listing, spool: Path, blobs: Blobs
) -> pa.Table:
    """Read one trajectory again."""
    for place in run.places:
        if not (listing.holds(place.path) or place.path.is_relative_to(spool)):
            finding = "the file is now a link that leaves the directory"
            raise InputError(LINK, place.where, finding)
        if listing.was_replaced(place.path):
            raise InputError("input_file", place.where, CHANGED, "", AGAIN)
    tables, rejected = [], list[Rejected]()
    with _reading(listing, blobs):
        for read in read_runs([run], settings):
            rejected += read.rejected
            if read.table.num_rows:
                ids = read.table.column("trajectory_id")
                tables.append(read.table.filter(pc.equal(ids, trajectory_id)))
    if not any(table.num_rows for table in tables):
        if rejected:
            raise min(rejected, key=lambda one: one.error.rule == INCOMPLETE).error
        where = run.places[0].where if run.places else trajectory_id
        raise InputError("input_file", where, CHANGED, "", AGAIN)
    return pa.concat_tables(tables, promote_options="permissive")


def rejected_rows(
    rejected: Sequence[Rejected], listing: Listing
) -> Iterator[tuple[Place, pa.Table]]:
    """Yield one row for each distinct error, as of a failed trajectory that made no call.

    Records that are unusable because of another record's error have no row of their own. Places are
    relative to the listed directory.
    """
    prefix = f"{str(listing.path).rstrip('/')}/"
    shown: dict[tuple[Path, str], tuple[Rejected, int]] = {}
    for one in rejected:
        if one.error.rule != INCOMPLETE:
            key = one.place.path, one.error.sentence
            first, number = shown.get(key, (one, 0))
            shown[key] = first, number + 1
    for place, error, _ in (first for first, _ in shown.values()):
        name = place.where.removeprefix(prefix)
        run = Run(instance_id=name, repetition_id=0, places=[place])
        hint = f" Hint: {error.hint}" if error.hint else ""
        settled = Settled(
            instance_id=name,
            repetition_id=0,
            steps=[Step(source=place.where)],
            error=f"{error}{hint}".replace(prefix, ""),
        )
        for part in tabulated([(run, settled)], []):
            yield place, part.table


def _sound(part: RunRows, rejected: list[Rejected]) -> pa.Table:
    """Check the rows of the trajectories that have token ids; rows of text have none to check."""
    table = part.table
    if not table.num_rows:
        return table
    lengths = list_lengths(table.column("prompt_token_ids"))
    names = table.column("trajectory_id")
    text = pc.unique(names.filter(pa.array(lengths == 0)))
    is_text = pc.is_in(names, text)
    exact = RunRows(part.runs, table.filter(pc.invert(is_text)))
    if not exact.table.num_rows:
        return table
    return pa.concat_tables([sound(exact, rejected, None), table.filter(is_text)])


def _by_id(part: RunRows) -> dict[str, Run]:
    ids = pc.unique(part.table.column("trajectory_id")).to_pylist() if part.table.num_rows else []
    runs = {f"{run.instance_id}_{run.repetition_id}": run for run in part.runs}
    return {name: runs.get(name, part.runs[0]) for name in ids}


def _sum(notes: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, notes.values()), Counter())


def encode_run(run: Run) -> bytes:
    """Encode a run; `decode_run` reads it."""
    return msgspec.msgpack.encode(run, enc_hook=os.fspath)


def decode_run(content: bytes) -> Run:
    """Parse the output of `encode_run`."""
    return msgspec.msgpack.decode(content, type=Run, dec_hook=lambda kind, value: kind(value))
