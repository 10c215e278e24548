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
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.dataset.opening import Version, read_input
from rollout_io.formats.base import About, Found, Input, Options, Place, Run, Trajectory
from rollout_io.formats.engines.files import Start, is_zip, members_of, read_member
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Grammar, account
from rollout_io.formats.parsing.bodies import Sampling, sampling_extra
from rollout_io.formats.parsing.content import NO_JSON, Message, filled, known
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, refuse_lfs_pointer
from rollout_io.formats.parsing.messages import MESSAGE, read_message
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.tokens import INT32_MAX
from schemas.errors import InputError, RolloutError

_LETTERS = {
    "C": 1.0,
    "P": 0.5,
    "I": 0.0,
    "N": 0.0,
    "yes": 1.0,
    "true": 1.0,
    "no": 0.0,
    "false": 0.0,
}
_TIMES = frozenset({"time", "working"})
_SCORERS = frozenset({"scorer", "scorers"})
_ATTACHMENT = re.compile(rb'"attachment://([0-9a-f]{32})"')
_MESSAGES = MESSAGE.plus(
    reads={"message": "error"},
    leaves={
        "facts about a message": "message/id message/source message/model message/metadata",
        "repeats the name of a call": "message/function",
    },
)
"""Messages of Inspect, which have more fields."""

_NOT_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')


class _Failure(msgspec.Struct, gc=False):
    message: str = ""


class _Limit(msgspec.Struct, gc=False):
    type: str
    limit: float | None = None


_Value = float | bool | str | None


class _Score(msgspec.Struct, gc=False):
    value: dict[str, _Value] | list[_Value] | _Value = None


class _Pools(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw] = []


class _Sample(msgspec.Struct, gc=False):
    """One sample in one epoch."""

    id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
    messages: list[msgspec.Raw] = []
    scores: dict[str, _Score] | None = None
    score: _Score | None = None
    events: list[msgspec.Raw] = []
    attachments: dict[str, str] = {}
    error: _Failure | None = None
    limit: _Limit | None = None
    events_data: _Pools | None = None
    message_pool: list[msgspec.Raw] | None = None

    @property
    def pool(self) -> Sequence[msgspec.Raw]:
        """Messages that events refer to by index."""
        if self.events_data is not None:
            return self.events_data.messages
        return self.message_pool or []


class _Event(msgspec.Struct, gc=False):
    """What an event must have, so that one without a type is refused."""

    event: str


class _Span(msgspec.Struct, gc=False):
    """The beginning of a span; in older logs, the beginning or end of a step."""

    id: str | None = None
    parent_id: str | None = None
    type: str | None = None
    action: str | None = None


class _Choice(msgspec.Struct, gc=False):
    message: msgspec.Raw
    stop_reason: str | None = None


class _Output(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: str | None = None


class _Wire(msgspec.Struct, gc=False):
    response: msgspec.Raw = NO_JSON


class _Model(msgspec.Struct, gc=False):
    input: list[msgspec.Raw] = []
    input_refs: list[tuple[int, int]] | None = None
    output: _Output = msgspec.field(default_factory=_Output)
    tools: list[dict[str, Any]] = []
    config: Sampling = msgspec.field(default_factory=Sampling)
    call: _Wire | None = None
    role: str | None = None
    span_id: str | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """True if the call has no response; Inspect logs an empty one for a failed call."""
        return bool(self.error or self.output.error) or not self.output.choices


class _Result(msgspec.Struct, gc=False):
    """The fields that show how a message was produced."""

    role: str | None = None
    source: str | None = None
    error: _Failure | None = None


_EVENTS = Grammar(
    kind="event",
    records={"": _Event, "span_begin": _Span, "step": _Span, "model": _Model},
)
_RESULT_DECODER = msgspec.json.Decoder(_Result)


def _plain_json(content: bytes) -> bytes:
    """Replace the bare NaN and Infinity that Inspect writes, which are not JSON.

    Each becomes an empty string padded to the same length, so that byte offsets stay valid.
    """
    if b"NaN" not in content and b"Infinity" not in content:
        return content
    return _NOT_JSON.sub(
        lambda m: m[0] if m[0].startswith(b'"') else b'""'.ljust(len(m[0])), content
    )


def _calls_of(sample: _Sample, where: str) -> Iterator[Call]:
    """Yield the calls of a sample in order, except failed calls and calls of scorers."""
    events = list(_model_events(sample, where))
    if not events:
        yield from _calls_of_messages(sample, where)
        return
    for here, event in events:
        if event.failed:
            continue
        prompt = event.input or list(_referred(event, sample, here))
        choice = event.output.choices[0]
        yield Call(
            where=here,
            prompt=[_message(m, sample, f"{here}.input[{i}]") for i, m in enumerate(prompt)],
            reply=_message(choice.message, sample, f"{here}.output"),
            answer=_resolved(event.call.response, sample, here) if event.call else None,
            agent=event.role,
            tools=[{"type": "function", "function": tool} for tool in event.tools] or None,
            stop_reason=choice.stop_reason,
            temperature=event.config.temperature,
            top_p=event.config.top_p,
            top_k=event.config.top_k,
            sampling_extra=sampling_extra(event.config),
        )


def _model_events(sample: _Sample, where: str) -> Iterator[tuple[str, _Model]]:
    scoring: set[str] = set()
    depth = 0
    for index, raw in enumerate(sample.events):
        here = f"{where}, events[{index}]"
        kind, event = _EVENTS.typed(bytes(raw), here, decode_line)
        if isinstance(event, _Span):
            is_scorer = event.type in _SCORERS
            if kind == "step":
                depth += is_scorer * (1 if event.action == "begin" else -1)
            elif event.id is not None and (is_scorer or event.parent_id in scoring):
                scoring.add(event.id)
        elif isinstance(event, _Model) and depth <= 0 and event.span_id not in scoring:
            yield here, event


def _referred(event: _Model, sample: _Sample, where: str) -> Iterator[msgspec.Raw]:
    """Yield the messages of the pool that an event refers to by ranges of indices."""
    size = len(sample.pool)
    for start, end in event.input_refs or ():
        if not 0 <= start <= end <= size:
            finding = f"`input_refs` has [{start}, {end}], but the pool has only {size} messages"
            hint = "read the log with Inspect, and write it again"
            raise InputError("dangling_reference", where, finding, hint=hint)
        yield from sample.pool[start:end]


def _calls_of_messages(sample: _Sample, where: str) -> Iterator[Call]:
    """Yield the generated messages as calls of one context; other messages occur only in prompts."""
    results = [decode_line(_RESULT_DECODER, bytes(raw), where) for raw in sample.messages]
    is_marked = any(message.source == "generate" for message in results)
    messages: list[Message] = []
    for index, (raw, result) in enumerate(zip(sample.messages, results, strict=True)):
        here = f"{where}, messages[{index}]"
        message = _message(raw, sample, here)
        if message["role"] == "assistant" and (not is_marked or result.source == "generate"):
            yield Call(where=here, prompt=list(messages), reply=message)
        messages.append(message)


def _message(raw: msgspec.Raw, sample: _Sample, where: str) -> Message:
    """Read a message as Inspect sends it: the error of a failed tool replaces its result."""
    resolved = _resolved(raw, sample, where)
    account(_MESSAGES, resolved)
    message = read_message(resolved, where)
    if message["role"] == "tool":
        failure = decode_line(_RESULT_DECODER, bytes(resolved), where).error
        if failure is not None:
            message["content"] = f"Error: {failure.message}"
    return message


def _resolved(raw: msgspec.Raw, sample: _Sample, where: str) -> msgspec.Raw:
    """Insert into the JSON the texts that Inspect moved to attachments."""
    if b"attachment://" not in bytes(raw):
        return raw

    def text(match: re.Match[bytes]) -> bytes:
        name = match[1].decode()
        if name not in sample.attachments:
            finding, hint = f"the sample has no attachment {name}", "copy the complete log again"
            raise InputError("dangling_reference", where, finding, hint=hint)
        return msgspec.json.encode(sample.attachments[name])

    return msgspec.Raw(_ATTACHMENT.sub(text, bytes(raw)))


def _read(sample: _Sample, run: Run, options: Options) -> Trajectory:
    """Read the calls and scores of a sample.

    Every score is a metric (letters as in Inspect: C 1, P 0.5, I and N 0; dictionaries key by key).
    A single score is the reward; with several, choose one with `--reward`. A sample with an
    `error` has failed, as has a sample that an operator stopped; see `Options` for time and context
    limits.
    """
    metrics = _numbers({**(sample.scores or {}), **known({"score": sample.score})})
    reward = next(iter(metrics.values())) if len(metrics) == 1 else None
    error = None if sample.error is None else sample.error.message or "error"
    kind = sample.limit.type if sample.limit else None
    if error is None and kind is not None:
        is_zero = kind == "context" and options.overflows == "zero"
        reward = 0.0 if is_zero else reward
        is_failed = (
            kind == "operator"
            or (kind in _TIMES and options.timeouts == "fail")
            or (kind == "context" and options.overflows == "fail")
        )
        error = f"{kind} limit" if is_failed else None
    failed = run.failed or error is not None
    where = run.places[0].where
    status = "" if run.labels["status"] == _SUCCESS else run.labels["status"]
    return Trajectory(
        steps=steps_of(list(_calls_of(sample, where)), where, failed=failed),
        reward=reward,
        error=error,
        metrics=metrics,
        user_values=filled(limit=kind, model=run.labels["model"], log_status=status),
    )


def _numbers(scores: Mapping[str, _Score]) -> dict[str, float]:
    """Return all numbers in the scores.

    If a score is a dictionary, its numbers are named "scorer.key"; if it is a list, "scorer[0]".
    """
    values: dict[str, _Value] = {}
    for name, score in scores.items():
        if isinstance(score.value, dict):
            values |= {f"{name}.{key}": value for key, value in score.value.items()}
        elif isinstance(score.value, list):
            values |= {f"{name}[{i}]": value for i, value in enumerate(score.value)}
        else:
            values[name] = score.value
    return known({name: _number(value) for name, value in values.items()})


def _number(value: _Value) -> float | None:
    """Convert a score as Inspect does; None if it has no numeric value."""
    if not isinstance(value, str):
        return None if value is None else float(value)
    if value in _LETTERS or value.lower() in _LETTERS:
        return _LETTERS.get(value, _LETTERS.get(value.lower()))
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


_START = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:\s*"[a-z]+"\s*,\s*"')
_HEADERS, _SAMPLES = ("header.json", "_journal/start.json"), "samples/"
_SUCCESS, _STATUS = "success", "log_status"


class _Eval(msgspec.Struct, gc=False):
    task: str
    model: str | None = None


class _Log(msgspec.Struct, gc=False):
    eval: _Eval
    status: str = "started"
    error: _Failure | None = None
    samples: list[msgspec.Raw] | None = None


_LOG_DECODER = msgspec.json.Decoder(_Log)


@lru_cache(maxsize=2)
def _log(path: Path, name: str, _: Version) -> tuple[_Log, int]:
    """Return what a log has beside its samples, and their number."""
    if not is_zip(path):
        content = read_input(path)
        refuse_lfs_pointer(content, name)
        log = decode_document(_LOG_DECODER, _plain_json(content), name)
        num_samples, log.samples = len(log.samples or ()), None  # which would keep the whole file
        return log, num_samples
    members = members_of(path, name)
    header = next((header for header in _HEADERS if header in members), None)
    if header is None:
        finding = "the zip archive is not an .eval log of Inspect: it has no header.json"
        raise InputError("inspect_archive", name, finding)
    where = f"{name}, {header}"
    log = decode_document(_LOG_DECODER, _plain_json(read_member(path, header, where)), where)
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


def _run(sample: _Sample, place: Place) -> Run:
    name = place.where.rpartition(", samples")[0]
    log, _ = _log(place.path, name, Version.of(place.path))
    instance = str(sample.id)
    labels = {"sample": instance, "epoch": str(sample.epoch), "task": log.eval.task}
    labels |= {"status": log.status, "model": log.eval.model or "unknown"}
    return Run(instance_id=instance, repetition_id=sample.epoch, places=[place], labels=labels)


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
    records={"": _Sample},
    leaves={
        "the task, which the messages repeat": "input choices target",
        "the last answer, and events of old logs, which the messages repeat": "output transcript",
        "the surroundings of the sample": "sandbox files setup metadata store",
        "times, numbers of tokens and retries": "timelines model_usage role_usage started_at "
        "completed_at total_time working_time uuid invalidation error_retries",
    },
    run=_run,
    read=_read,
    is_log=_is_log,
    files=_files,
    is_whole=lambda _: True,
    plain=_plain_json,
    members=_SAMPLES,
    elements="samples",
    finish=_finish,
).adapter("Inspect's eval logs: .eval archives, .json")
