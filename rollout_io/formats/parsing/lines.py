"""Records of logs, which are lines or JSON documents: their places, names, copies and damage."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import About, Found, Input, Place, Progress, Rejected, Run
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import read_lines, refuse_lfs_pointer, without_lone_surrogates
from rollout_io.formats.parsing.media import slimmed
from rollout_io.formats.parsing.naming import natural_key
from schemas.errors import InputError, RolloutError

DUPLICATE = "duplicate_record"
INCOMPLETE = "incomplete_trajectory"
_BLANK_BYTES = 2  # a line end, which the last line may lack
_TOLD_BYTES = 1 << 20
"""Progress is reported per MiB: a call per line would take as long as reading the line."""

_TEXT_DECODER = msgspec.json.Decoder(str)


class Record(NamedTuple):
    """A line of a log, with its location."""

    place: Place
    content: bytes


def read_record(place: Place) -> bytes:
    """Read the bytes of a record; while a dataset is written, its pictures are stored (`slimmed`)."""
    assert place.offset is not None
    file = _descriptor(place.path)  # keeps the file open: another thread may clear the cache
    content = os.pread(file.number, place.num_bytes, place.offset)
    if len(content) != place.num_bytes:
        finding = "the file shrank while it was being read"
        hint = "convert the log after its writer has finished"
        raise InputError("input_file", place.where, finding, hint=hint)
    return slimmed(content, place.path.parent)


class _Descriptor:
    """A file that is closed when the last reference is gone."""

    def __init__(self, path: Path) -> None:
        self._file = open_input(path)
        self.number = self._file.fileno()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@lru_cache(maxsize=16)
def _descriptor(path: Path) -> _Descriptor:
    return _Descriptor(path)


def close_files() -> None:
    """Close the files that `read_record` keeps open, because others may have replaced them."""
    _descriptor.cache_clear()


def lines_of(inputs: Sequence[Input], progress: Progress) -> Iterator[tuple[Place, bytes]]:
    """Yield the non-blank lines of all inputs, each with its location."""
    close_files()
    for name, path in inputs:
        num_reported = 0
        with open_input(path) as file:
            for number, offset, content in read_lines(file):
                if number == 1:
                    refuse_lfs_pointer(content, name)
                yield Place(path, f"{name}:{number}", offset, len(content)), content
                if offset - num_reported >= _TOLD_BYTES:
                    progress(offset - num_reported)
                    num_reported = offset
            progress(file.tell() - num_reported)


def without_copies(places: Sequence[Place]) -> tuple[list[Place], list[Rejected]]:
    """Separate lines from copies of an earlier line, which get a `duplicate_record` error.

    Only lines of similar size are read again; trailing whitespace is ignored.
    """
    sizes = sorted(place.num_bytes for place in places)
    twins = {size for pair in pairwise(sizes) if pair[1] - pair[0] <= _BLANK_BYTES for size in pair}
    first: dict[bytes, str] = {}
    distinct: list[Place] = []
    copies: list[Rejected] = []
    for place in places:
        try:
            if place.num_bytes in twins:
                refuse_repeated(read_record(place).rstrip(), place.where, first)
            distinct.append(place)
        except RolloutError as error:
            copies.append(Rejected(place, error))
    return distinct, copies


def refuse_repeated(content: bytes, where: str, first: dict[bytes, str]) -> None:
    """Refuse a byte-for-byte copy of a record in `first` (digest: location), and add the record."""
    other = first.setdefault(hashlib.blake2b(content, digest_size=16).digest(), where)
    if other != where:
        hint = "delete the copy, and check whether a file was appended to itself"
        raise InputError(DUPLICATE, where, f"the record is a copy of {other}", hint=hint)


def named_in(content: bytes, key: str) -> str | None:
    """Return the string under a key of a damaged record, if it is still readable."""
    match = re.search(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*")' % key.encode(), content)
    try:
        return match and _TEXT_DECODER.decode(match[1])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def incomplete(places: Iterable[Place], damage: RolloutError) -> Iterator[Rejected]:
    """Reject the intact records of a run with a damaged record: partial runs are never used."""
    finding = f"another record of the same run is damaged ({damage.rule}: {damage.where})"
    hint = "delete the damaged record if the run is complete without it"
    for place in places:
        yield Rejected(place, InputError(INCOMPLETE, place.where, finding, hint=hint))


_PACKED = (".gz", ".zst")
_BY_FILE = (
    "inferred: a log without an instance name is named after its file if the directory has the "
    "same name or the name contains a double underscore (owner__repo-1); any other file is a "
    "separate instance"
)


def run_of_file(place: Place, stated: str | None, suffixes: Sequence[str]) -> Run:
    """Return the run in a document, named by the document or after its file without the suffixes."""
    path = Path(place.where)
    name = path.name
    for suffix in (*_PACKED, *suffixes):
        name = name.removesuffix(suffix)
    by_file = name if name == path.parent.name or "__" in name else place.where
    return Run(
        instance_id=stated or by_file,
        repetition_id=None,
        places=[place],
        labels=filled(instance_id=stated, file=name, directory=path.parent.name),
    )


def index_of(place: Place) -> int:
    """Return the index of a record within its document."""
    assert isinstance(place.part, int)
    return place.part


def with_group_rule(
    items: Iterable[Found], rule: str = _BY_FILE, label: str = "instance_id"
) -> Iterator[Found]:
    """Yield everything in `items`; if a run lacks the label, also yield the rule for its group."""
    is_inferred = False
    for item in items:
        is_inferred |= isinstance(item, Run) and label not in item.labels
        yield item
    if is_inferred:
        yield About("groups", rule)


_DEPTH, _MOST_FILES = 5, 20_000  # detection must be fast for any directory that a user passes
_RECORDS = (".jsonl", ".json", ".gz", ".zst", ".pt", ".eval", ".parquet", ".traj", ".pkl")


def logs_of(
    log: Input, is_log: Callable[[str], bool], is_beside: Callable[[str], bool]
) -> list[Input]:
    """Return the logs in a directory, or a file itself; see `logs_below` for the arguments."""
    if not log.path.is_dir():
        return [log]
    return [Input(str(path), path) for path in logs_below(log.path, is_log, is_beside)]


def logs_below(
    directory: Path, is_log: Callable[[str], bool], is_beside: Callable[[str], bool]
) -> list[Path]:
    """Return the logs in a directory, in natural order; none if it may have other records.

    A file `is_beside` the logs if it has no records. Hidden files are ignored. The result is also empty for a directory with more
    than 20,000 files or five levels, whose logs must be passed individually.
    """
    files: list[Path] = []
    num_files = 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = [name for name in names if not name.startswith(".")]
        logs = [name for name in shown if is_log(name)]
        others = [name for name in shown if name.endswith(_RECORDS) and name not in logs]
        depth = len(Path(folder).relative_to(directory).parts)
        num_files += len(names)
        if num_files > _MOST_FILES or depth > _DEPTH or not all(map(is_beside, others)):
            return []
        files += [Path(folder) / name for name in logs]
    return sorted(files, key=lambda path: natural_key(str(path)))


def parts_of(
    place: Place, document: bytes, name: str, parts: Sequence[msgspec.Raw]
) -> Iterator[Place]:
    """Yield the location of each element of a list in a document; each element is a record."""
    document, end = without_lone_surrogates(document), 0  # as decoded: offsets are the same
    for i, part in enumerate(parts):
        start = document.index(bytes(part), end)
        end = start + len(bytes(part))
        where = f"{place.where}, {name}[{i}]" if name else f"{place.where}[{i}]"
        yield Place(place.path, where, start, end - start)
