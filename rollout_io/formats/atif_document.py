"""ATIF documents as logged, and their chat, for runs without token ids.

ATIF logs the agent's view of the exchange, not the messages that were sent to the model. The chat
is reconstructed from the steps:

    source system      a system message if it precedes all other steps; otherwise a note of the
                       harness, which was not sent to the model
    source agent       an answer of the model; a step that is copied or made no call
                       (llm_call_count 0) is part of the prompt
    observation        tool results; a user message if the result has no tool call id
    context_management a change of the context, by its `boundary`:
        replace        the observation of the step replaces all earlier messages
        append         the observation is added to the messages
        any other      what remains is not in the log: the calls after it are left out, until the
                       next `replace`
    compaction         without a boundary, or with sub-agents instead of a text: keeps the messages
                       before the first answer and drops all others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts, Item
from rollout_io.formats.dialects.responses import TEXTS
from rollout_io.formats.grammar import ITSELF, Contents, Grammar, account, inner
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line, read_document
from rollout_io.formats.parsing.messages import read_message
from rollout_io.formats.parsing.model_calls import EMPTY
from schemas.errors import InputError
from schemas.messages import is_answer

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

_RESULT = TEXTS.plus(reads={"image": "source"})
_CALL = Contents(
    reads={"": "tool_call_id function_name arguments"}, leaves={"facts about a call": "extra"}
)
_EXTRA = Contents(reads={"": "context_management"}, leaves={"facts about a step": "*"})


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

    content: Annotated[msgspec.Raw, inner(_RESULT)] = NO_JSON
    source_call_id: Any = None
    subagent_trajectory_ref: list[Ref] | None = None


class Observation(msgspec.Struct, gc=False):
    """Results that follow a step."""

    results: list[Result] | None = None


class StepRecord(msgspec.Struct, gc=False):
    """A message or a model call; `extra` may mark a compaction."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: msgspec.Raw = NO_JSON
    reasoning_content: str | None = None
    tool_calls: Annotated[msgspec.Raw, inner(_CALL)] = NO_JSON
    observation: Observation | None = None
    metrics: Metrics | None = None
    extra: Annotated[msgspec.Raw, inner(_EXTRA)] = NO_JSON
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
    trajectory_id: str | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: Annotated[list[Document] | None, ITSELF] = None


_DECODER = msgspec.json.Decoder(Document)
CONTENTS = Grammar(
    records={"": Document},
    leaves={
        "facts about the trajectory": "agent notes extra final_metrics session_id",
        "facts about a step or a call": "steps.timestamp steps.model_name steps.reasoning_effort "
        "steps.metrics steps.observation.results.extra "
        "steps.observation.results.subagent_trajectory_ref",
    },
).contents


def read_trajectory(path: Path) -> Document:
    """Read one ATIF file; its version must be known and its steps numbered 1..n.

    Raises:
        InputError: `atif_version`: the version is unknown; `atif_step_id`: the steps are not
            numbered 1..n; `atif_duplicate_id`: two embedded trajectories have the same id; or any
            error of `read_document`.
    """
    document, _ = read_document(_DECODER, path)
    account(CONTENTS, read_input(path))
    _check(document, path, "$")
    return document


def _check(document: Document, path: Path, json: str) -> None:
    if document.schema_version not in VERSIONS:
        finding, expected = repr(document.schema_version), f"{VERSIONS[0]} to {VERSIONS[-1]}"
        hint = "export the trajectory in a known version"
        raise InputError("atif_version", f"{path}, {json}.schema_version", finding, expected, hint)
    for index, step in enumerate(document.steps):
        if step.step_id != index + 1:
            finding, expected = f"step_id {step.step_id}", f"step_id {index + 1}"
            hint = "copy the file again from its source: steps are missing or out of order"
            raise InputError(
                "atif_step_id", f"{path}, {json}.steps[{index}]", finding, expected, hint
            )
    children = document.subagent_trajectories or []
    counts = Counter(child.trajectory_id for child in children)
    if counts and counts.most_common(1)[0][1] > 1:
        finding = f"two embedded trajectories have the id {counts.most_common(1)[0][0]!r}"
        where = f"{path}, {json}.subagent_trajectories"
        hint = "give each embedded trajectory a unique id"
        raise InputError("atif_duplicate_id", where, finding, hint=hint)
    for index, child in enumerate(children):
        _check(child, path, f"{json}.subagent_trajectories[{index}]")


_COMPACTION, _REPLACE, _APPEND = "compaction", "replace", "append"
SYSTEM_NOTES = "system steps after the first message, taken as notes of the harness: left out"
UNKNOWN_CONTEXTS = "calls after a change of the context that the log does not contain: left out"


class _ToolCall(msgspec.Struct, gc=False):
    function_name: str
    tool_call_id: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _Management(msgspec.Struct, gc=False):
    type: str | None = None
    boundary: str | None = None


class _Extra(msgspec.Struct, gc=False):
    context_management: _Management | None = None


_CALLS_DECODER = msgspec.json.Decoder(list[_ToolCall] | None)
_EXTRA_DECODER = msgspec.json.Decoder(_Extra | None)


def tell(log: Contexts, step: StepRecord, where: str, facts: Mapping[str, Any]) -> None:
    """Tell the contexts of an agent, whose tip is the step before, what a step adds to them.

    Raises:
        InputError: `record_type`, `message`: a field has an unsupported type.
    """
    extra = decode_line(_EXTRA_DECODER, bytes(step.extra), f"{where}.extra")
    managed = (extra and extra.context_management) or _Management()
    message, results = _message(step, where), _results(step, where)
    texts = [{"role": "user", "content": m["content"]} for m in results if m["content"]]
    boundary = managed.boundary
    is_elsewhere = boundary == _REPLACE and step.refs and not texts
    if is_elsewhere or (boundary == _APPEND and step.source != "system"):
        boundary = None
    if step.is_call:
        if log.tip is None and step.step_id > 1:
            _lose(log, where)
        note(EMPTY, not is_answer(message))
        log.say([message], where, facts=facts)
    elif step.source == "agent" or (step.source == "user" and boundary is None):
        log.see(Item("", [message], where, given=True))
    elif boundary is None:
        is_compaction = bool(step.refs) or managed.type == _COMPACTION
        _take_note(log, message, where, is_compaction=is_compaction)
        return
    if boundary == _REPLACE:
        log.replace()
    elif boundary not in {None, _APPEND}:
        _lose(log, where)
    for added in results if boundary is None else texts:
        log.see(Item("", [added], where, given=True))


def _lose(log: Contexts, where: str) -> None:
    error = InputError("record_type", where, "the log does not contain the new context")
    log.lose(error, loss=UNKNOWN_CONTEXTS)


def _take_note(log: Contexts, message: Message, where: str, *, is_compaction: bool) -> None:
    path = log.path()
    if all(m["role"] == "system" for node in path for m in node.messages):
        log.see(Item("", [message], where, given=True))
    elif not is_compaction:
        note(SYSTEM_NOTES)
    elif all(node.error is None for node in path):
        first = (n for n in path if any(m["role"] == "assistant" for m in n.messages))
        log.rewind(next((node.before for node in first), log.tip))


def temperature_of(settings: dict[str, Any] | None) -> float | None:
    """Return the sampling temperature in an agent's settings, if it is a valid number."""
    value = (settings or {}).get("temperature")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1e38 else None


def _message(step: StepRecord, where: str) -> Message:
    calls = decode_line(_CALLS_DECODER, bytes(step.tool_calls), f"{where}.tool_calls")
    fields = {
        "role": "assistant" if step.source == "agent" else step.source,
        "content": step.message,
        "reasoning_content": step.reasoning_content,
        "tool_calls": [
            {"id": call.tool_call_id, "name": call.function_name, "arguments": call.arguments}
            for call in calls or ()
        ]
        or None,
    }
    return read_message(msgspec.Raw(msgspec.json.encode(fields)), where)


def _results(step: StepRecord, where: str) -> list[Message]:
    messages: list[Message] = []
    for result in (step.observation and step.observation.results) or ():
        if result.subagent_trajectory_ref and bytes(result.content) == b"null":
            continue
        called = result.source_call_id
        role = "user" if called is None else "tool"
        fields = {"role": role, "content": result.content, "tool_call_id": called}
        raw = msgspec.Raw(msgspec.json.encode(fields))
        messages.append(read_message(raw, f"{where}.observation"))
    return messages
