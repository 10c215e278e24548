"""Formats that are recognized but rejected, with a hint about what to convert instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from rollout_io.formats.base import Adapter, Options, Place, Run
from rollout_io.formats.engines.records import Records
from schemas.errors import InputError


def _refused(summary: str, describe: Callable[[Any], str | None], hint: str) -> Adapter:
    """Return an adapter that rejects every record of its logs.

    `describe` returns what a record is, for errors; None if it is no record of the format.
    """

    def run(record: Any, place: Place) -> NoReturn:
        finding = describe(record) or "the record has no conversation"
        raise InputError("no_conversation", place.where, finding, hint=hint)

    adapter = Records(
        records={"": Any},
        run=run,
        read=_never_read,
        is_record=lambda value: any(describe(part) is not None for part in _parts(value)),
        elements="results",
    ).adapter(summary)
    return replace(adapter, contents=None)


def _parts(value: Any) -> list[Any]:
    results = value.get("results") if isinstance(value, Mapping) else None
    return results if isinstance(results, list) and results else [value]


def _never_read(_: Any, run: Run, __: Options) -> NoReturn:
    raise AssertionError(f"{run.places[0].where}: every record is rejected when it is found")


def _terminal_bench(record: Any) -> str | None:
    names = {"trial_name", "task_id", "is_resolved"}
    if not isinstance(record, Mapping) or not names <= record.keys():
        return None
    resolved = json.dumps(record["is_resolved"])[:80]
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
