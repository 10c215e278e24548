"""The `terminal_bench` format: results of Terminal-Bench 1, recognised and refused.

    {"trial_name": ..., "task_id": ..., "is_resolved": true, "failure_mode": "unset",
     "parser_results": {TEST: "passed"}, "recording_path": ...}

A result, alone or in the list `results` of a whole benchmark, says how a trial ended and holds no
conversation: there is nothing to train on. What the agent itself logged may be of another format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from rollout_io.adapters import Adapter, Found, Input, Options, Place, Progress, Rejected, Run
from rollout_io.logs.documents import decode_document, find_documents, is_document
from rollout_io.logs.parts import parts_of
from schemas.errors import RolloutError

_MARKS = (b'"is_resolved"', b'"recording_path"')
_UNSET = "unset"


class _Result(msgspec.Struct, gc=False):
    trial_name: str
    task_id: str
    is_resolved: bool | None
    failure_mode: str | None = None


class _Head(msgspec.Struct, gc=False):
    """A result, or a benchmark's."""

    trial_name: str | None = None
    task_id: str | None = None
    is_resolved: bool | msgspec.UnsetType | None = msgspec.UNSET
    results: list[_Result] | None = None

    def __post_init__(self) -> None:
        is_alone = self.is_resolved is not msgspec.UNSET and None not in (
            self.trial_name,
            self.task_id,
        )
        if not is_alone and not self.results:
            raise ValueError("no result of Terminal-Bench")


class _Benchmark(msgspec.Struct, gc=False):
    results: list[msgspec.Raw] | None = None


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_BENCHMARK_DECODER = msgspec.json.Decoder(_Benchmark)
_RESULT_DECODER = msgspec.json.Decoder(_Result)


def find_results(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Each result, refused."""
    yield from find_documents(inputs, progress, _find)


def _find(place: Place, content: bytes) -> Iterator[Found]:
    results = decode_document(_BENCHMARK_DECODER, content, place.where).results
    if not results:
        yield Rejected(place, _refusal(content, place.where))
        return
    parts = parts_of(place, content, "results", results)
    for part, raw in zip(parts, results, strict=True):
        yield Rejected(part, _refusal(bytes(raw), part.where))


def _refusal(content: bytes, where: str) -> RolloutError:
    try:
        result = decode_document(_RESULT_DECODER, content, where)
    except RolloutError as error:
        return error
    resolved = {True: "true", False: "false", None: "null"}[result.is_resolved]
    got = f"the result of trial {result.trial_name!r} without its conversation"
    got += f" (is_resolved {resolved}, failure_mode {_shown(result.failure_mode)})"
    hint = "convert what the agent logged (the trial's sessions/ and agent-logs/), with --rewards"
    return RolloutError("no_conversation", where, got, "the messages of the run", hint)


def read_result(run: Run, _: Options) -> NoReturn:
    """Nothing is found that could be read.

    Raises:
        RolloutError: no_conversation.
    """
    where = run.places[0].where
    raise RolloutError("no_conversation", where, "a result alone", "the messages of the run")


def _shown(mode: str | None) -> str:
    return " ".join(mode.split())[:80] if mode else _UNSET


def recognizes(path: Path) -> bool:
    """Whether a file is a result of Terminal-Bench 1, or of a whole benchmark."""
    return is_document(path, _HEAD_DECODER, _MARKS)


ADAPTER = Adapter(
    summary="Terminal-Bench 1 results: named, and refused (they hold no conversation)",
    recognizes=recognizes,
    find=find_results,
    read=read_result,
    is_text=True,
)
