"""Logs with one JSON document per file: names of runs, parts, files of directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.formats.base import About, Found, Input, Place, Run
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import without_lone_surrogates
from rollout_io.formats.parsing.naming import natural_key

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
