"""Records of logs, which are lines or JSON documents: their places, copies and damage; names and numbers in them.

Names of runs are split (`split_session`), ordered (`natural_key`) and kept apart by file. `label` and
`numbers` read names and numbers in the fields of a record, `ModelNames` the models of a log.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import About, Found, Input, Place, Progress, Rejected, Run, note_run
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import (
    decode_line,
    read_lines,
    refuse_lfs_pointer,
    without_lone_surrogates,
)
from rollout_io.formats.parsing.media import slimmed
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


_NUMBER = re.compile(r"([0-9]+)")
_REPETITION = re.compile(r"0|[1-9][0-9]{0,8}")

SESSION_SHAPE = "'instance/repetition', where repetition is a non-negative integer"


def full_name(session: str) -> tuple[str, int] | None:
    """Split "instance/repetition"; None if the name has a different form."""
    instance_id, _, repetition = session.rpartition("/")
    is_full = instance_id and _REPETITION.fullmatch(repetition)
    return (instance_id, int(repetition)) if is_full else None


def split_session(session: str, where: str) -> tuple[str, int]:
    """Split "instance/repetition"; the instance may contain slashes.

    Example:
        >>> split_session("math/train/12/3", "a.jsonl:1")
        ('math/train/12', 3)
    """
    key = full_name(session)
    if key is None:
        hint = "number the attempts at each instance: shop-1/0, shop-1/1, ..."
        raise InputError("session_name", where, f"session {session!r}", SESSION_SHAPE, hint)
    return key


def natural_key(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Return a key that sorts shop-2 before shop-10; numbers may have any length."""
    parts = _NUMBER.split(name)
    parts[1::2] = [(len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2])]
    return parts, name


def with_files_apart(items: Iterable[Found], text: str) -> Iterator[Found]:
    """Yield what was found; groups "NAME/KEY" of several files with one name become distinct.

    The groups of the second such file begin with "NAME/file-1". The text of the log is told first.
    """
    yield About("text", text)
    numbers: dict[str, dict[Path, int]] = {}
    for item in items:
        if isinstance(item, Run):
            name, _, key = item.instance_id.rpartition("/")
            files = numbers.setdefault(name, {})
            if number := files.setdefault(item.places[0].path, len(files)):
                item.instance_id = f"{name}/file-{number}/{key}"
        yield item


_NUMBER_DECODER = msgspec.json.Decoder(float | bool)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19  # of a 64-bit integer


def numbers(
    fields: Mapping[str, msgspec.Raw], where: str, objects: Iterable[str] = ()
) -> dict[str, float]:
    """Return the fields, as JSON, that are numbers or booleans (as 0 and 1).

    The numbers in `objects`, which are fields too, follow: `rewards.style`, for example.
    """
    values: dict[str, float] = {}
    for name, raw in fields.items():
        if not bytes(raw).startswith(_NO_NUMBERS):
            values[name] = float(decode_line(_NUMBER_DECODER, bytes(raw), f"{where}, {name}"))
    for name in objects:
        place = f"{where}, {name}"
        inner = decode_line(_OBJECT_DECODER, bytes(fields.get(name, b"null")), place)
        values |= {f"{name}.{key}": value for key, value in numbers(inner or {}, place).items()}
    return values


TASK_LABELS = ("task_id", "task", "problem_id", "question_id", "instance")
"""Keys that name the task of a run in logs that users write, beside `instance_id` and `id`."""

_REGROUP = "move it to the top level as `task_id`, or pass --group-by {}"
_READ = frozenset({"instance_id", *TASK_LABELS})
_NO_TASK = frozenset({"id", "prompt"})
_MOST_LABEL = 200


def task_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in `TASK_LABELS`, which become columns."""
    return {name: labels[name] for name in TASK_LABELS if name in labels}


_PLACES = ("metadata", "extra", "extra_info", "info")
_LIKE = frozenset(
    {
        *("task", "taskid", "taskname", "problemid", "questionid", "exampleid", "promptid"),
        *("instance", "instanceid"),
    }
)


def unread_labels(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return values that look like a label of the task, but are not where one is read.

    Such a value has another key at the top level, or is in `metadata`, `extra`, `extra_info` or
    `info`. `--group-by` accepts these names.

    Example:
        >>> unread_labels({"taskId": 7, "task_id": "a", "metadata": {"task_id": "b"}})
        {'taskId': '7', 'metadata.task_id': 'b'}
    """
    unread = {name: fields[name] for name in fields if name not in _READ and is_like_label(name)}
    for place in _PLACES:
        inner = _decoded(fields.get(place))
        for key, value in inner.items() if isinstance(inner, Mapping) else ():
            if is_like_label(key):
                unread[f"{place}.{key}"] = value
    values = {name: _decoded(value) for name, value in unread.items()}
    return {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, str | int) and not isinstance(value, bool) and is_name(str(value))
    }


def is_like_label(key: object) -> bool:
    """True if a key is similar to a label of the task, such as `taskId` or `example_id`."""
    is_short = isinstance(key, str) and len(key) <= 20
    return is_short and str(key).replace("_", "").replace("-", "").lower() in _LIKE


def note_unread_labels(labels: Mapping[str, str], instance_id: str, hint: str = _REGROUP) -> None:
    """Note that a run has labels from `unread_labels` and no label that names its group."""
    groups = {instance_id, *instance_id.split("/")}
    unread = {name: value for name, value in labels.items() if name not in _NO_TASK}
    if _READ & labels.keys() or groups & {*unread.values()}:
        return
    for name in unread:
        note_run(f"runs with `{name}`, which looks like a task label ({hint.format(name)})")


def _decoded(value: Any) -> Any:
    """Decode JSON; None if it is damaged."""
    try:
        return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_name(text: str) -> bool:
    """True if a label may name a task: it is one short line."""
    return 0 < len(text) <= _MOST_LABEL and "\n" not in text


def groups_told(keys: Container[str], inferred: str) -> str | None:
    """Describe by which labels runs are grouped; None if all have an `instance_id` or `id`."""
    used = [name for name in TASK_LABELS if name in keys]
    texts = ["by " + ", ".join(used)] if used else []
    return "; ".join([*texts, *([inferred] if "prompt" in keys else [])]) or None


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """Return a name that is a string or an integer; None if it is empty or of another type."""
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_TEXT_DECODER, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None


MODELS = "models"
_MODEL_KEY = b'"model"'
_MODEL_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')


class ModelNames:
    """Collector of the first `model` value of each record.

    Example:
        >>> names = ModelNames()
        >>> names.see(b'{"request": {"model": "smollm2"}}')
        >>> [found.value for found in names.about()]
        [['smollm2']]
    """

    def __init__(self) -> None:
        self._found: set[bytes] = set()
        self._last = b"\n"

    def see(self, record: bytes) -> None:
        """Search a record for a model name, without parsing it, for speed."""
        at = record.find(_MODEL_KEY)
        if record.startswith(self._last, at):  # the same as in the previous record
            return
        while at >= 0:
            value = _MODEL_VALUE.match(record, at + len(_MODEL_KEY))
            if value is not None:
                self._found.add(value[1])
                self._last = record[at : value.end()]
                return
            at = record.find(_MODEL_KEY, at + len(_MODEL_KEY))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        distinct = set()
        for text in self._found:
            try:
                distinct.add(_TEXT_DECODER.decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the record itself is rejected elsewhere
        return sorted(name for name in distinct if name)

    def about(self) -> Iterator[About]:
        """Yield the names as a fact about the log, for `Adapter.find`."""
        names = self.names()
        if names:
            yield About(MODELS, names)
