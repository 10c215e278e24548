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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.opening import Version
from rollout_io.formats.base import (
    About,
    Adapter,
    Completion,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.contexts import by_marks
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.dialects.bodies import tools_of, value_of
from rollout_io.formats.openai_messages import GROUPS
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.documents import index_of
from rollout_io.formats.parsing.lines import Record, read_record
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.naming import (
    TASK_LABELS,
    groups_told,
    is_name,
    note_unread_labels,
    task_labels,
    unread_labels,
)
from rollout_io.formats.parsing.records import (
    decode_record,
    find_records,
)
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_LISTS = ("messages", "conversations", "conversation")
_ANSWERS = ("completion", "response", "answer")
_SYSTEM = ("system", "system_prompt", "instructions")
_NAMES = ("instance_id", *TASK_LABELS, "id")
_ITEMS = frozenset({"function_call", "function_call_output", "reasoning"})
_ARROW, _PARQUET = ".arrow", ".parquet"
_NOT_TRL = "step"
_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, NotImplementedError)
_CONTENTS = Contents(
    reads={
        "": "messages conversations conversation prompt completion response answer tools system "
        "system_prompt instructions instance_id task_id task problem_id question_id instance id "
        "reward score metrics"
    }
)


def find_chats(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per line, document or row, in the order of the inputs."""
    keys: dict[str, None] = {}
    for given in inputs:
        find = _find_rows if _is_table(given.path) else _find_lines
        for found in find(given, progress):
            if isinstance(found, Run):
                keys |= dict.fromkeys([*found.labels][:1])
            yield found
    if told := groups_told(keys, GROUPS):
        yield About("groups", told)


def _find_lines(given: Input, progress: Progress) -> Iterator[Found]:
    def find(record: Record) -> Iterator[Found]:
        value: Any = decode_record(record)
        if not _is_list_of_chats(value):
            yield _run(record.place, value)
            return
        for i, each in enumerate(value):
            where = f"{record.place.where}[{i}]"
            yield _run(msgspec.structs.replace(record.place, where=where, part=i), each)

    return find_records([given], progress, find)


def _is_list_of_chats(value: Any) -> bool:
    """True for a document that is a list of records, as data sets of ShareGPT are."""
    return isinstance(value, list) and any(
        isinstance(each, Mapping) and any(isinstance(each.get(name), list) for name in _LISTS)
        for each in value
    )


def _find_rows(given: Input, progress: Progress) -> Iterator[Found]:
    num_bytes = given.path.stat().st_size
    progress(num_bytes)
    try:
        rows = [
            row for batch in range(_num_batches(given.path)) for row in _batch(given.path, batch)
        ]
    except _ERRORS as error:
        yield Rejected(Place(given.path, given.name, 0, num_bytes), _damaged(given.name, error))
        return
    for number, (batch, index, row) in enumerate(rows):
        place = Place(given.path, f"{given.name}, row {number}", None, 1, batch * _STRIDE + index)
        try:
            yield _run(place, row)
        except RolloutError as error:
            yield Rejected(place, error)


def _run(place: Place, record: Any) -> Run:
    fields = record if isinstance(record, Mapping) else {}
    named = {name: str(fields[name]) for name in _NAMES if _is_name(name, fields.get(name))}
    if not named:
        step = _conversation(record, place.where)
        named = {
            "prompt": prompt_key(step.prompt if isinstance(step, Completion) else step.messages)
        }
    instance = named[next(iter(named))]
    labels = named | unread_labels(fields)
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def _is_name(name: str, value: Any) -> bool:
    is_plain = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return is_plain and (name not in TASK_LABELS or is_name(str(value)))


def read_chat(run: Run, _: Options) -> Trajectory:
    """Read a conversation, or a prompt and its completion; numbers beside it become metrics.

    Raises:
        InputError: `message`: a message has an unknown shape; `no_calls`: there is no answer;
            `parquet_file`: the file is damaged.
    """
    (place,) = run.places
    record: Any = (
        _row(place) if _is_table(place.path) else decode_record(Record(place, read_record(place)))
    )
    if place.offset is not None and place.part is not None:
        record = record[index_of(place)]
    step = _conversation(record, place.where)
    fields = record if isinstance(record, Mapping) else {}
    account(_CONTENTS, fields)
    metrics = _numbers(fields) | {
        f"metrics.{name}": value for name, value in _numbers(fields.get("metrics")).items()
    }
    reward = metrics.get("reward", metrics.get("score"))
    note_unread_labels(run.labels, run.instance_id)
    labels = task_labels(run.labels)
    steps = by_marks(step)
    return Trajectory(steps=steps, reward=reward, metrics=metrics, user_values=labels)


def _numbers(fields: Any) -> dict[str, float]:
    known = fields.items() if isinstance(fields, Mapping) else ()
    return {
        name: float(value)
        for name, value in known
        if isinstance(value, int | float) and name not in _NAMES and math.isfinite(value)
    }


def _conversation(record: Any, where: str) -> Conversation | Completion:
    fields = record if isinstance(record, Mapping) else {"messages": record}
    given, answer = _parts(fields)
    if isinstance(given, str) and isinstance(answer, str):
        return Completion(source=where, prompt=given, response=answer)
    before = messages_of(_listed(given, "user"), f"{where}, messages")
    after = messages_of(_listed(answer, "assistant"), f"{where}, completion")
    messages = [*_system(fields, before), *before, *after]
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", where, "the conversation has no assistant message")
    tools = tools_of(fields.get("tools"))
    num_given = len(messages) - len(after) if after else 0
    return Conversation(source=where, messages=messages, tools=tools, num_given=num_given)


def _parts(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what was given, and the completion if the record has it apart."""
    for name in _LISTS:
        if fields.get(name):
            return value_of(fields[name]), None
    name = next((name for name in _ANSWERS if fields.get(name) is not None), _ANSWERS[0])
    return value_of(fields.get("prompt")), value_of(fields.get(name))


def _listed(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value] if value else []


def _system(fields: Mapping[str, Any], messages: Iterable[Message]) -> list[Message]:
    stated = next((s for name in _SYSTEM if isinstance(s := fields.get(name), str) and s), None)
    logged = [m["content"] for m in messages if m["role"] in {"system", "developer"}]
    return [{"role": "system", "content": stated}] if stated and stated not in logged else []


def messages_of(given: list[Any], where: str) -> list[Message]:
    """Convert messages of any framework, or items of OpenAI's Responses API."""
    if any(isinstance(each, Mapping) and str(each.get("type")) in _ITEMS for each in given):
        return responses.messages(given, where)
    return frameworks.messages(given, where)


def _without_nulls(value: Any) -> Any:
    """Drop the nulls that Arrow adds to structs."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


_STRIDE = 1 << 32
"""A row's index is its batch times this, plus its index in the batch."""


def _is_table(path: Path) -> bool:
    return path.name.endswith((_ARROW, _PARQUET))


def _num_batches(path: Path) -> int:
    if path.name.endswith(_PARQUET):
        return int(pq.read_metadata(path).num_row_groups)
    return len(_arrow_batches(path, Version.of(path)))


def _batch(path: Path, number: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    rows = _rows(path, Version.of(path), number)
    return ((number, index, _without_nulls(row)) for index, row in enumerate(rows))


@lru_cache(maxsize=2)
def _rows(path: Path, version: Version, number: int) -> list[dict[str, Any]]:
    """Read the rows of a row group, or of a record batch."""
    found: list[dict[str, Any]]
    if path.name.endswith(_PARQUET):
        with pq.ParquetFile(path) as file:
            found = file.read_row_group(number).to_pylist()
    else:
        found = _arrow_batches(path, version)[number].to_pylist()
    return found


@lru_cache(maxsize=2)
def _arrow_batches(path: Path, _: Version) -> list[pa.RecordBatch]:
    """Open the record batches of a memory-mapped Arrow file, as `datasets` saves it."""
    return list(pa.ipc.open_stream(pa.memory_map(str(path))))


def _row(place: Place) -> dict[str, Any]:
    batch, index = divmod(index_of(place), _STRIDE)
    try:
        row: dict[str, Any] = _without_nulls(
            _rows(place.path, Version.of(place.path), batch)[index]
        )
    except (*_ERRORS, IndexError) as error:
        raise _damaged(place.where, error) from None
    return row


def _damaged(where: str, error: Exception) -> InputError:
    got = " ".join(f"cannot read the file: {str(error) or type(error).__name__}".split())
    return InputError("parquet_file", where, got, hint="copy the file again, or write it again")


def recognizes(start: Start) -> bool:
    """True if a file has conversations, or prompts and completions, in one of the shapes."""
    path = start.path
    try:
        if _is_table(path):
            return start.is_file and _has_columns(path)
        is_whole = start.is_document
        return any(_is_chat(v, may_be_plain=is_whole) for v in start.values)
    except _ERRORS:
        return False


def _has_columns(path: Path) -> bool:
    if path.name.endswith(_PARQUET):
        names = set(pq.read_schema(path).names)
    else:
        names = set(pa.ipc.open_stream(pa.memory_map(str(path))).schema.names)
    is_pair = "prompt" in names and bool(names & {*_ANSWERS})
    return _NOT_TRL not in names and (bool(names & {*_LISTS}) or is_pair)


def _is_chat(record: Any, *, may_be_plain: bool = False) -> bool:
    """True if a record is a chat; plain messages in JSON Lines are `openai_messages`."""
    if isinstance(record, list):
        if _is_list_of_chats(record):
            return _is_chat(record[0], may_be_plain=True)
        is_known = all(_is_of_framework(each) for each in record)
        is_plain = all(_is_plain(each) for each in record)
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


def _is_plain(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" in given and "content" in given


def _is_of_framework(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    if "from" in given and "value" in given:
        return True
    if str(given.get("type")) in _ITEMS or ("kind" in given and "parts" in given):
        return True
    if str(given.get("type")) in frameworks.LANGCHAIN and ("data" in given or "content" in given):
        return True
    return "lc" in given or "blocks" in given or _is_plain(given)


ADAPTER = Adapter(
    summary="chat data sets (ShareGPT, prompt and completion) and messages of agent frameworks",
    recognizes=recognizes,
    find=find_chats,
    read=read_chat,
    is_text=True,
    noun="conversation",
    is_general=True,
    is_own=True,
    contents=_CONTENTS,
)
