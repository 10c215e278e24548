"""The namespace `rollouts` of Polars frames: `scan("DS/").rollouts.merge()`.

`rollout_io.scan` registers it, and so does every transform of `pipelines`; `import pipelines.frames`
does so for frames of other origin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import polars as pl

import pipelines

if TYPE_CHECKING:
    from pipelines.filtering.verdicts import Filter
    from schemas.metadata import Outcome

_FUNCTIONS = {
    "stats": "dataset_metrics",
    "returns": "trajectory_returns",
    "mask": "apply_masks",
} | {
    name: name
    for name in [
        "merge",
        "unmerge",
        "part_by_routes",
        "place_outcomes",
        "place_rewards",
        "place_token_rewards",
        "keep_rows",
        "judge",
        "drift",
        "messages",
    ]
}


@pl.api.register_dataframe_namespace("rollouts")
@pl.api.register_lazyframe_namespace("rollouts")
class Rollouts:
    """The transforms of `pipelines` as methods: what they take after the frame, and what they return.

    `stats` is `dataset_metrics`, `returns` is `trajectory_returns`, `mask` is `apply_masks`.

    Example:
        >>> scan("rollouts/").rollouts.filter("return > 0").rollouts.merge().sink_parquet(
        ...     "steps.parquet"
        ... )
    """

    def __init__(self, frame: pl.LazyFrame | pl.DataFrame) -> None:
        self._frame = frame.lazy()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _FUNCTIONS:
            raise AttributeError(f"rollouts has no method {name!r}, only {', '.join(dir(self))}")
        function = getattr(pipelines, _FUNCTIONS[name])
        return wraps(function)(lambda *values, **named: function(self._frame, *values, **named))

    def __dir__(self) -> list[str]:
        return [*_FUNCTIONS, "filter"]

    def filter(self, *filters: Filter | str, outcome: Outcome = "last") -> pl.LazyFrame:
        """Drop trajectories by filters and by conditions in SQL, as `rollouts filter --where` has them.

        Raises:
            InputError: `nothing_left`: no trajectory is left.
        """
        rules = [pipelines.where(rule) if isinstance(rule, str) else rule for rule in filters]
        return pipelines.apply_filters(self._frame, rules, outcome)[0]
