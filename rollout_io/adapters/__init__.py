"""Adapters: the runs of a harness's logs, found and read one by one.

An adapter is an `Adapter`, registered as an entry point of the group `rollout_io.adapters` under the
name that `rollouts convert --format` takes. It says where the runs of a log are (`find`, a quick
look at everything) and reads one of them (`read`). All else is the conversion's: order, groups,
rewards, re-tokenisation, checks, rejected records, files, processes, resuming.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import RolloutError


class Input(NamedTuple):
    """A log that was given.

    Attributes:
        name: What people call it.
        path: Where its bytes are: itself, or a copy that is unpacked and can be read twice.
    """

    name: str
    path: Path


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where one record is: a line of a file, a part of a document, or a document.

    Attributes:
        path: The file its bytes are in.
        where: What people call the place: "shop.jsonl:12".
        offset: Of its first byte; None: the record is no range of bytes of its own.
        num_bytes: Its size.
    """

    path: Path
    where: str
    offset: int | None = None
    num_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of one task, found but not yet read.

    Attributes:
        instance_id: Its task; the runs of one instance form the group.
        repetition_id: Which attempt; None: numbered in the order of the log.
        places: Its records, in order.
        labels: What else names it: the choices of `--group-by`.
        index: Which of the runs of its document it is.
        failed: Whether the rewards file says that it failed: then its tokens may be missing.
        rewarded: Whether the rewards file has its outcome: then the log's need not be clear.
    """

    instance_id: str
    repetition_id: int | None
    places: Sequence[Place]
    labels: Mapping[str, str] = field(default_factory=dict)
    index: int = 0
    failed: bool = False
    rewarded: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its records."""
        return sum([place.num_bytes for place in self.places])


class Rejected(NamedTuple):
    """A record that cannot be used, and why."""

    place: Place
    error: RolloutError


class About(NamedTuple):
    """What is known of a log as a whole: it goes to the history of the dataset."""

    name: str
    value: Any


Found = Run | Rejected | About


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a user chooses about the reading of runs.

    Attributes:
        reward: Which of the rewards of a run is its outcome; None: the format's own rule.
        timeouts: A run that ran out of time is a failed one (`fail`), or is used (`keep`).
        overflows: A run whose context grew too long has reward 0 (`zero`), is a failed one
            (`fail`), or is used as it is (`keep`).
    """

    reward: str | None = None
    timeouts: str = "fail"
    overflows: str = "zero"

    def __post_init__(self) -> None:
        for name, known in (
            ("timeouts", ("fail", "keep")),
            ("overflows", ("zero", "fail", "keep")),
        ):
            if getattr(self, name) not in known:
                expected = "one of " + ", ".join(map(repr, known))
                raise RolloutError("choices", name, repr(getattr(self, name)), expected)


Ids = npt.NDArray[np.int32] | bytes
"""Token ids, [n] int32; or the JSON text of such a list, which is parsed with all others at once."""

_NO_TOKENS = np.zeros(0, np.int32)


class Step(msgspec.Struct, kw_only=True, gc=False):
    """One LLM call, or one of its choices.

    Attributes:
        source: File and position it was read from.
        prompt_token_ids: [P] ids.
        response_ids: [R] ids.
        rollout_logprobs: [R] float32 nats, or None; an `array("f")` is quickest.
        rollout_expert_indices: [tokens, layers, topk] int16, or None.
        loss_mask: [R] bool, or None: all as `trains` says.
        trains: Whether the loss mask is true; false where the harness says not to train on it.
        spans: (start, length) of each sampled range of the response, or None: all of it.
        token_source: `engine` or `retokenized`.
        others: As the columns of the same name.
    """

    source: str
    prompt_token_ids: Ids = msgspec.field(default_factory=lambda: _NO_TOKENS)
    response_ids: Ids = msgspec.field(default_factory=lambda: _NO_TOKENS)
    rollout_logprobs: npt.NDArray[np.float32] | array[float] | None = None
    rollout_expert_indices: npt.NDArray[np.int16] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None
    trains: bool = True
    spans: Sequence[tuple[int, int]] | None = None
    token_source: str = "engine"
    reward: float | None = None
    stop_reason: str | None = None
    policy_version: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    agent: str | None = None
    messages: str | None = None
    response_text: str | None = None
    metrics: dict[str, float] | None = None


@dataclass(kw_only=True, slots=True)
class Conversation:
    """One context of an agent as text alone: its tokens can only be guessed, by re-tokenisation.

    Attributes:
        source: File and position it was read from.
        messages: OpenAI-style messages from first to last: `role`, `content`, and where they are
            known `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
        tools: OpenAI-style tool definitions, where the log has them.
        num_given: Leading messages that were given to the model, whoever wrote them: examples, or
            what a compaction kept. It did not write them here, so they do not train.
        logprobs: One list per assistant message that was not given, nats, or None.
        others: As in `Step`.
    """

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    num_given: int = 0
    logprobs: list[list[float]] | None = None
    trains: bool = True
    reward: float | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    agent: str | None = None
    metrics: dict[str, float] | None = None


@dataclass(kw_only=True, slots=True)
class Completion:
    """A prompt and what followed, as a tokenizer decoded them: text without roles.

    It is re-tokenised as it stands, without a template; all of the response trains.

    Attributes:
        source: File and position it was read from.
        prompt: Not empty.
        response: Not empty.
        others: As in `Step`.
    """

    source: str
    prompt: str
    response: str
    trains: bool = True
    reward: float | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    agent: str | None = None
    metrics: dict[str, float] | None = None


Logged = Step | Conversation | Completion
"""What a log has of one call, or of one context."""


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """All steps of one run, as the log has them.

    Attributes:
        steps: In order; several conversations are several contexts (sub-agents, compactions).
        reward: The outcome of the run; None: unknown.
        error: Why the run failed, or None. A failed run may have no steps.
        metrics: All numbers about the run, each reward among them under its own key.
        user_values: Texts about the run: columns of the user's.
    """

    steps: Sequence[Logged]
    reward: float | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    user_values: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[int], object]
"""Called with the bytes looked at since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One log format.

    Attributes:
        summary: One line: what writes the format.
        recognizes: Whether a file or directory is of this format, from its content. Called with
            any file or directory there is, not with a pipe: must be quick and must not raise.
        find: `find(inputs, progress)` gives, in the order of the dataset, each run, each record
            that is of no use, and what is known of the log as a whole. Every record is in exactly
            one of the runs or rejections.
        read: `read(run, options)` gives the `Trajectory` of a run (of a document of tables: its
            rows, as a table). Raises `RolloutError` where the run cannot be used.
        is_text: Whether its runs hold text alone, or mostly.
        is_table: Whether `read` gives the rows of a document, named and rewarded as they are.
    """

    summary: str
    recognizes: Callable[[Path], bool]
    find: Callable[[Sequence[Input], Progress], Iterable[Found]]
    read: Callable[[Run, Options], Any]
    is_text: bool = False
    is_table: bool = False


def one_run_a_document(
    inputs: Iterable[Input], progress: Progress, name: Callable[[Input], tuple[str, int | None]]
) -> Iterator[Run]:
    """The runs of logs that are one document each: for `Adapter.find`.

    Args:
        inputs: Files.
        progress: Told the size of each.
        name: Instance and repetition of a document.
    """
    for given in inputs:
        num_bytes = given.path.stat().st_size
        progress(num_bytes)
        instance_id, repetition_id = name(given)
        place = Place(given.path, given.name, 0, num_bytes)
        yield Run(instance_id=instance_id, repetition_id=repetition_id, places=[place])
