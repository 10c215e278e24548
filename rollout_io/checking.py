"""Checks a dataset against the named invariants, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from rollout_io.parallel import Workers
from rollout_io.reader import PathLike, stored_tables
from rollout_io.storage import find_shards
from schemas.checker import Checker


def check_dataset(path: PathLike, workers: Workers | None = None) -> Iterator[pl.DataFrame]:
    """Breaches of the named invariants over a dataset, piece by piece (see `schemas.check`).

    Args:
        path: Directory, glob or file, local or an fsspec URL.
        workers: Who looks through the shards; None: this process.
    """
    workers = workers or Workers()
    if workers != Workers():
        shards = [str(s.fs.unstrip_protocol(s.path)) for s in find_shards(path)]
        parts = list(workers.map_in_order(_check_shard, shards))
        if _are_apart(parts):
            yield from _together(parts)
            return
    checker = Checker()
    for table in stored_tables(path):
        yield checker.check(table)
    yield checker.finish()


@dataclass(frozen=True, slots=True)
class _Part:
    """What a checker found in one shard, and what it knows at its end."""

    breaches: pl.DataFrame
    checker: Checker


def _check_shard(path: str) -> _Part:
    checker = Checker()
    breaches = pl.concat([checker.check(table) for table in stored_tables(path)])
    return _Part(breaches, checker)


def _are_apart(parts: list[_Part]) -> bool:
    """Whether no trajectory is in two shards, nor one left open at the end of an inner shard."""
    ids = [part.checker.trajectory_ids for part in parts]
    is_distinct = len(set().union(*ids)) == sum(len(names) for names in ids)
    return is_distinct and all(part.checker.open_end is None for part in parts[:-1])


def _together(parts: list[_Part]) -> Iterator[pl.DataFrame]:
    num_rows = 0
    for part in parts:
        yield part.breaches.with_columns(pl.col("row") + num_rows)
        num_rows += part.checker.num_rows
    yield Checker.after([part.checker for part in parts]).finish()
