"""Formats that are recognized but rejected, with a hint about what to convert instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from rollout_io.formats.base import Adapter, Found, Input, Options, Progress, Rejected, Run
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.records import decode_record, find_records
from rollout_io.formats.start import Start
from schemas.errors import InputError


def _refused(summary: str, told: Callable[[Any], str | None], hint: str) -> Adapter:
    """Return an adapter that rejects every record of its logs.

    Args:
        summary: One-line description of the format.
        told: Returns what a record is, for errors; None if it is no record of the format. A log is
            JSON Lines, or a document that is one record or has a list `results` of records.
        hint: Hint that names the log to convert instead.
    """

    def recognizes(start: Start) -> bool:
        return any(told(each) is not None for v in start.values for each in _parts(v))

    def find_in(record: Record) -> Iterator[Rejected]:
        parts = _parts(decode_record(record))
        for i, part in enumerate(parts):
            where = record.place.where + (f", results[{i}]" if len(parts) > 1 else "")
            place = msgspec.structs.replace(record.place, where=where, part=i)
            got = told(part) or "the record has no conversation"
            yield Rejected(place, InputError("no_conversation", where, got, hint=hint))

    def find(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        return find_records(inputs, progress, find_in)

    return Adapter(
        summary=summary, recognizes=recognizes, find=find, read=_never_read, is_text=True
    )


def _parts(value: Any) -> list[Any]:
    results = value.get("results") if isinstance(value, Mapping) else None
    return results if isinstance(results, list) and results else [value]


def _never_read(run: Run, _: Options) -> NoReturn:
    raise AssertionError(f"{run.places[0].where}: every record is rejected when it is found")


def _terminal_bench(record: Any) -> str | None:
    names = {"trial_name", "task_id", "is_resolved"}
    if not isinstance(record, Mapping) or not names <= record.keys():
        return None
    resolved = {True: "true", False: "false"}.get(record["is_resolved"], "null")
    mode = " ".join(str(record.get("failure_mode") or "unset").split())[:80]
    trial = str(record["trial_name"])
    state = f"(is_resolved {resolved}, failure_mode {mode})"
    return f"the result of trial {trial!r} has no conversation {state}"


def _agents_sdk_trace(record: Any) -> str | None:
    is_trace = isinstance(record, Mapping) and record.get("object") in {"trace", "trace.span"}
    return "the trace of OpenAI's Agents SDK has no texts" if is_trace else None


REFUSED = {
    "openai_agents_trace": _refused(
        "traces of OpenAI's Agents SDK: recognized but rejected, since they have no texts",
        _agents_sdk_trace,
        "convert the run's saved state or items, or traces of OpenInference or OpenTelemetry",
    ),
    "terminal_bench": _refused(
        "Terminal-Bench 1 results: recognized but rejected, since they have no conversation",
        _terminal_bench,
        "convert the agent's logs (sessions/ and agent-logs/ of the trial) with --rewards",
    ),
}
