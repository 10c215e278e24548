"""Numbers of findings: of a dataset, and of each attempt for a comparison of two datasets."""

from __future__ import annotations

from typing import Any

import polars as pl

from rollout_io.dataset.versions import FINDINGS, read_current, read_version, version_names
from schemas.errors import InputError


def exploded(dataset: str, name: str) -> pl.DataFrame:
    """Return a line per finding of a version: trajectory_id, name and the finding's fields.

    Raises:
        InputError: `reward_version`: see `read_current`.
    """
    values = read_current(dataset, name, FINDINGS).drop_nulls("findings")
    lines = values.select("trajectory_id", pl.lit(name).alias("name"), "findings")
    return lines.explode("findings", empty_as_null=False).unnest("findings")


def finding_numbers(dataset: str) -> list[dict[str, Any]]:
    """Count a dataset's findings by version and label, and the trajectories that have them.

    Returns:
        name, label, num_findings, num_trajectories, problem: null, or why a version cannot be used.
        A version that found nothing has one line, without a label.
    """
    numbers: list[dict[str, Any]] = []
    for name in version_names(dataset, FINDINGS):
        empty = {"name": name, "label": None, "num_findings": 0, "num_trajectories": 0}
        unknown = {"name": name, "label": None, "num_findings": None, "num_trajectories": None}
        try:
            findings = exploded(dataset, name)
        except InputError as error:
            numbers.append(unknown | {"problem": str(error)})
            continue
        values, _ = read_version(dataset, name, FINDINGS)
        if len(values) and values["findings"].null_count() == len(values):
            numbers.append(unknown | {"problem": "the function failed for every trajectory"})
            continue
        counts = findings.group_by("name", "label").agg(
            num_findings=pl.len(), num_trajectories=pl.col("trajectory_id").n_unique()
        )
        lines = counts.sort("num_findings", "label", descending=[True, False]).to_dicts()
        numbers += [line | {"problem": None} for line in lines or [empty]]
    return numbers


def with_findings(
    a: str, b: str, lines_a: pl.DataFrame, lines_b: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """Add the numbers of findings that both datasets have, to one line per attempt.

    Args:
        a: Path of a dataset.
        b: The other one.
        lines_a: Its attempts (`pipelines.statistics.attempts.attempts`).
        lines_b: Those of the other one.

    Returns:
        Both with a column per label, such as `findings loops` or `findings judge/rude`, null where
        the finder failed; and the versions that different functions made, which are left out.

    Raises:
        InputError: `reward_version`: a dataset has changed since.
    """
    tables, others = [lines_a, lines_b], []
    for name in sorted({*version_names(a, FINDINGS)} & {*version_names(b, FINDINGS)}):
        how = [read_version(path, name, FINDINGS)[1] for path in (a, b)]
        if any(how[0].get(key) != how[1].get(key) for key in ("function", "sources")):
            others.append(name)
            continue
        values = [read_current(path, name, FINDINGS) for path in (a, b)]
        labels = pl.concat(values)["findings"].drop_nulls().explode(empty_as_null=False)
        for label in labels.struct.field("label").unique().sort():
            title = f"findings {name}" if label == name else f"findings {name}/{label}"
            number = pl.col("findings").list.eval(pl.element().struct.field("label") == label)
            for side, side_values in enumerate(values):
                counted = side_values.select(
                    "trajectory_id", number.list.sum().cast(pl.Float64).alias(title)
                )
                tables[side] = tables[side].join(
                    counted, on="trajectory_id", how="left", maintain_order="left"
                )
    return tables[0], tables[1], others
