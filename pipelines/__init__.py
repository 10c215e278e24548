"""Transform rollout tables (Polars in, Polars out), and produce them by generation or recording."""

from typing import TYPE_CHECKING

import rollout_io  # noqa: F401  (checks that no local file shadows `schemas`)
from schemas.lazy import exports

if TYPE_CHECKING:
    from pipelines.drift_diagnosis.table import drift
    from pipelines.filtering.masks import apply_masks
    from pipelines.filtering.row_removal import keep_rows
    from pipelines.filtering.verdicts import Filter, apply_filters, judge
    from pipelines.generation.generator_interface import (
        BatchMetadata,
        GeneratorInput,
        GeneratorInterface,
        GeneratorOutput,
        TrajectoryID,
    )
    from pipelines.generation.gym_generator import GymGenerator
    from pipelines.merging.merge import merge, part_by_routes
    from pipelines.merging.unmerge import unmerge
    from pipelines.mixing import mix
    from pipelines.rewards import (
        place_outcomes,
        place_rewards,
        place_token_rewards,
        trajectory_returns,
    )
    from pipelines.statistics.metrics import dataset_metrics, pass_at_k
    from pipelines.statistics.savings import dataset_savings
    from pipelines.statistics.summary import dataset_statistics
    from pipelines.token_records import scan_token_records

__all__ = [
    "BatchMetadata",
    "Filter",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "GymGenerator",
    "TrajectoryID",
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
    "part_by_routes",
    "pass_at_k",
    "place_outcomes",
    "place_rewards",
    "place_token_rewards",
    "scan_token_records",
    "trajectory_returns",
    "unmerge",
]

_MODULES = {
    "pipelines.drift_diagnosis.table": ("drift",),
    "pipelines.generation.generator_interface": (
        "BatchMetadata",
        "GeneratorInput",
        "GeneratorInterface",
        "GeneratorOutput",
        "TrajectoryID",
    ),
    "pipelines.generation.gym_generator": ("GymGenerator",),
    "pipelines.filtering.masks": ("apply_masks",),
    "pipelines.merging.merge": ("merge", "part_by_routes"),
    "pipelines.statistics.metrics": ("dataset_metrics", "pass_at_k"),
    "pipelines.mixing": ("mix",),
    "pipelines.rewards": (
        "place_outcomes",
        "place_rewards",
        "place_token_rewards",
        "trajectory_returns",
    ),
    "pipelines.filtering.row_removal": ("keep_rows",),
    "pipelines.statistics.savings": ("dataset_savings",),
    "pipelines.statistics.summary": ("dataset_statistics",),
    "pipelines.token_records": ("scan_token_records",),
    "pipelines.merging.unmerge": ("unmerge",),
    "pipelines.filtering.verdicts": ("Filter", "apply_filters", "judge"),
}
__getattr__ = exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return __all__
