"""Inputs of a conversion: search of directories, and copies of compressed files and pipes."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from glob import glob, has_magic
from io import BufferedReader
from pathlib import Path

import pyarrow as pa

from rollout_io.conversion.remote import WEB, copy_directory, is_url, reachable, shown, url_of
from rollout_io.dataset.filesystems import writable
from rollout_io.dataset.opening import Version, digest_of, open_input, standard_input
from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Input
from rollout_io.formats.detect import Tell, told
from rollout_io.formats.parsing.records import natural_key
from schemas.errors import InputError

STDIN = "-"
DUPLICATE_INPUT = "duplicate_input"
PathLike = str | os.PathLike[str]
_PACKED = (".gz", ".zst")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_COPY_BYTES = 4 << 20


def open_inputs(
    paths: Sequence[str],
    spool: Path,
    formats_of: Callable[[Path], Collection[str]],
    ignored: Collection[str] = (),
    tell: Tell | None = None,
) -> tuple[list[Input], list[str]]:
    """Return the files and directories to read, and the names of skipped directory entries.

    A pattern (`logs/*.jsonl`, `logs/**/*.json`) that is not the name of a file is replaced by the
    files that it matches. Remote files and directories are copied, without hidden files. A
    directory that is not itself a log is replaced by the logs and files inside it, at any depth and
    in natural order, except hidden ones.

    Pipes, devices and broken links inside a directory are skipped, as are links to directories that
    are not searched (outside it, hidden or ignored). Other links to directories are not followed,
    because their targets are searched anyway.

    Gzip and Zstandard files, recognised by their first bytes, are decompressed to `spool`; standard
    input (`-`) and pipes are saved there. What is `ignored` is skipped when a directory is searched. If
    `tell` is given, errors of files inside directories are passed to it instead of raised.
    """
    inputs: list[Input] = []
    unread: list[str] = []
    for remnant in spool.glob("*"):  # left by a conversion that was killed
        is_folder = remnant.is_dir() and not remnant.is_symlink()
        shutil.rmtree(remnant) if is_folder else remnant.unlink()
    skipped = {_real(path) for path in ignored}
    for path, is_matched in ((p, p != pattern) for pattern in paths for p in expanded(pattern)):
        source = Path(path)
        above = {_real(source), *(_real(source).parents if is_matched else ())}
        if path != STDIN and above & skipped:
            continue
        if tell is None:
            for file in (source, *(source.rglob("*") if source.is_dir() else ())):
                if (error := odd_name(file)) is not None:
                    raise error
        is_remote = is_url(path) and path.endswith("/")
        if is_remote:
            with writable(str(spool)):
                source = copy_directory(path, spool, ignored)
        if path != STDIN and source.is_dir():
            outside = set[Path]() if is_remote else skipped
            search = _Directories(formats_of, outside, _real(source))
            inside = search.logs_in(source)
            unread += map(str, search.unread)
            if not inside and (is_remote or not is_matched):
                raise InputError("input_file", path, "the directory contains no files")
            logs = []
            for log in inside:
                with told(str(log), tell):
                    is_log = log.is_dir()
                    logs.append(Input(str(log), log) if is_log else open_file(str(log), spool))
            inputs += [log._replace(name=url_of(log.name, spool)) for log in logs]
        else:
            inputs.append(open_file(path, spool))
    if not inputs:
        finding, hint = "the pattern matches no log", "check the path"
        if any(_real(Path(path)) in skipped for path in paths):
            finding = "the log is also named as the rewards file, or as the output"
            hint = "pass the logs as arguments, and another file to --rewards and --out"
        raise InputError("input_file", ", ".join(paths), finding, "", hint)
    return _without_repeated(inputs, tell), sorted(set(unread), key=natural_key)


def expanded(path: str) -> list[str]:
    """Return the files and directories that a path, pattern or URL matches, in natural order.

    The URLs of directories end with "/".
    """
    if path == STDIN or not (is_url(path) or has_magic(path)):
        return [path]
    if not is_url(path):
        if os.path.lexists(path):
            return [path]
        names = glob(path, recursive=True)  # noqa: PTH207 - `Path.glob` takes no absolute pattern
    elif path.startswith(WEB):
        return [path]  # web servers do not list files
    else:
        location = Location.of(path)
        with reachable(path):
            if location.fs.isfile(location.path):
                return [path]
            if location.fs.isdir(location.path):
                is_empty = not location.fs.find(location.path)
                names = [] if is_empty else [path.rstrip("/") + "/"]
            elif not has_magic(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            else:
                matched = location.fs.glob(location.path, detail=True)
                names = [
                    str(location.fs.unstrip_protocol(name))
                    + "/" * (about["type"] == "directory" and not name.endswith("/"))
                    for name, about in matched.items()
                ]
    if not names:
        finding, hint = "no file matches the pattern", "check the path; `**` matches any depth"
        if not has_magic(path):
            finding, hint = "the directory contains no files", "check the URL"
        raise InputError("input_file", path, finding, "", hint)
    covered = {parent for name in names for parent in Path(name).parents} & set(map(Path, names))
    tops = [n for n in names if not covered & set(Path(n).parents)]
    return sorted(tops, key=natural_key)


def odd_name(path: Path) -> InputError | None:
    """Return the error for a name that is not UTF-8: the column `source` stores it as text."""
    name = str(path)
    if name == name.encode(errors="replace").decode():
        return None
    readable, finding = os.fsencode(path).decode(errors="backslashreplace"), "is not valid UTF-8"
    return InputError("input_file", readable, f"the file name {finding}", "", "rename the file")


@dataclass(frozen=True, slots=True)
class _Directories:
    """Recursive search for logs in a directory; see `open_inputs`."""

    formats_of: Callable[[Path], Collection[str]]
    ignored: Collection[Path]
    root: Path
    unread: list[Path] = field(default_factory=list)

    def logs_in(self, directory: Path) -> list[Path]:
        """Return the files and logs in a directory; for a log, only itself and the logs inside."""
        if self._is_ignored(_real(directory)):
            return []
        formats = set(self.formats_of(directory))
        if formats:
            paths = [directory, *self._others_in(directory, formats)]
        else:
            paths = [path for child in self._children(directory) for path in self._below(child)]
        return sorted(paths, key=lambda path: natural_key(str(path)))

    def _below(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if path.is_dir() and not path.is_symlink():
            return self.logs_in(path)
        # A link to a directory is not followed: the logs of its target would be read twice.
        if not (path.is_dir() and self._is_searched(_real(path))):
            self.unread.append(path)
        return []

    def _is_searched(self, directory: Path) -> bool:
        if not directory.is_relative_to(self.root) or self._is_ignored(directory):
            return False
        return not any(n.startswith(".") for n in directory.relative_to(self.root).parts)

    def _is_ignored(self, path: Path) -> bool:
        return any(path.is_relative_to(ignored) for ignored in self.ignored)

    def _children(self, directory: Path) -> list[Path]:
        shown = (path for path in directory.iterdir() if not path.name.startswith("."))
        return [path for path in shown if _real(path) not in self.ignored]

    def _others_in(self, directory: Path, formats: AbstractSet[str]) -> Iterator[Path]:
        """Yield the logs in other formats inside a directory that is itself a log.

        If the directory is a single run, all files inside it belong to that run. A directory of
        several runs may also contain files of other tools.
        """
        children = {path: set(self.formats_of(path)) for path in self._children(directory)}
        has_runs = any(names and path.is_dir() for path, names in children.items())
        for path, names in children.items():
            if names and not names & formats:
                yield from self._below(path)
            elif has_runs and not names:
                yield from self._strays_in(path)

    def _strays_in(self, path: Path) -> Iterator[Path]:
        """Yield the logs below a path that is not itself a log."""
        if path.is_file():
            is_log = path.suffix in _PACKED and path.stem.endswith((".json", ".jsonl"))
            yield from [path] if is_log else []
        elif path.is_symlink() or not path.is_dir():
            yield from self._below(path)
        else:
            for child in self._children(path):
                yield from self._below(child) if self.formats_of(child) else self._strays_in(child)


def _real(path: PathLike) -> Path:
    """Resolve links; unlike `Path.resolve`, accept circular links."""
    return Path(os.path.realpath(path))


def open_file(name: str, spool: Path) -> Input:
    """Return a file that can be read twice; pipes and compressed files are saved first."""
    if name == STDIN:
        return Input(name, _save(standard_input(), name, spool))
    if is_url(name):
        location = Location.of(name)
        with reachable(name), location.fs.open(location.path, "rb") as remote:
            return Input(shown(name), _save(BufferedReader(remote), shown(name), spool))
    with open_input(name) as file:
        is_packed = _start_of(file).startswith((_GZIP, _ZSTD))
        if is_packed or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return Input(name, _save(file, name, spool))
    return Input(name, Path(name))


def digests_of(log: Input) -> list[list[str]]:
    """Return the name and content digest of each file of an input."""
    return [[str(f.relative_to(log.path)), digest_of(f)] for f in files_of(log)]


def files_of(log: Input) -> list[Path]:
    """Return the files of an input, in order: the input itself, or the files below it."""
    files = sorted(log.path.rglob("*")) if log.path.is_dir() else [log.path]
    return [file for file in files if file.is_file()]


def versions_of(inputs: Iterable[Input]) -> dict[Path, tuple[str, Version]]:
    """Return the name and the version of each file of these inputs, for `refuse_changed`."""
    versions: dict[Path, tuple[str, Version]] = {}
    for log in inputs:
        for file in files_of(log):
            with suppress(OSError):  # what vanished meanwhile is reported when it is opened
                versions[file] = log.name, Version.of(file)
    return versions


def refuse_changed(before: Mapping[Path, tuple[str, Version]]) -> None:
    """Check that files are still those that were found, so that no run mixes two of them.

    A file may have grown: its writer appended records, which this conversion does not read. `before`
    are the versions of the inputs before the first of them was read.
    """
    for file, (name, old) in before.items():
        try:
            new = Version.of(file)
        except OSError:
            new = None
        # Some network file systems give a file another inode after a while, so that alone is no change.
        if new is not None and new[2:] == old[2:]:
            continue
        is_same_file = new is not None and new[:2] == old[:2]
        if new is None or not is_same_file or new.num_bytes <= old.num_bytes:
            change = "removed" if new is None else "rewritten" if is_same_file else "replaced"
            finding = f"the file was {change} during the conversion"
            hint = "convert the log after its writer has finished"
            raise InputError("input_file", name, finding, "", hint)


def _save(stream: BufferedReader, name: str, spool: Path) -> Path:
    """Copy a stream to a new file, decompressed; remove the file if the copy fails."""
    suffixes = [s for s in Path(name.partition("?")[0]).suffixes if s not in {".gz", ".zst"}]
    with writable(str(spool)):
        spool.mkdir(parents=True, exist_ok=True)
        saved = spool / f"{len(list(spool.iterdir()))}{''.join(suffixes[-1:])}"
        try:
            with saved.open("wb") as file:
                file.writelines(_blocks(stream, name))
        except BaseException:
            saved.unlink(missing_ok=True)
            raise
    return saved


def _start_of(stream: BufferedReader) -> bytes:
    """Return the first bytes without consuming them."""
    return stream.peek(4)[:4]


def _blocks(stream: BufferedReader, name: str) -> Iterator[bytes]:
    try:
        yield from _unpacked(stream)
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        finding = f"the file cannot be decompressed ({' '.join(str(error).split())})"
        hint = "copy the file again: it is damaged or incomplete"
        raise InputError("input_file", name, finding, "", hint) from None


def _unpacked(stream: BufferedReader) -> Iterator[bytes]:
    start = _start_of(stream)
    if start.startswith(_GZIP):
        with gzip.GzipFile(fileobj=stream) as file:
            yield from iter(lambda: file.read(_COPY_BYTES), b"")
    elif start == _ZSTD:
        with pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd") as file:
            yield from iter(lambda: file.read(_COPY_BYTES), b"")
    else:
        yield from iter(lambda: stream.read(_COPY_BYTES), b"")


def copies_in(inputs: Iterable[Input]) -> Iterator[tuple[Input, InputError]]:
    """Yield each file whose content duplicates an earlier file, with a `duplicate_input` error."""
    by_size: defaultdict[int, list[Input]] = defaultdict(list)
    for log in inputs:
        if log.path.is_file() and (num_bytes := log.path.stat().st_size):
            by_size[num_bytes].append(log)
    first: dict[str, str] = {}
    # Only files of equal size are read: hashing every log would require reading all of them.
    for log in (log for twins in by_size.values() if len(twins) > 1 for log in twins):
        other = first.setdefault(digest_of(log.path), log.name)
        if other != log.name:
            finding = f"the file is a copy of {other}"
            hint = "pass only one of the two, or --on-error skip"
            yield log, InputError(DUPLICATE_INPUT, log.name, finding, "", hint)


def _without_repeated(inputs: Iterable[Input], tell: Tell | None) -> list[Input]:
    paths, names, distinct = set[Path](), set[str](), []
    for log in inputs:
        with told(log.name, tell):
            resolved = _real(log.path)
            if resolved in paths:
                finding, hint = "the log was passed twice", "pass each file once"
                raise InputError(DUPLICATE_INPUT, log.name, finding, "", hint)
            paths.add(resolved)
            if log.name in names:
                finding = (
                    "the input was passed twice, or two URLs differ only in their query strings"
                )
                hint = "pass each input once, or download the files and pass their paths"
                raise InputError(DUPLICATE_INPUT, log.name, finding, "", hint)
            names.add(log.name)
            distinct.append(log)
    return distinct


def paths_of(inputs: PathLike | Sequence[PathLike]) -> list[str]:
    """Convert one or several paths to a list of strings."""
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if not paths:
        finding, hint = "the list is empty", "pass files or directories"
        raise InputError("input_file", "inputs", finding, "", hint)
    return [os.fspath(path) for path in paths]
