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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import (
    About,
    Adapter,
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
from rollout_io.formats.parsing.documents import decode_record, logs_below, parts_of
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, read_document
from rollout_io.formats.parsing.lines import DUPLICATE, lines_of, read_record
from rollout_io.formats.parsing.messages import MESSAGE, read_messages
from rollout_io.formats.parsing.naming import numbers
from rollout_io.formats.start import Start
from schemas.errors import InputError, InvariantError, RolloutError

RESULTS, PAGE, METADATA = "results.jsonl", "rollouts_raw.json", "metadata.json"
_TOLERANCE = 1e-5  # reward - advantage differs by rounding within a group
_GROUPS = "inferred: rows with the same step, problem, prompt and (reward - advantage)"
_MARKS = (b'"samples"',)


CONTENTS = Contents(
    reads={
        "": "run_id sample_id problem_id step prompt completion reward advantage metrics env_name "
        "task tag"
    },
    leaves={
        "the task's reference, not sent": "answer info",
        "facts about the run": "timing created_at num_input_tokens num_output_tokens",
    },
)


class _Row(msgspec.Struct, gc=False):
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


_TEXTS = Contents(reads={"": ""}, inner={"messages": MESSAGE})
"""The JSON texts `prompt` and `completion`."""


class _Page(msgspec.Struct, gc=False):
    samples: list[msgspec.Raw]


class _Count(msgspec.Struct, gc=False):
    total: int
    page: int | None = None
    total_pages: int | None = None


class _Sample(msgspec.Struct, gc=False):
    run_id: str
    sample_id: int


class _PageShape(msgspec.Struct, gc=False):
    samples: list[_Sample]
    total_pages: int


class _RunConfig(msgspec.Struct, gc=False):
    id: str | None = None
    rollouts_per_example: int | None = None

    def group_size(self, run_id: str) -> int | None:
        """Return the size of a group in a run; None if the metadata describe another run."""
        return self.rollouts_per_example if self.id in {None, run_id} else None


class _Metadata(msgspec.Struct, gc=False):
    run: _RunConfig


_ROW_DECODER = msgspec.json.Decoder(_Row)
_PAGE_DECODER = msgspec.json.Decoder(_Page)
_COUNT_DECODER = msgspec.json.Decoder(_Count)
_PAGE_SHAPE_DECODER = msgspec.json.Decoder(_PageShape)
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

    def refuse_repeated(self, row: _Row, place: Place) -> None:
        """Raise an error for a sample that an earlier row contains.

        Raises:
            InputError: `duplicate_record`: the samples are identical.
            InvariantError: `unique_trajectory`: the earlier sample has different content.
        """
        other = self.first.setdefault((row.run_id, row.step, row.sample_id), place)
        if other != place:
            is_copy = read_record(other).rstrip() == read_record(place).rstrip()
            hint = "pass each page only once"
            got = f"sample {row.sample_id} of step {row.step} is already in {other.where}"
            if is_copy:
                raise InputError(DUPLICATE, place.where, got, hint=hint)
            raise InvariantError("unique_trajectory", place.where, got, hint=hint)

    def of(self, row: _Row, size: int | None) -> str:
        """Add a row to its group, which has at most `size` rows; return the group's name."""
        problem = f"{row.run_id}/step-{row.step}/problem-{row.problem_id}"
        groups = self.by_key.setdefault((problem, row.prompt), [])
        baseline = _baseline(row)
        fitting = (g for g in groups if _is_near(g.baseline, baseline) and g.num_rows != size)
        group = next(fitting, None)
        if group is None:
            number = self.num_of_problem.get(problem, 0)
            self.num_of_problem[problem] = number + 1
            group = _Group(f"{problem}/group-{number}", baseline)
            groups.append(group)
        group.num_rows += 1
        return group.name


def _baseline(row: _Row) -> float | None:
    if row.reward is None or row.advantage is None:
        return None
    return row.reward - row.advantage


def _is_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def find_rollouts(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield rows in the order of the log; the fact `partial` lists the logs with missing rows."""
    yield About("groups", _GROUPS)
    groups, partial = _Groups(), dict[str, str]()
    for given in inputs:
        log = _log(given)
        num_rows = 0
        for place in _places(log.rows, progress):
            num_rows += 1
            yield place if isinstance(place, Rejected) else _found(place, groups, log.run)
        count = log.page and _count(log.page)
        if count and count.total > num_rows:
            pages = f"page {count.page} of {count.total_pages}"
            partial[given.name] = (
                f"{num_rows} of {count.total} rows ({pages}): groups may be partial"
            )
    if partial:
        yield About("partial", partial)


class _Log(NamedTuple):
    """A log, with its file of rows, the page that counts the rows, and the run's metadata."""

    rows: Input
    page: Path | None
    run: _RunConfig


def _log(given: Input) -> _Log:
    if not given.path.is_dir():
        page = given.path if _is_page(given.path) else None
        return _Log(given, page, _run_config(given.path.parent / METADATA))
    page = given.path / PAGE
    name = RESULTS if (given.path / RESULTS).is_file() else PAGE
    rows = Input(f"{given.name}/{name}", given.path / name)
    return _Log(rows, page if page.is_file() else None, _run_config(given.path / METADATA))


def _run_config(path: Path) -> _RunConfig:
    try:
        return read_document(_METADATA_DECODER, path)[0].run
    except RolloutError:
        return _RunConfig()


def _count(page: Path) -> _Count | None:
    try:
        return read_document(_COUNT_DECODER, page)[0]
    except RolloutError:
        return None


def _places(file: Input, progress: Progress) -> Iterator[Place | Rejected]:
    """Yield the location of each row in a file."""
    if not _is_page(file.path):
        yield from (place for place, _ in lines_of([file], progress))
        return
    document = read_input(file.path)
    progress(len(document))
    place = Place(file.path, file.name, 0, len(document))
    try:
        page = decode_document(_PAGE_DECODER, document, file.name)
    except RolloutError as error:
        yield Rejected(place, error)
        return
    yield from parts_of(place, document, "samples", page.samples)


def _found(place: Place, groups: _Groups, run: _RunConfig) -> Found:
    try:
        row = decode_record(_ROW_DECODER, place)
        groups.refuse_repeated(row, place)
        return _run(place, row, groups.of(row, run.group_size(row.run_id)))
    except RolloutError as error:
        return Rejected(place, error)


def _run(place: Place, row: _Row, group: str) -> Run:
    found = {
        "run": row.run_id,
        "step": str(row.step),
        "problem": str(row.problem_id),
        "sample": str(row.sample_id),
        "env": row.env_name,
        "task": row.task,
    }
    return Run(
        instance_id=group,
        repetition_id=None,
        places=[place],
        labels={name: value for name, value in found.items() if value},
    )


def read_rollout(run: Run, _: Options) -> Trajectory:
    """Read the conversation of a row; all numbers of the row become metrics.

    Raises:
        InputError: `record_type`, `message`: a field has an invalid value.
    """
    (place,) = run.places
    row = decode_record(_ROW_DECODER, place)
    account(CONTENTS, read_record(place))
    messages = [*_messages(row.prompt, f"{place.where}, prompt")]
    messages += _messages(row.completion, f"{place.where}, completion")
    where = f"{place.where}, metrics"
    metrics = decode_line(_METRICS_DECODER, (row.metrics or "{}").encode(), where)
    known = {"reward": row.reward, "advantage": row.advantage}
    stated = {name: value for name, value in known.items() if value is not None}
    texts = {"env": row.env_name, "task": row.task, "tag": row.tag, "step": str(row.step)}
    return Trajectory(
        steps=[Conversation(source=place.where, messages=messages)],
        reward=row.reward,
        metrics=numbers(metrics, where) | stated,
        user_values={name: text for name, text in texts.items() if text},
    )


def _messages(text: str, where: str) -> list[dict[str, Any]]:
    messages = decode_line(_MESSAGES_DECODER, text.encode(), where)
    account(_TEXTS, b'{"messages":%s}' % text.encode())
    return read_messages(messages, where)


def _is_page(path: Path) -> bool:
    return Start(path).is_document_of(_PAGE_SHAPE_DECODER, _MARKS)


def recognizes(start: Start) -> bool:
    """True if a file has rows of a hosted run, or a directory has such a file."""
    path = start.path
    if path.is_dir():
        found = logs_below(path, (RESULTS, PAGE).__contains__, METADATA.__eq__)
        return all(file.parent == path for file in found) and any(
            recognizes(Start(file)) for file in found
        )
    return start.has_record(_ROW_DECODER) or _is_page(path)


ADAPTER = Adapter(
    summary="rollouts of Prime Intellect's hosted RL runs; text only",
    recognizes=recognizes,
    find=find_rollouts,
    read=read_rollout,
    is_text=True,
    contents=CONTENTS,
    line=_Row,
)
