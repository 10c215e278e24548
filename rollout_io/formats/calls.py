"""The `calls` format: JSONL, one LLM call per line, in any order, with the engine's exact tokens.

    {"session": "shop-1/0", "agent": "main", "time": 1795251821.16, "final": true,
     "request": {"messages": [...], "temperature": 1.0, ...},
     "response": {"prompt_token_ids": [...], "choices": [{"token_ids": [...], ...}], ...}}

`request` and `response` are the bodies that an OpenAI-compatible server receives and returns, with
`return_token_ids` and `logprobs` requested. `final`, `reward`, `policy_version`, `agent` and `time`
are optional; without `time`, the calls of a session are in file order. A session without any ids is
text: its contexts are re-tokenized. Logs with other names are read as such lines (`formats.mapped`).

A first pass records the places of each session's calls; then the sessions are read one by one.
Memory use is a few words per call, regardless of context length.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats import mapped
from rollout_io.formats.base import (
    HAS_TEXT,
    About,
    Adapter,
    Completion,
    Conversation,
    Found,
    Input,
    Logged,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Step,
    Trajectory,
    note,
)
from rollout_io.formats.dialects.bodies import answers_of, prompt_of
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.bodies import Answer, Int32, Request, Response
from rollout_io.formats.parsing.completions import read_choices, whole_response
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line, decoded, refuse_not_utf8
from rollout_io.formats.parsing.model_calls import EMPTY, Call, conversations_of
from rollout_io.formats.parsing.records import (
    TASK_LABELS,
    ModelNames,
    is_name,
    label,
    lines_of,
    named_in,
    natural_key,
    note_unread_labels,
    numbers,
    read_record,
    split_session,
    unread_labels,
    without_copies,
)
from rollout_io.formats.parsing.tokens import num_ids
from schemas.errors import InputError, InvariantError, RolloutError

Key = tuple[str, int]
NO_IDS = "no_token_ids"
_WITHOUT_IDS = frozenset({NO_IDS, "other_api", "nonempty_response"})
_NO_METRICS = frozenset({"reward", "time", "final", "policy_version"})
LEFT_OUT = "runs of text with rewards or policy versions of calls before the last: left out"
_SESSION_FIRST = re.compile(rb'\s*\{\s*"session"\s*:\s*"([^"\\\x00-\x1f]+)"')


class _Call(msgspec.Struct, gc=False):
    session: str
    request: Request
    response: Answer
    agent: str | None = None
    time: float | None = None
    final: bool = False
    reward: float | None = None
    policy_version: Int32 | None = None
    task_id: msgspec.Raw = NO_JSON
    task: msgspec.Raw = NO_JSON
    problem_id: msgspec.Raw = NO_JSON
    question_id: msgspec.Raw = NO_JSON
    instance: msgspec.Raw = NO_JSON


class _Bodies(msgspec.Struct, gc=False):
    request: Any
    response: Any


class _Head(msgspec.Struct, gc=False):
    session: str


class _Entry(msgspec.Struct, gc=False):
    """A call with its location and its line of the log."""

    place: Place
    content: bytes
    call: _Call


_RANK = attrgetter("call.time", "call.final")
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_DECODER = msgspec.json.Decoder(_Call)
_BODIES_DECODER = msgspec.json.Decoder(_Bodies)
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield sessions in natural order of instances (shop-2 before shop-10), then by repetition.

    A session with a damaged call is rejected if the damaged line still names the session. A copy of
    a call is rejected, but its session is not.
    """
    sessions: defaultdict[bytes, list[Place]] = defaultdict(list)
    models, exact = ModelNames(), set[bytes]()
    for place, content in lines_of(inputs, progress):
        models.see(content)
        match = _SESSION_FIRST.match(content)
        # The regular expression avoids parsing long lines; lines that it does not match are parsed.
        try:
            name = match[1] if match else b""
            name = name if name and name.isascii() else _session(content, place.where)
            sessions[name].append(place)
            if name not in exact and mapped.HAS_IDS.search(content):
                exact.add(name)
        except RolloutError as error:
            yield Rejected(place, error)
    yield from models.about()
    yield About(HAS_TEXT, len(exact) < len(sessions))
    runs: list[Run] = []
    for name, places in sessions.items():
        try:
            key = split_session(name.decode(), places[0].where)
            distinct, copies = without_copies(places)
            yield from copies
            runs.append(Run(instance_id=key[0], repetition_id=key[1], places=distinct))
        except RolloutError as error:
            yield from (Rejected(place, error) for place in places)
    keys = {name: natural_key(name) for name in {run.instance_id for run in runs}}
    yield from sorted(runs, key=lambda run: (keys[run.instance_id], run.repetition_id))


def _session(content: bytes, where: str) -> bytes:
    """Return the session name in a line that may be damaged, or may not begin with the name."""
    try:
        refuse_not_utf8(content, where)
        return decode_line(_HEAD_DECODER, content, where).session.encode()
    except RolloutError:
        name = named_in(content, "session")
        if name is None:
            raise
        return name.encode()


def read_session(run: Run, options: Options) -> Trajectory:
    """Read the calls of a session in order: one step per sampled choice, or its contexts as text.

    If all lines have `time`, their order in the file does not matter. The reward of a call is
    assigned to its last choice; the reward of the last call is the outcome.
    """
    session = f"{run.instance_id}/{run.repetition_id}"
    if options.map is None:
        entries = [_read(place, session) for place in run.places]
    else:
        entries = [_mapped(logged, options.map) for logged in mapped.calls_of(run, options.map)]
    _order(f"session {session}", entries)
    steps = _steps(entries, run, options)
    labels, fields = _labels(entries[0]), decoded(_FIELDS_DECODER, entries[0].content)
    note_unread_labels(
        labels | unread_labels(fields), run.instance_id, "name the sessions TASK/REPETITION"
    )
    last = entries[-1]
    fields = decoded(_FIELDS_DECODER, last.content)
    skipped = _NO_METRICS - {options.reward}
    metrics = numbers({n: raw for n, raw in fields.items() if n not in skipped}, last.place.where)
    return Trajectory(steps=steps, reward=last.call.reward, metrics=metrics, user_values=labels)


def _steps(entries: Sequence[_Entry], run: Run, options: Options) -> Sequence[Logged]:
    """Return the steps of a session; text if none of its responses has ids."""
    try:
        return [step for entry in entries for step in _exact(entry, run, options)]
    except RolloutError as error:
        has_ids = any(mapped.HAS_IDS.search(entry.content) for entry in entries)
        texts = () if has_ids or error.rule not in _WITHOUT_IDS else _texts(entries)
        if not texts:
            raise
        finding = "the call has no token ids" if error.expected else error.got
        finding += f", but {error.got}" if error.expected else ""
        for step in texts:
            if isinstance(step, Conversation):
                step.tokenless = InputError(NO_IDS, error.where, finding, hint=error.hint)
        return texts


def _exact(entry: _Entry, run: Run, options: Options) -> list[Step]:
    call = entry.call
    where, mode = entry.place.where, options.logprobs_mode
    steps = read_choices(call.response, call.request, where, failed=run.failed, logprobs_mode=mode)
    for step in steps:
        step.agent = call.agent
        if step.policy_versions is None:
            step.policy_version = call.policy_version
    steps[-1].reward = call.reward
    return steps


def _texts(entries: Sequence[_Entry]) -> Sequence[Conversation | Completion]:
    """Return the contexts of a session; the completions of prompts that are text without roles."""
    calls, completions = list[Call](), list[Completion]()
    for entry in entries:
        where, sampling = entry.place.where, entry.call.request
        bodies = decode_line(_BODIES_DECODER, entry.content, where)
        if not isinstance(entry.call.response, Response):
            joined = whole_response(entry.call.response, where)
            if not joined.choices:  # a stream of another API
                return []
            bodies.response = msgspec.json.decode(msgspec.json.encode(joined))
        prompt = prompt_of(bodies.request, f"{where}, request")
        answers = answers_of(bodies.response, f"{where}, response")
        if prompt is None:
            return []
        note(EMPTY, not answers)
        facts: dict[str, Any] = {"agent": entry.call.agent, "temperature": sampling.temperature}
        facts |= {"top_p": sampling.top_p, "stop_reason": _stop_reason(bodies.response)}
        for answer in answers:
            if prompt.is_plain and isinstance(bodies.request.get("prompt"), str):
                texts = {"prompt": prompt.messages[0]["content"], "response": answer["content"]}
                completions.append(Completion(source=where, **texts, **facts))
            else:
                facts |= {"prompt": prompt.messages, "tools": prompt.tools}
                calls.append(Call(where=where, reply=answer, **facts))
    outcomes = {(entry.call.reward, entry.call.policy_version) for entry in entries[:-1]}
    note(LEFT_OUT, not outcomes <= {(None, None)})
    return [*completions, *(conversations_of(calls) if calls else ())]


def _stop_reason(response: Mapping[str, Any]) -> str | None:
    first = (response.get("choices") or [response])[0]
    reason: str | None = (
        first.get("finish_reason") or first.get("stop_reason") or first.get("status")
    )
    return reason


def _labels(entry: _Entry) -> dict[str, str]:
    """Return the labels of the task in a call; the session names the group."""
    texts = {name: label(getattr(entry.call, name), entry.place.where) for name in TASK_LABELS}
    labels = {name: text for name, text in texts.items() if text and is_name(text)}
    for name in labels:
        note(f"sessions with `{name}`, kept as a column (groups: by the names of the sessions)")
    return labels


def _read(place: Place, session: str) -> _Entry:
    content = read_record(place)
    refuse_not_utf8(content, place.where)
    call = decode_line(_DECODER, content, place.where)
    if call.session != session:
        finding = f"the line has two sessions, {session!r} and {call.session!r}"
        hint = "write the key `session` once per line"
        raise InputError("session_name", place.where, finding, hint=hint)
    return _Entry(place, content, call)


def _mapped(logged: mapped.Logged, paths: Mapping[str, str]) -> _Entry:
    try:
        call = decode_line(_DECODER, logged.content, logged.where)
    except InputError as error:  # name the keys of the log, not those of a line
        where = error.where
        for name, path in paths.items():
            where = where.replace(f"$.{name}", f"$.{path}")
        raise error.at(where) from None
    return _Entry(Place(Path(), logged.where), logged.content, call)


def _order(session: str, entries: list[_Entry]) -> None:
    untimed = [entry for entry in entries if entry.call.time is None]
    if 0 < len(untimed) < len(entries):
        timed = next(entry for entry in entries if entry.call.time is not None)
        finding = f"this call of {session} has no `time`, but {timed.place.where} has one"
        hint = "write `time` for every call of the session, or for none"
        raise InputError("mixed_time", untimed[0].place.where, finding, hint=hint)
    if not untimed:
        entries.sort(key=_RANK)
        if len(set(map(_RANK, entries))) < len(entries):
            # Calls with equal times are ordered by the length of their prompts.
            entries.sort(key=lambda e: (*_RANK(e), _prompt_size(e.call), e.content))
    finals = [entry for entry in entries if entry.call.final]
    if len(finals) > 1:
        places = " and ".join(sorted(entry.place.where for entry in finals[:2]))
        finding = f"{session} has {len(finals)} `final` calls: {places}"
        hint = "number the runs of an instance: instance/0, instance/1, ..."
        raise InvariantError("boundary_alignment", finals[1].place.where, finding, hint=hint)
    if finals and finals[0] is not entries[-1]:
        where = finals[0].place.where
        finding = f"{session} has a call after its `final` call: {entries[-1].place.where}"
        hint = "correct the `time` of the two calls, or remove `final` from the earlier one"
        raise InvariantError("boundary_alignment", where, finding, hint=hint)


def _prompt_size(call: _Call) -> int:
    try:
        return num_ids(read_choices(call.response, call.request, "")[0].prompt_token_ids)
    except RolloutError:
        return 0


def recognizes(start: Start) -> bool:
    """True if a file has lines with a `session`, a `request` and a `response`."""
    return any(
        isinstance(record.get("session"), str)
        and isinstance(record.get("request"), dict)
        and isinstance(record.get("response", 0), dict | list | str | None)
        for record in start.records
    )


ADAPTER = Adapter(
    summary="requests and responses of an OpenAI-compatible engine (vLLM): JSONL, one call per line",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    noun="session",
    line=_Call,
    is_own=True,
)
