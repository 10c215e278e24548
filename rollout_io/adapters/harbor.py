"""The `harbor` format: job and trial directories, `result.json`, ATIF trajectories alone.

A trial is one trajectory: its model calls are the steps, in order, compactions and sub-agents
included. Harbor numbers no attempts: the trials of one task (name and checksum) in one job are taken
as a group, and numbered in the order of their names. This is inferred, and the metadata of the
dataset says so. An ATIF file given alone is an instance of its own: ATIF states no task and no
reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pyarrow as pa

from rollout_io.adapters import Adapter, Progress, Trajectory, raise_first, tables
from rollout_io.adapters.atif import NO_TOKENS, read_run, read_trajectory
from rollout_io.adapters.harbor_inputs import Source, find_runs, keyed, recognizes
from rollout_io.adapters.jsonl import read_document
from rollout_io.adapters.rewards import Key, Outcome, read_rewards
from rollout_io.adapters.sessions import settle, unknown_outcomes
from rollout_io.adapters.tokens import one_routing
from rollout_io.adapters.trial import CONTEXT_OVERFLOW, Trial, outcome_of, read_steps
from schemas.errors import RolloutError

_GROUPS = "inferred: the trials of one task (name and checksum) in one job, by trial name"
_FILES_ALONE = "inferred: each trajectory file is an instance of its own"
_OPTIONAL = (
    *("rollout_logprobs", "reward", "stop_reason", "temperature", "agent", "response_text"),
    *("metrics", "source"),
)


_TRIAL = msgspec.json.Decoder(Trial)


def read_harbor(
    paths: Sequence[str | Path],
    *,
    rewards: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[pa.Table]:
    """Read Harbor's results as rollout tables, one row per model call.

    A failed trial is kept with its `error`; where its tokens are missing, as one row of empty lists
    that says so. A trial without an exception must have its tokens. All keys of the verifier's
    rewards are in the `metrics` of the last row.

    Args:
        paths: Job directories, trial directories, `result.json` files, or ATIF files. Of the latter,
            those that another one refers to are read as part of it.
        rewards: JSONL of outcomes that win over those of the trials, see `read_rewards`.
        progress: Told the bytes read, each file twice.

    Returns:
        Tables of whole trajectories, all with one schema, whose metadata says how groups were found.

    Raises:
        RolloutError: Any record that cannot be used, before the first table: `no_token_ids`,
            `tokens_disagree`, `dangling_reference`, `reward_key`, `no_trial_result`, ...: the first
            one's place, and how many more there are.
    """
    report = progress or (lambda _: None)
    given = {} if rewards is None else read_rewards(rewards)
    errors: list[RolloutError] = []
    found_sources = [source for path in paths for source in find_runs(Path(path), errors)]
    if errors:
        raise_first(errors)
    sources = keyed(found_sources)
    index = _index(sources, given, report)
    sources = {key: s for key, s in sources.items() if s.path.resolve() not in index.inner}
    errors = [index.errors[key] for key in sources if key in index.errors]
    errors = errors or list(unknown_outcomes(sources.keys(), given))
    if errors:
        raise_first(errors)
    about = [_FILES_ALONE if source.head.is_atif else _GROUPS for source in sources.values()]
    metadata = {"groups": json.dumps(sorted(set(about)))}
    trajectories = _trajectories(sources, given, report)
    found = tables(trajectories, index.present, sorted(index.user_columns), index.routing)
    return (table.replace_schema_metadata(metadata) for table in found)


@dataclass(slots=True)
class _Index:
    """What the runs have, all together.

    Attributes:
        inner: ATIF files that are part of another run.
    """

    present: set[str] = field(default_factory=lambda: {"source"})
    user_columns: set[str] = field(default_factory=set)
    routing: tuple[int, int] | None = None
    inner: set[Path] = field(default_factory=set)
    errors: dict[Key, RolloutError] = field(default_factory=dict)


def _index(
    sources: Mapping[Key, Source], given: Mapping[Key, Outcome], report: Callable[[int], object]
) -> _Index:
    index = _Index()
    for key in {**sources, **given}:
        if key in sources:
            try:
                trajectory, inner = _read(key, sources[key], given.get(key), report)
                index.routing = one_routing(trajectory.steps, index.routing, str(sources[key].path))
            except RolloutError as error:
                index.errors[key] = error
                continue
        else:
            trajectory, inner = settle(key, [], given[key]), set()
        index.inner |= inner
        index.user_columns |= set(trajectory.user_values)
        index.present |= {"error"} if trajectory.error is not None else set()
        index.present |= {
            name for s in trajectory.steps for name in _OPTIONAL if getattr(s, name) is not None
        }
    return index


def _trajectories(
    sources: Mapping[Key, Source], given: Mapping[Key, Outcome], report: Callable[[int], object]
) -> Iterator[Trajectory]:
    for key, source in sources.items():
        yield _read(key, source, given.get(key), report)[0]
    for key, outcome in given.items():
        if key not in sources:
            yield settle(key, [], outcome)


def _read(
    key: Key, source: Source, given: Outcome | None, report: Callable[[int], object]
) -> tuple[Trajectory, set[Path]]:
    """The trajectory of a run, and the other ATIF files it is spread over."""
    try:
        if source.head.is_trial:
            return _read_trial(key, source, given, report), set()
        document = read_trajectory(source.path, report)
        run = read_run(source.path, document, report)
    except RecursionError:
        got = "lists or objects nested too deeply"
        raise RolloutError("json_document", str(source.path), got, "a log") from None
    if not run.steps:
        raise RolloutError("no_calls", str(source.path), "no calls at all", "at least one call")
    return settle(key, run.steps, given), run.paths - {source.path.resolve()}


def _read_trial(
    key: Key, source: Source, given: Outcome | None, report: Callable[[int], object]
) -> Trajectory:
    trial, num_bytes = read_document(_TRIAL, source.path)
    report(num_bytes)
    outcome = outcome_of(trial, str(source.path), given)
    try:
        steps = read_steps(trial, source.path, source.directory, report)
    except RolloutError as error:
        if error.rule != NO_TOKENS or (outcome.error is None and not trial.is_overflow):
            raise
        why = outcome.error or CONTEXT_OVERFLOW
        outcome = replace(outcome, reward=None, error=f"{why}; no tokens: {error.got}")
        steps = []
    return settle(key, steps, outcome)


ADAPTER = Adapter(
    summary="Harbor: job and trial directories, result.json, ATIF trajectories",
    recognizes=recognizes,
    read=read_harbor,
)
