"""The `harbor` format: job and trial directories, `result.json`, and single ATIF trajectories.

A trial is one trajectory. Its steps are the model calls in order, including calls of compactions
and sub-agents. Harbor does not number attempts, so the trials of one task (name and checksum) in
one job form a group and are numbered in the order of their names. The history of the dataset
records that the groups were inferred. A single ATIF file is a separate instance, as ATIF records
neither task nor reward.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from rollout_io.formats.atif import is_file, read_run, referred_files
from rollout_io.formats.atif_document import CONTENTS, read_trajectory
from rollout_io.formats.base import (
    HAS_TEXT,
    About,
    Adapter,
    Found,
    Input,
    Place,
    Progress,
    Rejected,
    Run,
)
from rollout_io.formats.engines.files import Start
from rollout_io.formats.harbor_trial import keeps_text, read_trial
from rollout_io.formats.parsing.content import known
from rollout_io.formats.parsing.jsonl import read_document
from rollout_io.formats.parsing.records import INCOMPLETE
from schemas.errors import InputError, RolloutError

Key = tuple[str, int]

_IDS = re.compile(rb'"completion_token_ids"\s*:\s*\[[\s\[\],]*\d')
_NULL = msgspec.Raw(b"null")
_NUM_TRIES = 8
_TRAJECTORY = ("agent", "trajectory.json")
_KEYS = (b'"trial_name"', b'"n_total_trials"', b'"schema_version"', b'"conversations"')


class _JobConfig(msgspec.Struct, gc=False):
    job_id: str | None = None


class Head(msgspec.Struct, gc=False):
    """The fields that identify the trial and the kind of a document.

    Attributes:
        has_ids: True if the result of the trial, or of one of its steps, has token ids.
    """

    trial_name: str | None = None
    task_name: str | None = None
    task_checksum: str | None = None
    id: str | None = None
    config: _JobConfig | None = None
    n_total_trials: int | None = None
    schema_version: str | None = None
    agent_result: msgspec.Raw = _NULL
    step_results: msgspec.Raw = _NULL
    has_ids: bool = False

    def __post_init__(self) -> None:
        results = (self.agent_result, self.step_results)
        self.has_ids = any(_IDS.search(memoryview(result)) for result in results)
        self.agent_result = self.step_results = _NULL  # would keep the entire document in memory

    @property
    def is_trial(self) -> bool:
        """True if the document is a trial's result."""
        return self.trial_name is not None and self.task_name is not None

    @property
    def is_atif(self) -> bool:
        """True if the document is an ATIF trajectory."""
        return self.schema_version is not None and self.schema_version.startswith("ATIF-")


class _Exported(msgspec.Struct, gc=False):
    conversations: list[msgspec.Raw]
    episode: msgspec.Raw
    trial_name: msgspec.Raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One run to read: a trial's `result.json`, or a single trajectory file."""

    path: Path
    head: Head
    directory: Path | None = None

    @property
    def job(self) -> str:
        """The job's id, or the name of its directory."""
        config = self.head.config
        return (config and config.job_id) or self.path.resolve().parent.parent.name


_HEAD = msgspec.json.Decoder(Head)
_EXPORT = msgspec.json.Decoder(list[_Exported])


def find_runs(path: Path, errors: list[RolloutError]) -> list[Source]:
    """Return the runs of an input, and append its errors to `errors`."""
    try:
        return _expand_directory(path, errors) if path.is_dir() else _expand_file(path, errors)
    except RolloutError as error:
        errors.append(error)
        return []


def _expand_file(path: Path, errors: list[RolloutError]) -> list[Source]:
    result = path.parent.parent / "result.json"
    if path.name == "trajectory.json" and path.parent.name == "agent" and is_file(result):
        head = _read_head(result)
        if head.is_trial:
            return [Source(path=result, head=head, directory=result.parent)]
    head = _read_head(path)
    if head.is_trial or head.is_atif:
        return [Source(path=path, head=head)]
    if head.n_total_trials is not None:
        before = len(errors)
        children = _expand_children(path.parent, errors)
        if not children and len(errors) == before:
            finding = "the file is the result of a job, but its directory contains no trials"
            hint = "pass the job directory, with the directories of its trials"
            raise InputError("harbor_input", str(path), finding, hint=hint)
        return _expand_directory(path.parent, errors)
    raise _unknown(path, "the file is neither a trial, nor a job, nor an ATIF trajectory")


def _expand_directory(path: Path, errors: list[RolloutError]) -> list[Source]:
    """Return a trial, or the trials of a job or of a directory of jobs, ordered by name.

    If a trial cannot be read, its error is appended to `errors`; all other trials are returned.
    """
    result, config = path / "result.json", path / "config.json"
    try:
        head = _read_head(result) if is_file(result) else Head()
    except RolloutError as error:
        errors.append(error)
        return _expand_children(path, errors)
    if head.is_trial:
        return [Source(path=result, head=head, directory=path)]
    if is_file(config) and _read_head(config).trial_name is not None:
        hint = "resume the job, or move the directory out of the input"
        finding = "the trial was stopped before it wrote result.json"
        raise InputError("no_trial_result", str(path), finding, hint=hint)
    num_errors = len(errors)
    children = _expand_children(path, errors)
    if is_file(path / "agent" / "trajectory.json"):  # a trial without its result
        children = [*find_runs(path / "agent" / "trajectory.json", errors), *children]
    if any(source.directory for source in children):
        # The trajectory in a trial directory that has no result.
        bare = [s for s in children if not s.directory and s.path.parts[-2:] == _TRAJECTORY]
        children = [source for source in children if source not in bare]
        for source in bare:
            finding = "the trial has no result.json, but other trials in its directory do"
            hint = "copy its result.json, or move the directory out of the input"
            where = str(source.path.parent.parent)
            errors.append(InputError("harbor_input", where, finding, hint=hint))
    num_trials = len(children) + len(errors) - num_errors
    if not num_trials:
        raise _unknown(path, "the directory contains no trial (no result.json)")
    if head.n_total_trials is not None and num_trials < head.n_total_trials:
        finding = f"{num_trials} of {head.n_total_trials} trials are present"
        hint = "resume the job, copy its missing trials, or pass the trial directories one by one"
        errors.append(InputError("missing_trials", str(path), finding, hint=hint))
    return children


def _expand_children(path: Path, errors: list[RolloutError]) -> list[Source]:
    return [source for child in _children(path) for source in find_runs(child, errors)]


def _children(path: Path) -> list[Path]:
    """Return the entries that may contain runs; skip links to the directory itself or a parent."""
    names = ("result.json", "config.json", "agent/trajectory.json")
    try:
        below = sorted(path.iterdir())
    except OSError as error:
        finding = f"cannot read the directory: {error.strerror or error}"
        raise InputError("input_file", str(path), finding) from None
    # `Path.resolve` raises an error for a link that points to itself.
    real = Path(os.path.realpath(path))
    below = [child for child in below if not real.is_relative_to(os.path.realpath(child))]

    def has_runs(child: Path) -> bool:
        if any(is_file(child / name) for name in names) or any(child.glob("*/result.json")):
            return True
        if child.is_dir():
            return recognizes(Start(child))
        try:
            is_document = child.suffix == ".json" and child.name not in names and is_file(child)
            return is_document and _read_head(child).is_atif
        except RolloutError:
            return False

    return [*filter(has_runs, below)]


def _read_head(path: Path) -> Head:
    try:
        return read_document(_HEAD, path)[0]
    except RolloutError as error:
        if is_export(path):
            finding = "the file is Harbor's traces export, which rollouts does not read"
            hint = "convert the trial directory or its agent/trajectory.json, "
            hint += "or pass --on-error skip to skip exports"
            raise InputError("harbor_export", str(path), finding, hint=hint) from None
        start = Start(path)
        if error.rule == "json_document" and len(start.lines) > 1 and not start.is_document:
            raise _unknown(path, "the file has several JSON documents (JSON Lines)") from None
        if error.rule == "record_type":
            why = error.sentence.removesuffix(".")
            raise _unknown(path, f"the document is not from Harbor ({why})") from None
        raise


def is_export(path: Path) -> bool:
    """True for a traces export: the text of trials as a list of conversations, without rewards."""
    try:
        return bool(read_document(_EXPORT, path)[0])
    except RolloutError:
        return False


def _unknown(path: Path, got: str) -> InputError:
    hint = "pass a job or trial directory, a result.json, or an ATIF trajectory; "
    hint += "`rollouts formats FILE` shows the format of a file"
    return InputError("harbor_input", str(path), got, hint=hint)


def keyed(sources: Sequence[Source]) -> dict[Key, Source]:
    """Return runs by instance and repetition, with groups in order of first appearance.

    Trials with the same task name but different checksums or jobs become separate instances:
    `task@job@checksum`.
    """
    _refuse_repeated(sources)
    groups: dict[tuple[str, str, str], list[Source]] = {}
    for source in sources:
        head = source.head
        task = (head.task_name or "", source.job, head.task_checksum or "")
        groups.setdefault(task if head.is_trial else (str(source.path), "", ""), []).append(source)
    counts = Counter(name for name, _, _ in groups)
    runs: dict[Key, Source] = {}
    for (name, job, checksum), members in groups.items():
        instance = name if counts[name] == 1 else f"{name}@{job}@{checksum}"
        members.sort(key=lambda source: source.head.trial_name or "")
        runs |= {(instance, i): source for i, source in enumerate(members)}
    return runs


def _refuse_repeated(sources: Iterable[Source]) -> None:
    first: dict[str, Source] = {}
    for source in sources:
        identity = (source.head.is_trial and source.head.id) or str(source.path.resolve())
        if identity in first:
            finding = f"the run was already passed as {first[identity].path}"
            hint = "pass each run only once"
            raise InputError("duplicate_input", str(source.path), finding, hint=hint)
        first[identity] = source


def recognizes(start: Start) -> bool:
    """True for a trial, job or ATIF trajectory, Harbor's text export, or a directory of such inputs.

    A trial that was stopped has a `config.json` but no result.
    """
    path = start.path
    try:
        if not start.is_file:
            names = ("result.json", "agent/trajectory.json", "*/result.json", "*/*/result.json")
            files = (file for name in names for file in path.glob(name))
            if any(_is_harbor(Start(file)) for file in islice(files, _NUM_TRIES)):
                return True
            config = path / "config.json"
            head = _read_head(config) if is_file(config) else Head()
            return head.trial_name is not None and head.task_name is None
        return _is_harbor(start)
    except (OSError, RolloutError):
        return False


def _is_harbor(start: Start) -> bool:
    if not any(key in start.head for key in _KEYS):
        return False
    try:
        head = read_document(_HEAD, start.path)[0]
    except RolloutError:
        return is_export(start.path)
    return head.is_trial or head.is_atif or head.n_total_trials is not None


_GROUPS = "inferred: the trials of one task (name and checksum) in one job, by trial name"
_FILES_ALONE = "inferred: each trajectory file is a separate instance"


def find_trials(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield trials, group by group in order of first appearance, and single trajectory files.

    An ATIF file that another file refers to is part of that file's run.
    """
    sources: list[Source] = []
    for log in inputs:
        errors: list[RolloutError] = []
        sources += find_runs(log.path, errors)
        for error in errors:
            yield Rejected(Place(log.path, error.where), error)
    runs = keyed(sources)
    inner, has_text, incomplete = _survey(runs.values())
    yield About(HAS_TEXT, has_text)
    runs = {key: source for key, source in runs.items() if source.path.resolve() not in inner}
    rules = {_FILES_ALONE if source.head.is_atif else _GROUPS for source in runs.values()}
    if rules:
        yield About("groups", "; ".join(sorted(rules)))
    for key, source in runs.items():
        num_bytes = source.path.stat().st_size
        progress(num_bytes)
        offset = None if source.directory else 0
        place = Place(source.path, str(source.path), offset, num_bytes)
        if source.path.resolve() in incomplete:
            yield Rejected(place, incomplete[source.path.resolve()])
            continue
        names = ("task_name", "task_checksum", "trial_name")
        named = {name: getattr(source.head, name) for name in names}
        labels = known(named | {"job": source.job if source.head.is_trial else None})
        yield Run(instance_id=key[0], repetition_id=key[1], places=[place], labels=labels)


def _survey(sources: Iterable[Source]) -> tuple[set[Path], bool, dict[Path, InputError]]:
    """Find the files that belong to the run of another file, or to a run that cannot be read.

    Returns:
        The files that belong to the run of another file; true if any run is read as text; and an
        error for each file that belongs to a trajectory that cannot be read, because runs are
        converted completely or not at all.
    """
    files: dict[Path, set[Path]] = {}
    incomplete: dict[Path, InputError] = {}
    has_text = False
    for source in sources:
        for path in _trajectories(source):
            try:
                run = read_run(path, read_trajectory(path))
                if run.tokenless is not None and not has_text:
                    has_text = source.head.is_atif or (
                        not source.head.has_ids and keeps_text(source.path)
                    )
            except RecursionError:
                continue  # reported when the run is read
            except RolloutError as error:  # reported when the run is read
                rejected = f"{error.rule}: {error.where}"
                finding = f"a different record of this run was rejected ({rejected})"
                for file in referred_files(path) - {path.resolve()}:
                    lost = InputError(INCOMPLETE, str(file), finding, hint=error.hint)
                    incomplete.setdefault(file, lost)
                continue
            resolved = source.path.resolve()
            files.setdefault(resolved, set()).update({file for file, _ in run.entered} - {resolved})
    # A readable part of an incomplete run must not hide the parts to which it refers.
    readable = [entered for resolved, entered in files.items() if resolved not in incomplete]
    inner = set[Path]().union(*readable)
    return inner, has_text, {file: e for file, e in incomplete.items() if file not in inner}


def _trajectories(source: Source) -> Iterator[Path]:
    if source.head.is_atif:
        yield source.path
    elif source.directory is not None:
        named = source.directory.glob("steps/*/agent/trajectory.json")
        paths = [source.directory / "agent" / "trajectory.json", *named]
        yield from (path for path in paths if is_file(path))


ADAPTER = Adapter(
    summary="Harbor: job and trial directories, result.json, ATIF trajectories",
    recognizes=recognizes,
    find=find_trials,
    read=read_trial,
    is_text=True,
    is_export=is_export,
    contents=CONTENTS,
)
