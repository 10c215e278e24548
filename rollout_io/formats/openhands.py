"""The `openhands` format: OpenHands' evaluation and resolver outputs, and lists of events.

    output.jsonl         {"instance_id": ..., "history": [event, ...], "test_result": {...},
                          "metrics": {...}, "error": null}
    the resolver's       {"issue": {"owner": ..., "repo": ..., "number": 5}, "history": [...],
                          "success": true}
    a list of events     [{"id": 5, "source": "agent", "action": "run", "args": {...},
                           "tool_call_metadata": {"model_response": {...}, ...}}, ...]

Each line, and each list of events, is a run. `openhands_events` converts events to messages. The
raw responses of the model may contain the engine's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import (
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.openhands_events import EVENT, is_reconstructed, read_calls
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.documents import (
    find_documents,
    run_of_file,
    with_group_rule,
)
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.lines import Record, find_lines, read_record, refuse_repeated
from rollout_io.formats.parsing.model_calls import steps_of
from rollout_io.formats.parsing.naming import numbers
from rollout_io.formats.start import Start
from schemas.errors import InputError

_SUFFIXES = (".events.json", ".json")
_MARKS = (b'"action"', b'"observation"')
_LIMITS = ("reached maximum", "AgentStuckInLoopError")
_MAX_DEPTH = 3


class _Issue(msgspec.Struct, gc=False):
    owner: str
    repo: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.repo}#{self.number}"


CONTENTS = Contents(
    reads={
        "": "instance_id issue metadata.llm_config.model test_result report metrics resolved success "
        "error"
    },
    leaves={
        "the task's data: what the agent saw of it is a message": "instance instruction issue_type "
        "base_commit",
        "the result of the run": "git_patch comment_success result_explanation",
        "settings": "metadata",
    },
    inner={"history": EVENT},
)


class _LlmConfig(msgspec.Struct, gc=False):
    model: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    llm_config: _LlmConfig | None = None


class _Names(msgspec.Struct, gc=False):
    """The fields that identify a run."""

    history: list[msgspec.Raw] | None
    instance_id: str | None = None
    issue: _Issue | None = None
    metadata: _Metadata | None = None


class _Row(msgspec.Struct, gc=False):
    history: list[msgspec.Raw] | None
    test_result: msgspec.Raw = NO_JSON
    report: msgspec.Raw = NO_JSON
    metrics: msgspec.Raw = NO_JSON
    resolved: bool | None = None
    success: bool | None = None
    error: str | None = None


class _RowHead(msgspec.Struct, gc=False):
    history: list[dict[str, msgspec.Raw] | list[msgspec.Raw]] | None
    instance_id: str | None = None
    issue: _Issue | None = None
    test_result: msgspec.Raw = NO_JSON
    metadata: msgspec.Raw = NO_JSON

    def __post_init__(self) -> None:
        is_evaluated = (self.test_result, self.metadata) != (NO_JSON, NO_JSON)
        is_row = self.instance_id is not None and is_evaluated
        if not is_row and self.issue is None:
            raise ValueError("the record is not an OpenHands run")


class _EventHead(msgspec.Struct, gc=False):
    """An event: an action of an agent, or an observation."""

    id: int
    source: str
    action: str | None = None
    observation: str | None = None

    def __post_init__(self) -> None:
        if self.action is None and self.observation is None:
            raise ValueError("the record is not an event")


_NAMES_DECODER = msgspec.json.Decoder(_Names)
_ROW_DECODER = msgspec.json.Decoder(_Row)
_ROW_HEAD_DECODER = msgspec.json.Decoder(_RowHead)
_EVENTS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_EVENTS_HEAD_DECODER = msgspec.json.Decoder(list[_EventHead])
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_runs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield runs in the order of the logs; the instance is `instance_id`, or the issue.

    The instance of a list of events is inferred from its file name.
    """
    documents = [given for given in inputs if _is_list(given.path)]
    lines = [given for given in inputs if given not in documents]
    first: dict[bytes, str] = {}

    def find(record: Record) -> Run:
        return _find_row(record, first)

    yield from find_lines(lines, progress, find)
    yield from with_group_rule(find_documents(documents, progress, _find_events))


def _is_list(path: Path) -> bool:
    with open_input(path) as file:
        return file.read(1 << 12).lstrip().startswith(b"[")


def _find_row(record: Record, first: dict[bytes, str]) -> Run:
    where = record.place.where
    refuse_repeated(record.content, where, first)
    names = decode_line(_NAMES_DECODER, record.content, where)
    instance = names.instance_id or (names.issue.name if names.issue else None)
    if not instance:
        hint = "keep the lines as OpenHands wrote them, because instance_id identifies the group"
        raise InputError("group", where, "the run has no `instance_id`", hint=hint)
    labels = {"instance_id": instance}
    config = names.metadata.llm_config if names.metadata else None
    if config is not None and config.model is not None:
        labels["model"] = config.model
    return Run(instance_id=instance, repetition_id=None, places=[record.place], labels=labels)


def _find_events(place: Place, content: bytes) -> Iterator[Run]:
    decode_document(_EVENTS_DECODER, content, place.where)
    yield run_of_file(place, None, _SUFFIXES)


def read_run(run: Run, _: Options) -> Trajectory:
    """Read the calls and the evaluation of a run.

    The reward is the first of these fields that exists: `test_result.report.resolved`,
    `test_result.resolved`, `report.resolved`, `resolved`, and the resolver's `success`. It is
    unknown if the evaluation failed (`error_eval`). All numbers and booleans become metrics.
    `error` marks the run as failed, unless the agent used up its iterations or budget, or was stuck
    in a loop; the error is then only stored as `exit_status`.

    Raises:
        RolloutError: The run cannot be used (`no_calls`, `no_token_ids`, `record_type`, ...).
    """
    (place,) = run.places
    content = read_record(place)
    where = f"{place.where}, history"
    if content.lstrip().startswith(b"["):
        where = f"{place.where}, events"
        row = _Row(decode_document(_EVENTS_DECODER, content, place.where))
        account(CONTENTS, b'{"history":%s}' % content)
    else:
        row = decode_line(_ROW_DECODER, content, place.where)
        account(CONTENTS, content)
    history = row.history or []
    error = row.error if row.error and not any(mark in row.error for mark in _LIMITS) else None
    calls = list(read_calls(history, where))
    failed = run.failed or error is not None
    metrics = _metrics(row, place.where)
    texts = {"exit_status": row.error, "model": run.labels.get("model")}
    if calls and is_reconstructed(history):
        texts["text_source"] = "reconstructed from thoughts and actions"
    return Trajectory(
        steps=steps_of(calls, place.where, failed=failed),
        reward=_reward(row, metrics),
        error=error,
        metrics=metrics,
        user_values={name: text for name, text in texts.items() if text},
    )


def _reward(row: _Row, metrics: dict[str, float]) -> float | None:
    if any(metrics.get(f"{name}.error_eval") for name in ("test_result.report", "report")):
        return None
    order = ("test_result.report.resolved", "test_result.resolved", "report.resolved")
    stated = next((metrics[name] for name in order if name in metrics), None)
    for flag in (row.resolved, row.success):
        if stated is None and flag is not None:
            stated = float(flag)
    return stated


def _metrics(row: _Row, where: str) -> dict[str, float]:
    """Return all numbers and booleans of the evaluation and the cost metrics."""
    found: dict[str, float] = {}
    for name in ("test_result", "report", "metrics"):
        found |= _numbers(name, getattr(row, name), where)
    for name in ("resolved", "success"):
        if (flag := getattr(row, name)) is not None:
            found[name] = float(flag)
    return found


def _numbers(name: str, raw: msgspec.Raw, where: str, depth: int = 0) -> dict[str, float]:
    """Return the numbers in an object, at any depth, by path: "test_result.report.resolved"."""
    if bytes(raw).startswith(b"{") and depth < _MAX_DEPTH:
        fields = decode_line(_OBJECT_DECODER, bytes(raw), f"{where}, {name}").items()
        parts = [_numbers(f"{name}.{key}", value, where, depth + 1) for key, value in fields]
        return {key: value for part in parts for key, value in part.items()}
    return numbers({name: raw}, where) if depth else {}


def recognizes(start: Start) -> bool:
    """True if a file has lines of runs with a history of events, or is a list of events."""
    is_lines = start.has_record(_ROW_HEAD_DECODER)
    return is_lines or start.is_document_of(_EVENTS_HEAD_DECODER, _MARKS)


ADAPTER = Adapter(
    summary="OpenHands: evaluation and resolver outputs (JSONL), lists of events (JSON)",
    recognizes=recognizes,
    find=find_runs,
    read=read_run,
    is_text=True,
    contents=CONTENTS,
)
