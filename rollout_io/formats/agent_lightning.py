"""The `agent_lightning` format: events of Agent Lightning's API, as JSONL or one JSON list.

The events of one attempt at a rollout form a run. Its calls are ordered by time, and all of them
are kept (the API's `format=triplet` keeps one per prompt). Events of other types are ignored.
Events do not name a task, so each rollout forms a separate group. If the log also has rollout
records (`GET /api/rollouts`: `rollout_id`, `input`, `status`), rollouts with equal inputs form one
group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from rollout_io.formats.base import (
    About,
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
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.bodies import Answer, Int32, Request, Usage
from rollout_io.formats.parsing.completions import read_choices
from rollout_io.formats.parsing.content import NO_JSON, filled, known
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.records import (
    DUPLICATE,
    ModelNames,
    incomplete,
    label,
    named_in,
    read_record,
    refuse_repeated,
)
from rollout_io.formats.parsing.tokens import (
    logprob_array,
    num_ids,
    route_array,
    same_ids,
    strict_ids,
)
from schemas.errors import InputError, InvariantError, RolloutError

_ENDED = "succeeded"
_ALONE = {DUPLICATE, "unique_trajectory"}
"""Rules that reject a single record instead of its attempt."""

ROLLOUTS = (
    "inferred: events do not name a task, so each rollout is a separate group (--group-by prompt "
    "groups rollouts with the same first prompt)"
)
INPUTS = "inferred: rollouts with the same `data_id` or, without it, with equal inputs"
_LEAVES = {
    "facts about a call": "model_request/data.finish_reason model_request/data.latency_ms "
    "model_request/data.model model_request/data.retry_count model_request/data.server "
    "model_request/data.usage",
    "facts about a rollout": "rollout/config rollout/is_train rollout/metadata rollout/status",
    "notes of the program, not sent": "note",
}


class _Event(msgspec.Struct, gc=False):
    rollout_id: str
    attempt_id: str | None = None
    timestamp: float | None = None


class _Server(msgspec.Struct, gc=False):
    version: Int32 | None = None


class _CallData(msgspec.Struct, gc=False):
    request: msgspec.Raw = msgspec.Raw(b"{}")
    response: msgspec.Raw = NO_JSON
    http_status: int | None = None
    status: str | None = None
    model_version: Int32 | None = None
    server: _Server | None = None
    routed_experts: msgspec.Raw = NO_JSON
    prompt_token_ids: msgspec.Raw = NO_JSON
    response_token_ids: msgspec.Raw = NO_JSON
    response_log_probs: list[float] | None = None
    usage: Usage | None = None

    @property
    def is_refused(self) -> bool:
        """True if the server did not answer."""
        return (self.http_status or 200) >= 400 or self.status not in {"ok", None}


class _Call(_Event, kw_only=True, gc=False):
    data: _CallData = msgspec.field(default_factory=_CallData)


class _RewardData(msgspec.Struct, gc=False):
    value: float | bool | None = None
    source: str | None = None
    reason: str | None = None


class _Reward(_Event, kw_only=True, gc=False):
    data: _RewardData = msgspec.field(default_factory=_RewardData)


class _Status(msgspec.Struct, gc=False):
    state: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class _RolloutRecord(_Event, kw_only=True, gc=False):
    input: msgspec.Raw = NO_JSON
    status: _Status


class _Prompt(msgspec.Struct, gc=False):
    messages: msgspec.Raw = NO_JSON
    prompt: msgspec.Raw = NO_JSON


_PROMPT = msgspec.json.Decoder(_Prompt | None)
_REQUEST = msgspec.json.Decoder(Request)
_ANSWER = msgspec.json.Decoder(Answer)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Rollout:
    """A rollout: the time and place of each event, by attempt, and the place of its own record.

    Damage is by attempt, too; that of None is of the entire rollout.
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

    def run_of(event: _Event, place: Place) -> Run:
        content = read_record(place)
        refuse_repeated(content.strip(), place.where, first)
        _note(event, place, rollouts)
        models.see(content)
        return Run(instance_id=event.rollout_id, repetition_id=None, places=[place])

    for item in replace(_RECORDS, run=run_of).find(inputs, progress):
        if isinstance(item, Rejected):
            yield item
            content = (
                b"" if item.place.part or item.error.rule in _ALONE else read_record(item.place)
            )
            name = named_in(content, "rollout_id")
            if name is not None:
                attempt = named_in(content, "attempt_id")
                rollout = rollouts.setdefault(name, _Rollout())
                rollout.damaged.setdefault(attempt, item.error)
                if attempt is not None:
                    rollout.attempts.setdefault(attempt, [])
    yield from models.about()
    if rollouts:
        yield About("groups", ROLLOUTS if any(not r.record for r in rollouts.values()) else INPUTS)
    for name, rollout in rollouts.items():
        yield from _runs(name, rollout)


def _note(event: _Event, place: Place, rollouts: dict[str, _Rollout]) -> None:
    where = place.where
    rollout = rollouts.get(event.rollout_id) or _Rollout()
    if isinstance(event, _RolloutRecord):
        if rollout.record is not None:
            hint = "convert the logs of different collections separately"
            finding = f"rollout {event.rollout_id!r} is already in {rollout.record.where}"
            raise InvariantError("unique_trajectory", where, finding, hint=hint)
        text = bytes(event.input)
        fields = decode_line(_FIELDS, text, f"{where}, input") if text.startswith(b"{") else {}
        data_id = label(fields.get("data_id"), where)
        rollout.labels |= known({"input": f"input-{_digest(event.input)}", "data_id": data_id})
        rollout.record, rollout.last = place, event.status.last_attempt_id
    elif event.attempt_id is None:
        raise InputError("record_type", where, "the event has no `attempt_id`")
    else:
        if isinstance(event, _Call):
            request = decode_line(_PROMPT, bytes(event.data.request), f"{where}, data.request")
            if request is not None:
                prompt = request.prompt if bytes(request.messages) == b"null" else request.messages
                rollout.labels.setdefault("prompt", f"prompt-{_digest(prompt)}")
        events = rollout.attempts.setdefault(event.attempt_id, [])
        is_untimed = event.timestamp is None and events
        events.append((events[-1][0] if is_untimed else event.timestamp or 0.0, place))
    rollouts[event.rollout_id] = rollout


def _digest(raw: msgspec.Raw) -> str:
    return hashlib.blake2b(bytes(raw), digest_size=6).hexdigest()


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
        superseded_by = last if last is not None and attempt != last else None
        names = {"rollout_id": name, "attempt_id": attempt}
        names |= filled(superseded_by=superseded_by, **labels)
        yield Run(instance_id=instance, repetition_id=None, places=places, labels=names)


def read_attempt(_: _Event, run: Run, _options: Options) -> Trajectory:
    """Read the calls of an attempt, one step per choice; the attempt's last reward is the outcome.

    Failed calls (HTTP status 400 and above) are counted in the metric `num_failed_requests`. A run
    has failed if its rollout failed, if none of its calls succeeded, or if it was retried and has
    no reward.
    """
    calls, rewards, status = list[tuple[str, _CallData]](), list[_RewardData](), None
    for place in run.places:
        event = _RECORDS.typed(read_record(place), place.where, decode_line)[1]
        if isinstance(event, _Call):
            calls.append((place.where, event.data))
        elif isinstance(event, _Reward) and event.data.value is not None:
            rewards.append(event.data)
        elif isinstance(event, _RolloutRecord):
            status = event.status
    refused = [call for _, call in calls if call.is_refused]
    error = None
    if status is not None and status.state != _ENDED:
        message = f": {status.error_message}" if status.error_message else ""
        error = f"rollout {status.state}{message}"
    elif "superseded_by" in run.labels and not rewards:
        error = f"superseded by attempt {run.labels['superseded_by']}"
    if error is None and calls and len(refused) == len(calls):
        error = f"all {len(refused)} model requests failed (HTTP {refused[-1].http_status})"
    failed = run.failed or error is not None
    answered = [(where, call) for where, call in calls if not call.is_refused]
    steps = [step for where, call in answered for step in _steps(call, where, failed=failed)]
    if not steps and not failed:
        where = run.places[0].where
        raise InputError("no_calls", where, "the attempt has no model requests")
    metrics = {f"reward[{i}]": float(r.value or 0) for i, r in enumerate(rewards[:-1])}
    last = rewards[-1] if rewards else _RewardData()
    if last.value is not None:
        metrics["reward"] = float(last.value)
    if refused:
        metrics["num_failed_requests"] = float(len(refused))
    return Trajectory(
        steps=steps,
        reward=metrics.get("reward"),
        error=error,
        metrics=metrics,
        user_values=filled(
            rollout_id=run.labels.get("rollout_id"),
            attempt_id=run.labels.get("attempt_id"),
            reward_source=last.source,
            reward_reason=last.reason,
        ),
    )


def _steps(call: _CallData, where: str, *, failed: bool) -> list[Step]:
    if bytes(call.response) == b"null" and bytes(call.response_token_ids) != b"null":
        steps = [_triplet(call, where)]
    else:
        request = decode_line(_REQUEST, bytes(call.request), f"{where}, data.request")
        answer = decode_line(_ANSWER, bytes(call.response), f"{where}, data.response")
        with np.errstate(over="ignore"):  # an overflow to infinity is rejected by logprobs_finite
            steps = read_choices(answer, request, where, failed=failed)
        _refuse_difference(call, steps, where)
    version = call.model_version
    if version is None and call.server is not None:
        version = call.server.version
    for step in steps:
        step.policy_version = version
    first = steps[0]
    num_tokens = num_ids(first.prompt_token_ids) + num_ids(first.response_ids)
    place = f"{where}, data.routed_experts"
    routes = route_array(call.routed_experts, num_tokens, place)
    first.rollout_expert_indices = first.rollout_expert_indices if routes is None else routes
    return steps


def _refuse_difference(call: _CallData, steps: Sequence[Step], where: str) -> None:
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


def _triplet(call: _CallData, where: str) -> Step:
    """Read a call that was exported with the API's `format=triplet`."""
    prompt = strict_ids(bytes(call.prompt_token_ids), "prompt", where)
    response = strict_ids(bytes(call.response_token_ids), "response", where)
    logprobs, usage = call.response_log_probs, call.usage or Usage()
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=None
        if logprobs is None
        else logprob_array(logprobs, len(response), where),
        num_counted=(usage.prompt_tokens or None, usage.completion_tokens or None),
    )


_is_entry = like("event_type rollout_id attempt_id data", "rollout_id is_train status config")
_RECORDS = Records(
    kind="event_type",
    default="rollout",
    records={"*": _Event, "model_request": _Call, "reward": _Reward, "rollout": _RolloutRecord},
    leaves=_LEAVES,
    run=lambda _, place: Run(instance_id="", repetition_id=None, places=[place]),
    read=read_attempt,
    is_record=lambda value: any(map(_is_entry, value if isinstance(value, list) else [value])),
    is_whole=lambda start: start.head.lstrip().startswith(b"["),
    elements="",
)
ADAPTER = replace(
    _RECORDS.adapter(
        "Agent Lightning: events (model requests, rewards) and rollouts, JSONL or a JSON list",
        is_text=False,
    ),
    find=find_attempts,
    line=None,
)
