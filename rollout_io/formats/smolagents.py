"""The `smolagents` format: the memory of an agent of smolagents, one JSON list per run.

    [{"task": "..."}, {"step_number": 1, "model_input_messages": [...],
      "model_output_message": {"role": "assistant", ...}, "tool_calls": [...], "error": null}]

`agent.memory.get_full_steps()` returns the list. Each step with an answer is a call, whose prompt
are its input messages. As smolagents does before it calls a model, the roles `tool-call` and
`tool-response` become `assistant` and `user`, and consecutive messages of one role are joined. Steps
whose answer was not kept are counted. The log has no reward and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.dialects.bodies import answers_of, response_with_tokens
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, inner
from rollout_io.formats.parsing.content import Message, extend
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.model_calls import Call, steps_of

_ROLES = {"tool-call": "assistant", "tool-response": "user"}
NO_ANSWER = "steps without the model's messages: left out"
_MESSAGE = Contents(
    reads={"": "role content tool_calls"}, leaves={"repeats the message": "raw token_usage"}
)
_LEAVES = {
    "is in the next prompt": "observations observations_images task_images action_output "
    "code_action tool_calls error plan system_prompt",
    "repeats the answer": "model_output",
    "facts about the step": "timing token_usage is_final_answer",
}
_Messages = Annotated[list[dict[str, Any]] | None, inner(_MESSAGE)]


class Step(msgspec.Struct, gc=False):
    """A step of a run: a call of the model, or a plan."""

    task: str | None = None
    step_number: int | None = None
    model_input_messages: _Messages = None
    model_output_message: Annotated[dict[str, Any] | None, inner(_MESSAGE)] = None


def run_of(steps: list[Step], place: Place) -> Run:
    """Return the run in a list of steps; runs of the same task form a group."""
    key = prompt_key(next((step.task for step in steps if step.task), ""))
    return Run(instance_id=key, repetition_id=None, places=[place], labels={"prompt": key})


def read(steps: list[Step], run: Run, _: Options) -> Trajectory:
    """Read the model calls of a run."""
    calls: list[Call] = []
    place = run.places[0].where
    for i, step in enumerate(steps):
        prompt, answer = step.model_input_messages, step.model_output_message
        if prompt and answer:
            calls += _calls(prompt, answer, f"{place}[{i}]")
        elif step.step_number is not None:
            note(NO_ANSWER)
    return Trajectory(steps=steps_of(calls, place, failed=run.failed))


def _calls(memory: list[Any], answer: Mapping[str, Any], where: str) -> Iterator[Call]:
    prompt = _joined(frameworks.messages([_cleaned(m) for m in memory], where))
    raw = answer.get("raw")
    fields = {name: value for name, value in answer.items() if name != "raw"}
    for reply in answers_of(fields, where):
        yield Call(where=where, prompt=prompt, reply=reply, answer=response_with_tokens(raw))


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role"))
    fields = {"role": _ROLES.get(role, role), "content": message.get("content")}
    return fields | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def _joined(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            extend(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _is_step(step: Any) -> bool:
    return isinstance(step, Mapping) and {"step_number", "model_input_messages"} <= step.keys()


ADAPTER = Records(
    records={"": list[Step]},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=lambda value: isinstance(value, list) and any(map(_is_step, value)),
    groups="inferred: runs of the same task",
).adapter("the memory of agents of smolagents, one JSON list per run")
