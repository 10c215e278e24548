"""The `prime_hosted` format: rollouts of Prime Intellect's hosted RL runs, from its API.

    results.jsonl       one rollout per line; `prompt`, `completion`, `metrics` are JSON in a string
    rollouts_raw.json   one page of the API: {"samples": [...], "total": 32, "page": 1, ...}
    metadata.json       {"run": {"id": ..., "rollouts_per_example": 8, ...}}

A directory with these files is one log, with the rollouts of `results.jsonl` (or else of the page);
a single file of rollouts is a log as well, and `metadata.json` beside it describes its run.

Rows do not name their group, and several groups may share a `problem_id`. Within a group, the
advantage is the reward minus one baseline, so rows of a step with the same problem, prompt and
`reward - advantage` form a group. If there are more than `rollouts_per_example` such rows, they are
split into several groups, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

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
)
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, account, like
from rollout_io.formats.parsing.content import filled, known
from rollout_io.formats.parsing.jsonl import decode_line, read_document
from rollout_io.formats.parsing.messages import MESSAGE, read_messages
from rollout_io.formats.parsing.records import DUPLICATE, logs_below, numbers, read_record
from schemas.errors import InputError, InvariantError, RolloutError

T = TypeVar("T")

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
    """Rows with the same `baseline` (reward - advantage), which is None if unknown."""

    name: str
    baseline: float | None
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
            is_copy = read_record(other).rstrip() == read_record(place).rstrip()
            hint = "pass each page only once"
            finding = f"sample {row.sample_id} of step {row.step} is already in {other.where}"
            if is_copy:
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
        count = _read(_COUNT_DECODER, log.path / PAGE if log.path.is_dir() else log.path)
        num = sum(num_rows[file.path] for file in _files(log))
        if count and count.total > num:
            page = f"page {count.page} of {count.total_pages}"
            partial[log.name] = f"{num} of {count.total} rows ({page}): groups may be partial"
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


def _read(decoder: msgspec.json.Decoder[T], path: Path) -> T | None:
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
