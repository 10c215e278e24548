"""The `harbor` format: job and trial directories, `result.json`, and single ATIF trajectories.

A trial is one trajectory. Its steps are the model calls in order, including calls of compactions
and sub-agents. Harbor does not number attempts, so the trials of one task (name and checksum) in
one job form a group and are numbered in the order of their names. The history of the dataset
records that the groups were inferred. A single ATIF file is a separate instance, as ATIF records
neither task nor reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from rollout_io.formats.atif import (
    NO_TOKENS,
    conversations,
    is_file,
    read_run,
    referred_files,
)
from rollout_io.formats.atif_document import CONTENTS, read_trajectory
from rollout_io.formats.base import (
    HAS_TEXT,
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
    Step,
    Trajectory,
)
from rollout_io.formats.harbor_inputs import Source, find_runs, is_export, keyed, recognizes
from rollout_io.formats.harbor_trial import (
    CONTEXT_OVERFLOW,
    Trial,
    keeps_text,
    outcome_of,
    read_steps,
)
from rollout_io.formats.parsing.content import known
from rollout_io.formats.parsing.jsonl import NESTED, read_document
from rollout_io.formats.parsing.lines import INCOMPLETE
from schemas.errors import InputError, RolloutError

_GROUPS = "inferred: the trials of one task (name and checksum) in one job, by trial name"
_FILES_ALONE = "inferred: each trajectory file is a separate instance"
_TRIAL = msgspec.json.Decoder(Trial)


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
        labels = _labels(source)
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
                has_text = has_text or (run.tokenless is not None and _keeps_text(source))
            except RecursionError:
                continue  # reported when the run is read
            except RolloutError as error:  # reported when the run is read
                finding = (
                    f"a different record of this run was rejected ({error.rule}: {error.where})"
                )
                for file in referred_files(path) - {path.resolve()}:
                    lost = InputError(INCOMPLETE, str(file), finding, hint=error.hint)
                    incomplete.setdefault(file, lost)
                continue
            resolved = source.path.resolve()
            files.setdefault(resolved, set()).update({file for file, _ in run.entered} - {resolved})
    # A readable part of an incomplete run must not hide the parts to which it refers.
    inner = {
        file
        for resolved, entered in files.items()
        if resolved not in incomplete
        for file in entered
    }
    return inner, has_text, {file: e for file, e in incomplete.items() if file not in inner}


def _trajectories(source: Source) -> Iterator[Path]:
    if source.head.is_atif:
        yield source.path
    elif source.directory is not None:
        named = source.directory.glob("steps/*/agent/trajectory.json")
        paths = [source.directory / "agent" / "trajectory.json", *named]
        yield from (path for path in paths if is_file(path))


def _keeps_text(source: Source) -> bool:
    if source.head.is_atif:
        return True
    return not source.head.has_ids and keeps_text(read_document(_TRIAL, source.path)[0])


def _labels(source: Source) -> dict[str, str]:
    head = source.head
    names = ("task_name", "task_checksum", "trial_name")
    job = source.job if head.is_trial else None
    return known({name: getattr(head, name) for name in names} | {"job": job})


def read_trial(run: Run, options: Options) -> Trajectory:
    """Read the calls of a trial or a trajectory file, as conversations if they have no token ids.

    A failed trial is kept with its `error`; if its tokens are missing, it has no steps and the
    reason is added to the error. All keys of the verifier's rewards become metrics.

    Raises:
        RolloutError: The run cannot be used (`no_token_ids`, `tokens_disagree`, `reward_key`, ...).
    """
    path = run.places[0].path
    try:
        if run.places[0].offset is None or "trial_name" in run.labels:
            directory = path.parent if run.places[0].offset is None else None
            return _read_trial(run, path, directory, options)
        return Trajectory(steps=_read_file(path))
    except RecursionError:
        raise InputError("json_document", str(path), NESTED) from None


def _read_file(path: Path) -> Sequence[Step | Conversation]:
    trial_run = read_run(path, read_trajectory(path))
    why = trial_run.tokenless
    steps = trial_run.steps if why is None else conversations(trial_run, why)
    if not steps:
        raise InputError("no_calls", str(path), "the trajectory has no model calls")
    return steps


def _read_trial(run: Run, path: Path, directory: Path | None, options: Options) -> Trajectory:
    trial, _ = read_document(_TRIAL, path)
    logged = outcome_of(trial, str(path), options, is_needed=not run.rewarded)
    is_failed = run.failed or logged.error is not None or trial.is_overflow
    try:
        steps = read_steps(trial, path, directory)
    except RolloutError as error:
        if error.rule != NO_TOKENS or not is_failed:
            raise
        return _without_steps(logged, error)
    why = next((s.tokenless for s in steps if isinstance(s, Conversation)), None)
    return _without_steps(logged, why) if why and is_failed else replace(logged, steps=steps)


def _without_steps(logged: Trajectory, why: RolloutError) -> Trajectory:
    error = f"{logged.error or CONTEXT_OVERFLOW}; no tokens: {why.got}"
    return replace(logged, steps=[], reward=None, error=error)


ADAPTER = Adapter(
    summary="Harbor: job and trial directories, result.json, ATIF trajectories",
    recognizes=recognizes,
    find=find_trials,
    read=read_trial,
    is_text=True,
    is_export=is_export,
    contents=CONTENTS,
)
