"""The interface of adapters, which find the runs in a harness's logs and read them.

An `Adapter` is registered as an entry point of the group `rollout_io.formats`, under its name for
`rollouts convert --format`. It locates the runs of a log in a quick pass (`find`) and reads them
one at a time (`read`). The conversion does the rest: order, groups, rewards, re-tokenization,
checks, rejected records, files, processes, resuming.

A reader notes what a log lacks or how its text was changed (`note`); the conversion collects the notes of
each run with `noted`, and the summary adds them up. Outside of `noted`, a note has no effect. Notes whose
name begins with `UNREAD` count content that a reader does not know (`grammar`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.configuration import Count, out_of_bounds
from schemas.errors import ConfigError, InputError, RolloutError

if TYPE_CHECKING:
    from rollout_io.formats.engines.files import Start
    from rollout_io.formats.grammar import Contents


class Input(NamedTuple):
    """An input log: its name in messages, and its path or that of a decompressed copy."""

    name: str
    path: Path


class Place(msgspec.Struct, frozen=True, gc=False):
    """Location of one record: a line of a file, part of a document, or a complete document.

    Attributes:
        path: File that contains the record.
        where: Name of the location in messages: "shop.jsonl:12".
        offset: Offset of the record's first byte; None if the record is not a range of bytes.
        num_bytes: Size of the record.
        part: Index or name of the record within its document, if it is not a range of bytes.
    """

    path: Path
    where: str
    offset: int | None = None
    num_bytes: int = 0
    part: int | str | None = None


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of one task, found but not yet read.

    Attributes:
        instance_id: Task of the run; the runs of one instance form a group.
        repetition_id: Index of the attempt; None lets the conversion number the attempts, in the
            order of the log.
        places: Locations of the run's records, in order.
        labels: Other identifiers of the run, for `--group-by`.
        failed: True if the rewards file reports a failure; the run may then lack tokens.
        rewarded: True if the rewards file has the run's outcome; the outcome in the log may then be
            ambiguous.
        copied: Indices of the places with an answer that another run has: it is part of the prompt.
    """

    instance_id: str
    repetition_id: int | None
    places: Sequence[Place]
    labels: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False
    rewarded: bool = False
    copied: frozenset[int] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Size of the run's records."""
        return sum([place.num_bytes for place in self.places])


class Rejected(NamedTuple):
    """A record that cannot be used, with the reason.

    Attributes:
        kind: What was rejected: a record of a log, a record that only lacks token ids (`text`), or
            a line of the rewards file (`reward`).
    """

    place: Place
    error: RolloutError
    kind: Literal["record", "text", "reward"] = "record"


class About(NamedTuple):
    """A fact about an entire log, which is added to the history of the dataset."""

    name: str
    value: Any


HAS_TEXT = "has_text"
"""Name of the `About` fact that is true if a log has text to re-tokenize; the history omits it.

Without this fact, `Adapter.is_text` determines whether the log has text.
"""

Found = Run | Rejected | About


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """User options for reading runs.

    Attributes:
        reward: Name of the reward to use as the run's outcome; None: the format's default.
        timeouts: Handling of runs that timed out: treat them as failed (`fail`) or use them
            (`keep`).
        overflows: Handling of runs that exceeded the context: set their reward to 0 (`zero`), treat
            them as failed (`fail`), or use them unchanged (`keep`).
        other_fields: Handling of fields of a GeneratorOutput that match no column: `refuse`,
            `keep` as columns, or `drop`.
        group_size: Attempts per prompt of a GeneratorOutput without `trajectory_ids`; >= 1.
        logprobs_mode: Distribution of the log-probabilities: `raw` or `processed`; None if unknown.
        map: Path of each field of a line of `calls` in the records of a log (`formats.mapped`); None
            if the log has a format of its own.
    """

    reward: str | None = None
    timeouts: Literal["fail", "keep"] = "fail"
    overflows: Literal["zero", "fail", "keep"] = "zero"
    other_fields: Literal["refuse", "keep", "drop"] = "refuse"
    group_size: Count | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    map: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, finding, expected in out_of_bounds(self):
            raise ConfigError("choices", name, finding, expected)


Ids = npt.NDArray[np.int32] | bytes
"""Token ids: [n] int32, or a JSON list as bytes, so that a batch can be parsed at once."""

_NO_TOKENS = np.zeros(0, np.int32)


class Step(msgspec.Struct, kw_only=True, gc=False):
    """One LLM call, or one of its choices.

    Attributes that are not listed are values of the columns with the same names.

    Attributes:
        source: File and position from which the step was read.
        prompt_token_ids: [P] ids.
        response_ids: [R] ids.
        rollout_logprobs: [R] float32 nats, or None; an `array("f")` is fastest.
        rollout_expert_indices: [tokens, layers, topk] int16, or None.
        sampling_support: [R] sets of ids that could have been drawn, or None.
        loss_mask: [R] bool; None if `trains` applies to all tokens.
        trains: False if the harness excludes the response from training.
        spans: (start, length) of each sampled range of the response; None: the entire response.
        token_source: `engine` or `retokenized`.
        num_counted: Numbers of prompt and response tokens that the engine reported; each may be
            None.
        texts: Verbatim parts of the response's text, without special tokens and tool calls.
        called: Words that the tool calls of the response consist of.
        token_text: Tokens of the response, decoded one by one and concatenated, or None.
        columns: Values of user columns; a name has the same type in all steps of a log.
    """

    source: str
    prompt_token_ids: Ids = msgspec.field(default_factory=lambda: _NO_TOKENS)
    response_ids: Ids = msgspec.field(default_factory=lambda: _NO_TOKENS)
    rollout_logprobs: npt.NDArray[np.float32] | array[float] | None = None
    rollout_expert_indices: npt.NDArray[np.int16] | None = None
    sampling_support: Sequence[Sequence[int]] | None = None
    redacted: npt.NDArray[np.bool_] | None = None
    trainer_logprobs: npt.NDArray[np.float32] | None = None
    teacher_token_ids: Sequence[Sequence[int]] | None = None
    teacher_logprobs: Sequence[Sequence[float]] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None
    trains: bool = True
    spans: Sequence[tuple[int, int]] | None = None
    token_source: str = "engine"
    num_counted: tuple[int | None, int | None] = (None, None)
    texts: Sequence[str] = ()
    called: Sequence[str] = ()
    token_text: str | None = None
    reward: float | None = None
    stop_reason: str | None = None
    policy_version: int | None = None
    policy_versions: npt.NDArray[np.int32] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    sampling_extra: str | None = None
    agent: str | None = None
    messages: str | None = None
    pictures: list[dict[str, Any]] | None = None
    response_text: str | None = None
    metrics: dict[str, float] | None = None
    columns: Mapping[str, pa.Scalar] = msgspec.field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Conversation:
    """One context of an agent as text; its tokens can only be approximated by re-tokenization.

    Attributes that are not listed are the same as in `Step`.

    Attributes:
        source: File and position from which the context was read.
        messages: OpenAI-style messages in order: `role`, `content`, and if known
            `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
        tools: OpenAI-style tool definitions, if the log has them.
        num_given: Number of leading messages that are part of the prompt, whatever their role, such
            as examples or a compacted history; these are not trained on.
        logprobs: Log-probabilities of each assistant message after the first `num_given` messages,
            nats; None if unknown.
        tokenless: Error that explains why the log has no token ids; None if its format never has
            any.
    """

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    num_given: int = 0
    logprobs: list[list[float]] | None = None
    tokenless: InputError | None = None
    trains: bool = True
    reward: float | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    agent: str | None = None
    metrics: dict[str, float] | None = None
    columns: Mapping[str, pa.Scalar] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Completion:
    """A prompt and its continuation as decoded by a tokenizer: text without roles.

    The text is re-tokenized verbatim, without a template; the entire response is trained on.
    Attributes that are not listed are the same as in `Step`.

    Attributes:
        source: File and position from which the text was read.
        prompt: Text of the prompt; not empty.
        response: Text of the response; not empty.
        has_special: Whether special tokens in the prompt, and in the response, are control tokens;
            if the log removed these, what looks like one is plain text.
    """

    source: str
    prompt: str
    response: str
    has_special: tuple[bool, bool] = (True, True)
    trains: bool = True
    reward: float | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    agent: str | None = None
    metrics: dict[str, float] | None = None


Logged = Step | Conversation | Completion
"""The record of one call, or of one context."""


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """All steps of one run, as logged.

    Attributes:
        steps: Steps in order; each conversation is one context (a sub-agent has its own, and a
            compaction begins a new one).
        reward: Outcome of the run; None if unknown.
        error: Why the run failed; None if it succeeded. A failed run may have no steps.
        metrics: All numbers about the run, including each reward under its own name.
        user_values: Strings about the run, which become user columns.
    """

    steps: Sequence[Logged]
    reward: float | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    user_values: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[int], object]
"""Called with the number of bytes scanned since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One log format.

    Attributes:
        summary: One-line description of the format.
        recognizes: Returns true if a file or directory, of which it is shown the start, is in this
            format. Called
            with any existing file or directory (not a pipe); must be fast and must not raise.
        find: `find(inputs, progress)` yields every run, in the order of the dataset, every record
            that cannot be used, and facts about the entire log. Every record is part of exactly
            one run or rejection.
        read: `read(run, options)` returns the `Trajectory` of a run; if `is_table`, the rows of a
            document as a table. Raises `RolloutError` if the run cannot be used.
        is_text: True if all or most runs in this format have text but no token ids.
        is_table: True if `read` returns rows that already have ids and rewards.
        noun: Noun for a run in counts, such as "session".
        line: Struct of a JSON line whose required keys identify the format; None if there is none.
            It is used to explain why a line without one of these keys is not recognized.
        is_export: Returns true for a file that this format recognizes but cannot read, because a
            tool exported it from the logs. It is skipped in a directory that also contains logs.
        is_general: True if the format is a family whose members may be formats of their own: any
            other format that recognizes a file precedes it.
        is_agent: True for the logs of an agent program, which sends a system prompt and tools with every
            request: contexts without them are counted.
        is_own: True for a format that users write themselves: roles, ids of tool calls and groups are
            checked for slips.
        contents: Record types and keys that `read` reads, and those that it leaves out; None if the
            format does not declare them. `read` calls `account` with it for every record.
    """

    summary: str
    recognizes: Callable[[Start], bool]
    find: Callable[[Sequence[Input], Progress], Iterable[Found]]
    read: Callable[[Run, Options], Any]
    is_text: bool = False
    is_table: bool = False
    noun: str = "run"
    line: type[msgspec.Struct] | None = None
    is_export: Callable[[Path], bool] | None = None
    is_general: bool = False
    is_agent: bool = False
    is_own: bool = False
    contents: Contents | None = None


UNREAD = "unread: "
OTHER = "..."
_MAX_UNREAD = 100

_NOTES: ContextVar[Counter[str] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[Counter[str]]:
    """Collect the notes that are made in this block."""
    counts: Counter[str] = Counter()
    token = _NOTES.set(counts)
    try:
        yield counts
    finally:
        _NOTES.reset(token)


def note(what: str, number: int = 1) -> None:
    """Add to the count of a note; nothing is added for 0."""
    notes = _NOTES.get()
    if notes is not None and number:
        notes[what] += number


def note_run(what: str) -> None:
    """Add the current run to the count of a note, once for all its records."""
    notes = _NOTES.get()
    if notes is not None:
        notes[what] = 1


def note_unread(name: str) -> None:
    """Count content that the reader does not know; beyond 100 names, all others count as one."""
    notes = _NOTES.get()
    if notes is None:
        return
    _count(notes, UNREAD + name, 1)


def added(notes: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two sets of notes, with the same limit on names as in `note_unread`."""
    total = dict(notes)
    for what, number in more.items():
        _count(total, what, number)
    return total


def _count(notes: dict[str, int], what: str, number: int) -> None:
    if what.startswith(UNREAD) and what not in notes:
        num_names = sum(key.startswith(UNREAD) for key in notes)
        what = what if num_names < _MAX_UNREAD else UNREAD + OTHER
    notes[what] = notes.get(what, 0) + number


def unread_in(notes: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of unknown content among notes, by name, the most frequent first."""
    entries = [
        (what.removeprefix(UNREAD), n) for what, n in notes.items() if what.startswith(UNREAD)
    ]
    return dict(sorted(entries, key=lambda entry: (entry[0] == OTHER, -entry[1], entry[0])))
