"""The `tau2` format: results of tau2-bench.

A JSON document has the simulations of an experiment, or each simulation is a file, `simulations/ID.json`,
beside the index `results.json` (`simulation_index`). A simulation is a run of its task, and `trial` is
the attempt. The agent's context has its own messages, the user's texts, and the results of the agent's
tool calls; calls of the user's own tools and their results are not shown to the agent and are left out.
The greeting at the beginning, which no model wrote, is part of the prompt. The log does not hold the
system prompt as sent: the policy of the domain stands for it, which is counted. Voice simulations
(`ticks`) are rejected: they have audio in place of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import (
    Conversation,
    Found,
    Options,
    Place,
    Rejected,
    Run,
    Trajectory,
    note,
)
from rollout_io.formats.engines.records import Records, beside
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.content import NO_JSON, Message, known, raw_of
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.messages import read_messages
from rollout_io.formats.parsing.records import numbers, read_record
from rollout_io.formats.parsing.tokens import INT32_MAX
from schemas.errors import InputError, count

POLICY = "runs whose system prompt is not logged: the domain's policy stands for it"
NO_POLICY = "runs whose system prompt is not logged"
_NO_CONVERSATION, _RESULTS, _FOLDER = "no_conversation", "results.json", "simulations"
_FAILED = frozenset({"too_many_errors", "agent_error", "user_error", "infrastructure_error"})
_MESSAGE = Contents(
    reads={"": "role content tool_calls id requestor error tool_messages"},
    leaves={
        "facts about the call": "turn_idx timestamp cost usage raw_data generation_time_seconds"
    },
)
_LEAVES = {
    "facts about the run": "timestamp start_time end_time duration agent_cost user_cost seed "
    "mode review auth_classification hallucination_retries_used speech_environment info"
}


class _Simulation(msgspec.Struct, gc=False):
    task_id: str | int | None = None
    id: str | None = None
    policy: str | None = None
    trial: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)] | None = None
    termination_reason: str | None = None
    reward_info: msgspec.Raw = NO_JSON
    messages: Annotated[list[dict[str, Any]] | None, inner(_MESSAGE)] = None
    ticks: list[msgspec.Raw] | None = None


class _Entry(msgspec.Struct, gc=False):
    id: str


class _Index(msgspec.Struct, gc=False):
    simulation_index: list[_Entry] = []


class _Environment(msgspec.Struct, gc=False):
    policy: str | None = None


class _Info(msgspec.Struct, gc=False):
    environment_info: _Environment | None = None


class _Experiment(msgspec.Struct, gc=False):
    info: _Info | None = None


_INDEX = msgspec.json.Decoder(_Index)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def run_of(simulation: _Simulation, place: Place) -> Run:
    """Return the run of a simulation; the index of simulations in other files is refused."""
    if simulation.task_id is None:
        raise _without_simulations(place.where, len(_indexed(place)))
    task = str(simulation.task_id)
    labels = {"task": task} | ({"id": simulation.id} if simulation.id else {})
    return Run(instance_id=task, repetition_id=simulation.trial, places=[place], labels=labels)


def read(simulation: _Simulation, run: Run, _: Options) -> Trajectory:
    """Read the agent's conversation in a simulation; numbers of its evaluation become metrics."""
    place = run.places[0]
    logged = simulation.messages or []
    if simulation.ticks and not logged:
        finding = "the simulation is of voice: it has ticks in place of messages"
        raise InputError("no_calls", place.where, finding, hint="convert simulations of text")
    messages = [*_messages(logged, f"{place.where}, messages")]
    policy = simulation.policy or _policy(place)
    note(POLICY if policy else NO_POLICY)
    system: list[Message] = [{"role": "system", "content": policy}] if policy else []
    reason = simulation.termination_reason
    where = f"{place.where}, reward_info"
    evaluation = decode_line(_FIELDS, bytes(simulation.reward_info), where) or {}
    metrics = numbers(evaluation, where, ["reward_breakdown"])
    step = Conversation(source=place.where, messages=[*system, *messages], stop_reason=reason)
    step.num_given = len(system) + _num_greetings(messages, logged)
    return Trajectory(
        steps=[step],
        reward=metrics.get("reward"),
        error=reason if reason in _FAILED else None,
        metrics=metrics,
    )


def _policy(place: Place) -> str | None:
    """Return the policy in the document of a simulation, or in the index of the simulations' folder."""
    index = place.path.parent.parent / _RESULTS
    if place.path.parent.name == _FOLDER and index.is_file():
        place = Place(index, str(index), 0, index.stat().st_size)
    info = beside(place, _Experiment).info
    return info.environment_info.policy if info and info.environment_info else None


def _indexed(place: Place) -> list[str]:
    """Return the names of the simulations that an index lists."""
    index: _Index = decode_document(_INDEX, read_record(place), place.where)
    return [entry.id for entry in index.simulation_index]


def _without_simulations(where: str, number: int) -> InputError:
    finding = f"an index of {count(number, 'simulation')}, which are not in the file"
    expected = f"the files of the folder `{_FOLDER}` beside it"
    hint = "convert the directory that has both, or the results as one file (`save` with `json`)"
    return InputError(_NO_CONVERSATION, where, finding, expected, hint)


def _with_index(items: Iterable[Found]) -> Iterator[Found]:
    """Yield what was found; an index is left out if all its simulations were found."""
    names, indexes = set[str | None](), list[Rejected]()
    for item in items:
        if isinstance(item, Rejected) and item.error.rule == _NO_CONVERSATION:
            indexes.append(item)
            continue
        if isinstance(item, Run):
            names.add(item.labels.get("id"))
        yield item
    for index in indexes:
        missing = [name for name in _indexed(index.place) if name not in names]
        if missing or not _indexed(index.place):
            yield Rejected(index.place, _without_simulations(index.place.where, len(missing)))


def _messages(logged: list[Any], where: str) -> Iterator[Message]:
    """Yield the messages that the agent saw, in OpenAI's format."""
    for i, message in enumerate(logged):
        if not isinstance(message, Mapping):
            raise InputError("message", f"{where}[{i}]", "a message is no object")
        inner = message.get("tool_messages")  # results of parallel calls
        if isinstance(inner, list):
            yield from _messages(inner, f"{where}[{i}]")
            continue
        role = message.get("role")
        if role == "tool" and message.get("requestor", "assistant") != "assistant":
            continue
        if role == "user" and not message.get("content"):
            continue  # a call of the user's own tools
        calls = [
            {key: call[key] for key in ("id", "name", "arguments") if key in call}
            if isinstance(call, Mapping)
            else call
            for call in (message.get("tool_calls") or () if role != "user" else ())
        ]
        fields = {
            "role": role,
            "content": message.get("content") or "",
            "tool_calls": calls or None,
            "tool_call_id": message.get("id") if role == "tool" else None,
            "is_error": True if role == "tool" and message.get("error") is True else None,
        }
        yield from read_messages([raw_of(known(fields))], f"{where}[{i}]")


def _num_greetings(messages: Sequence[Message], logged: list[Any]) -> int:
    """Return 1 if the run begins with an assistant message that no model wrote, otherwise 0."""
    first = logged[0] if logged else {}
    is_said = bool(first.get("raw_data") or first.get("usage") or first.get("tool_calls"))
    return int(len(messages) > 1 and messages[0]["role"] == "assistant" and not is_said)


_is_index = like({"tasks": object, "info": {"environment_info": object}})
_is_simulation = like("task_id termination_reason messages", "task_id termination_reason ticks")


def _is_results(value: Any) -> bool:
    simulations = value.get("simulations") if isinstance(value, dict) else None
    if isinstance(simulations, list):
        return any(map(_is_simulation, simulations))
    return _is_simulation(value) or _is_index(value)


ADAPTER = Records(
    records={"": _Simulation},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=_is_results,
    elements="simulations",
    finish=_with_index,
).adapter(
    "results of tau2-bench: one JSON document per experiment or simulation; text only",
    noun="simulation",
)
