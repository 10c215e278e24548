"""Read the per-token records of training runs."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from schemas.errors import InputError
from schemas.token_records import token_record_path, token_record_steps


def scan_token_records(run: str | os.PathLike[str], global_step: int | None = None) -> pl.LazyFrame:
    """Scan a training run's token records: the contribution of each trained token to an update.

    Args:
        run: Directory of the run.
        global_step: Number of the update; None: all updates, in order.

    Returns:
        `global_step` (int32), then `schemas.TOKEN_RECORD_COLUMNS`; one record per update and row of
        the dataset. Join it to the dataset on `trajectory_id` and `step_index`.

    Raises:
        InputError: `input_file`: the run has no records of the update, or no records at all.

    Example:
        >>> scan_token_records("run", 3).select("trajectory_id", "logprobs").collect()
    """
    folder = Path(run)
    steps = token_record_steps(folder)
    if global_step is not None:
        steps = [step for step in steps if step == global_step]
    if not steps:
        what = "any update" if global_step is None else f"update {global_step}"
        hint = "train with record_tokens=sampled or all"
        got = f"the run has no token records of {what}"
        raise InputError("input_file", str(folder), got, hint=hint)
    frames = (
        pl.scan_parquet(token_record_path(folder, step)).select(
            pl.lit(step, pl.Int32).alias("global_step"), pl.all()
        )
        for step in steps
    )
    return pl.concat(frames)
