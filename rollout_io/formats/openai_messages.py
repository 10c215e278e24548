"""The `openai_messages` format: JSONL, one conversation of OpenAI-style messages per line.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "instance_id": "shop-1", "reward": 1.0, "tools": [...]}
    [{"role": "user", ...}, {"role": "assistant", ...}]

A line is a run. Its group is `instance_id`, or else a label of the task (`TASK_LABELS`), which is
also kept as a column, or else `id`; other lines are grouped by the messages before their first
answer. The history of the dataset records the rule. The outcome is `reward`, or else `score`; numbers in `rewards`, `scores` and `metrics` are metrics too.

A system prompt beside the messages (`system_prompt`, `system`, `system_message`, `instructions`)
becomes the first message. Other text beside the messages is not read: it is counted by its key.
Messages that are marked as not `active` (a user took them back) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Conversation,
    Found,
    Input,
    Options,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.parsing.content import NO_JSON, Content, Message, parts_in, shown
from rollout_io.formats.parsing.jsonl import decode_line, decoded
from rollout_io.formats.parsing.lines import Record, find_lines, read_record
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
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.tokens import INT32_MAX
from rollout_io.formats.start import Start
from schemas.errors import InputError

GROUPS = "inferred: lines without an id that have the same messages before the first answer"
_ANOTHER = frozenset(
    {"response", "trajectory_format", "info", "message_log", "sessionId", "events"}
)
_NAMES = ("instance_id", *TASK_LABELS, "id")
_OF_NAMES = frozenset({*_NAMES, "repetition_id"})
_SYSTEM = ("system_prompt", "system", "system_message", "instructions")
_TEXT = (b'"', b"[")
INACTIVE = "messages that were taken back (not `active`): left out"
_GROUPS_OF_NUMBERS = frozenset({"metrics", "rewards", "scores"})
CONTENTS = Contents(
    reads={
        "": "tools instance_id task_id task problem_id question_id instance id repetition_id reward score metrics rewards scores "
        "system_prompt system system_message instructions"
    },
    inner={"messages": MESSAGE},
)


class _Role(msgspec.Struct, gc=False):
    """The role of a message whose content is where OpenAI's format has it."""

    role: str
    blocks: list[Any] | None = None
    parts: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None or self.parts is not None:
            raise ValueError("the message has another framework's shape")


_Roles = Annotated[list[_Role], msgspec.Meta(min_length=1)]


class _Line(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]
    tools: list[Any] | None = None
    reward: float | None = None
    score: float | None = None
    system_prompt: msgspec.Raw = NO_JSON
    system: msgspec.Raw = NO_JSON
    system_message: msgspec.Raw = NO_JSON
    instructions: msgspec.Raw = NO_JSON


class _State(msgspec.Struct, gc=False):
    active: int | bool | None = None


class _Names(msgspec.Struct, gc=False):
    id: msgspec.Raw = NO_JSON
    instance_id: msgspec.Raw = NO_JSON
    task_id: msgspec.Raw = NO_JSON
    task: msgspec.Raw = NO_JSON
    problem_id: msgspec.Raw = NO_JSON
    question_id: msgspec.Raw = NO_JSON
    instance: msgspec.Raw = NO_JSON
    repetition_id: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)] | None = None


class _Shape(msgspec.Struct, gc=False):
    messages: _Roles


_LINE_DECODER = msgspec.json.Decoder(_Line)
_BARE_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_SYSTEM_DECODER = msgspec.json.Decoder(Content)
_STATE_DECODER = msgspec.json.Decoder(_State)
_NAMES_DECODER = msgspec.json.Decoder(_Names)
_SHAPE_DECODER = msgspec.json.Decoder(_Shape | _Roles)
_LIST_DECODER = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_conversations(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per line, in the order of the lines."""
    keys: dict[str, None] = {}
    for found in find_lines(inputs, progress, _find):
        if isinstance(found, Run):
            keys |= dict.fromkeys([*found.labels][:1])
        yield found
    if told := groups_told(keys, GROUPS):
        yield About("groups", told)


def _find(record: Record) -> Run:
    place = record.place
    names, labels, unread = _Names(), dict[str, str](), dict[str, str]()
    if not _is_bare(record.content):
        names = decode_line(_NAMES_DECODER, record.content, place.where)
        found = {name: label(getattr(names, name), place.where) for name in _NAMES}
        labels = {name: value for name, value in found.items() if value and _is_label(name, value)}
        fields = decode_line(_FIELDS_DECODER, record.content, place.where)
        unread = unread_labels(fields)
    instance = next((labels[name] for name in _NAMES if name in labels), None)
    if instance is None:
        line = _decode(record.content, place.where)
        instance = prompt_key(_messages(line, place.where))
    return Run(
        instance_id=instance,
        repetition_id=names.repetition_id,
        places=[place],
        labels=(labels or {"prompt": instance}) | unread,
    )


def _is_label(name: str, value: str) -> bool:
    return name not in TASK_LABELS or is_name(value)


def _is_bare(content: bytes) -> bool:
    return content.lstrip().startswith(b"[")


def _decode(content: bytes, where: str) -> _Line:
    if _is_bare(content):
        return _Line(messages=decode_line(_BARE_DECODER, content, where))
    return decode_line(_LINE_DECODER, content, where)


def _messages(line: _Line, where: str) -> list[Message]:
    """Return the messages of a line, after the system prompt beside them."""
    states = [
        decode_line(_STATE_DECODER, bytes(raw), f"{where}, messages") for raw in line.messages
    ]
    active = [
        raw
        for raw, state in zip(line.messages, states, strict=True)
        if state.active is None or state.active
    ]
    note(INACTIVE, len(states) - len(active))
    messages = read_messages(active, f"{where}, messages")
    for name in _SYSTEM:
        place = f"{where}, {name}"
        if not bytes(getattr(line, name)).startswith(_TEXT):
            continue
        prompt = shown(parts_in(decode_line(_SYSTEM_DECODER, bytes(getattr(line, name)), place)))
        logged = [m["content"] for m in messages if m["role"] in {"system", "developer"}]
        if not prompt or prompt in logged:
            continue
        if logged:
            got = f"`{name}` differs from the system message of the conversation"
            hint = "keep the one that the model saw"
            raise InputError("message", place, got, "one system prompt", hint)
        messages.insert(0, {"role": "system", "content": prompt})
    return messages


def read_conversation(run: Run, _: Options, contents: Contents = CONTENTS) -> Trajectory:
    """Read the conversation of a line; all numbers of the line become metrics.

    Args:
        run: The line.
        contents: What is read of a line, and what is left out on purpose.

    Raises:
        InputError: `record_type`: a field has the wrong type; `message`: there are two system
            prompts; `no_calls`: there is no assistant message.
    """
    (place,) = run.places
    content = read_record(place)
    line = _decode(content, place.where)
    account(contents, b'{"messages":%s}' % content if _is_bare(content) else content)
    messages = _messages(line, place.where)
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", place.where, "the conversation has no assistant message")
    step = Conversation(source=place.where, messages=messages, tools=openai_tools(line.tools))
    note_unread_labels(run.labels, run.instance_id)
    reward = line.score if line.reward is None else line.reward
    return Trajectory(
        steps=[step],
        reward=reward,
        metrics=_metrics(content, place.where),
        user_values=task_labels(run.labels),
    )


def _metrics(content: bytes, where: str) -> dict[str, float]:
    if _is_bare(content):
        return {}
    fields = decode_line(_FIELDS_DECODER, content, where)
    known = {name: raw for name, raw in fields.items() if name not in _OF_NAMES}
    found = numbers(known, where)
    for name in _GROUPS_OF_NUMBERS & known.keys():
        inner = decode_line(_FIELDS_DECODER, bytes(known[name]), f"{where}, {name}")
        found |= {f"{name}.{key}": v for key, v in numbers(inner, f"{where}, {name}").items()}
    return found


def recognizes(start: Start) -> bool:
    """True if a file has lines of messages with roles, and no lines or fields of another format."""
    lines = start.lines
    return any(map(_is_line, lines)) and not any(map(_is_of_another, lines))


def _is_of_another(content: bytes) -> bool:
    """True if a line is an object without messages, or a list of messages with times (`ts`)."""
    try:
        if _is_bare(content):
            return all("ts" in message for message in decoded(_LIST_DECODER, content))
        return "messages" not in decoded(_FIELDS_DECODER, content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _is_line(content: bytes) -> bool:
    try:
        decoded(_SHAPE_DECODER, content)
        return _is_bare(content) or not _ANOTHER & decoded(_FIELDS_DECODER, content).keys()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


ADAPTER = Adapter(
    summary="OpenAI-style messages: JSONL, one conversation per line; text only",
    recognizes=recognizes,
    find=find_conversations,
    read=read_conversation,
    is_text=True,
    is_own=True,
    contents=CONTENTS,
)
