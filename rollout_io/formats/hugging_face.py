"""The Hugging Face Hub: its traces of sessions, read and written, and dataset folders.

The `session_traces` format is the Hub's Session Trace Simple Format. A file is a session, which the Hub
shows in its viewer of traces. The header may have more keys, which the Hub ignores. An export writes
there what it knows of the run, and `read` takes it back: `instance_id` (the group, else each session is
one), `repetition_id`, `reward` (of the run; of the context in a session with a `parent`), `error`,
`tools`, `parent` (the session whose run this one belongs to), `agent` and `step_index` (the order of the
contexts). The log has no token ids.

Each context of a trajectory is exported as a file, unless a later one continues it.

A dataset folder (`hf`) is for `datasets.load_dataset(folder)` and the Hub. `data/train-*.parquet` contain
the complete logical table (layout `full`); README.md is the dataset card, whose configuration, features
and sizes `datasets` writes itself. Pictures are in `data.blobs/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.blobs import Blobs, carry, names_in
from rollout_io.dataset.storage import PathLike
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    ParquetFile,
    declared_tables,
    new_export,
    without_maps,
)
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import Message, calls_in, known
from rollout_io.formats.parsing.messages import openai_tools, read_messages
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import count
from schemas.imports import requires_extra
from schemas.messages import RETOKENIZED, is_answer, marked, media_in
from schemas.metadata import DatasetMetadata
from schemas.rules import RULES

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


def write_traces(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
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
        models = [row.get("model") if m.get("role") == "assistant" else None for m in messages]
        pairs = zip(messages, models, strict=True)
        lines = [message | known({"model": model}) for message, model in pairs]
        yield name, [known(head | facts | of_run | {"parent": parent}), *lines]
        parent = parent or session


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


DATA_FILES = "data/*.parquet"

ROW = """\
A row is one sequence: the token ids of one call of a language model (its prompt and the response
sampled for it), or of several calls merged into one. The rows of one trajectory (one run of one
task) are adjacent and in order. The trajectories of one `instance_id` form a group."""


@dataclass(slots=True)
class _Statistics:
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    rewards: list[float] = field(default_factory=list)
    group_sizes: dict[str, int] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Add the counts of a table of complete trajectories."""
        self.num_rows += table.num_rows
        for name in ("prompt_token_ids", "response_ids"):
            self.num_tokens += pc.sum(pc.list_value_length(table.column(name))).as_py() or 0
        self.num_trained_tokens += pc.sum(pc.list_flatten(table.column("loss_mask"))).as_py() or 0
        last = table.filter(table.column("is_last_step"))
        for name in last.column("instance_id").to_pylist():
            self.group_sizes[name] = self.group_sizes.get(name, 0) + 1
        if "error" in last.column_names:
            healthy = pc.is_null(last.column("error"))
            self.num_failed += last.column("error").length() - (pc.sum(healthy).as_py() or 0)
            last = last.filter(healthy)
        if "reward" in last.column_names:
            self.rewards += pc.drop_null(last.column("reward")).to_pylist()

    def lines(self) -> Iterator[str]:
        """Yield the counts as lines of text."""
        num = sum(self.group_sizes.values())
        sizes = self.group_sizes.values() or [0]
        trajectories = f"{num:,} trajector{'y' if num == 1 else 'ies'}"
        failed = f"{self.num_failed:,} failed, kept with `error`"
        yield f"{count(self.num_rows, 'row')}, {trajectories} ({failed})"
        most = f" to {max(sizes)}" if max(sizes) > min(sizes) else ""
        groups = count(len(self.group_sizes), "group")
        yield f"{groups}, trajectories per group: {min(sizes)}{most}"
        yield f"{count(self.num_tokens, 'token')}, {self.num_trained_tokens:,} trained on"
        rewards = self.rewards
        unknown = num - self.num_failed - len(rewards)
        if rewards:
            mean = sum(rewards) / len(rewards)
            yield f"outcome rewards: mean {mean:g}, from {min(rewards):g} to {max(rewards):g}"
        if unknown:
            yield f"trajectories without a reward (null): {unknown:,}"


def card(
    schema: pa.Schema, statistics: _Statistics, num_bytes: int, metadata: DatasetMetadata
) -> str:
    """Return the text of README.md."""
    front = _front(schema, statistics.num_rows, num_bytes)
    parts = [f"---\n{front}\n---", "# Rollouts", ROW]
    parts += ["## Numbers", "\n".join(f"- {line}" for line in statistics.lines())]
    parts += ["## Columns", "\n".join(_columns(schema))]
    rules = [f"- `{rule.name}`: {rule.meaning}" for rule in RULES.values()]
    parts += ["## Invariants", "`rollouts validate data/` checks them.", "\n".join(rules)]
    history = [f"- tokenizer: {metadata.tokenizer or 'unknown'}"]
    history.append(f"- log-probabilities: {metadata.logprobs_mode or 'unknown'}")
    history += [f"- `{json.dumps(step)}`" for step in metadata.made_by]
    parts += ["## How it was made", "\n".join(history)]
    return "\n\n".join(parts) + "\n"


def _front(schema: pa.Schema, num_rows: int, num_bytes: int) -> str:
    """Return the metadata of the card, which `datasets` writes."""
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    split = {"name": "train", "num_bytes": num_bytes, "num_examples": num_rows}
    features = Features.from_arrow_schema(schema.remove_metadata())
    info = DatasetInfo(features=features, splits=[split], dataset_size=num_bytes)
    data = DatasetCardData(tags=["reinforcement-learning", "rollouts"])
    DatasetInfosDict(default=info).to_dataset_card_data(data)
    files = {"data_files": [{"split": "train", "path": DATA_FILES}]}
    MetadataConfigs(default=files).to_dataset_card_data(data)
    return str(data.to_yaml())


def _columns(schema: pa.Schema) -> Iterator[str]:
    yield from ("| column | type | meaning |", "|---|---|---|")
    for f in schema:
        column = COLUMN_BY_NAME.get(f.name)
        meaning = "user column" if column is None else column.meaning
        kind = re.sub(r"\b(item|element|child): ", "", str(f.type)).replace(" not null", "")
        yield f"| {f.name} | {kind} | {meaning} |"


def write_folder(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset into a new folder, one row group at a time.

    All rows and columns are exported, including failed trajectories. Maps (`metrics`) become lists
    of {key, value}, as `datasets` has no maps. `rollouts` can read `out/data` like any dataset.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out` exists or is inside the dataset, or the dataset has no rows.
    """
    from rollout_io.dataset.reader import read_metadata

    del failed
    with requires_extra("hf", "export --format hf"):
        import_module("datasets")
    statistics, schema = _Statistics(), pa.schema([])
    with new_export(out, dataset) as folder:
        metadata = read_metadata(dataset)
        folder.mkdir()
        (folder / "data").mkdir()
        blobs = Blobs.of(folder / "data")
        with _Shards(folder / "data", metadata) as shards:
            for piece in declared_tables(dataset):
                table = without_maps(piece)
                statistics.add(table)
                carry(names_in(table), [dataset], blobs)
                shards.write(table)
                schema = table.schema
        done = Exported(num_rows_read=statistics.num_rows, num_rows_written=statistics.num_rows)
        done.close(dataset)
        text = card(schema, statistics, shards.num_bytes, metadata)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return done


class _Shards:
    """Shards of about `SHARD_BYTES`; `num_bytes` is the in-memory size of all rows written."""

    def __init__(self, folder: Path, metadata: DatasetMetadata) -> None:
        self.num_bytes = 0
        self._folder, self._pairs = folder, metadata.encode("full")
        self._num_shards, self._file = 0, ExitStack()
        self._shard_end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, table: pa.Table) -> None:
        from rollout_io.dataset.writer import SHARD_BYTES  # loads polars

        if self.num_bytes >= self._shard_end:
            self._file.close()
            path = self._folder / f"train-{self._num_shards:05d}.parquet"
            self._shard = self._file.enter_context(ParquetFile(path, self._pairs))
            self._num_shards += 1
            self._shard_end = self.num_bytes + SHARD_BYTES
        self._shard.write(table)
        self.num_bytes += table.nbytes
