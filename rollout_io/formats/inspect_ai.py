"""The `inspect_ai` format: Inspect's eval logs, one JSON document (.json) or a zip archive (.eval).

    .json    {"version": 2, "status": "success", "eval": {"task": ...}, "samples": [sample, ...]}
    .eval    header.json (as above, without samples), samples/ID_epoch_N.json
    sample   {"id": 1, "epoch": 1, "messages": [...], "scores": {NAME: {"value": "C"}},
              "events": [{"event": "model", "input": [...], "output": {...}, "call": {...}}, ...],
              "attachments": {HASH: text}, "error": {...}, "limit": {...}}

A sample is a run: its id is the instance, its epoch the repetition. The calls are the `model`
events, except calls of scorers; their raw responses may have the engine's tokens. Without events,
the messages of the sample are one context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from rollout_io.dataset.opening import Version, read_input
from rollout_io.formats.base import About, Found, Input, Options, Place, Run, Trajectory
from rollout_io.formats.engines.containers import is_zip, members_of, read_member
from rollout_io.formats.engines.records import Records
from rollout_io.formats.inspect_ai_samples import (
    LEAVES,
    Sample,
    calls_of,
    outcome_of,
    plain_json,
)
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import decode_document, refuse_lfs_pointer
from rollout_io.formats.parsing.model_calls import steps_of
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_START = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:\s*"[a-z]+"\s*,\s*"')
_HEADERS, _SAMPLES = ("header.json", "_journal/start.json"), "samples/"
_SUCCESS, _STATUS = "success", "log_status"


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


_LOG_DECODER = msgspec.json.Decoder(_Log)


@lru_cache(maxsize=2)
def _log(path: Path, name: str, _: Version) -> tuple[_Log, int]:
    """Return what a log has beside its samples, and their number."""
    if not is_zip(path):
        content = read_input(path)
        refuse_lfs_pointer(content, name)
        log = decode_document(_LOG_DECODER, plain_json(content), name)
        num_samples, log.samples = len(log.samples or ()), None  # which would keep the whole file
        return log, num_samples
    members = members_of(path, name)
    header = next((header for header in _HEADERS if header in members), None)
    if header is None:
        finding = "the zip archive is not an .eval log of Inspect: it has no header.json"
        raise InputError("inspect_archive", name, finding)
    where = f"{name}, {header}"
    log = decode_document(_LOG_DECODER, plain_json(read_member(path, header, where)), where)
    return log, sum(name.startswith(_SAMPLES) for name in members)


def _files(file: Input) -> Iterator[Input | About]:
    log, num_samples = _log(file.path, file.name, Version.of(file.path))
    if log.status != _SUCCESS:
        message = log.error.message if log.error else ""
        yield About(_STATUS, {file.name: f"{log.status}: {message}".rstrip(": ")})
    if not num_samples:
        finding = f"the log has no samples (status {log.status!r})"
        hint = "run the evaluation without --no-log-samples, or leave this log out"
        raise InputError("no_samples", file.name, finding, hint=hint)
    yield file


def _run(sample: Sample, place: Place) -> Run:
    name = place.where.rpartition(", samples")[0]
    log, _ = _log(place.path, name, Version.of(place.path))
    instance = str(sample.id)
    labels = {"sample": instance, "epoch": str(sample.epoch), "task": log.eval.task}
    labels |= {"status": log.status, "model": log.eval.model or "unknown"}
    return Run(instance_id=instance, repetition_id=sample.epoch, places=[place], labels=labels)


def _read(sample: Sample, run: Run, options: Options) -> Trajectory:
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
    logged = outcome_of(sample, options)
    failed = run.failed or logged.error is not None
    logged.steps = steps_of(list(calls_of(sample, place.where)), place.where, failed=failed)
    status = "" if run.labels["status"] == _SUCCESS else run.labels["status"]
    texts = filled(model=run.labels["model"], log_status=status)
    logged.user_values = {**logged.user_values, **texts}
    return logged


def _finish(items: Iterator[Found]) -> Iterator[Found]:
    """Join what is said of the logs; with several tasks, the task precedes the id of a sample."""
    statuses: dict[str, str] = {}
    others: list[Found] = []
    for item in items:
        if isinstance(item, About):
            statuses |= item.value
        else:
            others.append(item)
    if statuses:
        yield About(_STATUS, statuses)
    runs = [item for item in others if isinstance(item, Run)]
    if len({run.labels["task"] for run in runs}) > 1:
        for run in runs:
            run.instance_id = f"{run.labels['task']}/{run.instance_id}"
    yield from others


def _is_log(start: Start) -> bool:
    try:
        if is_zip(start.path):
            names = members_of(start.path, str(start.path))
            is_inspect = _HEADERS[1] in names or any(name.startswith(_SAMPLES) for name in names)
            return is_inspect and any(name in names for name in _HEADERS)
    except RolloutError:
        return False
    return _START.match(start.head) is not None and b'"eval"' in start.head


ADAPTER = Records(
    records={"": Sample},
    leaves=LEAVES,
    run=_run,
    read=_read,
    is_log=_is_log,
    files=_files,
    is_whole=lambda _: True,
    plain=plain_json,
    members=_SAMPLES,
    elements="samples",
    finish=_finish,
).adapter("Inspect's eval logs: .eval archives, .json")
