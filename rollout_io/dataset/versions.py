"""What `rollouts rescore` keeps beside a dataset: one Arrow file per version, and how it was made.

    DS.rewards/NAME.arrow    a reward per trajectory
    DS.findings/NAME.arrow   a list of findings per trajectory

A version does not change the dataset (and is no Parquet file: a pattern such as `runs/*` would take
it for one). Digests of rows (`trajectory_facts.row_digest`) tell which of its trajectories have changed
since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from rollout_io.dataset.filesystems import whole
from rollout_io.dataset.opening import open_input
from rollout_io.dataset.reader import scan
from rollout_io.dataset.trajectory_facts import row_digest
from schemas.errors import ConfigError, InputError, count
from schemas.types import with_absent

LEFT_OUT = frozenset(
    {"prompt_token_ids", "rollout_logprobs", "trainer_logprobs", "sampling_support", "rewards"}
    | {"teacher_token_ids", "teacher_logprobs", "policy_versions", "rollout_expert_indices"}
)
"""Columns that are large and say nothing about the text."""

FINDING = {
    "label": pl.String,
    "text": pl.String,
    "step": pl.Int32,
    "start": pl.Int32,
    "length": pl.Int32,
    "text_start": pl.Int32,
    "text_length": pl.Int32,
}
"""Fields of a finding (`pipelines.rescoring.attempts.Finding`)."""

RULE = "reward_version"
_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
_SPARE = 2**16  # the sum over the rows of a trajectory fits into 63 bits
_MADE = b"rollout_io.reward_version"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of version.

    Attributes:
        name: What one version is called in messages.
        folder: It is kept in `DS.{folder}/`.
        column: Column with the value of each trajectory.
        type: Type of that column.
        option: Option of `rollouts rescore` that makes it.
    """

    name: str
    folder: str
    column: str
    type: pl.DataType
    option: str

    @property
    def schema(self) -> dict[str, Any]:
        """Columns of a version: the value is null if the trajectory has an error."""
        value = {self.column: self.type}
        return {"trajectory_id": pl.String, **value, "error": pl.String, "digest": pl.Int64}


REWARDS = Kind("reward version", "rewards", "reward", pl.Float64(), "--reward")
FINDINGS = Kind(
    "version of findings",
    "findings",
    "findings",
    pl.List(pl.Struct(FINDING)),
    "--findings",
)


def is_name(name: str) -> bool:
    """True for names of versions and labels of findings: letters, digits, _ and -."""
    return _NAME.fullmatch(name) is not None


def version_path(dataset: str, name: str, kind: Kind = REWARDS) -> Path:
    """Return the path of a version, whether or not it exists.

    Raises:
        ConfigError: `reward_version`: the name has other characters than letters, digits, _ and -.
        InputError: `reward_version`: the dataset is not a local directory.
    """
    if not is_name(name):
        expected = f"the name of a {kind.name}: letters, digits, _ and -, and no path"
        raise ConfigError(RULE, kind.column, repr(name), expected)
    if not Path(dataset).is_dir():
        finding, expected = "not a local directory", "the directory of one dataset"
        raise InputError(RULE, dataset, finding, expected)
    return Path(f"{dataset.rstrip('/')}.{kind.folder}") / f"{name}.arrow"


def is_version(dataset: str, name: str) -> bool:
    """True if the dataset has a reward version of this name."""
    return is_name(name) and Path(dataset).is_dir() and version_path(dataset, name).exists()


def version_names(dataset: str, kind: Kind) -> list[str]:
    """List the versions of a dataset; a dataset that is not one local directory has none."""
    folder = Path(f"{dataset.rstrip('/')}.{kind.folder}")
    is_one = dataset != "" and Path(dataset).is_dir()
    return sorted(path.stem for path in folder.glob("*.arrow")) if is_one else []


def digests(frame: pl.LazyFrame) -> pl.DataFrame:
    """Return trajectory_id and a digest of the rows of each trajectory, in no order.

    A dataset may be written again with the same ids; versions of other rows must not be used. The
    digest covers prompts and all that an `Attempt` has. Columns without a value do not change it.
    """
    seen = [n for n in frame.collect_schema() if n not in LEFT_OUT - {"prompt_token_ids"}]
    return (
        frame.select("trajectory_id", digest=row_digest(seen) // _SPARE)
        .group_by("trajectory_id")
        .agg(pl.col("digest").sum())
        .collect(engine="streaming")
    )


def write_version(
    path: Path, values: pl.DataFrame, how: Mapping[str, Any], kind: Kind = REWARDS
) -> None:
    """Write a version, which becomes visible once it is complete.

    Args:
        path: From `version_path`.
        values: Columns of `Kind.schema`.
        how: How it was made, stored as JSON.
        kind: Its kind.
    """
    table = values.cast(kind.schema).to_arrow()  # type: ignore[arg-type]
    table = table.replace_schema_metadata({_MADE: json.dumps(how)})
    path.parent.mkdir(exist_ok=True)
    with (
        whole(path) as partial,
        pa.OSFile(str(partial), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def read_version(
    dataset: str, name: str, kind: Kind = REWARDS
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Read a version: its rows, and how it was made.

    Raises:
        InputError: `reward_version`: it does not exist, or the file is not one.
    """
    path = version_path(dataset, name, kind)
    if not path.exists():
        others = ", ".join(version_names(dataset, kind))
        finding = f"no {kind.name} {name!r}"
        make = f"make one: rollouts rescore {dataset} {kind.option} ..."
        raise InputError(RULE, dataset, finding, hint=f"use one of {others}" if others else make)
    with open_input(path) as file:
        try:
            table = pa.ipc.open_file(file).read_all()
            how = json.loads((table.schema.metadata or {})[_MADE])
            values = pl.DataFrame(table.replace_schema_metadata(None))
            values = values.select(*kind.schema).cast(kind.schema)  # type: ignore[arg-type]
        except Exception as error:  # of Arrow, Polars or json, for a file of anything
            finding = f"the file is not a {kind.name}: {' '.join(str(error).split())[:200]}"
            raise InputError(RULE, str(path), finding, hint="score the dataset again") from None
    return values, how


def read_current(
    dataset: str, name: str, kind: Kind, frame: pl.LazyFrame | None = None
) -> pl.DataFrame:
    """Read the rows of a version, which must be about the rows that the dataset has now.

    Args:
        dataset: Path of the dataset.
        name: Name of the version.
        kind: Its kind.
        frame: Rows of the dataset; None: all.

    Raises:
        InputError: `reward_version`: there is no such version, or a trajectory that did not fail is not
            in it, or has changed since.
    """
    values, _ = read_version(dataset, name, kind)
    frame = with_absent(scan(dataset) if frame is None else frame, ["error"])
    missing = digests(frame.filter(pl.col("error").is_null())).join(
        values, on=["trajectory_id", "digest"], how="anti"
    )
    if len(missing):
        some = missing["trajectory_id"].min()
        finding = (
            f"{count(len(missing), 'trajectory')} not scored, or changed since, such as {some!r}"
        )
        hint = "run `rollouts rescore` with the same options again: it scores those"
        raise InputError(RULE, f"{dataset}, {kind.name} {name}", finding, hint=hint)
    return values


def count_findings(dataset: str, name: str) -> tuple[pl.Series, pl.Series]:
    """Count the findings of each trajectory; null if the finder failed at it.

    Args:
        dataset: Path of the dataset; "": unknown.
        name: NAME of a version, or NAME/LABEL for the findings with that label.

    Returns:
        Ids of trajectories, and their numbers of findings.

    Raises:
        ConfigError: `condition`: the dataset is unknown.
        InputError: `reward_version`: see `read_current`.
    """
    if not dataset:
        finding, expected = "there is no dataset to look them up", "the path of a dataset"
        raise ConfigError("condition", f"findings({name!r})", finding, expected)
    version, _, label = name.partition("/")
    values = read_current(dataset, version, FINDINGS)
    is_counted = pl.element().struct.field("label") == label if label else pl.lit(value=True)
    number = pl.col("findings").list.eval(is_counted).list.sum().cast(pl.Int64)
    counted = values.select("trajectory_id", number=number)
    return counted["trajectory_id"], counted["number"]
