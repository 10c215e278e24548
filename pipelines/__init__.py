"""Polars in, Polars out: merging, reward placement, statistics."""

from typing import TYPE_CHECKING

from schemas.lazy import exports

if TYPE_CHECKING:
    from pipelines.merging import merge, unmerge
    from pipelines.rewards import place_outcomes, place_rewards, trajectory_returns
    from pipelines.statistics import dataset_statistics

__all__ = [
    "dataset_statistics",
    "merge",
    "place_outcomes",
    "place_rewards",
    "trajectory_returns",
    "unmerge",
]

_MODULES = {
    "pipelines.merging": ("merge", "unmerge"),
    "pipelines.rewards": ("place_outcomes", "place_rewards", "trajectory_returns"),
    "pipelines.statistics": ("dataset_statistics",),
}
__getattr__ = exports(__name__, _MODULES)
