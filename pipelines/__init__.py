"""Transform rollout tables (Polars in, Polars out), and produce them by generation or recording."""

from typing import TYPE_CHECKING

import rollout_io  # noqa: F401  (checks that no local file shadows `schemas`)
from schemas.imports import exports

if TYPE_CHECKING:
    from pipelines.drift_diagnosis.diagnosis import drift
    from pipelines.filtering import Filter, apply_filters, apply_masks, judge, keep_rows
    from pipelines.filters import (
        best_of_group,
        duplicates,
        dynamic_sampling,
        failed,
        first_groups,
        overlong,
        pass_rate_range,
        reward_range,
        sample_groups,
        stale,
        step_range,
        token_range,
        unknown_return,
        where,
        zero_variance,
    )
    from pipelines.generation.skyrl import (
        BatchMetadata,
        GeneratorInput,
        GeneratorInterface,
        GymGenerator,
    )
    from pipelines.merging.merge import merge, merge_table, part_by_routes, unmerge, unmerge_table
    from pipelines.mixing import mix
    from pipelines.rewards import (
        place_outcomes,
        place_rewards,
        place_token_rewards,
        trajectory_returns,
    )
    from pipelines.similarity import near_duplicates, overlapping, overlaps
    from pipelines.statistics.metrics import dataset_metrics, pass_at_k
    from pipelines.statistics.savings import dataset_savings
    from pipelines.statistics.summary import dataset_statistics
    from pipelines.turns import messages
    from pipelines.view.run_files import scan_token_records

__all__ = [
    "BatchMetadata",
    "Filter",
    "GeneratorInput",
    "GeneratorInterface",
    "GymGenerator",
    "apply_filters",
    "apply_masks",
    "best_of_group",
    "dataset_metrics",
    "dataset_savings",
    "dataset_statistics",
    "drift",
    "duplicates",
    "dynamic_sampling",
    "failed",
    "first_groups",
    "judge",
    "keep_rows",
    "merge",
    "merge_table",
    "messages",
    "mix",
    "near_duplicates",
    "overlapping",
    "overlaps",
    "overlong",
    "part_by_routes",
    "pass_at_k",
    "pass_rate_range",
    "place_outcomes",
    "place_rewards",
    "place_token_rewards",
    "reward_range",
    "sample_groups",
    "scan_token_records",
    "stale",
    "step_range",
    "token_range",
    "trajectory_returns",
    "unknown_return",
    "unmerge",
    "unmerge_table",
    "where",
    "zero_variance",
]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
