"""Runs to tables: read, settled, checked; what cannot be used is rejected, a run as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.adapters import Adapter, Input, Options, Place, Rejected, Run, Trajectory
from rollout_io.conversion.outcomes import settle
from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.conversion.rows import Settled, table_of
from rollout_io.conversion.text import Retokenizer, with_tokens
from rollout_io.logs.naming import natural_key
from rollout_io.logs.tokens import strict_ids
from schemas.checker import Checker
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from schemas.rules import RULES

INCOMPLETE = "incomplete_trajectory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all chunks of a conversion share."""

    adapter: Adapter
    options: Options
    retokenizer: Retokenizer | None
    layout: Literal["prefix", "full"]
    metadata: DatasetMetadata


class Part(NamedTuple):
    """Runs, and their rows."""

    runs: Sequence[Run]
    table: pa.Table


@dataclass(slots=True)
class Reader:
    """Reads runs of a log in order.

    Attributes:
        settings: How.
        outcomes: What the rewards file says of the runs.
        rejected: Records of runs that cannot be read.
        routing: (layers, experts a token) of the log, once a run has routes.
    """

    settings: Settings
    outcomes: Mapping[Key, Outcome]
    rejected: list[Rejected] = field(default_factory=list)
    routing: tuple[int, int] | None = None

    def parts(self, runs: Sequence[Run]) -> Iterator[Part]:
        """The rows of runs, in order, as yet unchecked."""
        if self.settings.adapter.is_table:
            yield from self._tables(runs)
        elif batch := self._settle(runs):
            yield from _tabulated(batch, self.rejected)

    def _tables(self, runs: Sequence[Run]) -> Iterator[Part]:
        for run in runs:
            try:
                table = self.settings.adapter.read(run, self.settings.options)
                self._take_routing([_routing_of(table)], run)
            except RolloutError as error:
                self.rejected += _of_run(run, error)
            else:
                yield Part([run], table)

    def _settle(self, runs: Sequence[Run]) -> list[tuple[Run, Settled]]:
        batch: list[tuple[Run, Settled]] = []
        with np.errstate(over="ignore"):  # a float too large is infinite, which the checks refuse
            for run in runs:
                try:
                    settled = _settled(run, self.outcomes, self.settings)
                    routes = [step.rollout_expert_indices for step in settled.steps]
                    self._take_routing([r.shape[1:] for r in routes if r is not None], run)
                    batch.append((run, settled))
                except RolloutError as error:
                    self.rejected += _of_run(run, error)
        return batch

    def _take_routing(self, shapes: Iterable[tuple[int, ...] | None], run: Run) -> None:
        for shape in shapes:
            if shape is not None and self.routing not in {None, shape}:
                raise other_routing(run.places[0].where, shape, self.routing)
            if shape is not None:
                self.routing = (shape[0], shape[1])


def other_routing(
    where: str, shape: tuple[int, ...], known: tuple[int, ...] | None
) -> RolloutError:
    """The error of routes of a second model."""
    got, hint = f"{shape[0]} layers, top {shape[1]}", "convert the logs of each model by themselves"
    return RolloutError("routing_shape", where, got, f"{known}, as in earlier calls", hint)


def _routing_of(table: pa.Table) -> tuple[int, ...] | None:
    if "rollout_expert_indices" not in table.column_names:
        return None
    kind = table.schema.field("rollout_expert_indices").type.value_type
    return (kind.list_size, kind.value_type.list_size)


def _settled(run: Run, outcomes: Mapping[Key, Outcome], settings: Settings) -> Settled:
    assert run.repetition_id is not None
    logged = Trajectory(steps=[])
    if run.places:
        logged = settings.adapter.read(run, settings.options)
    steps = with_tokens(logged, settings.retokenizer)
    given = outcomes.get((run.instance_id, run.repetition_id))
    return settle(run, logged, steps, given, settings.options.reward)


def _tabulated(batch: Sequence[tuple[Run, Settled]], rejected: list[Rejected]) -> Iterator[Part]:
    """One table; or, where it cannot be made, those of each half, down to the run at fault."""
    try:
        yield Part([run for run, _ in batch], table_of([settled for _, settled in batch]))
    except (ArithmeticError, ValueError) as error:
        if len(batch) == 1:
            rejected += _of_run(batch[0][0], _fault(*batch[0], error))
            return
        middle = len(batch) // 2
        yield from _tabulated(batch[:middle], rejected)
        yield from _tabulated(batch[middle:], rejected)


def _fault(run: Run, settled: Settled, error: Exception) -> RolloutError:
    """What is wrong with the first ids that are no ids, or else with some value."""
    try:
        for step in settled.steps:
            for what, ids in (("prompt", step.prompt_token_ids), ("response", step.response_ids)):
                if isinstance(ids, bytes):
                    strict_ids(ids, what, step.source)
    except RolloutError as found:
        return found
    where, got = run.places[0].where, " ".join(str(error).split())
    hint = "a number too large, or of another kind, for its column"
    return RolloutError("columns_and_types", where, got, "", hint)


def sound(part: Part, rejected: list[Rejected]) -> pa.Table:
    """The rows without the trajectories that break a named invariant.

    Args:
        part: Runs and rows.
        rejected: Records of the runs that do are added to it.
    """
    runs, table = part
    found = Checker().check(table)
    breaches = found.filter(pl.col("severity") == "error") if len(found) else found
    if not len(breaches):
        return table
    names = table.column("trajectory_id")
    by_name = {f"{run.instance_id}_{run.repetition_id}": run for run in runs}
    faults: dict[str, RolloutError] = {}
    for breach in breaches.iter_rows(named=True):
        row = breach["row"]
        if row is None or names[row].as_py() not in by_name:
            error = _breach(breach, runs[0].places[0].where)
            rejected += [r for run in runs for r in _of_run(run, error)]
            return table.slice(0, 0)
        where = table.column("source")[row].as_py()
        faults.setdefault(names[row].as_py(), _breach(breach, where))
    rejected += [r for name, error in faults.items() for r in _of_run(by_name[name], error)]
    return table.filter(pc.invert(pc.is_in(names, pa.array(list(faults), names.type))))


def in_order(rejected: Iterable[Rejected], inputs: Sequence[Input]) -> list[Rejected]:
    """As the records are in the logs, and the logs as they were given."""
    ranks = {given.path: rank for rank, given in enumerate(inputs)}

    @lru_cache
    def key(path: Path) -> tuple[Any, ...]:
        given = next((p for p in (path, *path.parents) if p in ranks), None)
        return ranks[given] if given else len(ranks), natural_key(str(path))

    return sorted(rejected, key=lambda r: (key(r.place.path), r.place.offset or 0))


def errors_of(rejected: Iterable[Rejected], inputs: Sequence[Input]) -> list[RolloutError]:
    """The errors as they are in the logs; those that follow from another one last."""
    errors = [r.error for r in in_order(rejected, inputs)]
    return sorted(errors, key=lambda error: error.rule == INCOMPLETE)


def _breach(breach: dict[str, Any], where: str) -> RolloutError:
    rule, column = breach["rule"], breach["column"]
    got = f"{column}: {breach['got']}" if column else breach["got"]
    return RolloutError(rule, where, got, breach["expected"], RULES[rule].hint)


def _of_run(run: Run, error: RolloutError) -> Iterator[Rejected]:
    """All records of a run: the one at fault with its reason, the others since a run is whole."""
    guilty = {place for place in run.places if _is_at(error.where, place)}
    for place in run.places:
        if guilty and place not in guilty:
            got = f"a record of a run that was rejected ({error.rule}: {error.where})"
            expected = "a whole run"
            yield Rejected(place, RolloutError(INCOMPLETE, place.where, got, expected, error.hint))
        else:
            yield Rejected(place, error)


def _is_at(where: str, place: Place) -> bool:
    return where == place.where or where.startswith(f"{place.where},")
