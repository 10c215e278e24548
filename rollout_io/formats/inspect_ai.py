"""The `inspect_ai` format: Inspect's eval logs, one JSON document (.json) or a zip archive (.eval).

    .json    {"version": 2, "status": "success", "eval": {"task": ...}, "samples": [sample, ...]}
    .eval    header.json (as above, without samples), samples/ID_epoch_N.json
    sample   {"id": 1, "epoch": 1, "messages": [...], "scores": {NAME: {"value": "C"}},
              "events": [{"event": "model", "input": [...], "output": {...}, "call": {...}}, ...],
              "attachments": {HASH: text}, "error": {...}, "limit": {...}}

A sample is a run: its id is the instance, its epoch the repetition. The calls are the `model`
events, except calls of scorers; their raw responses may have the engine's tokens. Without events,
the messages of the sample are one context.

Members of archives are read into memory, with a size limit. pyarrow decompresses Zstandard members (method 93), because `zipfile` only supports them since
Python 3.14.
"""

from __future__ import annotations

import lzma
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa

from rollout_io.dataset.opening import Version, open_input, read_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.inspect_ai_samples import Sample, calls_of, outcome_of, plain_json
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.documents import parts_of
from rollout_io.formats.parsing.jsonl import decode_document, refuse_lfs_pointer
from rollout_io.formats.parsing.lines import read_record
from rollout_io.formats.parsing.model_calls import steps_of
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.tokens import INT32_MAX
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_START = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:\s*"[a-z]+"\s*,\s*"')
_HEADERS, _SAMPLES = ("header.json", "_journal/start.json"), "samples/"
REPLACED = "members of archives that a later member of the same name replaces"
"""Note about these members."""
_SUCCESS = "success"


class _Error(msgspec.Struct, gc=False):
    message: str = ""


class _Eval(msgspec.Struct, gc=False):
    task: str
    model: str | None = None


class _Log(msgspec.Struct, gc=False):
    eval: _Eval
    status: str = "started"
    error: _Error | None = None
    samples: list[msgspec.Raw] | None = None


class _Names(msgspec.Struct, gc=False):
    id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


_LOG_DECODER = msgspec.json.Decoder(_Log)
_NAMES_DECODER = msgspec.json.Decoder(_Names)
_SAMPLE_DECODER = msgspec.json.Decoder(Sample)


def find_samples(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield samples in the order of the logs.

    The instance is the sample id ("task/id" if the logs have several tasks), and the repetition is
    the epoch. The fact `log_status` lists the logs that did not end successfully.
    """
    found: list[Found] = []
    statuses: dict[str, str] = {}
    for given in inputs:
        progress(given.path.stat().st_size)
        try:
            found += _find(given, statuses)
        except RolloutError as error:
            found.append(Rejected(_whole(given), error))
    if statuses:
        yield About("log_status", statuses)
    runs = [item for item in found if isinstance(item, Run)]
    if len({run.labels["task"] for run in runs}) > 1:
        for run in runs:
            run.instance_id = f"{run.labels['task']}/{run.instance_id}"
    yield from found


def _whole(given: Input) -> Place:
    return Place(given.path, given.name, 0, given.path.stat().st_size)


def _find(given: Input, statuses: dict[str, str]) -> Iterator[Found]:
    log, places = _open_archive(given) if is_zip(given.path) else _open_document(given)
    if log.status != _SUCCESS:
        said = log.error.message if log.error else ""
        statuses[given.name] = f"{log.status}: {said}".rstrip(": ")
    for place in places:
        try:
            yield _run(place, log)
        except RolloutError as error:
            yield Rejected(place, error)
    if not places:
        got = f"the log has no samples (status {log.status!r})"
        hint = "run the evaluation without --no-log-samples, or leave this log out"
        raise InputError("no_samples", given.name, got, hint=hint)


def _open_document(given: Input) -> tuple[_Log, list[Place]]:
    content = read_input(given.path)
    refuse_lfs_pointer(content, given.name)
    content = plain_json(content)
    log = decode_document(_LOG_DECODER, content, given.name)
    return log, list(parts_of(_whole(given), content, "samples", log.samples or []))


def _open_archive(given: Input) -> tuple[_Log, list[Place]]:
    members = members_of(given.path, given.name)
    header = next((name for name in _HEADERS if name in members), None)
    if header is None:
        got = "the zip archive is not an .eval log of Inspect: it has no header.json"
        raise InputError("inspect_archive", given.name, got)
    where = f"{given.name}, {header}"
    log = decode_document(_LOG_DECODER, plain_json(read_member(given.path, header, where)), where)
    samples = [members[name] for name in members if name.startswith(_SAMPLES)]
    return log, [
        Place(given.path, f"{given.name}, {each.filename}", None, each.file_size, each.filename)
        for each in samples
        if not each.is_dir()
    ]


def _run(place: Place, log: _Log) -> Run:
    names = decode_document(_NAMES_DECODER, _content(place), place.where)
    instance = str(names.id)
    labels = {"sample": instance, "epoch": str(names.epoch), "task": log.eval.task}
    labels |= {"status": log.status, "model": log.eval.model or "unknown"}
    return Run(instance_id=instance, repetition_id=names.epoch, places=[place], labels=labels)


def _content(place: Place) -> bytes:
    """Read a sample: a range of bytes of a document, or a member of an archive."""
    if place.offset is not None:
        return plain_json(read_record(place))
    return plain_json(read_member(place.path, str(place.part), place.where))


def read_sample(run: Run, options: Options) -> Trajectory:
    """Read the calls and scores of a sample.

    Every score is a metric (letters as in Inspect: C 1, P 0.5, I and N 0; dictionaries key by key).
    A single score is the reward; with several, choose one with `--reward`. A sample with an
    `error` has failed, as has a sample that an operator stopped; see `Options` for time and context
    limits.

    Raises:
        RolloutError: The sample cannot be used (`no_calls`, `no_token_ids`, `dangling_reference`,
            ...).
    """
    (place,) = run.places
    if place.offset is None:
        note(REPLACED, num_replaced(place.path, str(place.part), place.where))
    sample = decode_document(_SAMPLE_DECODER, _content(place), place.where)
    logged = outcome_of(sample, options)
    failed = run.failed or logged.error is not None
    logged.steps = steps_of(list(calls_of(sample, place.where)), place.where, failed=failed)
    status = "" if run.labels["status"] == _SUCCESS else run.labels["status"]
    texts = filled(model=run.labels["model"], log_status=status)
    logged.user_values = {**logged.user_values, **texts}
    return logged


def recognizes(start: Start) -> bool:
    """True if a file is an Inspect log: a JSON document with Inspect's keys, or an archive."""
    path = start.path
    try:
        if is_zip(path):
            names = members_of(path, str(path))
            is_inspect = _HEADERS[1] in names or any(name.startswith(_SAMPLES) for name in names)
            return is_inspect and any(name in names for name in _HEADERS)
    except (OSError, RolloutError):
        return False
    return _START.match(start.head) is not None and b'"eval"' in start.head


ADAPTER = Adapter(
    summary="Inspect's eval logs: .eval archives, .json",
    recognizes=recognizes,
    find=find_samples,
    read=read_sample,
    is_text=True,
)


MAX_MEMBER_BYTES = 1 << 30
"""Limit on the uncompressed size of a member."""

_ZIP_START = b"PK\x03\x04"
_ZSTANDARD = 93  # compression method in the zip specification
_ENCRYPTED = 1  # bit 0 of the flags
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    ValueError,
)


def is_zip(path: Path) -> bool:
    """True if a file starts with the signature of a zip archive."""
    try:
        if not path.is_file():
            return False
        with open_input(path) as file:
            return file.read(len(_ZIP_START)) == _ZIP_START
    except (OSError, RolloutError):
        return False


def members_of(path: Path, where: str) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by name, in order; if a name repeats, the last one wins.

    Raises:
        InputError: `zip_archive`: the archive is damaged.
    """
    return {member.filename: member for member in _opened(path, where).infolist()}


def num_replaced(path: Path, name: str, where: str) -> int:
    """Count the earlier members of the same name, which the last one replaces."""
    archive = _opened(path, where)
    members = archive.infolist()
    if len(members) == len(archive.NameToInfo):
        return 0
    return sum(member.filename == name for member in members) - 1


def read_member(path: Path, name: str, where: str) -> bytes:
    """Read the bytes of a member.

    Raises:
        InputError: `zip_archive`: the member is missing, damaged, encrypted, compressed with an
            unknown method, or larger than `MAX_MEMBER_BYTES`.
    """
    archive = _opened(path, where)
    try:
        member = archive.getinfo(name)
        if member.file_size > MAX_MEMBER_BYTES:
            got = f"{member.file_size} bytes unpacked"
            expected = f"at most {MAX_MEMBER_BYTES} bytes"
            hint = "read the archive with the program that wrote it"
            raise InputError("zip_archive", where, got, expected, hint)
        if member.compress_type == _ZSTANDARD and not member.flag_bits & _ENCRYPTED:
            return _unpacked(path, member)
        with archive.open(member) as file:
            return file.read(MAX_MEMBER_BYTES)
    except KeyError:
        got = "the archive no longer contains this member"
        hint = "convert the log after its writer has finished"
        raise InputError("zip_archive", where, got, hint=hint) from None
    except RuntimeError as error:  # also an unknown compression method
        got = " ".join(f"cannot unpack the member: {error}".split())
        hint = "unpack the archive, and pack it again with a zip program, without a password"
        raise InputError("zip_archive", where, got, "deflate, Zstandard or none", hint) from None
    except _DAMAGE as error:
        raise _damaged(where, error) from None


def _unpacked(path: Path, member: zipfile.ZipInfo) -> bytes:
    """Decompress a Zstandard member; its size and checksum must match the directory entry."""
    with open_input(path) as file:
        file.seek(member.header_offset)
        start, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
        packed = file.read(member.compress_size)
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        content: bytes = stream.read(member.file_size + 1)
    is_whole = start == _ZIP_START and len(content) == member.file_size
    if not is_whole or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"wrong size or checksum of {member.filename!r}")
    return content


def _opened(path: Path, where: str) -> zipfile.ZipFile:
    try:
        return _archive(path, Version.of(path))
    except (*_DAMAGE, NotImplementedError) as error:
        raise _damaged(where, error) from None


@lru_cache(maxsize=1)
def _archive(path: Path, _: Version) -> zipfile.ZipFile:
    """Open an archive; its directory is cached until the file changes."""
    return zipfile.ZipFile(path)


def _damaged(where: str, error: Exception) -> InputError:
    got = f"cannot unpack the archive: {' '.join(str(error).split()) or type(error).__name__}"
    hint = "copy the file again: it is damaged or cut off"
    return InputError("zip_archive", where, got, hint=hint)
