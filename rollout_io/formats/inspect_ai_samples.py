"""The calls and scores of the samples in Inspect's logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Trajectory
from rollout_io.formats.contents import account
from rollout_io.formats.grammar import Grammar
from rollout_io.formats.parsing.bodies import Sampling
from rollout_io.formats.parsing.content import NO_JSON, Message, known
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, read_message
from rollout_io.formats.parsing.model_calls import Call
from rollout_io.formats.parsing.sampling import sampling_extra
from rollout_io.formats.parsing.tokens import INT32_MAX
from schemas.errors import InputError

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
MESSAGES = MESSAGE.plus(
    reads={"message": "error"},
    leaves={
        "facts about a message": "message/id message/source message/model message/metadata",
        "repeats the name of a call": "message/function",
    },
)
"""Messages of Inspect, which have more fields."""

LEAVES = {
    "the task, which the messages repeat": "input choices target",
    "the last answer, and events of old logs, which the messages repeat": "output transcript",
    "the surroundings of the sample": "sandbox files setup metadata store",
    "times, numbers of tokens and retries": "timelines model_usage role_usage started_at completed_at "
    "total_time working_time uuid invalidation error_retries",
}
"""Fields of a sample that are not read."""

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


class Sample(msgspec.Struct, gc=False):
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


def plain_json(content: bytes) -> bytes:
    """Replace the bare NaN and Infinity that Inspect writes, which are not JSON.

    Each becomes an empty string padded to the same length, so that byte offsets stay valid.
    """
    if b"NaN" not in content and b"Infinity" not in content:
        return content
    return _NOT_JSON.sub(_without_number, content)


def _without_number(match: re.Match[bytes]) -> bytes:
    text = match[0]
    return text if text.startswith(b'"') else b'""'.ljust(len(text))


def calls_of(sample: Sample, where: str) -> Iterator[Call]:
    """Yield the calls of a sample in order, except failed calls and calls of scorers.

    Raises:
        InputError: `record_type`: a field has the wrong type; `dangling_reference`: an attachment
            or a message of the pool is missing.
    """
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


def _model_events(sample: Sample, where: str) -> Iterator[tuple[str, _Model]]:
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


def _referred(event: _Model, sample: Sample, where: str) -> Iterator[msgspec.Raw]:
    """Yield the messages of the pool that an event refers to by ranges of indices."""
    size = len(sample.pool)
    for start, end in event.input_refs or ():
        if not 0 <= start <= end <= size:
            finding = f"`input_refs` has [{start}, {end}], but the pool has only {size} messages"
            hint = "read the log with Inspect, and write it again"
            raise InputError("dangling_reference", where, finding, hint=hint)
        yield from sample.pool[start:end]


def _calls_of_messages(sample: Sample, where: str) -> Iterator[Call]:
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


def _message(raw: msgspec.Raw, sample: Sample, where: str) -> Message:
    """Read a message as Inspect sends it: the error of a failed tool replaces its result."""
    resolved = _resolved(raw, sample, where)
    account(MESSAGES, resolved)
    message = read_message(resolved, where)
    if message["role"] == "tool":
        failure = decode_line(_RESULT_DECODER, bytes(resolved), where).error
        if failure is not None:
            message["content"] = f"Error: {failure.message}"
    return message


def _resolved(raw: msgspec.Raw, sample: Sample, where: str) -> msgspec.Raw:
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


def outcome_of(sample: Sample, options: Options) -> Trajectory:
    """Return a trajectory with the scores and failure of a sample; its steps are not read."""
    scores = {**(sample.scores or {})}
    if sample.score is not None:
        scores["score"] = sample.score
    metrics = _numbers(scores)
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
    texts = {} if kind is None else {"limit": kind}
    return Trajectory(steps=[], reward=reward, error=error, metrics=metrics, user_values=texts)


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
