"""The `openai_messages` and `chats` formats: conversations of OpenAI-style messages, and chats of any shape.

`openai_messages` is JSONL, one conversation per line:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "instance_id": "shop-1", "reward": 1.0, "tools": [...]}
    [{"role": "user", ...}, {"role": "assistant", ...}]

A line is a run. Its group is `instance_id`, or else a label of the task (`TASK_LABELS`), which is
also kept as a column, or else `id`; other lines are grouped by the messages before their first
answer. The history of the dataset records the rule. The outcome is `reward`, or else `score`; numbers in
`rewards`, `scores` and `metrics` are metrics too.

A system prompt beside the messages (`system_prompt`, `system`, `system_message`, `instructions`)
becomes the first message. Other text beside the messages is not read: it is counted by its key.
Messages that are marked as not `active` (a user took them back) are left out; answers with `weight` 0,
or another mark that they are not to be trained on (`parsing.messages.with_marks`), are part of the prompt.

`chats` are chat data sets, and messages as agent frameworks save them:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
    {"prompt": "...", "completion": "..."}
    {"messages": [{"type": "human", "content": "..."}, ...]}, or the list alone

Files are JSON Lines, one JSON document, Parquet, or the Arrow files of a directory that `datasets`
saved; a line, a document, a record of a document that lists them, or a row is a run. Messages may have any
shape that `dialects.frameworks` reads: LangChain's, pydantic-ai's, AutoGen's, LlamaIndex's, the items of
OpenAI's Agents SDK. Group, outcome, metrics, tools and system prompt are as in `openai_messages`. A prompt
and a completion that are text are tokenized verbatim, without a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import (
    About,
    Completion,
    Conversation,
    Found,
    Logged,
    Options,
    Place,
    Run,
    Trajectory,
)
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.dialects.bodies import tools_of, value_of
from rollout_io.formats.engines.files import Start, is_table, schema_of
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.grammar import inner, like
from rollout_io.formats.parsing.content import NO_JSON, Content, Message, parts_in, shown
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, openai_tools, prompt_key, read_messages
from rollout_io.formats.parsing.records import (
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
from schemas.errors import InputError

GROUPS = "inferred: lines without an id that have the same messages before the first answer"
_ANOTHER = frozenset(
    {"response", "trajectory_format", "info", "message_log", "sessionId", "events"}
)
NAMES = ("instance_id", *TASK_LABELS, "id")
_OF_NAMES = frozenset({*NAMES, "repetition_id"})
_SYSTEM_PROMPTS = ("system_prompt", "system", "system_message", "instructions")
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
    for name in _SYSTEM_PROMPTS:
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


def _read_line(line: Line, run: Run, _: Options) -> Trajectory:
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


def _is_log_of_lines(start: Start) -> bool:
    """True if a file has lines of messages with roles, and no lines or fields of another format."""
    # Another format's line is an object without messages, or a list of messages with times (`ts`).
    is_of_another = any(
        all(isinstance(message, dict) and "ts" in message for message in line)
        if isinstance(line, list)
        else "messages" not in line
        for line in start.values
    )
    return not start.is_document and any(map(_is_line, start.values)) and not is_of_another


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


OPENAI_MESSAGES = Records(
    records={"": Line},
    bare="messages",
    run=run_of,
    read=_read_line,
    is_log=_is_log_of_lines,
    is_whole=lambda _: False,
    finish=with_groups,
).adapter("OpenAI-style messages: JSONL, one conversation per line; text only", is_own=True)


_LISTS = ("messages", "conversations", "conversation")
_ANSWERS = ("completion", "response", "answer")
_SYSTEM = ("system", "system_prompt", "instructions")
_ITEMS = frozenset({"function_call", "function_call_output", "reasoning"})
_NOT_TRL = "step"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw] | Any)


class Chat(Named):
    """A conversation, or a prompt and its completion."""

    messages: Any = None
    conversations: Any = None
    conversation: Any = None
    prompt: Any = None
    completion: Any = None
    response: Any = None
    answer: Any = None
    tools: Any = None
    system: Any = None
    system_prompt: Any = None
    instructions: Any = None
    reward: Any = None
    score: Any = None
    metrics: msgspec.Raw = NO_JSON


def _run_of_chat(chat: Chat, place: Place) -> Run:
    """Return the run of a chat, named as in `openai_messages`."""
    names = chat.names(place.where)
    if not names:
        step = _conversation(chat, place.where)
        prompt = step.prompt if isinstance(step, Completion) else step.messages
        names = {"prompt": prompt_key(prompt)}
    labels = names | unread_labels(chat.fields)
    instance = next(iter(names.values()))
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def _read_chat(chat: Chat, run: Run, _: Options) -> Trajectory:
    """Read a conversation, or a prompt and its completion; numbers beside it become metrics."""
    (place,) = run.places
    step = _conversation(chat, place.where)
    fields = chat.fields
    numeric = {n: raw for n, raw in fields.items() if n not in NAMES}
    objects = ["metrics"] if bytes(chat.metrics).startswith(b"{") else []
    metrics = numbers(numeric, place.where, objects)
    note_unread_labels(run.labels, run.instance_id)
    return Trajectory(
        steps=[step],
        reward=metrics.get("reward", metrics.get("score")),
        metrics=metrics,
        user_values=task_labels(run.labels),
    )


def _conversation(chat: Chat, where: str) -> Conversation | Completion:
    prompt, answer = _parts(chat)
    if isinstance(prompt, str) and isinstance(answer, str):
        return Completion(source=where, prompt=prompt, response=answer)
    before = messages_of(_listed(prompt, "user"), f"{where}, messages")
    after = messages_of(_listed(answer, "assistant"), f"{where}, completion")
    messages = [*_system(chat, before), *before, *after]
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", where, "the conversation has no assistant message")
    num_given = len(messages) - len(after) if after else 0
    return Conversation(
        source=where, messages=messages, tools=tools_of(chat.tools), num_given=num_given
    )


def _parts(chat: Chat) -> tuple[Any, Any]:
    """Return what was given, and the completion if the record has it apart."""
    for name in _LISTS:
        if listed := getattr(chat, name):
            return value_of(listed), None
    answers = (getattr(chat, name) for name in _ANSWERS)
    answer = next((answer for answer in answers if answer is not None), None)
    return value_of(chat.prompt), value_of(answer)


def _listed(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value] if value else []


def _system(chat: Chat, messages: Iterable[Message]) -> list[Message]:
    texts = (getattr(chat, name) for name in _SYSTEM)
    stated = next((text for text in texts if isinstance(text, str) and text), None)
    logged = [m["content"] for m in messages if m["role"] in {"system", "developer"}]
    return [{"role": "system", "content": stated}] if stated and stated not in logged else []


def messages_of(values: list[Any], where: str) -> list[Message]:
    """Convert messages of any framework, or items of OpenAI's Responses API."""
    if any(isinstance(value, Mapping) and str(value.get("type")) in _ITEMS for value in values):
        return responses.messages(values, where)
    return frameworks.messages(values, where)


def _is_log(start: Start) -> bool:
    """True if a file has conversations, or prompts and completions, in one of the shapes."""
    if is_table(start.path):
        names = {*schema_of(start.path).names}
        is_pair = "prompt" in names and bool(names & {*_ANSWERS})
        return _NOT_TRL not in names and (bool(names & {*_LISTS}) or is_pair)
    return any(_is_chat(value, may_be_plain=start.is_document) for value in start.values)


def _has_list(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(value.get(n), list) for n in _LISTS)


def _is_chat(record: Any, *, may_be_plain: bool = False) -> bool:
    """True if a record is a chat; plain messages in JSON Lines are `openai_messages`."""
    if isinstance(record, list):
        if any(map(_has_list, record)):
            return _is_chat(record[0], may_be_plain=True)
        is_known = all(_is_of_framework(part) for part in record)
        is_plain = all(_is_plain(part) for part in record)
        return bool(record) and is_known and (may_be_plain or not is_plain)
    if not isinstance(record, Mapping) or _NOT_TRL in record:
        return False
    if isinstance(record.get("messages"), list):
        return _is_chat(record["messages"], may_be_plain=may_be_plain)
    listed = record.get("conversations", record.get("conversation"))
    if isinstance(listed, list):
        return _is_chat(listed, may_be_plain=True)
    answer = next((record[name] for name in _ANSWERS if name in record), None)
    return _is_said(record.get("prompt")) and _is_said(answer)


def _is_said(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return isinstance(value, str) or (is_list and all(isinstance(e, Mapping) for e in value))


_is_plain = like("role content")


def _is_of_framework(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if "from" in value and "value" in value:
        return True
    if str(value.get("type")) in _ITEMS or ("kind" in value and "parts" in value):
        return True
    if str(value.get("type")) in frameworks.LANGCHAIN and ("data" in value or "content" in value):
        return True
    return "lc" in value or "blocks" in value or _is_plain(value)


ADAPTER = Records(
    records={"": Chat},
    bare="messages",
    elements="",
    # The elements of a list of records, as data sets of ShareGPT are.
    is_list=lambda parts: any(_has_list(msgspec.json.decode(part)) for part in parts),
    run=_run_of_chat,
    read=_read_chat,
    is_log=_is_log,
    finish=with_groups,
).adapter(
    "chat data sets (ShareGPT, prompt and completion) and messages of agent frameworks",
    "conversation",
    is_general=True,
    is_own=True,
)
