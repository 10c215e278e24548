"""The namespace `rollouts` of Polars frames: `scan("DS/").rollouts.merge()`.

`rollout_io.scan` registers it, and so does every transform of `pipelines`; `import pipelines.frames`
does so for frames of other origin. LazyFrames and DataFrames have the same methods, which return
LazyFrames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

import pipelines

if TYPE_CHECKING:
    from pipelines.filtering.verdicts import Filter
    from pipelines.merging.lineage import Rule
    from pipelines.tables import Frame
    from schemas.metadata import Outcome


@pl.api.register_dataframe_namespace("rollouts")
@pl.api.register_lazyframe_namespace("rollouts")
class Rollouts:
    """Transforms of a rollout table.

    Example:
        >>> returns = scan("rollouts/").rollouts.merge().rollouts.returns()
    """

    def __init__(self, frame: pl.LazyFrame | pl.DataFrame) -> None:
        self._frame = frame.lazy()

    def merge(self, rule: Rule = "lineage", *, same_routes: bool = False) -> pl.LazyFrame:
        """Merge steps that extend one another; see `pipelines.merge`."""
        return pipelines.merge(self._frame, rule, same_routes=same_routes)

    def unmerge(self) -> pl.LazyFrame:
        """Split merged rows into their steps; see `pipelines.unmerge`."""
        return pipelines.unmerge(self._frame)

    def place_outcomes(self, outcomes: Frame) -> pl.LazyFrame:
        """Set the reward of each trajectory's last step; see `pipelines.place_outcomes`."""
        return pipelines.place_outcomes(self._frame, outcomes)

    def place_rewards(self) -> pl.LazyFrame:
        """Convert each scalar `reward` to per-token `rewards`; see `pipelines.place_rewards`."""
        return pipelines.place_rewards(self._frame)

    def filter(self, *filters: Filter | str, outcome: Outcome = "last") -> pl.LazyFrame:
        """Drop trajectories by filters and by conditions in SQL, as `rollouts filter --where` has them.

        Raises:
            InputError: `nothing_left`: no trajectory is left.

        Example:
            >>> scan("rollouts/").rollouts.filter("return > 0", zero_variance())
        """
        rules = [pipelines.where(rule) if isinstance(rule, str) else rule for rule in filters]
        return pipelines.apply_filters(self._frame, rules, outcome)[0]

    def returns(self, outcome: Outcome = "last") -> pl.LazyFrame:
        """Compute the return of each trajectory; see `pipelines.trajectory_returns`."""
        return pipelines.trajectory_returns(self._frame, outcome)

    def stats(self, outcome: Outcome = "last") -> pl.LazyFrame:
        """Compute metrics per step, trajectory and group; see `pipelines.dataset_metrics`."""
        return pipelines.dataset_metrics(self._frame, outcome)

    def messages(self) -> pl.LazyFrame:
        """Return one row per message; see `pipelines.messages`."""
        return pipelines.messages(self._frame)
