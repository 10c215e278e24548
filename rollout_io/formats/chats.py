"""The `chats` format: chat data sets, and messages as agent frameworks save them.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
    {"prompt": "...", "completion": "..."}
    {"messages": [{"type": "human", "content": "..."}, ...]}, or the list alone

Files are JSON Lines, one JSON document, Parquet, or the Arrow files of a directory that `datasets`
saved; a line, a document, a record of a document that lists them, or a row is a run. Messages may have any shape that `dialects.frameworks`
reads: LangChain's, pydantic-ai's, AutoGen's, LlamaIndex's, the items of OpenAI's Agents SDK. JSON
Lines with OpenAI-style `messages` are the format `openai_messages`.

Group, outcome, metrics, tools and system prompt are as in `openai_messages`. A prompt and a
completion that are text are tokenized verbatim, without a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_io.formats.base import Completion, Conversation, Options, Place, Run, Trajectory
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.dialects.bodies import tools_of, value_of
from rollout_io.formats.engines.containers import is_table, schema_of
from rollout_io.formats.engines.records import Records
from rollout_io.formats.openai_messages import NAMES, Named, with_groups
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.naming import (
    note_unread_labels,
    numbers,
    task_labels,
    unread_labels,
)
from rollout_io.formats.start import Start
from schemas.errors import InputError

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


def run_of(chat: Chat, place: Place) -> Run:
    """Return the run of a chat, named as in `openai_messages`."""
    names = chat.names(place.where)
    if not names:
        step = _conversation(chat, place.where)
        prompt = step.prompt if isinstance(step, Completion) else step.messages
        names = {"prompt": prompt_key(prompt)}
    labels = names | unread_labels(chat.fields)
    instance = next(iter(names.values()))
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(chat: Chat, run: Run, _: Options) -> Trajectory:
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


def _are_chats(parts: Sequence[msgspec.Raw]) -> bool:
    """True for the elements of a list of records, as data sets of ShareGPT are."""
    return any(_has_list(msgspec.json.decode(part)) for part in parts)


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


def _is_plain(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value


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
    is_list=_are_chats,
    run=run_of,
    read=read,
    is_log=_is_log,
    finish=with_groups,
).adapter(
    "chat data sets (ShareGPT, prompt and completion) and messages of agent frameworks",
    "conversation",
    is_general=True,
    is_own=True,
)
