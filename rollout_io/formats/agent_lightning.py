"""The `agent_lightning` format: events of Agent Lightning's API, as JSONL or one JSON list.

    {"event_type": "model_request", "rollout_id": "r1", "attempt_id": "0", "timestamp": 1795.2,
     "data": {"request": {...}, "response": {...}, "model_version": 3, "http_status": 200,
              "status": "ok", "routed_experts": null}}
    {"event_type": "reward", "rollout_id": "r1", "attempt_id": "0", "timestamp": 1796.0,
     "data": {"value": 1.0, "source": "agent", "reason": "solved"}}

The events of one attempt at a rollout form a run. Its calls are ordered by time, and all of them
are kept (the API's `format=triplet` keeps one per prompt). Events of other types are ignored.
Events do not name a task, so each rollout forms a separate group. If the log also has rollout
records (`GET /api/rollouts`: `rollout_id`, `input`, `status`), rollouts with equal inputs form one
group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

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
    Step,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.engines.records import elements_of, is_object_with, records_of
from rollout_io.formats.parsing.bodies import NO_JSON, Answer, Int32, Request, Usage
from rollout_io.formats.parsing.completions import read_choices
from rollout_io.formats.parsing.jsonl import decode_line, refuse_lfs_pointer, refuse_not_utf8
from rollout_io.formats.parsing.lines import (
    DUPLICATE,
    Record,
    incomplete,
    named_in,
    read_record,
    refuse_repeated,
)
from rollout_io.formats.parsing.naming import label
from rollout_io.formats.parsing.sampling import ModelNames
from rollout_io.formats.parsing.tokens import (
    logprob_array,
    num_ids,
    route_array,
    same_ids,
    strict_ids,
)
from rollout_io.formats.start import Start
from schemas.errors import InputError, InvariantError, RolloutError

_ENDED = "succeeded"
_ALONE = {DUPLICATE, "unique_trajectory"}
"""Rules that reject a single record instead of its attempt."""


ROLLOUTS = (
    "inferred: events do not name a task, so each rollout is a separate group (--group-by prompt "
    "groups rollouts with the same first prompt)"
)
INPUTS = "inferred: rollouts with the same `data_id` or, without it, with equal inputs"
_CALL_KEYS = (
    "request response model_version server.version routed_experts prompt_token_ids "
    "response_token_ids response_log_probs usage http_status status"
)
CONTENTS = Contents(
    kind="event_type",
    default="rollout",
    reads={
        "*": "rollout_id attempt_id timestamp",
        "model_request": " ".join(f"data.{name}" for name in _CALL_KEYS.split()),
        "reward": "data.value data.source data.reason",
        "rollout": "input status.state status.last_attempt_id status.error_message",
    },
    leaves={
        "facts about a call": "model_request/data.finish_reason model_request/data.latency_ms "
        "model_request/data.model model_request/data.retry_count model_request/data.server",
        "facts about a rollout": "rollout/config rollout/is_train rollout/metadata rollout/status",
        "notes of the program, not sent": "note",
    },
)


class _Asked(msgspec.Struct, gc=False):
    messages: msgspec.Raw = NO_JSON
    prompt: msgspec.Raw = NO_JSON


class _DataHead(msgspec.Struct, gc=False):
    request: _Asked | None = None


class _Status(msgspec.Struct, gc=False):
    state: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class _Head(msgspec.Struct, gc=False):
    """The fields that identify an event or a rollout record."""

    rollout_id: str
    event_type: str | None = None
    attempt_id: str | None = None
    timestamp: float | None = None
    data: msgspec.Raw = NO_JSON
    input: msgspec.Raw = NO_JSON
    status: _Status | None = None


class _Server(msgspec.Struct, gc=False):
    version: Int32 | None = None


class _Outcome(msgspec.Struct, gc=False):
    http_status: int | None = None
    status: str | None = None

    @property
    def is_failed(self) -> bool:
        return (self.http_status or 200) >= 400 or self.status not in {"ok", None}


class _Call(msgspec.Struct, gc=False):
    request: Request = msgspec.field(default_factory=Request)
    response: Answer = None
    model_version: Int32 | None = None
    server: _Server | None = None
    routed_experts: msgspec.Raw = NO_JSON
    prompt_token_ids: msgspec.Raw = NO_JSON
    response_token_ids: msgspec.Raw = NO_JSON
    response_log_probs: list[float] | None = None
    usage: Usage | None = None


class _Reward(msgspec.Struct, gc=False):
    value: float | bool | None = None
    source: str | None = None
    reason: str | None = None


_HEAD = msgspec.json.Decoder(_Head)
_DATA_HEAD = msgspec.json.Decoder(_DataHead)
_OUTCOME = msgspec.json.Decoder(_Outcome)
_CALL = msgspec.json.Decoder(_Call)
_REWARD = msgspec.json.Decoder(_Reward)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Rollout:
    """The records of a rollout.

    Attributes:
        attempts: Time and location of each event, by attempt.
        damaged: Errors of damaged records by attempt; key None: damage to the entire rollout.
        record: Location of the record about the rollout itself, or None.
    """

    attempts: dict[str, list[tuple[float, Place]]] = field(default_factory=dict)
    damaged: dict[str | None, RolloutError] = field(default_factory=dict)
    record: Place | None = None
    labels: dict[str, str] = field(default_factory=dict)
    last: str | None = None


def find_attempts(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield attempts, rollout by rollout; the last attempt includes the rollout's record.

    An attempt with a damaged event is rejected if the event still names the attempt. If the record
    of a rollout is damaged, all attempts at the rollout are rejected.
    """
    rollouts: dict[str, _Rollout] = {}
    first: dict[bytes, str] = {}
    models = ModelNames()
    for given in inputs:
        try:
            yield from _note_all(_records(given, progress), rollouts, first, models)
        except RolloutError as error:
            if error.rule == "input_file":
                raise
            yield Rejected(Place(given.path, given.name, 0, given.path.stat().st_size), error)
    yield from models.about()
    if rollouts:
        yield About("groups", ROLLOUTS if any(not r.record for r in rollouts.values()) else INPUTS)
    for name, rollout in rollouts.items():
        yield from _runs(name, rollout)


def _note_all(
    records: Iterable[Record],
    rollouts: dict[str, _Rollout],
    first: dict[bytes, str],
    models: ModelNames,
) -> Iterator[Rejected]:
    for place, content in records:
        try:
            refuse_not_utf8(content, place.where)
            refuse_repeated(content.strip(), place.where, first)
            _note(place, decode_line(_HEAD, content, place.where), rollouts)
            models.see(content)
        except RolloutError as error:
            yield Rejected(place, error)
            name = named_in(content, "rollout_id")
            if name is not None and error.rule not in _ALONE:
                _note_damage(rollouts.setdefault(name, _Rollout()), content, error)


def _note_damage(rollout: _Rollout, content: bytes, error: RolloutError) -> None:
    attempt = named_in(content, "attempt_id")
    rollout.damaged.setdefault(attempt, error)
    if attempt is not None:
        rollout.attempts.setdefault(attempt, [])


def _records(log: Input, progress: Progress) -> Iterator[Record]:
    for record in records_of(log, progress, _is_list):
        refuse_lfs_pointer(record.content, log.name)
        yield from elements_of(record)


def _is_list(start: Start) -> bool:
    return start.head.lstrip().startswith(b"[")


def _note(place: Place, head: _Head, rollouts: dict[str, _Rollout]) -> None:
    if head.event_type is None and (head.status is None or bytes(head.data) != b"null"):
        got = "the object is neither an event (`event_type`) nor a rollout (`input` and `status`)"
        raise InputError("record_type", place.where, got)
    if head.event_type is None:
        rollout = rollouts.setdefault(head.rollout_id, _Rollout())
        if rollout.record is not None:
            hint = "convert the logs of different collections separately"
            got = f"rollout {head.rollout_id!r} is already in {rollout.record.where}"
            raise InvariantError("unique_trajectory", place.where, got, hint=hint)
        rollout.record = place
        rollout.labels |= _of_input(head.input, place.where)
        rollout.last = None if head.status is None else head.status.last_attempt_id
        return
    if head.attempt_id is None:
        raise InputError("record_type", place.where, "the event has no `attempt_id`")
    digest = None
    if head.event_type == "model_request":
        digest = _digest_of_prompt(head.data, place.where)
    rollout = rollouts.setdefault(head.rollout_id, _Rollout())
    events = rollout.attempts.setdefault(head.attempt_id, [])
    events.append(
        (events[-1][0] if head.timestamp is None and events else head.timestamp or 0.0, place)
    )
    if digest is not None:
        rollout.labels.setdefault("prompt", digest)


def _of_input(raw: msgspec.Raw, where: str) -> dict[str, str]:
    text = bytes(raw)
    found = {"input": f"input-{hashlib.blake2b(text, digest_size=6).hexdigest()}"}
    fields = decode_line(_FIELDS, text, f"{where}, input") if text.startswith(b"{") else {}
    name = label(fields.get("data_id"), where)
    return found if name is None else found | {"data_id": name}


def _digest_of_prompt(data: msgspec.Raw, where: str) -> str | None:
    asked = decode_line(_DATA_HEAD, bytes(data), f"{where}, data").request
    if asked is None:
        return None
    text = bytes(asked.prompt) if bytes(asked.messages) == b"null" else bytes(asked.messages)
    return f"prompt-{hashlib.blake2b(text, digest_size=6).hexdigest()}"


def _runs(name: str, rollout: _Rollout) -> Iterator[Run | Rejected]:
    labels = rollout.labels
    instance = labels.get("data_id") or labels.get("input") or name
    last = rollout.last if rollout.last in rollout.attempts else None
    last = last or next(reversed(rollout.attempts), None)
    for attempt, events in (rollout.attempts or {"": []}).items():
        places = [place for _, place in sorted(events, key=lambda event: event[0])]
        if rollout.record is not None and attempt == (last or ""):
            places.append(rollout.record)
        damage = rollout.damaged.get(attempt) or rollout.damaged.get(None)
        if damage is not None:
            yield from incomplete(places, damage)
            continue
        own = {"rollout_id": name, "attempt_id": attempt}
        if last is not None and attempt != last:
            own["superseded_by"] = last
        own |= {key: value for key, value in labels.items() if value}
        yield Run(instance_id=instance, repetition_id=None, places=places, labels=own)


def read_attempt(run: Run, _: Options) -> Trajectory:
    """Read the calls of an attempt, one step per choice; the attempt's last reward is the outcome.

    Failed calls (HTTP status 400 and above) are counted in the metric `num_failed_requests`. A run
    has failed if its rollout failed, if none of its calls succeeded, or if it was retried and has
    no reward.

    Raises:
        RolloutError: The attempt cannot be used (`no_token_ids`, `no_calls`, `routing_shape`, ...).
    """
    heads = []
    for place in run.places:
        content = read_record(place)
        account(CONTENTS, content)
        heads.append((place.where, decode_line(_HEAD, content, place.where)))
    rewards = [_reward(h, where) for where, h in heads if h.event_type == "reward"]
    known = [reward for reward in rewards if reward.value is not None]
    requests = [(where, h) for where, h in heads if h.event_type == "model_request"]
    refused = [outcome for where, h in requests if (outcome := _outcome(h, where)).is_failed]
    error = _error(run, [h for _, h in heads if h.event_type is None], has_reward=bool(known))
    if error is None and requests and len(refused) == len(requests):
        error = f"all {len(refused)} model requests failed (HTTP {refused[-1].http_status})"
    failed = run.failed or error is not None
    steps = [
        step
        for where, head in requests
        if not _outcome(head, where).is_failed
        for step in _steps(head, where, failed=failed)
    ]
    if not steps and not failed:
        where = run.places[0].where
        raise InputError("no_calls", where, "the attempt has no model requests")
    metrics = {f"reward[{i}]": float(r.value or 0) for i, r in enumerate(known[:-1])}
    if known:
        metrics["reward"] = float(known[-1].value or 0)
    if refused:
        metrics["num_failed_requests"] = float(len(refused))
    return Trajectory(
        steps=steps,
        reward=metrics.get("reward"),
        error=error,
        metrics=metrics,
        user_values=_texts(run, known),
    )


def _reward(head: _Head, where: str) -> _Reward:
    return decode_line(_REWARD, bytes(head.data), f"{where}, data")


def _outcome(head: _Head, where: str) -> _Outcome:
    return decode_line(_OUTCOME, bytes(head.data), f"{where}, data")


def _error(run: Run, records: Sequence[_Head], *, has_reward: bool) -> str | None:
    status = (records[0].status if records else None) or _Status(state=_ENDED)
    if status.state != _ENDED:
        return f"rollout {status.state}" + (
            f": {status.error_message}" if status.error_message else ""
        )
    if "superseded_by" in run.labels and not has_reward:
        return f"superseded by attempt {run.labels['superseded_by']}"
    return None


def _texts(run: Run, rewards: Sequence[_Reward]) -> dict[str, str]:
    last = rewards[-1] if rewards else _Reward()
    texts = {name: run.labels.get(name) for name in ("rollout_id", "attempt_id")}
    texts |= {"reward_source": last.source, "reward_reason": last.reason}
    return {name: text for name, text in texts.items() if text}


def _steps(head: _Head, where: str, *, failed: bool) -> list[Step]:
    call = decode_line(_CALL, bytes(head.data), f"{where}, data")
    if call.response is None and bytes(call.response_token_ids) != b"null":
        steps = [_triplet(call, where)]
    else:
        with np.errstate(over="ignore"):  # an overflow to infinity is rejected by logprobs_finite
            steps = read_choices(call.response, call.request, where, failed=failed)
        _refuse_difference(call, steps, where)
    version = call.model_version
    if version is None and call.server is not None:
        version = call.server.version
    for step in steps:
        step.policy_version = version
    if bytes(call.routed_experts) != b"null":
        first = steps[0]
        num_tokens = num_ids(first.prompt_token_ids) + num_ids(first.response_ids)
        place = f"{where}, data.routed_experts"
        first.rollout_expert_indices = route_array(call.routed_experts, num_tokens, place)
    return steps


def _refuse_difference(call: _Call, steps: Sequence[Step], where: str) -> None:
    """Reject a response whose only choice has ids that differ from the event's triplet fields."""
    if len(steps) > 1:
        return
    for name, ids in (
        ("prompt_token_ids", steps[0].prompt_token_ids),
        ("response_token_ids", steps[0].response_ids),
    ):
        other = bytes(getattr(call, name))
        if other != b"null" and isinstance(ids, bytes):
            same_ids(ids, other, name, f"{where}, data")


def _triplet(call: _Call, where: str) -> Step:
    """Read a call that was exported with the API's `format=triplet`."""
    prompt = strict_ids(bytes(call.prompt_token_ids), "prompt", where)
    response = strict_ids(bytes(call.response_token_ids), "response", where)
    given, usage = call.response_log_probs, call.usage or Usage()
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=None if given is None else logprob_array(given, len(response), where),
        num_counted=(usage.prompt_tokens or None, usage.completion_tokens or None),
    )


_is_event = is_object_with(["event_type", "rollout_id", "attempt_id", "data"])
_is_rollout = is_object_with(["rollout_id", "is_train", "status", "config"])


def recognizes(start: Start) -> bool:
    """True if a file contains Agent Lightning's events or rollout records."""
    values = start.document if isinstance(start.document, list) else start.values
    return any(_is_event(value) or _is_rollout(value) for value in values)


ADAPTER = Adapter(
    summary="Agent Lightning: events (model requests, rewards) and rollouts, JSONL or a JSON list",
    recognizes=recognizes,
    find=find_attempts,
    read=read_attempt,
    contents=CONTENTS,
)
