"""The `calls` format: JSONL, one LLM call a line, in any order, with the engine's exact tokens.

    {"session": "shop-1/0", "agent": "main", "time": 1795251821.16, "final": true,
     "request": {"messages": [...], "temperature": 1.0, ...},
     "response": {"prompt_token_ids": [...], "choices": [{"token_ids": [...], ...}], ...}}

`request` and `response` are as an OpenAI-compatible server took and gave them, asked for
`return_token_ids` and `logprobs`. `final`, `reward`, `policy_version`, `agent` and `time` are
optional; without `time`, calls of a session are in the order of the lines.

A first look notes where the calls of each session are; then each session is read. So memory holds a
few words per call, however long the contexts are.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from rollout_io.adapters import (
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
from rollout_io.adapters.detect import has_record
from rollout_io.logs.completions import Answer, Int32, Request, read_choices
from rollout_io.logs.jsonl import decode_line, refuse_not_utf8
from rollout_io.logs.naming import natural_key, split_session
from rollout_io.logs.records import lines_of, read_record
from rollout_io.logs.tokens import num_ids
from schemas.errors import RolloutError

Key = tuple[str, int]
_SESSION_FIRST = re.compile(rb'\s*\{\s*"session"\s*:\s*"([^"\\\x00-\x1f]+)"')
_SESSION = re.compile(rb'"session"\s*:\s*("(?:[^"\\]|\\.)*")')


class _Call(msgspec.Struct, gc=False):
    session: str
    request: Request
    response: Answer
    agent: str | None = None
    time: float | None = None
    final: bool = False
    reward: float | None = None
    policy_version: Int32 | None = None


class _Head(msgspec.Struct, gc=False):
    session: str


class _Shape(msgspec.Struct, gc=False):
    session: str
    request: dict[str, msgspec.Raw]
    response: dict[str, msgspec.Raw] | list[msgspec.Raw] | str | None


class _Entry(msgspec.Struct, gc=False):
    """A call and its place."""

    place: Place
    content: bytes
    call: _Call


_RANK = attrgetter("call.time", "call.final")
_SHAPE_DECODER = msgspec.json.Decoder(_Shape)
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_TEXT_DECODER = msgspec.json.Decoder(str)
_DECODER = msgspec.json.Decoder(_Call)


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Sessions in natural order (shop-2 before shop-10), repetitions ascending.

    A damaged call takes its session with it, where the line still says which.
    """
    sessions: defaultdict[bytes, list[Place]] = defaultdict(list)
    for place, content in lines_of(inputs, progress):
        match = _SESSION_FIRST.match(content)
        try:
            name = match[1] if match else b""
            name = name if name and name.isascii() else _session(content, place.where)
            sessions[name].append(place)
        except RolloutError as error:
            yield Rejected(place, error)
    runs: list[Run] = []
    for name, places in sessions.items():
        try:
            key = split_session(name.decode(), places[0].where)
            runs.append(Run(instance_id=key[0], repetition_id=key[1], places=places))
        except RolloutError as error:
            yield from (Rejected(place, error) for place in places)
    keys = {name: natural_key(name) for name in {run.instance_id for run in runs}}
    yield from sorted(runs, key=lambda run: (keys[run.instance_id], run.repetition_id))


def _session(content: bytes, where: str) -> bytes:
    """The session of a line in which it is not the first key, or of a damaged one that names it."""
    try:
        refuse_not_utf8(content, where)
        return decode_line(_HEAD_DECODER, content, where).session.encode()
    except RolloutError:
        match = _SESSION.search(content)
        try:
            if match is not None:
                return _TEXT_DECODER.decode(match[1]).encode()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        raise


def read_session(run: Run, _: Options) -> Trajectory:
    """The calls of a session in order, one step per sampled choice.

    Any permutation of lines that carry `time` gives the same steps. A call's own reward goes to its
    last choice; the last call's is the outcome.

    Raises:
        RolloutError: A call that cannot be used, or calls whose order cannot be told.
    """
    session = f"{run.instance_id}/{run.repetition_id}"
    entries = [_read(place, session) for place in run.places]
    _order(f"session {session}", entries)
    steps: list[Step] = []
    for entry in entries:
        call, where = entry.call, entry.place.where
        choices = read_choices(call.response, call.request, where, failed=run.failed)
        for step in choices:
            step.agent, step.policy_version = call.agent, call.policy_version
        choices[-1].reward = call.reward
        steps += choices
    return Trajectory(steps=steps, reward=steps[-1].reward)


def _read(place: Place, session: str) -> _Entry:
    content = read_record(place)
    refuse_not_utf8(content, place.where)
    call = decode_line(_DECODER, content, place.where)
    if call.session != session:
        got, expected = f"session {call.session!r} too", f"{session} alone"
        raise RolloutError("session_name", place.where, got, expected, "a key twice in one object")
    return _Entry(place, content, call)


def _order(session: str, entries: list[_Entry]) -> None:
    untimed = [entry for entry in entries if entry.call.time is None]
    if 0 < len(untimed) < len(entries):
        timed = next(entry for entry in entries if entry.call.time is not None)
        expected = f"a `time`, as in {timed.place.where}"
        hint = "give every call of a session its time, or none"
        got = f"a call of {session} without `time`"
        raise RolloutError("mixed_time", untimed[0].place.where, got, expected, hint)
    if not untimed:
        entries.sort(key=_RANK)
        if len(set(map(_RANK, entries))) < len(entries):
            _order_ties(session, entries)
    finals = [entry for entry in entries if entry.call.final]
    if len(finals) > 1:
        places = " and ".join(sorted(entry.place.where for entry in finals[:2]))
        got = f"{session} with {len(finals)} last steps (`final`): {places}"
        hint = "two runs under one session name? number them instance/0, instance/1, ..."
        raise RolloutError("boundary_alignment", finals[1].place.where, got, "one last step", hint)
    if finals and finals[0] is not entries[-1]:
        where = finals[0].place.where
        got = f"{session} going on after its `final` call, in {entries[-1].place.where}"
        hint = "correct the `time` of the two calls, or take `final` off the earlier one"
        raise RolloutError("boundary_alignment", where, got, "`final` to be last", hint)


def _order_ties(session: str, entries: list[_Entry]) -> None:
    """Calls of one time: the shorter prompt first, and none twice."""
    entries.sort(key=lambda e: (e.call.time, e.call.final, _prompt_size(e.call), e.content))
    for before, entry in itertools.pairwise(entries):
        if before.content.rstrip() == entry.content.rstrip():
            got = f"a copy of {before.place.where} ({session})"
            hint = "was a file given twice, or appended to itself?"
            raise RolloutError("duplicate_call", entry.place.where, got, "each call once", hint)


def _prompt_size(call: _Call) -> int:
    try:
        return num_ids(read_choices(call.response, call.request, "")[0].prompt_token_ids)
    except RolloutError:
        return 0


def recognizes(path: Path) -> bool:
    """Whether a file has lines with a `session`, a `request` and a `response`."""
    return has_record(path, _SHAPE_DECODER)


ADAPTER = Adapter(
    summary="calls of an OpenAI-compatible engine (vLLM), as they went over the wire: JSONL",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
)
