"""Rewriting of a dataset, shard by shard; finished shards survive an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from operator import add
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.conversion.staging import Staging, emptied
from rollout_io.dataset.checking import (
    checked,
    checker_of,
    refuse_split,
    structure_of,
    validate,
)
from rollout_io.dataset.filesystems import LocalFiles
from rollout_io.dataset.footer import Part
from rollout_io.dataset.opening import digest_of
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.reader import pieces, read_layout
from rollout_io.dataset.sources import Sources
from rollout_io.dataset.storage import Location, find_shards, refuse_inside
from rollout_io.dataset.writer import RolloutWriter
from schemas.checker import Checker, ValidationError
from schemas.metadata import DatasetMetadata, Layout
from schemas.ragged import list_lengths

Transform = Callable[[pa.Table], pa.Table]
Progress = Callable[[int], object]
_Task = tuple[str, str, Part]


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of rows and tokens (prompt + response) before and after a rewrite."""

    num_rows_before: int = 0
    num_tokens_before: int = 0
    num_rows_after: int = 0
    num_tokens_after: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Add two counts."""
        return Counts(*map(add, astuple(self), astuple(other)))


def rewrite(
    dataset: str,
    out: str,
    transform: Transform,
    metadata: DatasetMetadata,
    *,
    decode: bool = True,
    layout: Layout | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
    sources: Sources | None = None,
) -> Counts:
    """Apply `transform` to each row group of a dataset, and write the results as a new dataset.

    Input and output are checked against the named invariants in the same pass. An interrupted run
    leaves its finished shards in a hidden directory inside `out`; the same call resumes from them.

    Args:
        dataset: Path of a dataset.
        out: Directory to write, local or an fsspec URL.
        transform: Maps complete trajectories to complete trajectories; a module-level function.
        metadata: Metadata of the new files.
        decode: If true, the transform receives full prompts (see `iter_tables`).
        layout: Layout of the new dataset; None: the layout of `dataset`.
        workers: Processes that do the work; None: this process.
        progress: Called with the number of rows read since the last call.
        sources: The dataset as it was before the caller read anything from it.

    Raises:
        ValidationError: The dataset breaks a named invariant; nothing is written.
        InputError: `out_is_free`: `out` already contains a dataset, or is inside `dataset`;
            `input_file`: the dataset changed while it was read.
    """
    refuse_inside(out, dataset)
    read_from = sources or Sources(dataset)
    staging, workers = Staging(out), workers or Workers()
    report = progress or (lambda _num_rows: None)
    layout = layout or read_layout(dataset)
    pairs = {key.decode(): value.decode() for key, value in metadata.encode(layout).items()}
    states = _states(dataset)
    with staging.resumable():
        staging.refuse_occupied()
        parts = pieces(dataset)
        whole = Part.of([pairs, states], num_parts=len(parts))
        done = {i: Counts(**report) for i, report in staging.resume(whole).items()}
        checkers = {i: structure_of(parts[i]) for i in done}
        for counts in done.values():
            report(counts.num_rows_before)
        job = partial(_rewrite_piece, transform, metadata, layout, decode)
        missing = [i for i in range(len(parts)) if i not in done]
        tasks = [(parts[i], staging.chunk_path(i), replace(whole, index=i)) for i in missing]
        with _named_by_the_whole(dataset), closing(_run(job, tasks, workers, report)) as results:
            for index, (counts, checker) in results:
                staging.finish_chunk(missing[index], asdict(counts))
                done[missing[index]], checkers[missing[index]] = counts, checker
        refuse_split(dataset, [checkers[i] for i in range(len(parts))])
        read_from.refuse_changed()
        staging.publish(whole, [dataset])
    return sum(done.values(), Counts())


@contextmanager
def _named_by_the_whole(dataset: str) -> Iterator[None]:
    """If a piece is invalid, check the entire dataset and report its first error instead.

    A piece may contain only part of a trajectory, so its first error can be misleading.
    """
    try:
        yield
    except ValidationError:
        validate(dataset)
        raise


def _run(job: Any, tasks: Sequence[_Task], workers: Workers, report: Progress) -> Any:
    if workers == Workers():
        for index, task in enumerate(tasks):
            yield index, job(task, report)
        return
    with closing(workers.map(job, tasks)) as results:
        for index, result in results:
            report(result[0].num_rows_before)
            yield index, result


def _rewrite_piece(
    transform: Transform,
    metadata: DatasetMetadata,
    layout: Layout,
    decode: bool,  # noqa: FBT001
    task: _Task,
    progress: Progress | None = None,
) -> tuple[Counts, Checker]:
    """Rewrite one piece; return its counts and the checker of its input."""
    source, out, part = task
    counts, checker = Counts(), checker_of(source)
    try:
        with RolloutWriter(emptied(out), layout=layout, metadata=metadata, part=part) as writer:
            for table in checked(checker, source, decode=decode):
                transformed = transform(table)
                writer.write(transformed)
                sizes = (
                    table.num_rows,
                    _num_tokens(table),
                    transformed.num_rows,
                    _num_tokens(transformed),
                )
                counts += Counts(*sizes)
                if progress is not None:
                    progress(table.num_rows)
    except ValidationError as error:
        if error.source == source:
            raise
        raise ValidationError.of(error.breaches, f"the result for {source}") from None
    return counts, checker


def _states(dataset: str) -> list[str]:
    """Return a fingerprint of each of the dataset's shards, to detect changes between runs."""
    return [_state(shard) for shard in find_shards(dataset)]


def _state(shard: Location) -> str:
    """Return the digest of a shard's content, or the version that an object store reports."""
    if isinstance(shard.fs, LocalFiles):
        return digest_of(shard.path)
    info = shard.fs.info(shard.path)
    version = info.get("etag") or info.get("ETag")
    if version:
        return str(version)
    with shard.fs.open(shard.path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _num_tokens(table: pa.Table) -> int:
    """Count the tokens of prompts and responses, in either layout."""
    lists = {"prompt_token_ids", "prompt_suffix_ids", "response_ids"} & set(table.column_names)
    num = sum(int(list_lengths(table.column(name)).sum()) for name in lists)
    shares = "prefix_length" in table.column_names
    return num + (pc.sum(table.column("prefix_length")).as_py() or 0 if shares else 0)
