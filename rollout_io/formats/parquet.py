"""Export to plain Parquet: a dataset in the `full` layout, with the same columns in all files.

Every Parquet reader sees complete prompts. `rollouts` reads the directory like any dataset.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pyarrow as pa

from rollout_io.dataset.rewriting import rewrite
from rollout_io.dataset.sources import Sources
from rollout_io.dataset.storage import PathLike
from rollout_io.formats.exporting import Exported, Failed, refuse_taken


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write a copy of the dataset with full prompts, one row group at a time.

    All rows and columns are exported, including failed trajectories. Repeat the call to resume an
    interrupted export.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out_is_free`: `out` is a file, already contains a dataset, or is inside
            `dataset`; `some_rows`: the dataset has no rows.
    """
    from rollout_io.dataset.reader import iter_tables, read_metadata, shard_sizes

    del failed
    if Path(out).is_file():
        refuse_taken(out, dataset)
    sources = Sources(dataset)
    schema = next(iter(iter_tables(dataset))).schema
    if not any(shard_sizes(dataset).values()):
        Exported().close(dataset)
    source, target = os.fspath(dataset), os.fspath(out)
    complete = partial(_with_all_columns, schema)
    counts = rewrite(
        source, target, complete, read_metadata(dataset), layout="full", sources=sources
    )
    return Exported(num_rows_read=counts.num_rows_before, num_rows_written=counts.num_rows_after)


def _with_all_columns(schema: pa.Schema, table: pa.Table) -> pa.Table:
    """Add columns that exist only in other shards, filled with nulls."""
    tables = [schema.empty_table(), table]
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
