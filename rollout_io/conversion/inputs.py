"""What was given to convert, as files that can be read twice: unpacked, and directories opened."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from rollout_io.adapters import Input
from rollout_io.conversion.staging import writable
from rollout_io.logs.jsonl import open_input
from rollout_io.logs.naming import natural_key
from schemas.errors import RolloutError

STDIN = "-"
PathLike = str | os.PathLike[str]
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_COPY_BYTES = 4 << 20


def open_inputs(
    paths: Iterable[str], spool: Path, is_log: Callable[[Path], bool], out: Path | None = None
) -> list[Input]:
    """The files and directories to read.

    A directory that is no log itself stands for the files in it, at any depth, in natural order;
    hidden ones are passed over. Gzip and Zstandard, told by their first bytes, are unpacked;
    standard input (`-`) and pipes are saved.

    Args:
        paths: As they were given.
        spool: Directory for what is unpacked or saved.
        is_log: Whether a directory is one log.
        out: A directory whose files are no input, wherever it lies.

    Raises:
        RolloutError: `input_file`: something cannot be read; `duplicate_input`: one log twice.
    """
    found: list[Input] = []
    for left in spool.glob("*"):  # by a conversion that was killed
        left.unlink()
    for path in paths:
        given = Path(path)
        _refuse_odd_names(given)
        if path != STDIN and given.is_dir() and not is_log(given):
            inside = [file for file in _files_below(given) if not _is_below(file, out)]
            if not inside:
                raise RolloutError("input_file", path, "a directory without files", "logs")
            found += [_readable(str(file), file, spool) for file in inside]
        else:
            found.append(_readable(path, given, spool))
    _refuse_repeated(found)
    return found


def _refuse_odd_names(path: Path) -> None:
    """Refuse names that are not UTF-8: each row says where it is from, and a table holds text."""
    for file in (path, *(path.rglob("*") if path.is_dir() else ())):
        name = str(file)
        if name != name.encode(errors="replace").decode():
            shown = os.fsencode(file).decode(errors="backslashreplace")
            raise RolloutError("input_file", shown, "a name that is not UTF-8", "", "rename it")


def _is_below(file: Path, directory: Path | None) -> bool:
    return directory is not None and file.resolve().is_relative_to(directory.resolve())


def _files_below(directory: Path) -> list[Path]:
    found = (path for path in directory.rglob("*") if path.is_file())
    shown = [p for p in found if not any(n.startswith(".") for n in p.relative_to(directory).parts)]
    return sorted(shown, key=lambda path: natural_key(str(path)))


def _readable(name: str, path: Path, spool: Path) -> Input:
    if name == STDIN:
        return Input(name, _save(sys.stdin.buffer, name, spool))
    if path.is_dir():
        return Input(name, path)
    if path.is_fifo() and not path.is_relative_to("/dev"):
        got, hint = "a pipe, which may never be written", f"cat {name} | rollouts convert - ..."
        raise RolloutError("input_file", name, got, "a file, or - for standard input", hint)
    with open_input(path) as file:
        if not path.is_file():
            return Input(name, _save(file, name, spool))
        start = file.read(4)
    if start.startswith((_GZIP, _ZSTD)):
        with path.open("rb") as file:
            return Input(name, _save(file, name, spool))
    return Input(name, path)


def _save(stream: BinaryIO, name: str, spool: Path) -> Path:
    """Copy a stream to a file of its own, unpacked."""
    suffixes = [s for s in Path(name).suffixes if s not in {".gz", ".zst"}]
    with writable(str(spool)):
        spool.mkdir(parents=True, exist_ok=True)
        saved = spool / f"{len(list(spool.iterdir()))}{''.join(suffixes[-1:])}"
        with saved.open("wb") as file:
            file.writelines(_blocks(stream, name))
    return saved


def _blocks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        yield from _unpacked(stream)
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        got = f"what cannot be unpacked ({' '.join(str(error).split())})"
        hint = "the file is damaged or cut off: copy it again"
        raise RolloutError("input_file", name, got, "a whole file", hint) from None


def _unpacked(stream: BinaryIO) -> Iterator[bytes]:
    assert isinstance(stream, BufferedReader)
    start = stream.peek(4)[:4]
    if start.startswith(_GZIP):
        with gzip.GzipFile(fileobj=stream) as file:
            yield from iter(lambda: file.read(_COPY_BYTES), b"")
    elif start == _ZSTD:
        with pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd") as file:
            yield from iter(lambda: file.read(_COPY_BYTES), b"")
    else:
        yield from iter(lambda: stream.read(_COPY_BYTES), b"")


def _refuse_repeated(inputs: Iterable[Input]) -> None:
    known: set[Path] = set()
    for given in inputs:
        resolved = given.path.resolve()
        if resolved in known:
            got, hint = "one log given twice", "give each file once"
            raise RolloutError("duplicate_input", given.name, got, "each call once", hint)
        known.add(resolved)


def paths_of(inputs: PathLike | Sequence[PathLike]) -> list[str]:
    """One path or several, as text.

    Raises:
        RolloutError: `input_file`: there is none.
    """
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if not paths:
        raise RolloutError("input_file", "inputs", "no input at all", "files or directories")
    return [os.fspath(path) for path in paths]
