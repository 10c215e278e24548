"""A dataset made from another, shard by shard: what was done outlives a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.conversion.staging import Staging
from rollout_io.parallel import Workers
from rollout_io.reader import iter_tables, pieces
from rollout_io.storage import Location, find_shards, occupied
from rollout_io.writer import RolloutWriter
from schemas.checker import ValidationError
from schemas.metadata import DatasetMetadata
from schemas.ragged import list_lengths

Transform = Callable[[pa.Table], pa.Table]
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows and tokens (prompt + response) before and after."""

    num_rows_before: int = 0
    num_tokens_before: int = 0
    num_rows_after: int = 0
    num_tokens_after: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        mine, others = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})


def rewrite(
    dataset: str,
    out: str,
    transform: Transform,
    metadata: DatasetMetadata,
    *,
    decode: bool = True,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> Counts:
    """Write what `transform` makes of each row group of a dataset, as a dataset of its own.

    A run that was stopped leaves the shards that are done in a hidden directory inside `out`, and
    the same call goes on from them.

    Args:
        dataset: Path of a dataset.
        out: Directory to write, local or an fsspec URL.
        transform: Whole trajectories to whole trajectories; of a module's top level.
        metadata: What the new files say of themselves.
        decode: Whether the transform is given full prompts (see `iter_tables`).
        workers: Who does the work; None: this process.
        progress: Told how many more rows were read.

    Raises:
        RolloutError: `out_is_free`: a dataset is there; bad input; nothing of the dataset is left.
    """
    staging, workers = Staging(out), workers or Workers()
    report = progress or (lambda _num_rows: None)
    made = {key.decode(): value.decode() for key, value in metadata.encode("prefix").items()}
    identity = {"made": made, "shards": _states(dataset)}
    with staging.resumable():
        shards = staging.out.shards()
        if shards and not staging.is_publishing(identity):
            raise occupied(staging.where, len(shards))
        staging.begin(identity)
        sources = pieces(dataset)
        done = _earlier(staging, len(sources))
        for counts in done.values():
            report(counts.num_rows_before)
        job = partial(_rewrite_piece, transform, metadata, decode)
        missing = [i for i in range(len(sources)) if i not in done]
        tasks = [(sources[i], staging.chunk_path(i)) for i in missing]
        with closing(_run(job, tasks, workers, report)) as results:
            for index, counts in results:
                staging.finish_chunk(missing[index], asdict(counts))
                done[missing[index]] = counts
        staging.publish(len(sources))
    return sum(done.values(), Counts())


def _run(job: Any, tasks: Sequence[tuple[str, str]], workers: Workers, report: Progress) -> Any:
    if workers == Workers():
        for index, task in enumerate(tasks):
            yield index, job(task, report)
        return
    with closing(workers.map(job, tasks)) as results:
        for index, counts in results:
            report(counts.num_rows_before)
            yield index, counts


def _rewrite_piece(
    transform: Transform,
    metadata: DatasetMetadata,
    decode: bool,  # noqa: FBT001
    task: tuple[str, str],
    progress: Progress | None = None,
) -> Counts:
    source, out = task
    counts = Counts()
    try:
        with RolloutWriter(out, metadata=metadata) as writer:
            for table in iter_tables(source, decode=decode):
                made = transform(table)
                writer.write(made)
                sizes = (table.num_rows, _num_tokens(table), made.num_rows, _num_tokens(made))
                counts += Counts(*sizes)
                if progress is not None:
                    progress(table.num_rows)
    except ValidationError as error:
        raise ValidationError(error.breaches, f"what comes of {source}") from None
    return counts


def _earlier(staging: Staging, num: int) -> dict[int, Counts]:
    """What an earlier, stopped run had done."""
    found = {i: staging.report(i) for i in range(num)}
    return {i: Counts(**report) for i, report in found.items() if report is not None}


def _states(dataset: str) -> list[Any]:
    """What changes when the dataset does."""
    return [[shard.path, _state(shard)] for shard in find_shards(dataset)]


def _state(shard: Location) -> Any:
    info = shard.fs.info(shard.path)
    return [info["size"], str(info.get("mtime") or info.get("etag") or info.get("ETag"))]


def _num_tokens(table: pa.Table) -> int:
    """Of prompts and responses, in either layout."""
    lists = {"prompt_token_ids", "prompt_suffix_ids", "response_ids"} & set(table.column_names)
    num = sum(int(list_lengths(table.column(name)).sum()) for name in lists)
    shares = "prefix_length" in table.column_names
    return num + (pc.sum(table.column("prefix_length")).as_py() or 0 if shares else 0)
