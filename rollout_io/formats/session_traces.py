"""The `session_traces` format: the Hugging Face Hub's Session Trace Simple Format, read and written.

    {"type": "session", "harness": "my-agent", "id": "s", "name": "..."}
    {"type": "message", "message": {"role": "user", "content": "..."}}
    {"type": "message", "message": {"role": "assistant", "content": "", "reasoningContent": "...",
     "toolCalls": [{"id": "c", "function": {"name": "ls", "arguments": "{}"}}]}}
    {"type": "message", "message": {"role": "tool", "content": "...", "toolCallId": "c"}}

A file is a session, which the Hub shows in its viewer of traces. The header may have more keys, which
the Hub ignores. An export writes there what it knows of the run, and `read` takes it back:
`instance_id` (the group, else each session is one), `repetition_id`, `reward` (of the run; of the
context in a session with a `parent`), `error`, `tools`, `parent` (the session whose run this one
belongs to), `agent` and `step_index` (the order of the contexts). The log has no token ids.

Each context of a trajectory is exported as a file, unless a later one continues it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from rollout_io.formats.base import Found, Input, Options, Progress, Run, Trajectory
from rollout_io.formats.contents import Contents
from rollout_io.formats.exporting import Exported, Failed, PathLike, declared_tables, new_export
from rollout_io.formats.parsing.completions import calls_in
from rollout_io.formats.parsing.content import Message, known
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record, read_record
from rollout_io.formats.parsing.messages import openai_tools, read_messages
from rollout_io.formats.parsing.sessions import Contexts, Item, Names, Session, Sessions, texts
from schemas.messages import RETOKENIZED, is_answer, marked, media_in

HARNESS = "rollout-io"
NO_MESSAGES = "without messages (token ids alone)"
NO_ANSWER = "without an answer"
NOT_WRITTEN = "rewards of rows that have no header of their own, not written"
MARKED = "pictures and other parts that are not text, each written as a mark such as [image]"
_MAX_NAME = 80
_COLUMNS = ("trajectory_id", "instance_id", "repetition_id", "reward", "error", "agent", "model")
_FIELDS = {
    "reasoningContent": "reasoning_content",
    "toolCalls": "tool_calls",
    "toolCallId": "tool_call_id",
}
_MESSAGE = "message.role message.content message.reasoningContent message.toolCalls.id "
CONTENTS = Contents(
    kind="type",
    reads={
        "session": "id harness instance_id repetition_id reward error tools parent agent "
        "step_index",
        "message": f"{_MESSAGE}message.toolCalls.function message.toolCallId message.model",
    },
    leaves={
        "facts about a session": "session/name session/model",
        "facts about a message": "message/message.timestamp message/message.toolCalls.type "
        "message/timestamp",
    },
)


class _Head(msgspec.Struct, gc=False):
    instance_id: str | None = None
    repetition_id: int | None = None
    reward: float | None = None
    error: str | None = None
    tools: Any = None
    step_index: int | None = None


class _Line(msgspec.Struct, gc=False):
    type: str
    message: dict[str, msgspec.Raw] | None = None
    error: str | None = None
    tools: Any = None


_HEAD = msgspec.json.Decoder(_Head)
_LINE = msgspec.json.Decoder(_Line)
_TEXT = msgspec.json.Decoder(str | None)


def read_session(records: Sequence[Record]) -> Session:
    """Read the messages of a session, which are one context."""
    items, models, contexts, error = list[Item](), list[str | None](), Contexts(), None
    for place, content in records:
        line = decode_line(_LINE, content, place.where)
        if line.type == "session":
            error, contexts.tools = line.error, openai_tools(line.tools)
        elif line.type == "message" and line.message is not None:
            fields = {_FIELDS.get(name, name): value for name, value in line.message.items()}
            models.append(decode_line(_TEXT, bytes(fields.pop("model", b"null")), place.where))
            raw = msgspec.Raw(msgspec.json.encode(fields))
            items.append(Item(place.where, read_messages([raw], place.where), place.where))
    contexts.add(items)
    return Session(contexts, error, texts(models))


def _names(path: Path, records: Sequence[Mapping[str, Any]]) -> Names:
    head = next((r for r in records if r.get("type") == "session"), {})
    session, parent, agent, harness = (head.get(n) for n in ("id", "parent", "agent", "harness"))
    labels = {"harness": harness} if isinstance(harness, str) else {}
    parent = parent if isinstance(parent, str) else None
    agent = agent if isinstance(agent, str) else None
    return Names(session if isinstance(session, str) else str(path), parent, agent, labels)


def _is_session(record: Mapping[str, Any]) -> bool:
    is_head = record.get("type") == "session" and isinstance(record.get("harness"), str)
    return is_head and isinstance(record.get("id"), str)


_SESSIONS = Sessions(
    contents=CONTENTS,
    names=_names,
    read=read_session,
    is_record=_is_session,
    marks=(b'"harness"',),
)


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per session without a parent; its header may name the group and the attempt."""
    for found in _SESSIONS.find(inputs, progress):
        if isinstance(found, Run):
            head = _head_of(found)
            found.instance_id = head.instance_id or found.instance_id
            found.repetition_id = head.repetition_id if head.instance_id else found.repetition_id
        yield found


def _head_of(run: Run) -> _Head:
    """Return the header of a session; an empty one if it is damaged, which `read` reports."""
    try:
        return _HEAD.decode(read_record(run.places[0]))
    except (msgspec.MsgspecError, ValueError):
        return _Head()


def read_trace(run: Run, options: Options) -> Trajectory:
    """Read the contexts of a session and its sub-agents, in the order of their `step_index`.

    The reward of the run is in the header of its session; those of the others are of their contexts.

    Raises:
        InputError: `record_type`: a field has the wrong type; `no_calls`: there is no answer.
    """
    found, heads = _SESSIONS.read_run(run, options), dict[str, _Head]()
    for _, file in groupby(run.places, lambda place: place.path):
        places = [*file]
        head = decode_line(_HEAD, read_record(places[0]), places[0].where)
        heads |= {place.where: head for place in places}
    main = heads[run.places[0].where]
    contexts = [(heads[step.source], step) for step in found.steps]
    for head, step in contexts:
        step.reward = None if head is main else head.reward
    order = [head.step_index for head, _ in contexts if head.step_index is not None]
    if len(order) == len(contexts):
        contexts = [contexts[i] for i in sorted(range(len(order)), key=order.__getitem__)]
    steps = [step for _, step in contexts]
    metrics = {} if main.reward is None else {"reward": main.reward}
    reward = None if found.error else main.reward
    return replace(found, steps=steps, reward=reward, metrics=metrics)


ADAPTER = replace(
    _SESSIONS.adapter("session traces, as the Hugging Face Hub shows them: JSONL; text only"),
    find=find_sessions,
    read=read_trace,
    is_agent=False,
)


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write a directory with one file per context of a trajectory; all rows are kept.

    Args:
        dataset: The rollout dataset.
        out: Path of the new directory.
        failed: Ignored, since nothing is masked.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out` exists or is inside the dataset, or no row has messages.
    """
    del failed
    done, num_marked, num_files, num_rewards = Exported(), 0, 0, 0
    with new_export(out, dataset) as folder:
        folder.mkdir()
        for table in declared_tables(dataset):
            for rows in _trajectories(table):
                done.num_rows_read += len(rows)
                num_rewards += sum(map(_is_rewarded, rows))
                said = [(row, messages) for row in rows if (messages := _said(row))]
                spoken = [(row, messages) for row, messages in said if _is_told(row, messages)]
                done.leave_out(NO_MESSAGES, len(rows) - len(said))
                done.leave_out(NO_ANSWER, len(said) - len(spoken))
                done.num_rows_written += len(spoken)
                for name, lines in _files(spoken, rows[-1]):
                    num_rewards -= _is_rewarded(lines[0])
                    num_marked += sum(len(media_in(message)) for message in lines[1:])
                    path = folder / f"{num_files:06d}-{name}.jsonl"
                    text = "".join(map(_line, lines))  # a lone surrogate stays an escape of JSON
                    path.write_text(text, encoding="utf-8", errors="backslashreplace")
                    num_files += 1
        done.close(dataset)
    done.remarks += [f"{MARKED}: {num_marked:,}"] if num_marked else []
    done.remarks += [f"{NOT_WRITTEN}: {num_rewards:,}"] if num_rewards else []
    return done


def _is_rewarded(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("reward"))


def _is_told(row: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """True if a session of the messages can be read: it has an answer, or says why it has none."""
    return any(map(is_answer, messages)) or row.get("error") is not None


def _trajectories(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    names = [*_COLUMNS, "messages", "response_text", "segments", "token_source", "step_index"]
    rows: list[dict[str, Any]] = []
    for row in table.select([n for n in names if n in table.column_names]).to_pylist():
        if rows and rows[0]["trajectory_id"] != row["trajectory_id"]:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _said(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row with its last answer; a merged row has them in its last segment."""
    last = (row.get("segments") or [{}])[-1]
    sent, text = (last.get(n) or row.get(n) for n in ("messages", "response_text"))
    try:
        found = json.loads(sent or "null")
    except (ValueError, RecursionError):  # text
        found = sent
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        prompt = found if found is None or isinstance(found, str) else sent
        found = [{"role": "user", "content": prompt}] if prompt else []
    if found and row["token_source"] != RETOKENIZED and text:
        content, calls = calls_in(text)
        said = {"role": "assistant", "content": content}
        found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def _files(
    spoken: Sequence[tuple[Mapping[str, Any], list[Message]]], last: Mapping[str, Any]
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield a name and the lines of each context that no later one continues: the last one first.

    Args:
        spoken: Rows of a trajectory with their messages.
        last: Its last row, which has the reward of the run.
    """
    ends = [
        i
        for i, (_, messages) in enumerate(spoken)
        if not any(_continues(later, messages) for _, later in spoken[i + 1 :])
    ]
    parent = None
    for number, i in enumerate(reversed(ends)):
        row, messages = spoken[i]
        session = row["trajectory_id"] + (f"/{number}" if number else "")
        facts = {n: row.get(n) for n in ("instance_id", "repetition_id", "agent", "step_index")}
        facts |= {"reward": (row if number else last).get("reward")}
        of_run = {} if number else {"error": last.get("error")}
        head = {"type": "session", "harness": HARNESS, "id": session, "name": session}
        name = re.sub(r"[^\w.-]+", "_", session)[:_MAX_NAME]
        yield name, [known(head | facts | of_run | {"parent": parent}), *_told(messages, row)]
        parent = parent or session


def _told(messages: Sequence[Message], row: Mapping[str, Any]) -> Iterator[Message]:
    for message in messages:
        model = row.get("model") if message.get("role") == "assistant" else None
        yield message | known({"model": model})


def _continues(later: Sequence[Message], messages: Sequence[Message]) -> bool:
    """True if messages begin with others, whose last answer may be in another form (as text)."""
    start = messages[:-1]
    is_longer = len(later) > len(messages) and list(later[: len(start)]) == list(start)
    return is_longer and later[len(start)].get("role") == "assistant"


def _line(fields: Mapping[str, Any]) -> str:
    """Return a header, or a message, as a line of the file."""
    if "harness" not in fields:
        content = marked(fields).get("content")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content)
        named = {name: fields.get(key) for name, key in _FIELDS.items()}
        message = {"role": fields.get("role", "user"), "content": content or ""} | known(named)
        fields = {"type": "message", "message": message | known({"model": fields.get("model")})}
    return json.dumps(fields, ensure_ascii=False) + "\n"
