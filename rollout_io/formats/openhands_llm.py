"""The `openhands_llm` format: logs of model calls by OpenHands (SDK and before), one document each.

    {"messages": [...], "tools": [...], "kwargs": {...}, "response": {"choices": [...]},
     "timestamp": 1757015033.2, "cost": 0.02, "latency_sec": 3.4}

Calls of the Responses API have `input` and `instructions` in place of messages. The files of a
directory are one run, in the order of their times. A call whose prompt begins with the messages of an
earlier call continues its context. The tokens are exact if the responses have the engine's ids. The log
has no reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import read_input
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
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects.bodies import answers_of, prompt_of
from rollout_io.formats.parsing.content import raw_of
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.lines import read_record
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.naming import natural_key
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_GROUPS = "inferred: the calls in one directory are one run, and a separate instance"
_CONTENTS = Contents(
    reads={"": "messages tools input instructions response kwargs.temperature kwargs.top_p"},
    leaves={
        "settings of the request": "kwargs context_window llm_path include store reasoning",
        "facts about the call": "cost timestamp latency_sec usage_summary usage error fncall_prompt "
        "args log_completions",
        "repeats the response": "raw_response",
    },
)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def find_calls(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per directory."""
    yield About("groups", _GROUPS)
    runs: dict[str, list[tuple[float, Place]]] = {}
    for given in sorted(inputs, key=lambda each: natural_key(each.name)):
        content = read_input(given.path)
        progress(len(content))
        place = Place(given.path, given.name, 0, len(content))
        try:
            time = decode_document(_OBJECT, content, given.name).get("timestamp")
            number = float(time) if isinstance(time, int | float) else 0.0
            runs.setdefault(str(Path(given.name).parent), []).append((number, place))
        except RolloutError as error:
            yield Rejected(place, error)
    for folder, calls in runs.items():
        places = [place for _, place in sorted(calls, key=lambda each: each[0])]
        yield Run(instance_id=folder, repetition_id=0, places=places, labels={"directory": folder})


def read_calls(run: Run, _: Options) -> Trajectory:
    """Read the calls of a directory.

    Raises:
        InputError: `record_type`: a document is no object, or has no prompt; `message`: a message
            cannot be read; `no_calls`, `no_token_ids`: see `steps_of`.
    """
    calls: list[Call] = []
    for place in run.places:
        where = place.where
        value = decode_document(_OBJECT, read_record(place), where)
        account(_CONTENTS, value)
        prompt = prompt_of(value, where)
        if prompt is None:
            hint = "see docs/formats.md#openhands_llm for the fields of the format"
            raise InputError("record_type", where, "the log has no prompt", "messages", hint)
        response = value.get("response")
        answers = answers_of(response, f"{where}, response") if response else []
        if not answers:
            continue
        kwargs = value.get("kwargs")
        sampling = kwargs if isinstance(kwargs, Mapping) else {}
        call = Call(
            where=where,
            prompt=prompt.messages,
            reply=answers[0],
            answer=raw_of(response),
            tools=prompt.tools,
            temperature=_number(sampling.get("temperature")),
            top_p=_number(sampling.get("top_p")),
        )
        calls.append(call)
    return Trajectory(steps=steps_of(calls, run.places[0].where))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def recognizes(start: Start) -> bool:
    """True if a file is the log of one call."""
    return start.is_file and any(map(_is_call, start.values))


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict) or not {"response", "timestamp", "latency_sec"} <= value.keys():
        return False
    return isinstance(value.get("messages", value.get("input")), list)


ADAPTER = Adapter(
    summary="logs of model calls by OpenHands, one JSON document each",
    recognizes=recognizes,
    find=find_calls,
    read=read_calls,
    is_text=True,
    noun="run",
    contents=_CONTENTS,
)
