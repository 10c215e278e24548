"""Reward versions of a dataset: one Arrow file each, beside its shards.

    DS.rewards/NAME.arrow   one row per trajectory, and how it was made

A version does not change the dataset (and is no Parquet file: a pattern such as `runs/*` would take it for one). `with_version` sets the rewards of its rows for one use, such
as a training run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from pipelines.rescoring.attempts import LEFT_OUT
from pipelines.rewards import place_outcomes
from rollout_io.dataset.atomic_files import whole
from rollout_io.dataset.opening import open_input
from rollout_io.dataset.row_digests import row_digest
from schemas.errors import ConfigError, InputError, count
from schemas.types import with_absent

RULE = "reward_version"
SCHEMA = {
    "trajectory_id": pl.String,
    "reward": pl.Float64,
    "error": pl.String,
    "digest": pl.Int64,
}
"""Columns of a version: reward is null if the trajectory has an error; digest as in `digests`."""

UNSCORED = "reward {}: "
"""How the error of a trajectory begins that has no reward in the version of that name."""
_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
_SPARE = 2**16  # the sum over the rows of a trajectory fits into 63 bits
_MADE = b"rollout_io.reward_version"


def version_path(dataset: str, name: str) -> Path:
    """Return the path of a version, whether or not it exists.

    Raises:
        ConfigError: `reward_version`: the name has other characters than letters, digits, _ and -.
        InputError: `reward_version`: the dataset is not a local directory.
    """
    if not _NAME.fullmatch(name):
        expected = "the name of a reward version: letters, digits, _ and -, and no path"
        raise ConfigError(RULE, "reward", repr(name), expected)
    if not Path(dataset).is_dir():
        got, expected = "not a local directory", "the directory of one dataset"
        raise InputError(RULE, dataset, got, expected)
    return Path(f"{dataset.rstrip('/')}.rewards") / f"{name}.arrow"


def is_version(dataset: str, name: str) -> bool:
    """True if the dataset has a version of this name."""
    return bool(
        _NAME.fullmatch(name) and Path(dataset).is_dir() and version_path(dataset, name).exists()
    )


def digests(frame: pl.LazyFrame) -> pl.DataFrame:
    """Return trajectory_id and a digest of the rows of each trajectory, in no order.

    A dataset may be written again with the same ids; scores of other rows must not be used. The
    digest covers prompts and all that an `Attempt` has. Columns without a value do not change it.
    """
    seen = [n for n in frame.collect_schema() if n not in LEFT_OUT - {"prompt_token_ids"}]
    return (
        frame.select("trajectory_id", digest=row_digest(seen) // _SPARE)
        .group_by("trajectory_id")
        .agg(pl.col("digest").sum())
        .collect(engine="streaming")
    )


def write_version(path: Path, scores: pl.DataFrame, made: Mapping[str, Any]) -> None:
    """Write a version, which becomes visible once it is complete.

    Args:
        path: From `version_path`.
        scores: Columns of `SCHEMA`.
        made: How it was made, stored as JSON.
    """
    table = scores.cast(SCHEMA).to_arrow()  # type: ignore[arg-type]
    table = table.replace_schema_metadata({_MADE: json.dumps(made)})
    path.parent.mkdir(exist_ok=True)
    with (
        whole(path) as partial,
        pa.OSFile(str(partial), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def read_version(dataset: str, name: str) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Read a version: its rows, and how it was made.

    Raises:
        InputError: `reward_version`: it does not exist, or the file is not one.
    """
    path = version_path(dataset, name)
    if not path.exists():
        known = sorted(one.stem for one in path.parent.glob("*.arrow"))
        got = f"no reward version {name!r}"
        hint = (
            f"use one of {', '.join(known)}" if known else f"make one: rollouts rescore {dataset}"
        )
        raise InputError(RULE, dataset, got, hint=hint)
    with open_input(path) as file:
        try:
            table = pa.ipc.open_file(file).read_all()
            made = json.loads((table.schema.metadata or {})[_MADE])
            scores = pl.DataFrame(table.replace_schema_metadata(None)).select(*SCHEMA).cast(SCHEMA)  # type: ignore[arg-type]
        except Exception as error:  # of Arrow, Polars or json, for a file of anything
            got = f"the file is not a reward version: {' '.join(str(error).split())[:200]}"
            raise InputError(RULE, str(path), got, hint="score the dataset again") from None
    return scores, made


def with_version(frame: pl.LazyFrame, dataset: str, name: str) -> pl.LazyFrame:
    """Replace the rewards of a dataset's rows by those of a version.

    A trajectory that has no reward in the version becomes a failed one, with the version's error.

    Args:
        frame: Rows of the dataset.
        dataset: Its path.
        name: Name of the version.

    Raises:
        InputError: `reward_version`: there is no such version, or the dataset has trajectories that
            it does not have.

    Example:
        >>> rows = with_version(scan("runs/shop"), "runs/shop", "strict")
    """
    scores, _ = read_version(dataset, name)
    frame = with_absent(frame, ["error"])
    missing = digests(frame.filter(pl.col("error").is_null())).join(
        scores, on=["trajectory_id", "digest"], how="anti"
    )
    if len(missing):
        some = missing["trajectory_id"].min()
        got = f"{count(len(missing), 'trajectory')} not scored, or changed since, such as {some!r}"
        hint = "run `rollouts rescore` with the same options again: it scores those"
        raise InputError(RULE, f"{dataset}, version {name}", got, hint=hint)
    errors = scores.filter(pl.col("reward").is_null()).select(
        "trajectory_id", unscored=pl.lit(UNSCORED.format(name)) + pl.col("error")
    )
    rows = frame.join(errors.lazy(), on="trajectory_id", how="left", maintain_order="left")
    rows = rows.with_columns(error=pl.coalesce("error", "unscored")).drop("unscored")
    return place_outcomes(rows, scores.select("trajectory_id", "reward"))
