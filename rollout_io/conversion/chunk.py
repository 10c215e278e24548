"""One chunk of runs to shards of its own: read, settled, checked; what breaks a rule is rejected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from rollout_io.adapters import Rejected, Run
from rollout_io.conversion import rejections
from rollout_io.conversion.batch import Reader, Settings, sound
from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.conversion.summary import Summary
from rollout_io.writer import RolloutWriter
from schemas.errors import RolloutError

BATCH_BYTES = 32 << 20


@dataclass(kw_only=True, slots=True)
class Chunk:
    """Runs, and what the rewards file says of them."""

    index: int
    runs: Sequence[Run]
    outcomes: Mapping[Key, Outcome] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Report:
    """What became of a chunk.

    Attributes:
        trajectory_ids: Of documents of tables, whose names the plan does not know: and the document.
        routing: (layers, experts a token), where there are routes.
    """

    summary: Summary = field(default_factory=Summary)
    rejected: list[Rejected] = field(default_factory=list)
    trajectory_ids: dict[str, str] = field(default_factory=dict)
    routing: tuple[int, int] | None = None

    def encode(self) -> dict[str, Any]:
        """As JSON; `decode` reads it."""
        rejected = [rejections.encode(r) for r in self.rejected]
        return {
            "summary": self.summary.encode(),
            "rejected": rejected,
            "trajectory_ids": self.trajectory_ids,
            "routing": self.routing,
        }

    @classmethod
    def decode(cls, values: dict[str, Any]) -> Self:
        """What `encode` wrote."""
        rejected = [rejections.decode(r) for r in values["rejected"]]
        return cls(
            summary=Summary.decode(values["summary"]),
            rejected=rejected,
            trajectory_ids=values["trajectory_ids"],
            routing=values["routing"] and tuple(values["routing"]),
        )

    def take_names(self, table: pa.Table, where: str) -> None:
        """Note the trajectories of a document.

        Raises:
            RolloutError: `unique_trajectory`: one that another document has.
        """
        names = dict.fromkeys(table.column("trajectory_id").to_pylist(), where)
        for name in names:
            if name in self.trajectory_ids:
                raise repeated(name, self.trajectory_ids[name], where)
        self.trajectory_ids |= names


def repeated(name: str, first: str, second: str) -> RolloutError:
    """The error of a trajectory that two documents have."""
    hint = "outputs of several training steps: make each a dataset of its own"
    got = f"trajectory {name!r}, which {first} has too"
    return RolloutError("unique_trajectory", second, got, "each trajectory once", hint)


def convert_chunk(
    chunk: Chunk,
    settings: Settings,
    out: str,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Write the rows of a chunk to a directory of its own.

    Args:
        chunk: The runs.
        settings: How they are read and written.
        out: Directory to write.
        progress: Told the bytes and rows that are done.
    """
    report, tell = Report(), progress or (lambda _num_bytes, _num_rows: None)
    reader = Reader(settings, chunk.outcomes)
    broken: list[Rejected] = []
    with without_collector(), _writer(settings, out) as writer:
        for runs, num_bytes in _batches(chunk.runs):
            for part in reader.parts(runs):
                if settings.adapter.is_table:
                    report.take_names(part.table, part.runs[0].places[0].where)
                table = sound(part, broken)
                if table.num_rows:
                    report.summary.add(table)
                    writer.write(table)
                tell(0, table.num_rows)
            tell(num_bytes, 0)
    report.rejected, report.routing = reader.rejected + broken, reader.routing
    return report


def _writer(settings: Settings, out: str) -> RolloutWriter:
    return RolloutWriter(out, layout=settings.layout, metadata=settings.metadata, checked=True)


def _batches(runs: Sequence[Run]) -> Iterator[tuple[list[Run], int]]:
    """Runs in a row, and the bytes of their records."""
    batch: list[Run] = []
    num_bytes = 0
    for run in runs:
        batch.append(run)
        num_bytes += run.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes


@contextmanager
def without_collector() -> Iterator[None]:
    """Millions of short-lived numbers and no cycles: the cycle collector only costs time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
