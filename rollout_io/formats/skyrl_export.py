"""Export to SkyRL's GeneratorOutput, as one JSON object.

Fields as in `skyrl.train.generators.base.GeneratorOutput`, SkyRL 0.3.0: prompt_token_ids,
response_ids, rewards, loss_masks, stop_reasons, rollout_metrics, rollout_logprobs, trajectory_ids,
rollout_expert_indices, is_last_step, env_metrics, trajectory_generation_times; and if the dataset
has them, SkyRL 0.4's trajectory_time_splits and rollout_sample_support, and token_source, which
SkyRL ignores.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from rollout_io.dataset.reader import read, read_metadata
from rollout_io.formats.exporting.export_files import new_export
from rollout_io.formats.exporting.export_rows import (
    FAILED,
    IN_FAILED_GROUP,
    Exported,
    Failed,
    Failures,
    PathLike,
)
from rollout_io.formats.skyrl_generator_output import aligned_support, generator_output_text
from rollout_io.formats.skyrl_other_fields import SUPPORT, USER_FIELDS
from rollout_io.formats.skyrl_output_columns import METRICS_KEY
from schemas.errors import count

METRICS = "rollout_metrics"
HELD = {
    *("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step"),
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards"),
    *(
        "stop_reason",
        "rollout_expert_indices",
        "metrics",
        "segments",
        "error",
        "token_source",
        *USER_FIELDS,
    ),
}


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write the dataset as a GeneratorOutput; see `to_generator_output` for rewards and failures.

    Rewards depend on the `outcome` in the dataset's metadata.

    The entire table is held in memory, because the output is one document. A masked trajectory
    becomes one placeholder row, at the position of its last row. `rollout_metrics` of a converted
    GeneratorOutput are restored if the dataset was converted from that one file and not changed.

    Raises:
        RolloutError: `out_is_free`: `out` exists; or any error of `to_generator_output`.
    """
    with new_export(out, dataset) as path:
        table, found = read(dataset), Failures.of(dataset, failed)
        outcome = read_metadata(dataset).outcome or "last"
        text = generator_output_text(_with_metrics(table, dataset), out, failed, outcome)
        path.write_text(text, encoding="utf-8")
    masked, last = found.masked(table), np.asarray(table.column("is_last_step"))
    done = Exported(num_rows_read=table.num_rows)
    done.num_rows_written = int((~masked | last).sum())
    done.leave_out(FAILED, int((found.failed(table) & ~last).sum()))
    done.leave_out(IN_FAILED_GROUP, int((masked & ~found.failed(table) & ~last).sum()))
    if masked.any():
        num = int((masked & last).sum())
        done.remarks.append(f"{count(num, 'placeholder')} written for masked trajectories")
    others = [name for name in table.column_names if name not in HELD]
    if SUPPORT in table.column_names and aligned_support(table, masked) is None:
        others.append(SUPPORT)
    if others:
        names = ", ".join(others)
        done.remarks.append(f"not exported, because GeneratorOutput has no field for them: {names}")
    return done.close(dataset)


def _with_metrics(table: pa.Table, dataset: PathLike) -> pa.Table:
    history = read_metadata(dataset).made_by
    by_file = history[0].get(METRICS) if len(history) == 1 else None
    if not isinstance(by_file, dict) or len(by_file) != 1 or len(history[0]["inputs"]) != 1:
        return table
    (metrics,) = by_file.values()
    return table.replace_schema_metadata({METRICS_KEY: json.dumps(metrics)})
