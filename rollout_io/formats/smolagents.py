"""The `smolagents` format: the memory of an agent of smolagents, one JSON list per run.

    [{"task": "..."}, {"step_number": 1, "model_input_messages": [...],
      "model_output_message": {"role": "assistant", ...}, "tool_calls": [...], "error": null}]

`agent.memory.get_full_steps()` returns the list. Each step with an answer is a call, whose prompt
are its input messages. As smolagents does before it calls a model, the roles `tool-call` and
`tool-response` become `assistant` and `user`, and consecutive messages of one role are joined. Steps
whose answer was not kept are counted. The log has no reward and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.dialects.bodies import answers_of, response_with_tokens
from rollout_io.formats.parsing.content import Message, extend
from rollout_io.formats.parsing.lines import Record, read_record
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.records import decode_record, find_records, first_values

_GROUPS = "inferred: runs of the same task"
_ROLES = {"tool-call": "assistant", "tool-response": "user"}
NO_ANSWER = "steps without the model's messages: left out"
_MESSAGE = Contents(
    reads={"": "role content tool_calls"}, leaves={"repeats the message": "raw token_usage"}
)
CONTENTS = Contents(
    reads={"": "task step_number"},
    leaves={
        "is in the next prompt": "observations observations_images task_images action_output "
        "code_action tool_calls error plan system_prompt",
        "repeats the answer": "model_output",
        "facts about the step": "timing token_usage is_final_answer",
    },
    inner={"model_input_messages": _MESSAGE, "model_output_message": _MESSAGE},
)


class _Step(msgspec.Struct, gc=False):
    task: str | None = None
    step_number: int | None = None
    model_input_messages: list[dict[str, Any]] | None = None
    model_output_message: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(list[_Step])


def find_runs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per list; runs of the same task form a group."""
    yield About("groups", _GROUPS)
    yield from find_records(inputs, progress, _find)


def _find(record: Record) -> Iterator[Found]:
    steps = decode_record(record, _DECODER)
    key = prompt_key(next((step.task for step in steps if step.task), ""))
    yield Run(instance_id=key, repetition_id=None, places=[record.place], labels={"prompt": key})


def read_run(run: Run, _: Options) -> Trajectory:
    """Read the model calls of a run.

    Raises:
        InputError: `no_calls`: no step has the model's messages; `message`: a message is invalid.
    """
    (place,) = run.places
    calls: list[Call] = []
    content = read_record(place)
    account(CONTENTS, content)
    steps: list[_Step] = decode_record(Record(place, content), _DECODER)
    for i, step in enumerate(steps):
        given, answer = step.model_input_messages, step.model_output_message
        where = f"{place.where}[{i}]"
        if given and answer:
            calls += _calls(given, answer, where)
        elif step.step_number is not None:
            note(NO_ANSWER)
    return Trajectory(steps=steps_of(calls, place.where, failed=run.failed))


def _calls(given: list[Any], answer: Mapping[str, Any], where: str) -> Iterator[Call]:
    prompt = _joined(frameworks.messages([_cleaned(m) for m in given], where))
    raw = answer.get("raw")
    fields = {name: value for name, value in answer.items() if name != "raw"}
    for reply in answers_of(fields, where):
        yield Call(where=where, prompt=prompt, reply=reply, answer=response_with_tokens(raw))


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role"))
    fields = {"role": _ROLES.get(role, role), "content": message.get("content")}
    return fields | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def _joined(messages: list[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"]:
            extend(found[-1], message)
        else:
            found.append(message)
    return found


def recognizes(path: Path) -> bool:
    """True if a file is a list with a task and steps that keep the model's messages."""
    return any(
        isinstance(value, list) and any(_is_step(step) for step in value)
        for value in first_values(path)
    )


def _is_step(step: Any) -> bool:
    return isinstance(step, Mapping) and {"step_number", "model_input_messages"} <= step.keys()


ADAPTER = Adapter(
    summary="the memory of agents of smolagents, one JSON list per run",
    recognizes=recognizes,
    find=find_runs,
    read=read_run,
    is_text=True,
    contents=CONTENTS,
)
