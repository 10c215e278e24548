"""The `openai_messages` format: JSONL, one conversation of OpenAI-style messages per line.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "instance_id": "shop-1", "reward": 1.0, "tools": [...]}
    [{"role": "user", ...}, {"role": "assistant", ...}]

A line is a run. Its group is `instance_id`, or else a label of the task (`TASK_LABELS`), which is
also kept as a column, or else `id`; other lines are grouped by the messages before their first
answer. The history of the dataset records the rule. The outcome is `reward`, or else `score`; numbers in `rewards`, `scores` and `metrics` are metrics too.

A system prompt beside the messages (`system_prompt`, `system`, `system_message`, `instructions`)
becomes the first message. Other text beside the messages is not read: it is counted by its key.
Messages that are marked as not `active` (a user took them back) are left out; answers with `weight` 0,
or another mark that they are not to be trained on (`parsing.messages.with_marks`), are part of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import (
    About,
    Conversation,
    Found,
    Logged,
    Options,
    Place,
    Run,
    Trajectory,
)
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.content import NO_JSON, Content, Message, parts_in, shown
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, openai_tools, prompt_key, read_messages
from rollout_io.formats.parsing.naming import (
    TASK_LABELS,
    groups_told,
    is_name,
    label,
    note_unread_labels,
    numbers,
    task_labels,
    unread_labels,
)
from rollout_io.formats.parsing.tokens import INT32_MAX
from rollout_io.formats.start import Start
from schemas.errors import InputError

GROUPS = "inferred: lines without an id that have the same messages before the first answer"
_ANOTHER = frozenset(
    {"response", "trajectory_format", "info", "message_log", "sessionId", "events"}
)
NAMES = ("instance_id", *TASK_LABELS, "id")
_OF_NAMES = frozenset({*NAMES, "repetition_id"})
_SYSTEM = ("system_prompt", "system", "system_message", "instructions")
_TEXT = (b'"', b"[")


class Named(Open, kw_only=True):
    """A record with labels that name its group."""

    instance_id: msgspec.Raw = NO_JSON
    task_id: msgspec.Raw = NO_JSON
    task: msgspec.Raw = NO_JSON
    problem_id: msgspec.Raw = NO_JSON
    question_id: msgspec.Raw = NO_JSON
    instance: msgspec.Raw = NO_JSON
    id: msgspec.Raw = NO_JSON

    def names(self, where: str) -> dict[str, str]:
        """Return the labels that the record has, the first of which names its group."""
        labels = {name: label(getattr(self, name), where) for name in NAMES}
        return {
            name: value
            for name, value in labels.items()
            if value and (name not in TASK_LABELS or is_name(value))
        }


class Line(Named, kw_only=True):
    """A conversation."""

    messages: Annotated[list[msgspec.Raw], inner(MESSAGE)]
    tools: list[Any] | None = None
    repetition_id: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)] | None = None
    reward: float | None = None
    score: float | None = None
    metrics: msgspec.Raw = NO_JSON
    rewards: msgspec.Raw = NO_JSON
    scores: msgspec.Raw = NO_JSON
    system_prompt: msgspec.Raw = NO_JSON
    system: msgspec.Raw = NO_JSON
    system_message: msgspec.Raw = NO_JSON
    instructions: msgspec.Raw = NO_JSON


_SYSTEM_DECODER = msgspec.json.Decoder(Content)


def with_groups(items: Iterable[Found]) -> Iterator[Found]:
    """Yield what was found in a log, and by which labels its runs are grouped."""
    keys: dict[str, None] = {}
    for item in items:
        if isinstance(item, Run):
            keys |= dict.fromkeys([*item.labels][:1])
        yield item
    if rule := groups_told(keys, GROUPS):
        yield About("groups", rule)


def run_of(line: Line, place: Place) -> Run:
    """Return the run of a line."""
    labels = line.names(place.where)
    instance = next(iter(labels.values()), None) or prompt_key(_messages(line, place.where))
    return Run(
        instance_id=instance,
        repetition_id=line.repetition_id,
        places=[place],
        labels=(labels or {"prompt": instance}) | unread_labels(line.fields),
    )


def _messages(line: Line, where: str) -> list[Message]:
    """Return the messages of a line, after the system prompt beside them."""
    messages = read_messages(line.messages, f"{where}, messages")
    return [*system_of(line, messages, where), *messages]


def system_of(line: Line, messages: Iterable[Message], where: str) -> list[Message]:
    """Return the system prompt beside the messages of a line as a message; none if they have it."""
    logged = [m["content"] for m in messages if m["role"] in {"system", "developer"}]
    stated = list[Message]()
    for name in _SYSTEM:
        place = f"{where}, {name}"
        if not bytes(getattr(line, name)).startswith(_TEXT):
            continue
        prompt = shown(parts_in(decode_line(_SYSTEM_DECODER, bytes(getattr(line, name)), place)))
        if not prompt or prompt in logged:
            continue
        if logged:
            finding = f"`{name}` differs from the system message of the conversation"
            hint = "keep the one that the model saw"
            raise InputError("message", place, finding, "one system prompt", hint)
        stated.append({"role": "system", "content": prompt})
        logged.append(prompt)
    return stated


def read(line: Line, run: Run, _: Options) -> Trajectory:
    """Read the conversation of a line; all numbers of the line become metrics."""
    where = run.places[0].where
    messages = _messages(line, where)
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", where, "the conversation has no assistant message")
    step = Conversation(source=where, messages=messages, tools=openai_tools(line.tools))
    return trajectory_of(line, run, [step])


def trajectory_of(line: Line, run: Run, steps: Sequence[Logged]) -> Trajectory:
    """Return what a line says about its steps; all numbers of the line become metrics."""
    note_unread_labels(run.labels, run.instance_id)
    return Trajectory(
        steps=list(steps),
        reward=line.score if line.reward is None else line.reward,
        metrics=metrics_of(line, run.places[0]),
        user_values=task_labels(run.labels),
    )


def metrics_of(line: Line, place: Place) -> dict[str, float]:
    """Return the numbers of a line, by name."""
    fields = {name: raw for name, raw in line.fields.items() if name not in _OF_NAMES}
    return numbers(fields, place.where, ["metrics", "rewards", "scores"])


def _is_log(start: Start) -> bool:
    """True if a file has lines of messages with roles, and no lines or fields of another format."""
    is_lines = not start.is_document and any(map(_is_line, start.values))
    return is_lines and not any(map(_is_of_another, start.values))


def _is_of_another(line: Any) -> bool:
    """True if a line is an object without messages, or a list of messages with times (`ts`)."""
    if isinstance(line, list):
        return all(isinstance(message, dict) and "ts" in message for message in line)
    return "messages" not in line


def _is_line(line: Any) -> bool:
    messages = line if isinstance(line, list) else line.get("messages")
    if isinstance(line, dict) and _ANOTHER & line.keys():
        return False
    return isinstance(messages, list) and len(messages) > 0 and all(map(_has_role, messages))


def _has_role(message: Any) -> bool:
    """True for a message whose content is where OpenAI's format has it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return message.get("blocks") is None and message.get("parts") is None


ADAPTER = Records(
    records={"": Line},
    bare="messages",
    run=run_of,
    read=read,
    is_log=_is_log,
    is_whole=lambda _: False,
    finish=with_groups,
).adapter("OpenAI-style messages: JSONL, one conversation per line; text only", is_own=True)
