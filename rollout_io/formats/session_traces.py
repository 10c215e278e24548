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
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from rollout_io.dataset.storage import PathLike
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.exporting import Exported, Failed, declared_tables, new_export
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import Message, calls_in, known
from rollout_io.formats.parsing.messages import openai_tools, read_messages
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
_LEAVES = {
    "facts about a session": "session/name session/model",
    "facts about a message": "message/message.timestamp message/message.toolCalls.type "
    "message/timestamp",
}


class Head(msgspec.Struct, gc=False):
    """The header of a file."""

    id: str | None = None
    harness: str | None = None
    instance_id: str | None = None
    repetition_id: int | None = None
    reward: float | None = None
    error: str | None = None
    tools: Any = None
    parent: str | None = None
    agent: str | None = None
    step_index: int | None = None


class _Function(msgspec.Struct, gc=False):
    id: str | None = None
    function: Any = None


class _Message(msgspec.Struct, gc=False, rename="camel"):
    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    tool_calls: list[_Function] | None = None
    tool_call_id: Any = None
    model: str | None = None


class _Spoken(msgspec.Struct, gc=False):
    message: _Message | None = None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session, which are one context."""
    facts: dict[str, Any] = {}
    for where, _, record in lines:
        if isinstance(record, Head):
            log.error, log.tools = record.error, openai_tools(record.tools)
            log.order = record.step_index
            log.reward = record.reward
            facts = {} if log.name is None else {"reward": record.reward}
        elif isinstance(record, _Spoken) and record.message is not None:
            log.model = record.message.model or log.model
            fields = msgspec.structs.asdict(record.message)
            del fields["model"]
            raw = msgspec.Raw(msgspec.json.encode(known(fields)))
            log.say(read_messages([raw], where), where, facts=facts)


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the header of a file; it may name the group and the attempt."""
    head = next((line for line in first if isinstance(line, Head)), Head())
    return Names(
        head.id or str(path),
        head.parent,
        head.agent,
        labels={"harness": head.harness},
        instance=head.instance_id,
        repetition=head.repetition_id,
    )


ADAPTER = replace(
    Sessions(
        kind="type",
        records={"session": Head, "message": _Spoken},
        leaves=_LEAVES,
        names=names,
        read=read,
        is_record=like({"type": "session", "harness": str, "id": str}),
    ).adapter("session traces, as the Hugging Face Hub shows them: JSONL; text only"),
    is_agent=False,
)


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write a directory with one file per context of a trajectory; all rows are kept.

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
                told_rows = [(row, messages) for row in rows if (messages := _said(row))]
                spoken = [
                    (row, messages)
                    for row, messages in told_rows
                    if row.get("error") is not None or any(map(is_answer, messages))
                ]
                done.leave_out(NO_MESSAGES, len(rows) - len(told_rows))
                done.leave_out(NO_ANSWER, len(told_rows) - len(spoken))
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
        messages = json.loads(sent or "null")
    except (ValueError, RecursionError):  # text
        messages = sent
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        prompt = messages if messages is None or isinstance(messages, str) else sent
        messages = [{"role": "user", "content": prompt}] if prompt else []
    if messages and row["token_source"] != RETOKENIZED and text:
        content, calls = calls_in(text)
        answer = {"role": "assistant", "content": content}
        messages.append(answer | ({"tool_calls": calls} if calls else {}))
    return messages


def _files(
    spoken: Sequence[tuple[Mapping[str, Any], list[Message]]], last: Mapping[str, Any]
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield a name and the lines of each context that no later one continues: the last one first."""
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
