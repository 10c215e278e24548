"""The `prime_hosted` format, rollouts of Prime Intellect's hosted RL runs; and annotations of prime-rl.

The rollouts are from the API:

    results.jsonl       one rollout per line; `prompt`, `completion`, `metrics` are JSON in a string
    rollouts_raw.json   one page of the API: {"samples": [...], "total": 32, "page": 1, ...}
    metadata.json       {"run": {"id": ..., "rollouts_per_example": 8, ...}}

A directory with these files is one log, with the rollouts of `results.jsonl` (or else of the page);
a single file of rollouts is a log as well, and `metadata.json` beside it describes its run.

Rows do not name their group, and several groups may share a `problem_id`. Within a group, the
advantage is the reward minus one baseline, so rows of a step with the same problem, prompt and
`reward - advantage` form a group. If there are more than `rollouts_per_example` such rows, they are
split into several groups, in order.

An annotation is what prime-rl learned about a trace after it had written the episode (`verifiers`).
Since September 2026, prime-rl writes an episode once (`traces/stream/`), and appends what the
orchestrator and the trainer find out later to `traces/annotations/<producer>/`
(`prime_rl.monitors.file.traces.update`). A branch is a path from the root to a leaf, in the order of
the leaves; a stream has one value per token of its path, or of the first tokens of it, and null where
there is none. Later records override earlier ones: objects in `info` are merged, and a message takes
a stream that has a value for one of its sampled tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.formats.base import (
    About,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Trajectory,
    note_unread,
)
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, Grammar, account, like
from rollout_io.formats.parsing.content import filled, known
from rollout_io.formats.parsing.jsonl import decode_line, read_document
from rollout_io.formats.parsing.messages import MESSAGE, read_messages
from rollout_io.formats.parsing.records import DUPLICATE, logs_below, numbers, read_record
from rollout_io.formats.parsing.tokens import broken, logprob_array
from schemas.errors import InputError, InvariantError, RolloutError, count

RESULTS, PAGE, METADATA = "results.jsonl", "rollouts_raw.json", "metadata.json"
_TOLERANCE = 1e-5  # reward - advantage differs by rounding within a group
_LEAVES = {
    "the task's reference, not sent": "answer info",
    "facts about the run": "timing created_at num_input_tokens num_output_tokens",
}
_TEXTS = Contents(reads={"": ""}, inner={"messages": MESSAGE})
"""The JSON texts `prompt` and `completion`."""


class Row(msgspec.Struct, gc=False):
    """A rollout; the fields that are specific to this format are required."""

    run_id: str
    sample_id: int
    problem_id: int | str
    step: int
    prompt: str
    completion: str
    reward: float | None = None
    advantage: float | None = None
    metrics: str | None = None
    env_name: str | None = None
    task: str | None = None
    tag: str | None = None


class _Count(msgspec.Struct, gc=False):
    total: int
    page: int | None = None
    total_pages: int | None = None


class _RunConfig(msgspec.Struct, gc=False):
    id: str | None = None
    rollouts_per_example: int | None = None

    def group_size(self, run_id: str) -> int | None:
        """Return the size of a group in a run; None if the metadata describe another run."""
        return self.rollouts_per_example if self.id in {None, run_id} else None


class _Metadata(msgspec.Struct, gc=False):
    run: _RunConfig


_COUNT_DECODER = msgspec.json.Decoder(_Count)
_METADATA_DECODER = msgspec.json.Decoder(_Metadata)
_MESSAGES_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_METRICS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Group:
    name: str
    baseline: float | None  # reward - advantage of its rows; None if unknown
    num_rows: int = 0


@dataclass(slots=True)
class _Groups:
    """The groups found so far, keyed by problem and prompt."""

    by_key: dict[tuple[str, ...], list[_Group]] = field(default_factory=dict)
    num_of_problem: dict[str, int] = field(default_factory=dict)
    first: dict[tuple[str, int, int], Place] = field(default_factory=dict)

    def refuse_repeated(self, row: Row, place: Place) -> None:
        """Raise an error for a sample that an earlier row contains."""
        other = self.first.setdefault((row.run_id, row.step, row.sample_id), place)
        if other != place:
            hint = "pass each page only once"
            finding = f"sample {row.sample_id} of step {row.step} is already in {other.where}"
            if read_record(other).rstrip() == read_record(place).rstrip():
                raise InputError(DUPLICATE, place.where, finding, hint=hint)
            raise InvariantError("unique_trajectory", place.where, finding, hint=hint)

    def of(self, row: Row, size: int | None) -> str:
        """Add a row to its group, which has at most `size` rows; return the group's name."""
        problem = f"{row.run_id}/step-{row.step}/problem-{row.problem_id}"
        groups = self.by_key.setdefault((problem, row.prompt), [])
        baseline = None
        if row.reward is not None and row.advantage is not None:
            baseline = row.reward - row.advantage
        fitting = (g for g in groups if _is_near(g.baseline, baseline) and g.num_rows != size)
        group = next(fitting, None)
        if group is None:
            number = self.num_of_problem.get(problem, 0)
            self.num_of_problem[problem] = number + 1
            group = _Group(f"{problem}/group-{number}", baseline)
            groups.append(group)
        group.num_rows += 1
        return group.name


def _is_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def find(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield rows in the order of the log; the fact `partial` lists the logs with missing rows."""
    groups, configs, num_rows = _Groups(), dict[Path, _RunConfig](), Counter[Path]()

    def run(row: Row, place: Place) -> Run:
        groups.refuse_repeated(row, place)
        path = place.path.parent / METADATA
        if path not in configs:
            metadata = _read(_METADATA_DECODER, path)
            configs[path] = _RunConfig() if metadata is None else metadata.run
        return _run(place, row, groups.of(row, configs[path].group_size(row.run_id)))

    for item in replace(_RECORDS, run=run).find(inputs, progress):
        if not isinstance(item, About):
            num_rows[item.places[0].path if isinstance(item, Run) else item.place.path] += 1
        yield item
    partial = {}
    for log in inputs:
        page = _read(_COUNT_DECODER, log.path / PAGE if log.path.is_dir() else log.path)
        num = sum(num_rows[file.path] for file in _files(log))
        if page and page.total > num:
            text = f"{num} of {page.total} rows (page {page.page} of {page.total_pages})"
            partial[log.name] = f"{text}: groups may be partial"
    if partial:
        yield About("partial", partial)


def _files(log: Input) -> list[Input]:
    """Return the file of rows in a directory; none if its logs are in others below it."""
    if not log.path.is_dir():
        return [log]
    paths = logs_below(log.path, (RESULTS, PAGE).__contains__, METADATA.__eq__)
    name = RESULTS if log.path / RESULTS in paths else PAGE
    is_log = bool(paths) and all(path.parent == log.path for path in paths)
    return [Input(f"{log.name}/{name}", log.path / name)] if is_log else []


def _read(decoder: msgspec.json.Decoder[Any], path: Path) -> Any:
    """Read a document; None if there is none of this kind."""
    try:
        return read_document(decoder, path)[0]
    except RolloutError:
        return None


def _run(place: Place, row: Row, group: str) -> Run:
    labels = filled(
        run=row.run_id,
        step=str(row.step),
        problem=str(row.problem_id),
        sample=str(row.sample_id),
        env=row.env_name,
        task=row.task,
    )
    return Run(instance_id=group, repetition_id=None, places=[place], labels=labels)


def read(row: Row, run: Run, _: Options) -> Trajectory:
    """Read the conversation of a row; all numbers of the row become metrics."""
    (place,) = run.places
    messages = [*_messages(row.prompt, f"{place.where}, prompt")]
    messages += _messages(row.completion, f"{place.where}, completion")
    where = f"{place.where}, metrics"
    metrics = decode_line(_METRICS_DECODER, (row.metrics or "{}").encode(), where)
    return Trajectory(
        steps=[Conversation(source=place.where, messages=messages)],
        reward=row.reward,
        metrics=numbers(metrics, where) | known({"reward": row.reward, "advantage": row.advantage}),
        user_values=filled(env=row.env_name, task=row.task, tag=row.tag, step=str(row.step)),
    )


def _messages(text: str, where: str) -> list[dict[str, Any]]:
    messages = decode_line(_MESSAGES_DECODER, text.encode(), where)
    account(_TEXTS, b'{"messages":%s}' % text.encode())
    return read_messages(messages, where)


_PAGE = {"samples": [{"run_id": object, "sample_id": object}], "total_pages": object}
_RECORDS = Records(
    records={"": Row},
    leaves=_LEAVES,
    run=lambda row, place: _run(place, row, ""),
    read=read,
    is_record=like("run_id sample_id problem_id step prompt completion", _PAGE),
    is_whole=lambda start: like(_PAGE)(start.document),
    files=_files,
    elements="samples",
    groups="inferred: rows with the same step, problem, prompt and (reward - advantage)",
)
ADAPTER = replace(
    _RECORDS.adapter("rollouts of Prime Intellect's hosted RL runs; text only"), find=find
)


PART = "annotation"
"""`Place.part` of the annotations among the records of an episode."""

LOGPROBS, _FLAGS = "trainer_logprobs", "is_masked"
_Numbers = list[float | None] | None


class Head(msgspec.Struct, gc=False):
    """The fields by which an annotation is recognized, and the trace that it is about."""

    trace_id: str
    version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    branches: list[msgspec.Raw] | None = None
    advantage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    subset: str | None = None

    def __post_init__(self) -> None:
        is_update = self.version is not msgspec.UNSET and self.branches is not None
        is_flat = self.advantage is not msgspec.UNSET and self.subset is not None
        if not is_update and not is_flat:
            raise ValueError("the record is not an annotation")


class _Info(msgspec.Struct, gc=False):
    effective: bool | None = None
    advantage: float | None = None
    subset: str | None = None


class _Branch(msgspec.Struct, gc=False):
    index: int
    trainer_logprobs: _Numbers = None
    advantages: _Numbers = None
    entropies: _Numbers = None
    mismatch_kl: _Numbers = None
    is_masked: list[bool | None] | None = None


class _Record(msgspec.Struct, gc=False):
    trace_id: str
    version: int = 1
    info: dict[str, Any] | None = None
    branches: list[_Branch] | None = None


class Update(NamedTuple):
    """One annotation: its location, the facts about its trace, and its values by token."""

    where: str
    info: dict[str, Any]
    branches: list[_Branch]


HEAD = msgspec.json.Decoder(Head)
UPDATES = Grammar(records={"": _Record}).contents
_RECORD = msgspec.json.Decoder(_Record)
_FIELDS = msgspec.json.Decoder(dict[str, Any])


def read_updates(places: Sequence[Place]) -> dict[str, list[Update]]:
    """Read annotations, by the trace that they are about.

    Raises:
        InputError: `record_type`: a field has the wrong type, or the version is not 1.
    """
    updates: dict[str, list[Update]] = {}
    for place in places:
        content, where = read_record(place), place.where
        record = decode_line(_RECORD, content, where)
        fields = decode_line(_FIELDS, content, where)
        if record.version != 1:
            hint = "convert the episodes without their annotations"
            finding = f"an annotation of version {record.version}"
            raise InputError("record_type", where, finding, "version 1", hint)
        for name in (name for branch in fields.get("branches") or () for name in branch):
            if name not in _Branch.__struct_fields__:
                note_unread(f"branches.{name}")
        flat = {k: value for k, value in fields.items() if k not in _Record.__struct_fields__}
        update = Update(where, {**flat, **(record.info or {})}, record.branches or [])
        updates.setdefault(record.trace_id, []).append(update)
    return updates


class Annotations:
    """What all annotations of one trace say together.

    Attributes:
        columns: Values of the trace's rows in the columns `effective` (bool), `advantage` (double)
            and `annotations` (the merged `info`, as JSON).

    Args:
        updates: Annotations, the newest last.
        paths: Node indices from the root to each leaf, in the order of the leaves.
        masks: For each node, [tokens] bool, true for sampled tokens.

    Raises:
        RolloutError: `dangling_reference`: a branch does not exist; `lengths_align`: a stream is longer
            than its path; `record_type`: a fact has the wrong type.

    Example:
        >>> update = Update("a:1", {"effective": True}, [_Branch(0, entropies=[None, 0.5])])
        >>> made = Annotations([update], [[0, 1]], [np.array([False]), np.array([True])])
        >>> made.columns["effective"].as_py(), made.of(1, 0, 1)[1]["entropies"].as_py()
        (True, [0.5])
    """

    def __init__(
        self,
        updates: Sequence[Update],
        paths: Sequence[Sequence[int]],
        masks: Sequence[npt.NDArray[np.bool_]],
    ) -> None:
        self.columns: dict[str, pa.Scalar] = {}
        self._streams: dict[int, dict[str, tuple[list[Any], str]]] = {}
        info: dict[str, Any] = {}
        for update in updates:
            info = _merged(info, update.info)
            try:
                facts = msgspec.convert(info, _Info)
            except msgspec.ValidationError as error:
                raise InputError("record_type", update.where, str(error)) from None
            for branch in update.branches:
                if not 0 <= branch.index < len(paths):
                    num = count(len(paths), "branch")
                    finding = f"branch {branch.index}, but the trace has {num}"
                    raise InputError("dangling_reference", update.where, finding)
                self._take(branch, paths[branch.index], masks, update.where)
        if not updates:
            return
        effective = facts.effective
        if effective is None and facts.subset is not None:
            effective = facts.subset == "effective"
        text = msgspec.json.encode(info).decode()
        columns = {
            "effective": pa.scalar(effective, pa.bool_()),
            "advantage": pa.scalar(facts.advantage, pa.float64()),
            "annotations": pa.scalar(text if info else None, pa.string()),
        }
        self.columns = {name: value for name, value in columns.items() if value.is_valid}

    def _take(
        self,
        branch: _Branch,
        path: Sequence[int],
        masks: Sequence[npt.NDArray[np.bool_]],
        where: str,
    ) -> None:
        num_tokens = sum(len(masks[node]) for node in path)
        for name in _Branch.__struct_fields__[1:]:
            values = getattr(branch, name) or []
            if len(values) > num_tokens:
                finding = f"branch {branch.index} has {len(values)} {name}"
                expected = f"at most {num_tokens}, one per token"
                raise broken("lengths_align", where, finding, expected)
            start = 0
            for node in path:
                num = len(masks[node])
                part = [*values[start : start + num]]
                part += [None] * (num - len(part))  # after the stream's end
                start += num
                if any(v is not None for v, m in zip(part, masks[node], strict=True) if m):
                    self._streams.setdefault(node, {})[name] = (part, where)

    def of(
        self, node: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.float32] | None, dict[str, pa.Scalar]]:
        """Return the values of a node's tokens from `start` to `stop`.

        Returns:
            `trainer_logprobs`, [tokens] float32 nats, 0.0 at tokens without one, None if unknown; and
            the other columns: those of the trace, and each stream as a list with nulls.

        Raises:
            InvariantError: `logprobs_finite`, `logprobs_nonpositive`: a value is invalid.
        """
        columns, logprobs = dict(self.columns), None
        for name, (values, where) in self._streams.get(node, {}).items():
            part = values[start:stop]
            if name == LOGPROBS:
                logprobs = logprob_array([v or 0.0 for v in part], len(part), where)
            else:
                kind = pa.bool_() if name == _FLAGS else pa.float64()
                columns[name] = pa.scalar(part, pa.list_(kind))
        return logprobs, columns


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
    return new
