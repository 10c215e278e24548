"""Formats that are recognized but rejected, with a hint about what to convert instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Generic, NoReturn, TypeVar

import msgspec

from rollout_io.formats.base import Adapter, Found, Input, Options, Place, Progress, Rejected, Run
from rollout_io.formats.parsing.documents import find_documents, is_document, parts_of
from rollout_io.formats.parsing.jsonl import decode_document, decoded, first_lines
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


class _GeminiLine(msgspec.Struct, gc=False):
    """The first line of a session: it describes the session and contains no messages."""

    session: str = msgspec.field(name="sessionId")
    project: str = msgspec.field(name="projectHash")
    start: str = msgspec.field(name="startTime")
    messages: msgspec.UnsetType = msgspec.UNSET


class _GeminiRecord(msgspec.Struct, gc=False):
    """A later line: a message, an update of the session, or a return to an earlier message."""

    id: str | None = None
    type: str | None = None
    set: dict[str, msgspec.Raw] | None = msgspec.field(name="$set", default=None)
    rewind: str | None = msgspec.field(name="$rewindTo", default=None)

    def __post_init__(self) -> None:
        is_message = self.id is not None and self.type in _GEMINI_TYPES
        if not is_message and self.set is None and self.rewind is None:
            raise ValueError("not a record of a session")


_GEMINI_TYPES = frozenset({"user", "gemini", "info", "warning", "error"})
_GEMINI_FIRST = msgspec.json.Decoder(_GeminiLine)
_GEMINI_LATER = msgspec.json.Decoder(_GeminiRecord)


def _is_gemini_lines(path: Path) -> bool:
    """True if a file begins as Gemini CLI's sessions do since version 0.39."""
    first, *later = [*islice(first_lines(path), 2)] or [b""]
    try:
        decoded(_GEMINI_FIRST, first)
        for line in later:
            decoded(_GEMINI_LATER, line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _find_gemini_lines(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    for given in inputs:
        size = given.path.stat().st_size
        progress(size)
        got = "the session is in the JSON Lines of Gemini CLI 0.39 and newer, which are not read"
        hint = "record Gemini's model calls at an OpenAI-compatible engine in the format `calls`, "
        hint += "or write the conversation as `openai_messages`, without what was taken back"
        place = Place(given.path, given.name, 0, size)
        yield Rejected(place, InputError("no_conversation", given.name, got, hint=hint))


def _never_read(run: Run, _: Options) -> NoReturn:
    raise AssertionError(f"{run.places[0].where}: every record is rejected when it is found")


REFUSED = {
    "gemini_cli_jsonl": Adapter(
        summary="sessions of Gemini CLI since 0.39 (JSON Lines): recognized but rejected",
        recognizes=_is_gemini_lines,
        find=_find_gemini_lines,
        read=_never_read,
        is_text=True,
        noun="session",
    ),
    "terminal_bench": _refused(
        "Terminal-Bench 1 results: recognized but rejected, since they have no conversation",
        _TerminalBench,
        (b'"is_resolved"', b'"recording_path"'),
        "convert the agent's logs (sessions/ and agent-logs/ of the trial) with --rewards",
    ),
}
