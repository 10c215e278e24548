"""Polars in, Polars out: rewards, filters, masks, merging, metrics, diagnosis."""

from typing import TYPE_CHECKING

from schemas.lazy import exports

if TYPE_CHECKING:
    from pipelines.diagnosis.table import drift
    from pipelines.masks import apply_masks
    from pipelines.merging import merge
    from pipelines.metrics import dataset_metrics, pass_at_k
    from pipelines.mixing import mix
    from pipelines.rewards import (
        place_outcomes,
        place_rewards,
        place_token_rewards,
        trajectory_returns,
    )
    from pipelines.rows import keep_rows
    from pipelines.savings import dataset_savings
    from pipelines.statistics import dataset_statistics
    from pipelines.unmerging import unmerge
    from pipelines.verdicts import Filter, apply_filters, judge

__all__ = [
    "Filter",
    "apply_filters",
    "apply_masks",
    "dataset_metrics",
    "dataset_savings",
    "dataset_statistics",
    "drift",
    "judge",
    "keep_rows",
    "merge",
    "mix",
    "pass_at_k",
    "place_outcomes",
    "place_rewards",
    "place_token_rewards",
    "trajectory_returns",
    "unmerge",
]

_MODULES = {
    "pipelines.diagnosis.table": ("drift",),
    "pipelines.masks": ("apply_masks",),
    "pipelines.merging": ("merge",),
    "pipelines.metrics": ("dataset_metrics", "pass_at_k"),
    "pipelines.mixing": ("mix",),
    "pipelines.rewards": (
        "place_outcomes",
        "place_rewards",
        "place_token_rewards",
        "trajectory_returns",
    ),
    "pipelines.rows": ("keep_rows",),
    "pipelines.savings": ("dataset_savings",),
    "pipelines.statistics": ("dataset_statistics",),
    "pipelines.unmerging": ("unmerge",),
    "pipelines.verdicts": ("Filter", "apply_filters", "judge"),
}
__getattr__ = exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return __all__
