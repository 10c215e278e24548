"""The `openhands_llm` format: logs of model calls by OpenHands (SDK and before), one document each.

    {"messages": [...], "tools": [...], "kwargs": {...}, "response": {"choices": [...]},
     "timestamp": 1757015033.2, "cost": 0.02, "latency_sec": 3.4}

Calls of the Responses API have `input` and `instructions` in place of messages. The files of a
directory are one run, in the order of their times. A call whose prompt begins with the messages of an
earlier call continues its context. The tokens are exact if the responses have the engine's ids. The log
has no reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import Found, Options, Place, Run, Trajectory
from rollout_io.formats.dialects.bodies import answers_of, prompt_of
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import raw_of
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.records import natural_key, read_record
from schemas.errors import InputError

_LEAVES = {
    "settings of the request": "kwargs context_window llm_path include store reasoning",
    "facts about the call": "cost latency_sec usage_summary usage error fncall_prompt "
    "args log_completions",
    "repeats the response": "raw_response",
}


class _Sampling(msgspec.Struct, gc=False):
    temperature: Any = None
    top_p: Any = None


class Logged(msgspec.Struct, gc=False):
    """The log of a call."""

    messages: Any = None
    tools: Any = None
    input: Any = None
    instructions: Any = None
    response: Any = None
    timestamp: Any = None
    kwargs: _Sampling | None = None


_LOGGED = msgspec.json.Decoder(Logged)


def run_of(call: Logged, place: Place) -> Run:
    """Return a run of one call, which `_by_folder` joins with the others of its directory."""
    labels = {"time": str(_number(call.timestamp) or 0.0)}
    folder = str(Path(place.where).parent)
    return Run(instance_id=folder, repetition_id=0, places=[place], labels=labels)


def _by_folder(items: Iterator[Found]) -> Iterator[Found]:
    folders: dict[str, list[Run]] = {}
    for item in items:
        if isinstance(item, Run):
            folders.setdefault(item.instance_id, []).append(item)
        else:
            yield item
    for folder in sorted(folders, key=natural_key):
        calls = sorted(folders[folder], key=lambda call: natural_key(call.places[0].where))
        calls.sort(key=lambda call: float(call.labels["time"]))
        places = [call.places[0] for call in calls]
        yield Run(instance_id=folder, repetition_id=0, places=places, labels={"directory": folder})


def read(_: Logged, run: Run, __: Options) -> Trajectory:
    """Read the calls of a directory."""
    calls: list[Call] = []
    for place in run.places:
        where = place.where
        logged = decode_document(_LOGGED, read_record(place), where)
        prompt = prompt_of(msgspec.structs.asdict(logged), where)
        if prompt is None:
            hint = "see docs/formats/openhands_llm.md for the fields of the format"
            raise InputError("record_type", where, "the log has no prompt", "messages", hint)
        answers = answers_of(logged.response, f"{where}, response") if logged.response else []
        sampling = logged.kwargs or _Sampling()
        calls += [
            Call(
                where=where,
                prompt=prompt.messages,
                reply=answer,
                answer=raw_of(logged.response),
                tools=prompt.tools,
                temperature=_number(sampling.temperature),
                top_p=_number(sampling.top_p),
            )
            for answer in answers[:1]
        ]
    return Trajectory(steps=steps_of(calls, run.places[0].where))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_ANSWERED = {"response": object, "timestamp": object, "latency_sec": object}
ADAPTER = Records(
    records={"": Logged},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=like({**_ANSWERED, "messages": list}, {**_ANSWERED, "messages": None, "input": list}),
    is_whole=lambda _: True,
    groups="inferred: the calls in one directory are one run, and a separate instance",
    finish=_by_folder,
).adapter("logs of model calls by OpenHands, one JSON document each")
