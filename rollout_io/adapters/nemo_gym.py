"""The `nemo_gym` format: NeMo Gym's rollouts, JSONL, one run a line.

    {"responses_create_params": {"input": [...]}, "reward": 1.0, "_ng_task_index": 0,
     "_ng_rollout_index": 3, "response": {"output": [item, ...], "usage": {...}}, ...}

`response` is a Responses object whose output holds all calls of the run (see `responses`). Such an
object alone, or as `input` of an object, is read too: a run without a reward and, as no task is
stated, in a group of its own.

The log is read twice, once to check every run, once to yield them in order of their tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pyarrow as pa

from rollout_io.adapters import (
    ABOUT,
    Adapter,
    Progress,
    Step,
    Trajectory,
    natural_key,
    raise_first,
    refuse_repeated,
    tables,
)
from rollout_io.adapters.detect import has_record
from rollout_io.adapters.jsonl import (
    decode_line,
    open_input,
    read_document,
    read_lines,
    refuse_lfs_pointer,
)
from rollout_io.adapters.responses import Response, Share, read_steps
from rollout_io.adapters.rewards import Key, Outcome, read_rewards
from rollout_io.adapters.sessions import settle, unknown_outcomes
from rollout_io.adapters.tokens import INT32_MAX, one_routing
from schemas.errors import RolloutError

_OTHER_FIELDS = {"responses_create_params", "response", "agent_ref"}
_FRAMEWORK = "_ng_"
_OPTIONAL = (
    *("rollout_logprobs", "reward", "stop_reason", "temperature", "top_p", "agent", "messages"),
    *("response_text", "metrics"),
)

_Index = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _Params(msgspec.Struct, gc=False):
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    temperature: Share | None = None
    top_p: Share | None = None


class _Agent(msgspec.Struct, gc=False):
    name: str | None = None


class _Run(msgspec.Struct, gc=False):
    response: Response
    responses_create_params: _Params = msgspec.field(default_factory=_Params)
    reward: float | None = None
    mask_sample: bool | None = None
    agent_ref: _Agent | None = None
    task: _Index | None = msgspec.field(name="_ng_task_index", default=None)
    rollout: _Index | None = msgspec.field(name="_ng_rollout_index", default=None)


class _Head(msgspec.Struct, gc=False):
    responses_create_params: dict[str, msgspec.Raw] | None = None
    response: dict[str, msgspec.Raw] | None = None
    input: dict[str, msgspec.Raw] | None = None
    object: str | None = None
    output: list[msgspec.Raw] | None = None

    def __post_init__(self) -> None:
        alone = self.object == "response" and self.output is not None
        inner = self.response if self.responses_create_params is not None else self.input
        if not alone and not (inner and {"object", "output"} <= inner.keys()):
            raise ValueError("no rollout")


class _Record(NamedTuple):
    run: _Run
    prefix: str
    metrics: dict[str, float]


class _Place(NamedTuple):
    path: Path
    where: str
    offset: int
    num_bytes: int


@dataclass(slots=True)
class _Log:
    places: dict[Key, _Place] = field(default_factory=dict)
    present: set[str] = field(default_factory=lambda: {"source"})
    routing: tuple[int, int] | None = None
    errors: list[RolloutError] = field(default_factory=list)
    inferred: bool = False


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_DECODER = msgspec.json.Decoder(msgspec.Raw)
_RUN_DECODER = msgspec.json.Decoder(_Run)
_RESPONSE_DECODER = msgspec.json.Decoder(Response)
_NUMBER_DECODER = msgspec.json.Decoder(float | bool)
_NUMBERS_DECODER = msgspec.json.Decoder(dict[str, float | bool])


def read_rollouts(
    paths: Sequence[str | Path],
    *,
    rewards: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[pa.Table]:
    """Read runs as rollout tables, one row per model call.

    Instance and repetition are `_ng_task_index` and `_ng_rollout_index`; rows come in their order.
    All calls of a run are its steps, in order, whether or not a prompt extends the one before.
    The reward goes to the last step, 0.0 to the earlier ones. Metrics of the last step are all
    numbers of the line, its reward among them, and the numbers of objects that hold nothing else
    (`scores.style`). With `mask_sample` no token of the run trains. A `response.error` makes a
    failed trajectory.

    Args:
        paths: JSONL files, or JSON documents (`.json`) of one run each.
        rewards: JSONL of outcomes, see `read_rewards`; they win over those of the log.
        progress: Told the bytes read; twice the size of the inputs in all.

    Returns:
        Tables of whole trajectories, all with one schema. Its metadata says so where a group is
        not stated by the log.

    Raises:
        RolloutError: Any bad run, before the first table: the first one's place, and how many more
            there are.
    """
    report = progress or (lambda _: None)
    outcomes = {} if rewards is None else read_rewards(rewards)
    refuse_repeated(paths)
    log = _index(paths, outcomes, report)
    errors = log.errors or list(unknown_outcomes(log.places.keys(), outcomes))
    if errors:
        raise_first(errors)
    if not log.places and not outcomes:
        where = ", ".join(str(path) for path in paths)
        raise RolloutError("no_calls", where, "no runs at all", "one JSON object a line")
    for key in outcomes.keys() - log.places.keys():
        _note_columns(log, settle(key, [], outcomes[key]))
    user_columns = sorted({name for o in outcomes.values() for name in o.user_values})
    found = tables(_trajectories(log, outcomes, report), log.present, user_columns, log.routing)
    return map(_say_inferred, found) if log.inferred else found


def _index(paths: Sequence[str | Path], outcomes: Mapping[Key, Outcome], report: Progress) -> _Log:
    """Check every run, and note where it is."""
    log = _Log()
    for path in paths:
        for place, content in _records(Path(path), log.errors):
            report(place.num_bytes)
            try:
                record = _decode(content, place.where)
                log.inferred |= record.run.task is None
                _add(log, place, _trajectory(record, place.where, outcomes))
            except RolloutError as error:
                log.errors.append(error)
    return log


def _say_inferred(table: pa.Table) -> pa.Table:
    rule = b'"inferred: where the log states no task, each response is a group of its own"'
    return table.replace_schema_metadata({f"{ABOUT}groups": rule})


def _records(path: Path, errors: list[RolloutError]) -> Iterator[tuple[_Place, bytes]]:
    """The runs of a file as JSON; a damaged document, or a pointer to a file, is an error."""
    try:
        if path.suffix == ".json":
            raw, num_bytes = read_document(_RAW_DECODER, path)
            yield _Place(path, str(path), 0, num_bytes), bytes(raw)
        else:
            yield from _lines(path)
    except RolloutError as error:
        errors.append(error)


def _lines(path: Path) -> Iterator[tuple[_Place, bytes]]:
    with open_input(path) as file:
        if not file.seekable():
            hint = "save it to a file first: a log is read twice"
            raise RolloutError("input_file", str(path), "a pipe", "a file", hint)
        for line in read_lines(file):
            refuse_lfs_pointer(line.content, str(path))
            where = f"{path}:{line.number}"
            yield _Place(path, where, line.offset, len(line.content)), line.content


def _decode(content: bytes, where: str) -> _Record:
    fields = decode_line(_OBJECT_DECODER, content, where)
    if "response" in fields:
        run = decode_line(_RUN_DECODER, content, where)
        record = _Record(run, f"{where}, response.", _metrics(fields, where))
    elif "output" in fields:
        response = decode_line(_RESPONSE_DECODER, content, where)
        record = _Record(_Run(response=response), f"{where}, ", {})
    elif bytes(fields.get("input", b"")).startswith(b"{"):
        response = decode_line(_RESPONSE_DECODER, bytes(fields["input"]), f"{where}, input")
        record = _Record(_Run(response=response), f"{where}, input.", {})
    else:
        got = "an object without a response (its keys: " + ", ".join(list(fields)[:8]) + ")"
        expected = "`response`, a Responses object with the items of the run"
        hint = "give the rollouts that NeMo Gym collects, not its tasks nor a trainer's data"
        raise RolloutError("no_response", where, got, expected, hint)
    return record


def _key(run: _Run, where: str) -> Key:
    if run.task is not None and run.rollout is not None:
        return str(run.task), run.rollout
    if run.task is not None or run.rollout is not None or not run.response.id:
        expected = "`_ng_task_index` and `_ng_rollout_index`, or neither and a response with an id"
        got = f"task {run.task}, rollout {run.rollout}, response id {run.response.id!r}"
        hint = "take the lines as NeMo Gym wrote them: the indices name the group"
        raise RolloutError("group", where, got, expected, hint)
    return run.response.id, 0


def _trajectory(record: _Record, where: str, outcomes: Mapping[Key, Outcome]) -> Trajectory:
    run, key = record.run, _key(record.run, where)
    error = None if run.response.error is None else run.response.error.message
    own = Outcome(
        where=where, reward=run.reward, error=error, metrics=record.metrics, user_values={}
    )
    outcome = _override(own, outcomes.get(key))
    sent = _sent(run.responses_create_params)
    failed = outcome.error is not None
    steps = read_steps(run.response, sent, record.prefix, failed=failed) or [Step(source=where)]
    for step in steps:
        _complete(step, run)
    return settle(key, steps, outcome)


def _complete(step: Step, run: _Run) -> None:
    params, response = run.responses_create_params, run.response
    step.temperature = response.temperature if params.temperature is None else params.temperature
    step.top_p = response.top_p if params.top_p is None else params.top_p
    step.agent = None if run.agent_ref is None else run.agent_ref.name
    step.trains = not run.mask_sample


def _sent(params: _Params) -> list[Any] | None:
    """The messages a run begins with; None where the log does not have them."""
    if params.input is None:
        return None
    system = [{"role": "system", "content": params.instructions}] if params.instructions else []
    if isinstance(params.input, str):
        return [*system, {"role": "user", "content": params.input}]
    return [*system, *params.input]


def _override(own: Outcome, given: Outcome | None) -> Outcome:
    if given is None:
        return own
    return replace(
        given,
        reward=own.reward if given.reward is None else given.reward,
        error=given.error or own.error,
        metrics=own.metrics | given.metrics,
    )


def _metrics(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """All numbers of a line, and those of objects of numbers; indices of NeMo Gym's are none."""
    metrics: dict[str, float] = {}
    for name, raw in fields.items():
        if name in _OTHER_FIELDS or name.startswith(_FRAMEWORK):
            continue
        text = bytes(raw)
        if text.startswith(b"{"):
            metrics |= {f"{name}.{k}": v for k, v in _numbers(text).items()}
        elif not text.startswith((b'"', b"[", b"null")):
            metrics[name] = float(decode_line(_NUMBER_DECODER, text, f"{where}, {name}"))
    return metrics


def _numbers(text: bytes) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _NUMBERS_DECODER.decode(text).items()}
    except (msgspec.ValidationError, msgspec.DecodeError):
        return {}


def _add(log: _Log, place: _Place, trajectory: Trajectory) -> None:
    key = (trajectory.instance_id, trajectory.repetition_id)
    if key in log.places:
        got = f"task {key[0]}, rollout {key[1]} again: {log.places[key].where} has it"
        hint = "files of several collections: make each a dataset of its own"
        raise RolloutError("unique_trajectory", place.where, got, "each rollout once", hint)
    log.routing = one_routing(trajectory.steps, log.routing, place.where)
    log.places[key] = place
    _note_columns(log, trajectory)


def _note_columns(log: _Log, trajectory: Trajectory) -> None:
    for step in trajectory.steps:
        log.present.update(name for name in _OPTIONAL if getattr(step, name) is not None)
    if trajectory.error is not None:
        log.present.update({"error", "reward"})


def _trajectories(
    log: _Log, outcomes: Mapping[Key, Outcome], report: Progress
) -> Iterator[Trajectory]:
    keys = sorted({*log.places, *outcomes}, key=lambda key: (natural_key(key[0]), key[1]))
    for key in keys:
        place = log.places.get(key)
        if place is None:
            yield settle(key, [], outcomes[key])
            continue
        report(place.num_bytes)
        with open_input(place.path) as file:
            file.seek(place.offset)
            content = file.read(place.num_bytes)
        yield _trajectory(_decode(content, place.where), place.where, outcomes)


def recognizes(path: Path) -> bool:
    """Whether a file has lines with a task's `responses_create_params` and a Responses object."""
    return has_record(path, _HEAD_DECODER)


ADAPTER = Adapter(
    summary="NeMo Gym's rollouts with the engine's tokens on their items: JSONL",
    recognizes=recognizes,
    read=read_rollouts,
)
