"""The formats that are installed, and which of them a log is of, by its content.

Formats are found as entry points of the group `rollout_io.adapters`, each an `Adapter`. One that does
not load is no reason to refuse the others: it is named, with why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.adapters import Adapter
from rollout_io.logs.jsonl import open_input, refuse_lfs_pointer
from schemas.errors import RolloutError

GROUP = "rollout_io.adapters"
RULE = "known_format"
HINT = "rollouts formats lists them; --format NAME reads the log as one, and says what is wrong"

_NUM_LINES = 8
_LINE_BYTES = 64 << 20
_LFS_BYTES = 1024  # no pointer is longer, says its specification


class Formats(NamedTuple):
    """What is installed.

    Attributes:
        adapters: By name, in alphabetical order.
        failures: Why a format did not load, by its name.
    """

    adapters: dict[str, Adapter]
    failures: dict[str, str]


def adapters() -> dict[str, EntryPoint]:
    """The registered formats by name, in alphabetical order; none is imported."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def load_formats(entries: Mapping[str, EntryPoint] | None = None) -> Formats:
    """Import all formats.

    Args:
        entries: By name; None: `adapters()`.
    """
    formats = Formats({}, {})
    for name, entry in (adapters() if entries is None else entries).items():
        try:
            formats.adapters[name] = load_adapter(entry)
        except RolloutError as error:
            formats.failures[name] = error.got
    return formats


def load_adapter(entry: EntryPoint) -> Adapter:
    """Import one format.

    Raises:
        RolloutError: `format_loads`: the import fails, or what is registered is no `Adapter`.
    """
    where, hint = f"format {entry.name} ({entry.value})", "install its package again, or remove it"
    try:
        found = entry.load()
    except Exception as error:
        got = " ".join(f"{type(error).__name__}: {error}".split())
        raise RolloutError("format_loads", where, got, "an Adapter", hint) from error
    if not isinstance(found, Adapter):
        got = f"an object of type {type(found).__name__}"
        raise RolloutError("format_loads", where, got, "an Adapter", hint)
    return found


def find_adapter(name: str) -> Adapter:
    """The adapter registered under a format's name.

    Raises:
        RolloutError: `known_format`: there is none; `format_loads`: it does not load.
    """
    entries = adapters()
    if name not in entries:
        expected = "one of " + ", ".join(entries)
        near = difflib.get_close_matches(name, entries, 1)
        hint = f"did you mean --format {near[0]}?" if near else "rollouts formats"
        raise RolloutError(RULE, "--format", repr(name), expected, hint)
    return load_adapter(entries[name])


def recognize(path: str | Path, formats: Mapping[str, Adapter]) -> list[str]:
    """Names of the formats that a file or directory is of.

    Raises:
        RolloutError: `input_file`: it cannot be read, or it is a pipe; `lfs_pointer`.
    """
    _refuse_unreadable(Path(path))
    return [name for name, adapter in formats.items() if adapter.recognizes(Path(path))]


def detect(paths: Mapping[str, Path], formats: Mapping[str, Adapter]) -> str:
    """The name of the one format that all inputs are of.

    Args:
        paths: By what people call them.
        formats: By name.

    Raises:
        RolloutError: `known_format`: an input is of no format, all are of several, or the inputs
            differ; `input_file`; `lfs_pointer`.
    """
    found = {name: recognize(path, formats) for name, path in paths.items()}
    common = [name for name in formats if all(name in names for names in found.values())]
    if len(common) == 1:
        return common[0]
    unknown = next((path for path, names in found.items() if not names), None)
    if unknown is not None:
        expected = "content of one of " + ", ".join(formats)
        raise RolloutError(RULE, unknown, "content of no known format", expected, HINT)
    first, names = next(iter(found.items()))
    if common:
        got = f"content of {len(common)} formats: " + ", ".join(common)
        hint = f"say which: --format {common[0]}; rollouts formats describes them"
        raise RolloutError(RULE, first, got, "one format", hint)
    other = min(found, key=lambda path: len(set(found[path]) & set(names)))
    got = f"format {' or '.join(found[other])}, and {first} of format {' or '.join(names)}"
    hint = "convert each format by itself; rollouts formats FILE... says which is which"
    raise RolloutError(RULE, other, got, "one format for all inputs", hint)


def first_lines(path: Path) -> Iterator[bytes]:
    """The first 8 lines of a file that are not blank; none where it cannot be read.

    A line that goes on for more than 64 MiB is cut there, and is the last.
    """
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            for _ in range(_NUM_LINES):
                line = file.readline(_LINE_BYTES)
                if line.strip():
                    yield line
                if not line.endswith(b"\n"):
                    return
    except OSError:
        return


def has_record(path: Path, decoder: msgspec.json.Decoder[Any]) -> bool:
    """Whether a decoder of lines accepts one of a file's first: for `Adapter.recognizes`.

    One damaged line does not hide what a log is: the reader names it.
    """
    return any(_decodes(line, decoder) for line in first_lines(path))


def _decodes(line: bytes, decoder: msgspec.json.Decoder[Any]) -> bool:
    try:
        decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _refuse_unreadable(path: Path) -> None:
    """Refuse what is neither a directory nor a file to open; a pipe is not opened: it would wait."""
    if path.is_dir():
        return
    if path.exists() and not path.is_file():
        hint = "save it to a file first: a log is read more than once"
        raise RolloutError("input_file", str(path), "a pipe", "a file or directory", hint)
    with open_input(path) as file:
        refuse_lfs_pointer(file.read(_LFS_BYTES), str(path))
