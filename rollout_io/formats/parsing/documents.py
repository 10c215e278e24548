"""Logs with one JSON document per file: decoding, detection, and run names from file names."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import open_input, read_input
from rollout_io.formats.base import About, Found, Input, Place, Progress, Rejected, Run
from rollout_io.formats.parsing.jsonl import (
    contained,
    decoded,
    refuse_lfs_pointer,
    without_lone_surrogates,
)
from rollout_io.formats.parsing.records import refuse_repeated
from schemas.errors import RolloutError

_PACKED = (".gz", ".zst")
_START_BYTES = 1 << 16
_BY_FILE = (
    "inferred: a log without an instance name is named after its file if the directory has the "
    "same name or the name contains a double underscore (owner__repo-1); any other file is a "
    "separate instance"
)


def find_documents(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Place, bytes], Iterable[Found]]
) -> Iterator[Found]:
    """Find the runs in each file, for `Adapter.find`; a file that cannot be used is rejected.

    Args:
        inputs: Files with one JSON document each.
        progress: Called with the size of each file.
        find: Returns the runs and rejections of a document; raises `RolloutError` if the document
            cannot be used.
    """
    first: dict[bytes, str] = {}
    for given in inputs:
        content = without_lone_surrogates(read_input(given.path))
        progress(len(content))
        place = Place(given.path, given.name, 0, len(content))
        try:
            refuse_lfs_pointer(content, given.name)
            refuse_repeated(content, given.name, first)
            with contained(given.name):
                found = list(find(place, content))
            yield from found
        except RolloutError as error:
            yield Rejected(place, error)


def is_document(path: Path, decoder: msgspec.json.Decoder[Any], marks: Iterable[bytes]) -> bool:
    """True if a file is one document that a decoder accepts; for `Adapter.recognizes`.

    Args:
        path: Any existing path.
        decoder: Decoder of types without `Raw` fields, which would refer to the memory map.
        marks: Byte strings, one of which must occur in the first 64 KiB; this check is fast.
    """
    try:
        if not path.is_file():
            return False
        with open_input(path) as file:
            start = file.read(_START_BYTES)
            if not start.lstrip().startswith((b"{", b"[")) or not any(m in start for m in marks):
                return False
            decoded(decoder, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def run_of_file(place: Place, stated: str | None, suffixes: Sequence[str]) -> Run:
    """Return the run in a document, named by the document or after its file.

    Args:
        place: The document; `where` is the name of the file.
        stated: Instance in the document, if any.
        suffixes: File name endings that are not part of a run's name, longest first.
    """
    path = Path(place.where)
    name = path.name
    for suffix in (*_PACKED, *suffixes):
        name = name.removesuffix(suffix)
    found = {"instance_id": stated, "file": name, "directory": path.parent.name}
    by_file = name if name == path.parent.name or "__" in name else place.where
    return Run(
        instance_id=stated or by_file,
        repetition_id=None,
        places=[place],
        labels={label: value for label, value in found.items() if value},
    )


def with_group_rule(
    found: Iterable[Found], rule: str = _BY_FILE, label: str = "instance_id"
) -> Iterator[Found]:
    """Yield everything in `found`; if a run lacks the label, also yield the rule for its group."""
    is_inferred = False
    for item in found:
        is_inferred |= isinstance(item, Run) and label not in item.labels
        yield item
    if is_inferred:
        yield About("groups", rule)
