"""Formats that are recognized but rejected, with a hint about what to convert instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Generic, NoReturn, TypeVar

import msgspec

from rollout_io.formats.base import Adapter, Found, Input, Options, Place, Progress, Rejected, Run
from rollout_io.formats.parsing.documents import find_documents, is_document, parts_of
from rollout_io.formats.parsing.jsonl import decode_document
from schemas.errors import InputError, RolloutError

T = TypeVar("T")


class _TerminalBench(msgspec.Struct, gc=False):
    trial_name: str
    task_id: str
    is_resolved: bool | None
    failure_mode: str | None = None

    def __str__(self) -> str:
        resolved = {True: "true", False: "false", None: "null"}[self.is_resolved]
        mode = " ".join((self.failure_mode or "unset").split())[:80]
        state = f"(is_resolved {resolved}, failure_mode {mode})"
        return f"the result of trial {self.trial_name!r} has no conversation {state}"


class _Results(msgspec.Struct, Generic[T], gc=False):
    results: Annotated[list[T], msgspec.Meta(min_length=1)]


_PARTS: msgspec.json.Decoder[_Results[msgspec.Raw]] = msgspec.json.Decoder(_Results[msgspec.Raw])


def _refused(
    summary: str, record: type[msgspec.Struct], marks: Sequence[bytes], hint: str
) -> Adapter:
    """Return an adapter that rejects every record of its logs.

    A log is a document that is one record, or that has a list `results` of records.

    Args:
        summary: One-line description of the format.
        record: Type of a record, whose `str` describes the record in errors.
        marks: Byte strings, one of which occurs in the first 64 KiB of every log.
        hint: Hint that names the log to convert instead.
    """
    decoder = msgspec.json.Decoder(record)
    list_decoder = msgspec.json.Decoder(_Results[record])  # type: ignore[valid-type]

    def recognizes(path: Path) -> bool:
        return any(is_document(path, known, marks) for known in (decoder, list_decoder))

    def reject(place: Place, content: bytes) -> Rejected:
        try:
            got = str(decode_document(decoder, content, place.where))
        except RolloutError as error:
            return Rejected(place, error)
        return Rejected(place, InputError("no_conversation", place.where, got, hint=hint))

    def find_in(place: Place, document: bytes) -> Iterator[Rejected]:
        try:
            records = _PARTS.decode(document).results
        except (msgspec.MsgspecError, UnicodeDecodeError):
            yield reject(place, document)
            return
        parts = parts_of(place, document, "results", records)
        yield from (reject(part, bytes(raw)) for part, raw in zip(parts, records, strict=True))

    def find(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        yield from find_documents(inputs, progress, find_in)

    return Adapter(
        summary=summary, recognizes=recognizes, find=find, read=_never_read, is_text=True
    )


def _never_read(run: Run, _: Options) -> NoReturn:
    raise AssertionError(f"{run.places[0].where}: every record is rejected when it is found")


REFUSED = {
    "terminal_bench": _refused(
        "Terminal-Bench 1 results: recognized but rejected, since they have no conversation",
        _TerminalBench,
        (b'"is_resolved"', b'"recording_path"'),
        "convert the agent's logs (sessions/ and agent-logs/ of the trial) with --rewards",
    ),
}
