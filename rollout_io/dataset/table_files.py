"""Tables that a verb writes to a single Parquet file."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from rollout_io.dataset.atomic_files import whole, writable
from rollout_io.dataset.locking import destination
from schemas.errors import InputError


def check_table_out(out: str) -> None:
    """Check that a table can be written to a path, before the table is computed.

    Raises:
        InputError: `output_file`: the name does not end in `.parquet`; `out_is_free`: the path
            exists.
    """
    if Path(out).suffix != ".parquet":
        got, hint = "the file name does not end in .parquet", "choose a name that does"
        raise InputError("output_file", f"--out {out}", got, hint=hint)
    if os.path.lexists(out):
        got, hint = "the output path already exists", "choose a different --out, or remove it"
        raise InputError("out_is_free", out, got, hint=hint)


def write_table(table: pl.DataFrame, out: str) -> None:
    """Write a table atomically to a new Parquet file, and create its parent directories.

    Raises:
        InputError: `out_is_free`: the path exists, or another process is writing to it; `output_file`: it cannot be written.
    """
    with destination(out, noun="path"):
        check_table_out(out)
        with writable(out), whole(Path(out), is_new=True) as partial:
            table.write_parquet(partial)
