"""Plan of a conversion, which names and orders the runs and cuts them into chunks."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_io.conversion.chunk import Chunk
from rollout_io.conversion.inputs import files_of
from rollout_io.conversion.rewards import Key, Outcome, by_run
from rollout_io.conversion.staging import Staging
from rollout_io.dataset.footer import Part
from rollout_io.formats.base import About, Found, Input, Rejected, Run
from rollout_io.formats.detect import empty_file
from schemas.errors import ConfigError, InputError, InvariantError

# Size of the log records of one chunk. An interruption loses at most one chunk per worker.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 32 << 20, 128 << 20
_NUM_CHUNKS = 16  # with fewer, workers are often idle while the last chunk is converted


@dataclass(slots=True)
class Plan:
    """Runs and rejected records found in the logs."""

    runs: list[Run] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_runs(self) -> int:
        """Number of runs in the log, not counting runs that only the rewards file mentions."""
        return sum(bool(run.places) for run in self.runs)

    @property
    def num_records(self) -> int:
        """Number of records found, used or not."""
        return len(self.rejected) + sum(len(run.places) for run in self.runs)


def plan(
    items: Iterable[Found], outcomes: Mapping[str, Outcome], group_by: Sequence[str] = ()
) -> Plan:
    """Collect the findings of an adapter, and name the runs.

    Runs without a repetition are numbered in order within their instance; with `group_by`, all runs
    are renumbered. A second run with the same name is rejected, as is an outcome without a run.
    """
    (planned,), _ = plan_logs([items], outcomes, group_by)
    return planned


def plan_logs(
    logs: Iterable[Iterable[Found]], outcomes: Mapping[str, Outcome], group_by: Sequence[str] = ()
) -> tuple[list[Plan], dict[Key, Outcome]]:
    """Return a plan for each log of a dataset, and the outcomes by run.

    The last plan includes the outcomes without a logged run.
    """
    plans, first = [], dict[str, Run]()
    for items in logs:
        planned, runs = Plan(), list[Run]()
        for item in items:
            if isinstance(item, Rejected):
                planned.rejected.append(item)
            elif isinstance(item, About):
                planned.about[item.name] = item.value
            else:
                runs.append(item)
        if group_by:
            runs = list(_regrouped(runs, group_by, planned.rejected))
            planned.about["groups"] = "chosen: --group-by " + ",".join(group_by)
        _number(runs)
        planned.runs = list(_unique(runs, first, planned.rejected))
        plans.append(planned)
    last, keys = plans[-1], {_key(run): run for planned in plans for run in planned.runs}
    resolved, unresolved = by_run(outcomes, keys)
    last.rejected += unresolved
    for key, outcome in resolved.items():
        if key in keys:
            keys[key].rewarded, keys[key].failed = True, outcome.error is not None
        else:
            last.runs.append(Run(instance_id=key[0], repetition_id=key[1], places=()))
    return plans, resolved


def refuse_nothing(plans: Sequence[Plan], inputs: Sequence[Input]) -> None:
    """Check that at least one log has a record."""
    if not any(planned.runs or planned.rejected for planned in plans):
        where = ", ".join(log.name for log in inputs)
        if all(log.path.is_file() and not log.path.stat().st_size for log in inputs):
            raise empty_file(where)
        hint = "check the format of the file: rollouts formats FILE"
        raise InputError("no_calls", where, "the log contains no calls", "", hint)


def size_of(inputs: Iterable[Input]) -> int:
    """Return the number of bytes of these logs."""
    return sum(file.stat().st_size for log in inputs for file in files_of(log))


def chunk_size(num_bytes: int) -> int:
    """Return the number of bytes per chunk, which does not depend on the number of workers."""
    return min(max(num_bytes // _NUM_CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)


def chunks(runs: Sequence[Run], chunk_bytes: int) -> Iterator[list[Run]]:
    """Cut consecutive runs into non-empty chunks of about `chunk_bytes` of records."""
    chunk: list[Run] = []
    num_bytes = 0
    for run in runs:
        if chunk and num_bytes + run.num_bytes > chunk_bytes:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(run)
        num_bytes += run.num_bytes
    if chunk:
        yield chunk


def _regrouped(
    runs: Iterable[Run], group_by: Sequence[str], rejected: list[Rejected]
) -> Iterator[Run]:
    for run in runs:
        missing = [name for name in group_by if name not in run.labels]
        if missing:
            where, finding = run.places[0].where, f"the run has no label {missing[0]!r}"
            near = difflib.get_close_matches(missing[0], run.labels, 1)
            hint = "omit --group-by"
            hint += f", or use one of {', '.join(run.labels)}" if run.labels else ""
            hint = f"did you mean {near[0]}? Otherwise {hint}" if near else hint
            error = ConfigError("group_by", where, finding, "", hint)
            rejected += [Rejected(place, error) for place in run.places]
            continue
        run.instance_id = "/".join(run.labels[name] for name in group_by)
        run.repetition_id = None
        yield run


def _number(runs: Sequence[Run]) -> None:
    """Assign free repetition numbers, in order, to the runs that have none."""
    taken: defaultdict[str, set[int]] = defaultdict(set)
    for run in runs:
        if run.repetition_id is not None:
            taken[run.instance_id].add(run.repetition_id)
    following: defaultdict[str, int] = defaultdict(int)
    for run in runs:
        if run.repetition_id is None:
            number = following[run.instance_id]
            while number in taken[run.instance_id]:
                number += 1
            run.repetition_id, following[run.instance_id] = number, number + 1


def _unique(runs: Iterable[Run], first: dict[str, Run], rejected: list[Rejected]) -> Iterator[Run]:
    """Yield the runs whose names are not in `first`, and add them; reject the others."""
    for run in runs:
        name = f"{run.instance_id}_{run.repetition_id}"
        other = first.setdefault(name, run)
        if other is run:
            yield run
            continue
        finding = f"instance {run.instance_id!r}, repetition {run.repetition_id}, also occurs in "
        finding += other.places[0].where
        hint = "convert the logs of each collection to a separate dataset"
        error = InvariantError("unique_trajectory", run.places[0].where, finding, "", hint)
        rejected += [Rejected(place, error) for place in run.places]


def _key(run: Run) -> Key:
    assert run.repetition_id is not None
    return run.instance_id, run.repetition_id


def chunks_of(
    plans: Sequence[Plan],
    outcomes: Mapping[Key, Outcome],
    chunk_bytes: int,
    identity: Mapping[str, Any],
    staging: Staging,
) -> tuple[Part, list[Chunk]]:
    """Cut the runs into chunks; also return the part of the dataset that all have in common."""
    parts = [
        (i, runs) for i, planned in enumerate(plans) for runs in chunks(planned.runs, chunk_bytes)
    ]
    every = (run for _, runs in parts for run in runs)
    facts = [[run.instance_id, run.repetition_id, run.num_bytes] for run in every]
    whole = Part.of([identity, facts], num_parts=len(parts))
    return whole, [
        Chunk(
            part=replace(whole, index=i),
            runs=runs,
            outcomes={key: outcomes[key] for key in map(_key, runs) if key in outcomes},
            out=staging.chunk_path(i),
            log=log,
        )
        for i, (log, runs) in enumerate(parts)
    ]
