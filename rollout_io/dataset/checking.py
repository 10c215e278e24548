"""Checks of a dataset against the named invariants, shard by shard, and of groups with several tasks.

Code that rewrites a dataset or trains on it reads it with `checked_tables`, or piece by piece with
`checked` and `refuse_split`, or calls `validate` first. Groups whose attempts begin with different prompts
(`mixed_groups`) are probably attempts at different tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

import schemas
from rollout_io.dataset.blobs import RULE, Blobs, fault_of, names_in, stores_of
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.polars_sources import Rows
from rollout_io.dataset.reader import (
    iter_tables,
    read_metadata,
    scan,
    shard_paths,
    small_together,
    stored_tables,
)
from rollout_io.dataset.shard_files import open_shards
from rollout_io.dataset.storage import PathLike, Paths, joined
from schemas.checker import Checker, raise_errors
from schemas.columns import PICTURES
from schemas.errors import count
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.pictures import identity_ids, pictures_of
from schemas.ragged import Ragged
from schemas.structure_checks import STRUCTURE_COLUMNS
from schemas.view import View


def check(path: Paths | Rows, workers: Workers | None = None) -> pl.DataFrame:
    """Return every breach of the named invariants in a dataset, with the columns of `schemas.check`.

    Args:
        path: Directory, glob or file, local or an fsspec URL, or a list of these; or a frame.
        workers: Processes that check the shards; None: this process.
    """
    if isinstance(path, Rows):
        return schemas.check(path)
    breaches = pl.concat([*_breaches(path, workers), *check_blobs(path)])
    if read_metadata(path).outcome == "sum":  # the return is no outcome of the last step
        breaches = breaches.filter(pl.col("rule") != "outcome_on_last_step")
    return breaches


def validate(path: Paths | Rows, workers: Workers | None = None) -> None:
    """Raise an error if `check` finds errors (warnings are ignored).

    Raises:
        ValidationError: The dataset breaks a named invariant; unlike `check`, this stops at the
            first piece that does.
    """
    if isinstance(path, Rows):
        schemas.validate(path)
        return
    for breaches in (*_breaches(path, workers), *check_blobs(path)):
        raise_errors(breaches, joined(path))


def check_blobs(path: Paths) -> Iterator[pl.DataFrame]:
    """Yield the rows of a dataset whose pictures are missing or were changed; each file is read once."""
    stores, faults, num_rows = list[Blobs](), dict[str, str | None](), 0
    for shard in open_shards(path):
        names = [name for name in (PICTURES, "trajectory_id", "step_index") if name in shard.names]
        has_pictures, at = PICTURES in names, num_rows
        tables = shard.row_groups(names, is_checked=False) if has_pictures else ()
        stores = stores or (stores_of(path) if has_pictures else [])
        for _, table in tables:
            for name in sorted(names_in(table) - faults.keys()):
                faults[name] = fault_of(name, stores)
            if any(faults.values()):
                yield View(table, at).run(partial(_check_files, faults=faults))
            at += table.num_rows
        num_rows += shard.num_rows


def _check_files(view: View, faults: Mapping[str, str | None]) -> None:
    first = dict[int, str]()
    for row, entries in enumerate(view.column(PICTURES).to_pylist()):
        names = [entry["sha256"] for entry in entries or () if entry is not None]
        for fault in filter(None, map(faults.get, names)):
            first.setdefault(row, fault)
    rows = np.array(list(first), np.int64)
    view.report(f"{RULE}.file", PICTURES, rows, fault=first.__getitem__)


def _breaches(path: Paths, workers: Workers | None = None) -> Iterator[pl.DataFrame]:
    """Yield the breaches piece by piece."""
    vocab_size = read_metadata(path).vocab_size
    if workers is not None and workers != Workers():
        parts = list(workers.map_in_order(partial(_check_shard, vocab_size), shard_paths(path)))
        checkers = [checker for _, checker in parts]
        if _are_apart(checkers):
            num_rows = 0
            for breaches, checker in parts:
                yield breaches.with_columns(pl.col("row") + num_rows)
                num_rows += checker.num_rows
            yield Checker.after(checkers).finish()
            return
    checker, is_clean = Checker(vocab_size), True
    for _, tables in small_together(stored_tables(path)):
        together = Checker(vocab_size)
        # One by one once there is a breach: breaches then have the same order in any grouping.
        is_clean = is_clean and _is_clean(together, tables)
        is_apart = checker.trajectory_ids.isdisjoint(together.trajectory_ids)
        if is_clean and is_apart and checker.open_end is None:
            checker.follow(together)
        else:
            for table in tables:
                yield checker.check(table)
    yield checker.finish()


def _is_clean(checker: Checker, tables: Sequence[pa.Table]) -> bool:
    """Check tables together; return false if there is a breach, or if their types differ."""
    if any(not table.schema.equals(tables[0].schema) for table in tables):
        return False
    return checker.check(pa.concat_tables(tables)).is_empty()


def checked_tables(
    path: Paths, columns: Sequence[str] | None = None, *, decode: bool = True
) -> Iterator[pa.Table]:
    """Iterate over a dataset like `iter_tables`, and check every named invariant in the same pass.

    All columns are read and checked, even if `columns` selects only some. The last table (which may
    be the only one) is yielded only after the entire dataset has been checked.

    Raises:
        ValidationError: The dataset breaks a named invariant.
    """
    checker, held = checker_of(path), None
    for table in checked(checker, path, decode=decode):
        if held is not None:
            yield held
        held = table if columns is None else table.select(columns)
    raise_errors(checker.finish(), joined(path))
    if held is not None:
        yield held


def checker_of(path: Paths) -> Checker:
    """Return a checker with the dataset's vocabulary size, if its metadata records one."""
    return Checker(read_metadata(path).vocab_size)


def checked(checker: Checker, piece: Paths, *, decode: bool = True) -> Iterator[pa.Table]:
    """Check each table of one piece of a dataset (see `pieces`), then yield it.

    Invariants that span several pieces are checked by `refuse_split`.

    Args:
        checker: Checker for the tables of this piece; pass it to `refuse_split` afterwards.
        piece: A dataset, or one of its `pieces`.
        decode: See `iter_tables`.

    Raises:
        ValidationError: The piece breaks a named invariant.
    """
    for table in iter_tables(piece, decode=decode):
        raise_errors(checker.check(table), joined(piece))
        yield table


def structure_of(piece: Paths) -> Checker:
    """Rebuild the checker of a piece known to be valid, reading only its structure columns."""
    checker = Checker()
    for table in iter_tables(piece, STRUCTURE_COLUMNS):
        checker.check(table)
    return checker


def refuse_split(path: Paths, checkers: Sequence[Checker]) -> None:
    """Check the invariants that span the pieces of a dataset.

    Args:
        path: The dataset.
        checkers: The checker of each of its `pieces`, in order.

    Raises:
        ValidationError: A trajectory spans two pieces, or the last trajectory is incomplete.
    """
    if not _are_apart(checkers):
        validate(path)
    raise_errors(Checker.after(checkers).finish(), joined(path))


def _check_shard(vocab_size: int | None, path: str) -> tuple[pl.DataFrame, Checker]:
    checker = Checker(vocab_size)
    return pl.concat([checker.check(table) for table in stored_tables(path)]), checker


def _are_apart(checkers: Sequence[Checker]) -> bool:
    """True if no trajectory spans two pieces and only the last piece may end inside a trajectory."""
    ids = [checker.trajectory_ids for checker in checkers]
    is_distinct = len(set().union(*ids)) == sum(len(names) for names in ids)
    return is_distinct and all(checker.open_end is None for checker in checkers[:-1])


_NAMES = ("instance_id", "step_index", "prompt_token_ids")


def digest_of(prompt: npt.NDArray[np.integer[Any]]) -> bytes | None:
    """Return a digest of the `identity_ids` of a prompt, [P]; None if it is empty."""
    tokens = np.ascontiguousarray(prompt, np.int64).tobytes()
    return blake2b(tokens, digest_size=16).digest() if tokens else None


def mixed_groups(dataset: PathLike) -> tuple[list[str], int]:
    """List the groups of a dataset whose attempts have different first prompts, in order.

    Attempts without a prompt are ignored. Memory use grows with the number of groups.

    Returns:
        These groups, and the number of groups with a prompt.
    """
    first: dict[str, bytes] = {}
    mixed: dict[str, None] = {}
    present = scan(dataset).collect_schema()
    names = [*_NAMES, *([PICTURES] if PICTURES in present else ())]
    for table in iter_tables(dataset, names, decode=False):
        rows = np.flatnonzero(to_numpy(table.column("step_index")) == 0)
        # The first row of a trajectory has no prefix in another row.
        stored = "prompt_suffix_ids" if "prompt_suffix_ids" in table.column_names else _NAMES[-1]
        begins = np.zeros(table.num_rows, np.int64)
        tokens = Ragged.from_arrow(table.column(stored))
        prompts = identity_ids(tokens, begins, pictures_of(table))
        groups = table.column("instance_id").take(to_arrow(rows)).to_pylist()
        for name, row in zip(groups, rows.tolist(), strict=True):
            digest = digest_of(prompts.row(row))
            if digest is not None and first.setdefault(name, digest) != digest:
                mixed[name] = None
    return list(mixed), len(first)


def mixed_text(dataset: PathLike) -> str | None:
    """Return a note about `mixed_groups`; None if there are none."""
    mixed, num_groups = mixed_groups(dataset)
    if not mixed:
        return None
    return (
        f"{len(mixed):,} of {count(num_groups, 'group')} {'has' if len(mixed) == 1 else 'have'} "
        f"attempts with different first prompts, such as {mixed[0]!r:.80}. Training compares the "
        "attempts of a group, so give each task its own name, or convert with --group-by LABEL"
    )
