"""The `nemo_gym` format: NeMo Gym's rollouts, JSONL, one run per line.

    {"responses_create_params": {"input": [...]}, "reward": 1.0, "_ng_task_index": 0,
     "_ng_rollout_index": 3, "response": {"output": [item, ...], "usage": {...}}, ...}

`response` is a Responses object whose output has all calls of the run (see `parsing.responses`).
If no call has token ids, the run is read as text (see `nemo_gym_text`). A bare Responses object, or
an object with one as its `input`, is accepted too: it is a run without a reward and, since it has
no task, forms a separate group. A file may also contain a single run as a pretty-printed JSON
document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import (
    HAS_TEXT,
    About,
    Adapter,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Step,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects.responses import ITEMS
from rollout_io.formats.nemo_gym_text import Request, read_conversation
from rollout_io.formats.parsing.bodies import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line, read_document
from rollout_io.formats.parsing.lines import Record, find_lines, read_record
from rollout_io.formats.parsing.naming import natural_key, numbers
from rollout_io.formats.parsing.responses import NO_TOKENS, Response, holds_tokens, read_steps
from rollout_io.formats.parsing.sampling import ModelNames, sampling_extra
from rollout_io.formats.parsing.tokens import INT32_MAX
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_OTHER_FIELDS = {"responses_create_params", "response", "agent_ref"}
_FRAMEWORK = "_ng_"
CONTENTS = Contents(
    reads={
        "": "responses_create_params.instructions responses_create_params.tools "
        "responses_create_params.metadata.problem_statement response.instructions response.tools "
        "response.error response.incomplete_details reward mask_sample error_kind agent_ref "
        "_ng_task_index _ng_rollout_index"
    },
    leaves={
        "settings of the request and facts about the response": "responses_create_params.* "
        "response.* responses_create_params.metadata.*",
        "the verifier's data and results, which the model does not see": "*",
    },
    inner={"responses_create_params.input": ITEMS, "response.output": ITEMS},
)
UNRELIABLE = "the reward is unreliable"
_Index = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _Agent(msgspec.Struct, gc=False):
    name: str | None = None


class _Rollout(msgspec.Struct, gc=False):
    response: Response
    responses_create_params: Request = msgspec.field(default_factory=Request)
    reward: float | None = None
    mask_sample: bool | None = None
    error_kind: str | None = None
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
            raise ValueError("the record is not a rollout")


class _Record(NamedTuple):
    content: bytes
    run: _Rollout
    prefix: str
    metrics: dict[str, float]


class _Names(msgspec.Struct, gc=False):
    """The fields that identify a run."""

    response: dict[str, msgspec.Raw] | None = None
    responses_create_params: dict[str, msgspec.Raw] | None = None
    input: msgspec.Raw = NO_JSON
    id: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON
    agent_ref: _Agent | None = None
    task: _Index | None = msgspec.field(name="_ng_task_index", default=None)
    rollout: _Index | None = msgspec.field(name="_ng_rollout_index", default=None)


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_NAMES_DECODER = msgspec.json.Decoder(_Names)
_TEXT_DECODER = msgspec.json.Decoder(str | None)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_DECODER = msgspec.json.Decoder(msgspec.Raw)
_ITEMS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_RUN_DECODER = msgspec.json.Decoder(_Rollout)
_RESPONSE_DECODER = msgspec.json.Decoder(Response)
_NUMBERS_DECODER = msgspec.json.Decoder(dict[str, float | bool])


def find_rollouts(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield runs in the order of their tasks.

    The instance is `_ng_task_index`, and the repetition is `_ng_rollout_index`. Without these, each
    response forms a separate group, and the history of the dataset records that rule.
    """
    documents = [given for given in inputs if _is_document(given.path)]
    lines = [given for given in inputs if given not in documents]
    models = ModelNames()
    has_text = False

    def find(record: Record) -> Run:
        nonlocal has_text
        models.see(record.content)
        names, run = _find(record)
        has_text = has_text or _is_text(names)
        return run

    found = [*_find_documents(documents, progress, find), *find_lines(lines, progress, find)]
    yield from models.about()
    yield About(HAS_TEXT, has_text)
    runs = [item for item in found if isinstance(item, Run)]
    if _part_tasks(runs):
        rule = "inferred: tasks with the same index but different inputs are separate groups"
        yield About("tasks", rule)
    yield from (item for item in found if not isinstance(item, Run))
    if any("task" not in run.labels for run in runs):
        rule = "inferred: each response without a task is a separate group"
        yield About("groups", rule)
    yield from sorted(runs, key=lambda run: (natural_key(run.instance_id), run.repetition_id))


def _part_tasks(runs: Sequence[Run]) -> bool:
    """Rename tasks that have the same index but different inputs; return True if there are any."""
    inputs: dict[str, set[str]] = {}
    for run in runs:
        inputs.setdefault(run.instance_id, set()).add(run.labels.get("input", ""))
    for run in runs:
        if len(inputs[run.instance_id]) > 1:
            run.instance_id = f"{run.instance_id}@{run.labels.get('input', '')}"
    return any(len(found) > 1 for found in inputs.values())


def _is_document(path: Path) -> bool:
    """True if a file is one JSON document, possibly over several lines."""
    if path.suffix == ".json":
        return True
    with open_input(path) as file:
        return file.readline(1 << 16).strip() == b"{"


def _find_documents(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Record], Run]
) -> Iterator[Found]:
    for name, path in inputs:
        place = Place(path, name, 0, path.stat().st_size)
        progress(place.num_bytes)
        try:
            yield find(Record(place, bytes(read_document(_RAW_DECODER, path)[0])))
        except RolloutError as error:
            yield Rejected(place, error)


def _find(record: Record) -> tuple[_Names, Run]:
    where = record.place.where
    names = decode_line(_NAMES_DECODER, record.content, where)
    response_id = _response_id(names, record.content, where)
    labels = {} if response_id is None else {"response_id": response_id}
    if names.agent_ref is not None and names.agent_ref.name is not None:
        labels["agent"] = names.agent_ref.name
    if names.responses_create_params is not None:
        sent = bytes(names.responses_create_params.get("input", NO_JSON))
        labels["input"] = hashlib.blake2b(sent, digest_size=4).hexdigest()
    if names.task is not None and names.rollout is not None:
        instance, repetition = str(names.task), names.rollout
        labels["task"] = instance
    elif names.task is not None or names.rollout is not None or not response_id:
        got = "the line needs `_ng_task_index` and `_ng_rollout_index`, or only a response id (it "
        got += f"has task {names.task}, rollout {names.rollout}, response id {response_id!r})"
        hint = "keep the lines as NeMo Gym wrote them, because the indices identify the group"
        raise InputError("group", where, got, hint=hint)
    else:
        instance, repetition = response_id, 0
    run = Run(instance_id=instance, repetition_id=repetition, places=[record.place], labels=labels)
    return names, run


def _is_text(names: _Names) -> bool:
    """True if a run did not fail and has its input, but no token ids."""
    sent, response = names.responses_create_params, names.response
    if sent is None or response is None or response.get("error", NO_JSON) != NO_JSON:
        return False
    try:
        items = _ITEMS_DECODER.decode(response.get("output", NO_JSON))
        return bytes(sent.get("input", NO_JSON)) != b"null" and not holds_tokens(items)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False  # reported when the run is read


def _response_id(names: _Names, content: bytes, where: str) -> str | None:
    response = names.response
    if response is None and bytes(names.input).startswith(b"{"):
        response = decode_line(_OBJECT_DECODER, bytes(names.input), f"{where}, input")
    if response is None and bytes(names.output) != b"null":
        response = {"id": names.id}
    if response is None:
        raise _no_response(decode_line(_OBJECT_DECODER, content, where), where)
    raw = response.get("id", NO_JSON)
    found: str | None = decode_line(_TEXT_DECODER, bytes(raw), f"{where}, response.id")
    return found


def read_rollout(run: Run, _: Options) -> Trajectory:
    """Read all calls of a run, in order; a prompt need not extend the previous one.

    A run without any token ids becomes a conversation, unless it has failed or its input is
    unknown. All numbers of the line become metrics, including its reward and the numbers in objects
    that contain only numbers (`scores.style`). With `response.error` or `mask_sample`, the
    trajectory has failed: NeMo Gym says by the latter that the reward is unreliable, because the
    agent, the sandbox or the verifier failed.

    Raises:
        RolloutError: The run cannot be used (`no_token_ids`, `no_response`, ..., or an error of
            `read_conversation`).
    """
    (place,) = run.places
    record = _decode(read_record(place), place.where)
    logged = record.run
    failed = run.failed or logged.response.error is not None
    steps = _steps(record, place.where, failed=failed)
    for step in steps:
        _complete(step, logged)
    return Trajectory(
        steps=steps,
        reward=logged.reward,
        error=_error(logged),
        metrics=record.metrics,
    )


def _error(run: _Rollout) -> str | None:
    """Return why a run failed; None if it did not."""
    if run.response.error is not None:
        return run.response.error.message
    return f"mask_sample: {run.error_kind or UNRELIABLE}" if run.mask_sample else None


def _steps(record: _Record, where: str, *, failed: bool) -> Sequence[Step | Conversation]:
    request, response = record.run.responses_create_params, record.run.response
    try:
        return read_steps(response, _sent(request), record.prefix, failed=failed)
    except InputError as error:
        if error.rule != NO_TOKENS or request.input is None or holds_tokens(response.output):
            raise
        account(CONTENTS, record.content)
        return [replace(read_conversation(request, response, where), tokenless=error)]


def _decode(content: bytes, where: str) -> _Record:
    fields = decode_line(_OBJECT_DECODER, content, where)
    if "response" in fields:
        run = decode_line(_RUN_DECODER, content, where)
        record = _Record(content, run, f"{where}, response.", _metrics(fields, where))
    elif "output" in fields:
        response = decode_line(_RESPONSE_DECODER, content, where)
        record = _Record(content, _Rollout(response=response), f"{where}, ", {})
    elif bytes(fields.get("input", b"")).startswith(b"{"):
        response = decode_line(_RESPONSE_DECODER, bytes(fields["input"]), f"{where}, input")
        record = _Record(content, _Rollout(response=response), f"{where}, input.", {})
    else:
        raise _no_response(fields, where)
    return record


def _no_response(fields: dict[str, msgspec.Raw], where: str) -> InputError:
    got = "the object has no `response` (its keys: " + ", ".join(list(fields)[:8]) + ")"
    hint = "convert the rollouts that NeMo Gym collects, not its tasks or a trainer's data"
    return InputError("no_response", where, got, hint=hint)


def _complete(step: Step | Conversation, run: _Rollout) -> None:
    params, response = run.responses_create_params, run.response
    step.temperature = response.temperature if params.temperature is None else params.temperature
    step.top_p = response.top_p if params.top_p is None else params.top_p
    if isinstance(step, Step):
        step.sampling_extra = sampling_extra(params)
    step.agent = None if run.agent_ref is None else run.agent_ref.name


def _sent(params: Request) -> list[Any] | None:
    """Return the messages at the start of a run; None if the log lacks them."""
    if params.input is None:
        return None
    system = [{"role": "system", "content": params.instructions}] if params.instructions else []
    if isinstance(params.input, str):
        return [*system, {"role": "user", "content": params.input}]
    return [*system, *params.input]


def _metrics(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """Return all numbers of a record and its all-numeric objects, except NeMo Gym's indices."""
    metrics: dict[str, float] = {}
    for name, raw in fields.items():
        if name in _OTHER_FIELDS or name.startswith(_FRAMEWORK):
            continue
        if bytes(raw).startswith(b"{"):
            metrics |= {f"{name}.{k}": v for k, v in _numbers(bytes(raw)).items()}
        else:
            metrics |= numbers({name: raw}, where)
    return metrics


def _numbers(text: bytes) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _NUMBERS_DECODER.decode(text).items()}
    except (msgspec.ValidationError, msgspec.DecodeError):
        return {}


def recognizes(start: Start) -> bool:
    """True if a file has lines with a task's `responses_create_params` and a Responses object."""
    path = start.path
    if start.has_record(_HEAD_DECODER):
        return True
    try:
        if not start.is_file or not _is_document(path):
            return False
        read_document(_HEAD_DECODER, path)
    except (OSError, RolloutError, ValueError, RecursionError):
        return False
    return True


ADAPTER = Adapter(
    summary="NeMo Gym's rollouts, with token ids or as text: JSONL",
    recognizes=recognizes,
    find=find_rollouts,
    read=read_rollout,
    is_text=True,
    contents=CONTENTS,
)
