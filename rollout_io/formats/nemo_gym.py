"""The `nemo_gym` format: NeMo Gym's rollouts; `nemo_rl`: message logs of the same runs that NeMo RL saves.

NeMo Gym writes JSONL, one run per line. `response` is a Responses object whose output has all calls of
the run (see `parsing.model_calls`). If no call has token ids, the run is read as text (see
`nemo_gym_text`). A bare Responses object, or an object with one as its `input`, is accepted too: it is a
run without a reward and, since it has no task, forms a separate group. A file may also contain a single
run as a pretty-printed JSON document.

NeMo RL writes one JSON document. Each element of `expected_output` (or of a list document) is a run. A
message's `token_ids` are the tokens that it adds to the context, so the prompt of a call consists of all
ids before its answer; only answers have log-probabilities. The document records no groups: each run is a
separate instance. A document with `seen_token_ids` and `output_prompt_token_ids` (a prompt as seen and as
rendered again) contains no run: it is recognized but rejected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_io.formats.base import (
    HAS_TEXT,
    About,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Step,
    Trajectory,
)
from rollout_io.formats.dialects.responses import ITEMS
from rollout_io.formats.engines.files import Start
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.nemo_gym_text import Request, read_conversation
from rollout_io.formats.parsing.bodies import sampling_extra
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.model_calls import (
    NO_TOKENS,
    ResponsesObject,
    items_hold_tokens,
    read_steps,
)
from rollout_io.formats.parsing.records import ModelNames, natural_key, numbers, read_record
from rollout_io.formats.parsing.tokens import INT32_MAX, logprob_array, token_ids
from schemas.errors import InputError

_OTHER_FIELDS = {"responses_create_params", "response", "agent_ref"}
_FRAMEWORK = "_ng_"
_REQUEST = Contents(
    reads={"": "instructions tools metadata.problem_statement"},
    leaves={"settings of the request": "* metadata.*"},
    inner={"input": ITEMS},
)
_RESPONSE = Contents(
    reads={"": "instructions tools error incomplete_details"},
    leaves={"facts about the response": "*"},
    inner={"output": ITEMS},
)
_LEAVES = {"the verifier's data and results, which the model does not see": "* agent_ref"}
UNRELIABLE = "the reward is unreliable"
_Index = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _Agent(msgspec.Struct, gc=False):
    name: str | None = None


class Rollout(Open):
    """A run; `id`, `input` and `output` are those of a bare response, or what holds it."""

    response: Annotated[msgspec.Raw, inner(_RESPONSE)] = NO_JSON
    responses_create_params: Annotated[msgspec.Raw, inner(_REQUEST)] = NO_JSON
    id: msgspec.Raw = NO_JSON
    input: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON
    reward: float | None = None
    mask_sample: bool | None = None
    error_kind: str | None = None
    agent_ref: _Agent | None = None
    task: _Index | None = msgspec.field(name="_ng_task_index", default=None)
    rollout: _Index | None = msgspec.field(name="_ng_rollout_index", default=None)


class _Logged(NamedTuple):
    """A run with its request and response, and where the fields of the response are."""

    run: Rollout
    request: Request
    response: ResponsesObject
    prefix: str


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REQUEST_DECODER = msgspec.json.Decoder(Request | None)
_RESPONSE_DECODER = msgspec.json.Decoder(ResponsesObject)
_NUMBERS_DECODER = msgspec.json.Decoder(dict[str, float | bool])


def find(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield runs in the order of their tasks.

    The instance is `_ng_task_index`, and the repetition is `_ng_rollout_index`. Without these, each
    response forms a separate group, and the history of the dataset records that rule.
    """
    models, has_text = ModelNames(), False

    def run_of(rollout: Rollout, place: Place) -> Run:
        nonlocal has_text
        models.see(read_record(place))
        logged = _logged(rollout, place)
        has_text = has_text or _is_text(logged)
        return _run(logged, place)

    items = [*replace(_RECORDS, run=run_of).find(inputs, progress)]
    yield from models.about()
    yield About(HAS_TEXT, has_text)
    runs = [item for item in items if isinstance(item, Run)]
    if _part_tasks(runs):
        rule = "inferred: tasks with the same index but different inputs are separate groups"
        yield About("tasks", rule)
    yield from (item for item in items if not isinstance(item, Run))
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
    return any(len(names) > 1 for names in inputs.values())


def _logged(rollout: Rollout, place: Place) -> _Logged:
    where = place.where
    if bytes(rollout.response) != b"null":
        content, prefix = bytes(rollout.response), "response"
    elif bytes(rollout.output) != b"null":
        content, prefix = read_record(place), ""
    elif bytes(rollout.input).startswith(b"{"):
        content, prefix = bytes(rollout.input), "input"
    else:
        names = ", ".join([*rollout.fields][:8])
        finding = f"the object has no `response` (its keys: {names})"
        hint = "convert the rollouts that NeMo Gym collects, not its tasks or a trainer's data"
        raise InputError("no_response", where, finding, hint=hint)
    inside = f"{where}, {prefix}" if prefix else where
    response = decode_line(_RESPONSE_DECODER, content, inside)
    sent = bytes(rollout.responses_create_params) if prefix == "response" else b"null"
    request = decode_line(_REQUEST_DECODER, sent, f"{where}, responses_create_params")
    place_of = f"{where}, {prefix}." if prefix else f"{where}, "
    return _Logged(rollout, request or Request(), response, place_of)


def _run(logged: _Logged, place: Place) -> Run:
    run, response_id = logged.run, logged.response.id
    labels = {} if response_id is None else {"response_id": response_id}
    if run.agent_ref is not None and run.agent_ref.name is not None:
        labels["agent"] = run.agent_ref.name
    if bytes(run.responses_create_params) != b"null":
        where = f"{place.where}, responses_create_params"
        fields = decode_line(_OBJECT, bytes(run.responses_create_params), where)
        sent = bytes(fields.get("input", NO_JSON))
        labels["input"] = hashlib.blake2b(sent, digest_size=4).hexdigest()
    if run.task is not None and run.rollout is not None:
        instance, repetition = str(run.task), run.rollout
        labels["task"] = instance
    elif run.task is not None or run.rollout is not None or not response_id:
        finding = "the line needs `_ng_task_index` and `_ng_rollout_index`, or only a response id "
        finding += f"(it has task {run.task}, rollout {run.rollout}, response id {response_id!r})"
        hint = "keep the lines as NeMo Gym wrote them, because the indices identify the group"
        raise InputError("group", place.where, finding, hint=hint)
    else:
        instance, repetition = response_id, 0
    return Run(instance_id=instance, repetition_id=repetition, places=[place], labels=labels)


def _is_text(logged: _Logged) -> bool:
    """True if a run did not fail and has its input, but no token ids."""
    if logged.request.input is None or logged.response.error is not None:
        return False
    try:
        return not items_hold_tokens(logged.response.output)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False  # reported when the run is read


def read(rollout: Rollout, run: Run, _: Options) -> Trajectory:
    """Read all calls of a run, in order; a prompt need not extend the previous one.

    A run without any token ids becomes a conversation, unless it has failed or its input is
    unknown. All numbers of the line become metrics, including its reward and the numbers in objects
    that contain only numbers (`scores.style`). With `response.error` or `mask_sample`, the
    trajectory has failed: NeMo Gym says by the latter that the reward is unreliable, because the
    agent, the sandbox or the verifier failed.
    """
    (place,) = run.places
    logged = _logged(rollout, place)
    failed = run.failed or logged.response.error is not None
    steps = _steps(logged, place.where, failed=failed)
    params, response, agent = logged.request, logged.response, rollout.agent_ref
    for step in steps:
        for name in ("temperature", "top_p"):
            value = getattr(params, name)
            setattr(step, name, getattr(response, name) if value is None else value)
        step.agent = None if agent is None else agent.name
        if isinstance(step, Step):
            step.sampling_extra = sampling_extra(params)
    error = f"mask_sample: {rollout.error_kind or UNRELIABLE}" if rollout.mask_sample else None
    error = error if response.error is None else response.error.message
    is_run = bytes(rollout.response) != b"null"
    return Trajectory(
        steps=steps,
        reward=rollout.reward,
        error=error,
        metrics=_metrics(rollout.fields, place.where) if is_run else {},
    )


def _steps(logged: _Logged, where: str, *, failed: bool) -> Sequence[Step | Conversation]:
    request, response = logged.request, logged.response
    try:
        return read_steps(response, _sent(request), logged.prefix, failed=failed)
    except InputError as error:
        if error.rule != NO_TOKENS or request.input is None or items_hold_tokens(response.output):
            raise
        return [replace(read_conversation(request, response, where), tokenless=error)]


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
        if not bytes(raw).startswith(b"{"):
            metrics |= numbers({name: raw}, where)
            continue
        with suppress(msgspec.ValidationError, msgspec.DecodeError):
            inner_numbers = _NUMBERS_DECODER.decode(raw).items()
            metrics |= {f"{name}.{key}": float(value) for key, value in inner_numbers}
    return metrics


def _is_document(start: Start) -> bool:
    is_alone = start.path.suffix == ".json" and start.document is not None
    return is_alone or start.head.partition(b"\n")[0].strip() == b"{"


_RECORDS = Records(
    records={"": Rollout},
    leaves=_LEAVES,
    run=lambda rollout, place: _run(_logged(rollout, place), place),
    read=read,
    is_record=like(
        {"object": "response", "output": list},
        {"responses_create_params": dict, "response": {"object": object, "output": object}},
        {"responses_create_params": None, "input": {"object": object, "output": object}},
    ),
    is_whole=_is_document,
)
ADAPTER = replace(
    _RECORDS.adapter("NeMo Gym's rollouts, with token ids or as text: JSONL"), find=find
)


_HINT = "convert the rollouts of NeMo Gym, which have all ids (--format nemo_gym)"
_RL_LEAVES = {
    "texts and settings beside the tokens": "message_log.content input_message_log full_result"
}
_Logprob = Annotated[float, msgspec.Meta(ge=-1e38, le=1e38)]


class _RlMessage(msgspec.Struct, gc=False):
    role: str
    token_ids: list[int] | None = None
    generation_logprobs: list[_Logprob] | None = None


class _RlResult(msgspec.Struct, gc=False):
    reward: float | None = None


class _MessageLog(msgspec.Struct, gc=False):
    """A run, or two renderings of a prompt."""

    message_log: list[_RlMessage] | None = None
    full_result: _RlResult | None = None
    seen_token_ids: msgspec.Raw = NO_JSON


def _run_of_rl(logged: _MessageLog, place: Place) -> Run:
    """Return the run of a message log."""
    if logged.message_log is None:
        is_pair = bytes(logged.seen_token_ids) != b"null"
        finding = "the document has two renderings of a prompt, but no response"
        finding = finding if is_pair else "the record has no `message_log`"
        raise InputError("no_calls", place.where, finding)
    labels = {"file": place.where.rpartition(", ")[0] or place.where}
    return Run(instance_id=place.where, repetition_id=0, places=[place], labels=labels)


def _read_rl(logged: _MessageLog, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run, one per answer."""
    where, messages = run.places[0].where, logged.message_log or []
    ids = [_ids(m, f"{where}, message_log[{i}]") for i, m in enumerate(messages)]
    reward = None if logged.full_result is None else logged.full_result.reward
    return Trajectory(
        steps=[
            _step(message, ids[: i + 1], f"{where}, message_log[{i}]")
            for i, message in enumerate(messages)
            if message.role == "assistant"
        ],
        reward=reward,
        metrics={} if reward is None else {"reward": reward},
    )


def _ids(message: _RlMessage, where: str) -> list[int]:
    if message.token_ids:
        return message.token_ids
    how = "no token ids" if message.token_ids is None else "an empty list of token ids"
    finding = f"the message of role {message.role!r} has {how}"
    raise InputError("no_token_ids", where, finding, hint=_HINT)


def _step(message: _RlMessage, ids: Sequence[list[int]], where: str) -> Step:
    response = token_ids(ids[-1], "response", where)
    logprobs = None
    if message.generation_logprobs is not None:
        logprobs = logprob_array(message.generation_logprobs, len(response), where)
    return Step(
        source=where,
        prompt_token_ids=token_ids([*chain.from_iterable(ids[:-1])], "prompt", where),
        response_ids=response,
        rollout_logprobs=logprobs,
    )


_has_log, _is_pair = like("message_log"), like("seen_token_ids output_prompt_token_ids")


def _is_rl_document(value: Any) -> bool:
    """True for message logs, or two renderings of a prompt."""
    runs = value.get("expected_output") if isinstance(value, dict) else value
    return _is_pair(value) or (isinstance(runs, list) and bool(runs) and all(map(_has_log, runs)))


NEMO_RL = Records(
    records={"": _MessageLog},
    leaves=_RL_LEAVES,
    run=_run_of_rl,
    read=_read_rl,
    is_record=_is_rl_document,
    is_whole=lambda _: True,
    elements="expected_output",
    groups="inferred: each run is a separate instance",
).adapter("NeMo RL's message logs with the engine's tokens: one JSON document", is_text=False)
