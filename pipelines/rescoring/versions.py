"""Use a reward version of a dataset in place of its rewards, such as for one training run."""

from __future__ import annotations

import polars as pl

from pipelines.rewards import place_outcomes
from rollout_io.dataset.versions import REWARDS, read_current
from schemas.types import with_absent

UNSCORED = "reward {}: "
"""How the error of a trajectory begins that has no reward in the version of that name."""


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
    scores = read_current(dataset, name, REWARDS, frame)
    errors = scores.filter(pl.col("reward").is_null()).select(
        "trajectory_id", unscored=pl.lit(UNSCORED.format(name)) + pl.col("error")
    )
    rows = with_absent(frame, ["error"]).join(
        errors.lazy(), on="trajectory_id", how="left", maintain_order="left"
    )
    rows = rows.with_columns(error=pl.coalesce("error", "unscored")).drop("unscored")
    return place_outcomes(rows, scores.select("trajectory_id", "reward"))
