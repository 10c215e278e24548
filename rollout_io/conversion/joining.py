"""`--join`: the log of a harness, with the exact tokens of the calls that were recorded of it.

The log says who called, which tools ran and how the run ended; the recorded calls have the tokens that
the engine received and sampled. An answer of the log and a recorded call belong together if they have
the same tool calls and the same text, apart from whitespace; the log may lack the reasoning. Among
equal answers, the calls of the session that most other answers of the run belong to come first, in
their order. Each recorded call is used once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rollout_io.dataset.opening import digest_of
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.reader import RowReader, iter_tables, read_metadata
from rollout_io.dataset.storage import SHARD_SUFFIX, Location, find_shards
from rollout_io.formats.base import Conversation, Logged, Step, Trajectory, note
from rollout_io.formats.parsing.content import calls_in
from rollout_io.formats.parsing.messages import text_of
from schemas.columns import JOINED, PICTURES
from schemas.errors import InputError, count
from schemas.messages import is_answer
from schemas.metadata import DatasetMetadata

MATCHED = "answers joined with a recorded call"
ALONE = "answers without a recorded call, left out"
_INDEXED = ("trajectory_id", "step_index", "response_text")
_KEPT = (
    *("rollout_logprobs", "loss_mask", "rollout_expert_indices", "sampling_support"),
    *("stop_reason", "policy_version", "policy_versions"),
    *("temperature", "top_p", "top_k", "sampling_extra", "token_source", "messages"),
    *(PICTURES, "response_text"),
)
ROUTING = "rollout_expert_indices"
_ARRAYS: dict[str, Any] = {
    "prompt_token_ids": np.int32,
    "response_ids": np.int32,
    "rollout_logprobs": np.float32,
    "loss_mask": np.bool_,
    "policy_versions": np.int32,
}
_TAILS = (0, 1, 4, 16, 64)  # lengths of the ends of texts by which calls are found
_MOST_NAMES = 1000


class _Call(NamedTuple):
    """A recorded call: its row, the number of its trajectory, its name, and its text without whitespace."""

    row: int
    session: int
    name: str
    text: str


class _Answer(NamedTuple):
    """An answer of the log: its conversation, the index of its message, and its text and calls."""

    conversation: Conversation
    at: int
    thought: str
    text: str
    calls: str

    @property
    def name(self) -> str:
        return f"{self.conversation.source}, message {self.at}"

    def is_said_by(self, call: _Call) -> bool:
        """True if a recorded call has this text; it may begin with reasoning that the log lacks."""
        if not call.text.endswith(self.text):
            return False
        before = call.text[: len(call.text) - len(self.text)]
        return not self.thought or not before or self.thought in before


@dataclass(slots=True)
class Recorded:
    """The recorded calls, by their answers."""

    path: str
    _reader: RowReader
    alone: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)
    _found: dict[tuple[str, str], list[_Call]] = field(default_factory=dict)
    _bounds: list[tuple[int, int]] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, path: str) -> Recorded:
        """Index the calls of a dataset."""
        reader = RowReader(path)
        if "response_text" not in reader.schema.names:
            finding = "the dataset has no column response_text, by which calls are matched"
            hint = "pass a dataset that `rollouts record` wrote"
            raise InputError("join", path, finding, "", hint)
        if _is_merged(reader.schema):
            hint = "run `rollouts merge --undo` on it first"
            raise InputError("join", path, "the rows of the dataset are merged", "", hint)
        recorded, num_rows = cls(path, reader), 0
        for table in iter_tables(path, _INDEXED, decode=False):
            starts = [*trajectory_starts(table).tolist(), table.num_rows]
            for begin, end in pairwise(starts):
                recorded._bounds.append((num_rows + begin, num_rows + end))
                for at, values in enumerate(table.slice(begin, end - begin).to_pylist(), begin):
                    if values["response_text"] is not None:
                        recorded._add(num_rows + at, values)
            num_rows += table.num_rows
        return recorded

    def _add(self, row: int, values: Mapping[str, Any]) -> None:
        response, logged = calls_in(values["response_text"])
        text, calls = _plain(response), _spelled(logged)
        name = f"{values['trajectory_id']}, step {values['step_index']}"
        call = _Call(row, len(self._bounds) - 1, name, text)
        self._calls.append(call)
        for size in _TAILS:
            if size <= len(text):
                self._found.setdefault((calls, text[len(text) - size :]), []).append(call)

    def joined(self, trajectory: Trajectory, steps: Sequence[Logged]) -> list[Step]:
        """Return the recorded calls of a trajectory's answers as steps, in the order of recording."""
        answers = list(_answers_of(steps))
        matched = self._matched(answers)
        note(MATCHED, len(matched))
        note(ALONE, len(answers) - len(matched))
        self.alone += [answer.name for i, answer in enumerate(answers) if i not in matched]
        if not matched:
            if trajectory.error is not None or not answers:
                return []
            number = count(len(answers), "answer")
            finding = f"none of its {number} is among the calls of {self.path}"
            hint = "pass the dataset or the log of the calls that were recorded of this run"
            raise InputError("join", answers[0].conversation.source, finding, "", hint)
        pairs = sorted(matched.items(), key=lambda pair: pair[1].row)
        numbers = {call.session for call in matched.values()}
        sessions = {number: self._session(number) for number in numbers}
        joined_steps = [self._step(call, answers[i], sessions[call.session]) for i, call in pairs]
        if trajectory.reward is None and "reward" in self._reader.schema.names:
            last = self._reader.take(np.array([pairs[-1][1].row]), ["reward"])
            joined_steps[-1].reward = last.column("reward")[0].as_py()
        return joined_steps

    def _matched(self, answers: Sequence[_Answer]) -> dict[int, _Call]:
        """Return the call of each answer that has one, by the index of the answer."""
        options = [self._options(answer) for answer in answers]
        sessions = [{call.session for call in calls} for calls in options]
        # Answers that only one session has tell which session an ambiguous one ("Done.") is of.
        votes = Counter(next(iter(calls)) for calls in sessions if len(calls) == 1)
        last: dict[tuple[int, int], int] = {}
        matched: dict[int, _Call] = {}
        for i, (answer, calls) in enumerate(zip(answers, options, strict=True)):
            context = id(answer.conversation)

            def rank(call: _Call, context: int = context) -> tuple[int, bool, int]:
                # A conversation's calls were recorded in its order, so an earlier one is a last resort.
                before = last.get((context, call.session), -1)
                return -votes[call.session], call.row < before, call.row

            unused = [call for call in calls if call.row not in self._used]
            if unused:
                matched[i] = call = min(unused, key=rank)
                last[context, call.session] = call.row
                self._used.add(call.row)
        return matched

    def _options(self, answer: _Answer) -> list[_Call]:
        size = max(size for size in _TAILS if size <= len(answer.text))
        tail = answer.text[len(answer.text) - size :]
        calls = self._found.get((answer.calls, tail), [])
        return [call for call in calls if answer.is_said_by(call)]

    def _session(self, number: int) -> pa.Table:
        """Read all calls of a session: each prompt is stored as a part of earlier calls."""
        there = [name for name in _KEPT if name in self._reader.schema.names]
        names = ["prompt_token_ids", "response_ids", *there]
        return self._reader.rows(*self._bounds[number], names)

    def _step(self, call: _Call, answer: _Answer, session: pa.Table) -> Step:
        conversation = answer.conversation
        row = session.slice(call.row - self._bounds[call.session][0], 1)
        values = row.drop_columns([n for n in _ARRAYS if n in row.column_names]).to_pylist()[0]
        arrays = {
            name: np.asarray(row.column(name)[0].values.to_numpy(zero_copy_only=False), kind)
            for name, kind in _ARRAYS.items()
            if name in row.column_names and row.column(name)[0].is_valid
        }
        if ROUTING in row.column_names and row.column(ROUTING)[0].is_valid:
            arrays[ROUTING] = np.array(row.column(ROUTING)[0].as_py(), np.int16)
        values.pop(ROUTING, None)
        names = {"source": f"{conversation.source} with {call.name}", "agent": conversation.agent}
        facts = {"trains": conversation.trains, "columns": conversation.columns}
        return Step(**{**values, **arrays, **names, **facts})

    def state(self) -> dict[str, Any]:
        """Return which calls are used so far, as JSON; `restore` reads it."""
        return {"used": sorted(self._used), "alone": self.alone}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an interrupted conversion."""
        self._used |= set(state["used"])
        self.alone = list(dict.fromkeys([*self.alone, *state["alone"]]))

    def report(self) -> dict[str, Any]:
        """Return the numbers and names of the calls that were joined, and of those that were not."""
        unused = [call.name for call in self._calls if call.row not in self._used]
        return {
            "num_joined": len(self._used),
            "num_without_call": len(self.alone),
            "without_call": self.alone[:_MOST_NAMES],
            "num_without_answer": len(unused),
            "without_answer": unused[:_MOST_NAMES],
        }


def _answers_of(steps: Sequence[Logged]) -> Iterator[_Answer]:
    for step in steps:
        if not isinstance(step, Conversation):
            finding, hint = "the log has token ids itself, or no messages", "omit --join"
            raise InputError("join", step.source, finding, "", hint)
        for index, message in enumerate(step.messages):
            if index >= step.num_given and is_answer(message):
                text = text_of({"content": message.get("content")}) or ""
                thought = _plain(str(message.get("reasoning_content") or ""))
                calls = _spelled(message.get("tool_calls") or ())
                yield _Answer(step, index, thought, _plain(text), calls)


def _spelled(calls: Iterable[Mapping[str, Any]]) -> str:
    """Return calls as text: names and arguments, in their order.

    Harnesses write arguments anew: 1.0 may become 1, and keys may have another order.
    """
    functions = [call["function"] for call in calls]
    named = [[str(function["name"]), _value(function["arguments"])] for function in functions]
    return json.dumps(named, sort_keys=True) if named else ""


def _value(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return _number(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            return _plain(arguments)
    return _number(arguments)


def _number(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_number(inner) for inner in value]
    return {k: _number(v) for k, v in value.items()} if isinstance(value, dict) else value


def _plain(text: str) -> str:
    return "".join(text.split())


def _is_merged(schema: pa.Schema) -> bool:
    if "segments" not in schema.names:
        return False
    return bool(schema.field("segments").type.value_type.get_field_index(JOINED) >= 0)


def with_recorded(metadata: DatasetMetadata, path: str) -> DatasetMetadata:
    """Fill in what the metadata does not say about tokens from the dataset of the recorded calls."""
    recorded = read_metadata(path)
    names = (
        *("tokenizer", "tokenizer_fingerprint", "vocab_size", "logprobs_mode"),
        "chat_template_fingerprint",
    )
    lacking = {n: getattr(recorded, n) for n in names if getattr(metadata, n) is None}
    models = {*metadata.models, *recorded.models}
    return metadata.replace(models=tuple(sorted(models)), **lacking)


@contextmanager
def recorded_calls(
    join: str | None, convert: Callable[[str, str], object]
) -> Iterator[Recorded | None]:
    """Yield the recorded calls at a path; None if there is none."""
    if join is None:
        yield None
    elif is_dataset(join):
        yield Recorded.read(join)
    else:
        with TemporaryDirectory() as folder:
            dataset = str(Path(folder) / "calls")
            convert(join, dataset)
            yield Recorded.read(dataset)


def is_dataset(path: str) -> bool:
    """True if a path is a rollout dataset; false for a log of calls."""
    location = Location.of(path)
    is_folder = location.fs.isdir(location.path)
    return bool(location.datasets()) if is_folder else path.endswith(SHARD_SUFFIX)


def states_of(path: str) -> list[list[str]]:
    """Return the files of recorded calls, each with a digest of its content."""
    if is_dataset(path):
        files = [shard.path for shard in find_shards(path) if shard.is_local]
    else:
        place = Path(path)
        files = [str(f) for f in sorted(place.rglob("*")) if f.is_file()] or [path]
    return [[file, digest_of(file)] for file in files]
