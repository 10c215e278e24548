"""Fields of ATIF documents as logged, and checks of versions and step numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_io.formats.parsing.jsonl import read_document
from schemas.errors import InputError

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

_NO_JSON = msgspec.Raw(b"null")


class Metrics(msgspec.Struct, gc=False):
    """Token counts, ids and log-probabilities of a call."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class Ref(msgspec.Struct, gc=False):
    """A reference to the trajectory of a sub-agent."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None
    session_id: str | None = None


class Result(msgspec.Struct, gc=False):
    """One result of a tool call, or of an operation of the harness."""

    content: msgspec.Raw = _NO_JSON
    source_call_id: Any = None
    subagent_trajectory_ref: list[Ref] | None = None


class Observation(msgspec.Struct, gc=False):
    """Results that follow a step."""

    results: list[Result] | None = None


class StepRecord(msgspec.Struct, gc=False):
    """A message or a model call; `extra` may mark a compaction."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: msgspec.Raw = _NO_JSON
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _NO_JSON
    observation: Observation | None = None
    metrics: Metrics | None = None
    extra: msgspec.Raw = _NO_JSON
    llm_call_count: int | None = None
    is_copied_context: bool | None = None

    @property
    def is_call(self) -> bool:
        """True if the step is a model call that is not copied from another trajectory."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0

    @property
    def refs(self) -> list[Ref]:
        """References to sub-agents in the step's results."""
        results = self.observation.results if self.observation else None
        return [ref for result in results or () for ref in result.subagent_trajectory_ref or ()]


class Agent(msgspec.Struct, gc=False):
    """The agent and its tool definitions."""

    name: str
    tool_definitions: Any = None
    extra: dict[str, Any] | None = None


class Document(msgspec.Struct, gc=False):
    """An ATIF trajectory as stored in a file."""

    schema_version: str
    agent: Agent
    steps: list[StepRecord]
    session_id: str | None = None
    trajectory_id: str | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list[Document] | None = None


_DECODER = msgspec.json.Decoder(Document)


def read_trajectory(path: Path) -> Document:
    """Read one ATIF file; its version must be known and its steps numbered 1..n.

    Raises:
        InputError: `atif_version`: the version is unknown; `atif_step_id`: the steps are not
            numbered 1..n; `atif_duplicate_id`: two embedded trajectories have the same id; or any
            error of `read_document`.
    """
    document, _ = read_document(_DECODER, path)
    _check(document, path, "$")
    return document


def _check(document: Document, path: Path, json: str) -> None:
    if document.schema_version not in VERSIONS:
        got, expected = repr(document.schema_version), f"{VERSIONS[0]} to {VERSIONS[-1]}"
        hint = "export the trajectory in a known version"
        raise InputError("atif_version", f"{path}, {json}.schema_version", got, expected, hint)
    for index, step in enumerate(document.steps):
        if step.step_id != index + 1:
            got, expected = f"step_id {step.step_id}", f"step_id {index + 1}"
            hint = "copy the file again from its source: steps are missing or out of order"
            raise InputError("atif_step_id", f"{path}, {json}.steps[{index}]", got, expected, hint)
    children = document.subagent_trajectories or []
    counts = Counter(child.trajectory_id for child in children)
    if counts and counts.most_common(1)[0][1] > 1:
        got = f"two embedded trajectories have the id {counts.most_common(1)[0][0]!r}"
        where = f"{path}, {json}.subagent_trajectories"
        hint = "give each embedded trajectory a unique id"
        raise InputError("atif_duplicate_id", where, got, hint=hint)
    for index, child in enumerate(children):
        _check(child, path, f"{json}.subagent_trajectories[{index}]")
