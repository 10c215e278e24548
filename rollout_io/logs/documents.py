"""Logs that are one JSON document a file: read, told apart, and named by their files."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollout_io.adapters import About, Found, Input, Place, Progress, Rejected, Run
from rollout_io.logs.jsonl import decode_line, open_input, refuse_lfs_pointer, refuse_not_utf8
from schemas.errors import RolloutError

T = TypeVar("T")

_PACKED = (".gz", ".zst")
_START_BYTES = 1 << 16
_BY_FILE = (
    "inferred: where a log states no instance, its file's name is it, if the directory has that "
    "name too or it has two underscores in a row (owner__repo-1); other files are instances of "
    "their own"
)


def find_documents(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Place, bytes], Iterable[Found]]
) -> Iterator[Found]:
    """What is in each file, for `Adapter.find`; one that is of no use is rejected.

    Args:
        inputs: Files of one JSON document each.
        progress: Told the size of each.
        find: What a document holds; raises `RolloutError` where it is nothing.
    """
    first: dict[bytes, str] = {}
    for given in inputs:
        with open_input(given.path) as file:
            content = file.read()
        progress(len(content))
        place = Place(given.path, given.name, 0, len(content))
        try:
            refuse_lfs_pointer(content, given.name)
            refuse_repeated(content, given.name, first)
            yield from find(place, content)
        except RolloutError as error:
            yield Rejected(place, error)


def refuse_repeated(content: bytes, where: str, first: dict[bytes, str]) -> None:
    """Refuse a record that was there before, byte for byte.

    Args:
        content: The record.
        where: Its place.
        first: Places of earlier records by their digests; this one's is added.

    Raises:
        RolloutError: duplicate_record.
    """
    other = first.setdefault(hashlib.blake2b(content, digest_size=16).digest(), where)
    if other != where:
        hint = "was a file copied, or appended to itself?"
        raise RolloutError("duplicate_record", where, f"a copy of {other}", "each run once", hint)


def decode_document(decoder: msgspec.json.Decoder[T], content: bytes, where: str) -> T:
    """Decode a JSON document.

    Raises:
        RolloutError: `json_document` (no JSON, or not UTF-8) or `record_type`.
    """
    try:
        refuse_not_utf8(content, where)
        return decode_line(decoder, content, where)
    except RolloutError as error:
        if error.rule != "json_line":
            raise
        got = error.got.replace("a line cut off", "a file cut off")
        hint = "the writer was stopped, or the file is of another format: write or copy it again"
        raise RolloutError("json_document", where, got, "one JSON document", hint) from None


def is_document(path: Path, decoder: msgspec.json.Decoder[Any], marks: Iterable[bytes]) -> bool:
    """Whether a file is one document that a decoder accepts: for `Adapter.recognizes`.

    Args:
        path: Anything there is.
        decoder: Of types that keep no `Raw`.
        marks: One of them stands in the first 64 KiB, or the file is not looked at further.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
            if not start.lstrip().startswith((b"{", b"[")) or not any(m in start for m in marks):
                return False
            decoder.decode(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def run_of_file(place: Place, stated: str | None, suffixes: Sequence[str]) -> Run:
    """The run of a document, named by what it states or else by its file (see `with_group_rule`).

    Args:
        place: The document; its `where` is the name of the file.
        stated: The instance it states.
        suffixes: Ends of file names that are no part of the name of a run, longest first.
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


def with_group_rule(found: Iterable[Found], rule: str = _BY_FILE) -> Iterator[Found]:
    """What was found, and how the groups were inferred, where a run has no `instance_id` label."""
    is_inferred = False
    for item in found:
        is_inferred |= isinstance(item, Run) and "instance_id" not in item.labels
        yield item
    if is_inferred:
        yield About("groups", rule)
