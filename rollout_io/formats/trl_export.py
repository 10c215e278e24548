"""Export to TRL: Parquet with the fields that a `rollout_func` of its GRPO trainer returns.

`trl.trainer.grpo_trainer.GRPOTrainer._generate` (TRL 1.16.0) reads from a rollout function's
result:
- `prompt_ids`, `completion_ids`, `logprobs`: required, each a list of lists;
- `env_mask`: 1 where the completion token is trained on;
- any other key: passed to the reward functions under its name.

`group_id` and `model_version` are named as in `trl.experimental.async_grpo` (RolloutSample).
"""

from __future__ import annotations

import pyarrow as pa

from rollout_io.formats.exporting.export_files import ParquetFile, new_export, renamed
from rollout_io.formats.exporting.export_rows import (
    Exported,
    Failed,
    Failures,
    Groups,
    PathLike,
    Uniform,
    declared_tables,
    rewards_of,
)

NAMES = {
    "prompt_token_ids": "prompt_ids",
    "response_ids": "completion_ids",
    "loss_mask": "env_mask",
    "rollout_logprobs": "logprobs",
    "policy_version": "model_version",
}


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset, one row group at a time; the output has one row per sequence.

    The columns are `prompt_ids` and `completion_ids` (list<int32>), `env_mask` (list<int8>, the
    `loss_mask`), `logprobs` (list<float32> or null), `reward` (float64, unchanged), `group_id`
    (int64, instances numbered by first appearance), `model_version` (the `policy_version`), and all
    other columns under their original names. TRL aborts on a failed rollout and requires complete
    groups, so masked trajectories are left out.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A reward is null; only some rows have log-probabilities; `out` exists; a user
            column has a name that the export uses.
    """
    uniform, done, groups = Uniform(dataset, ["rollout_logprobs"]), Exported(), Groups()
    with new_export(out, dataset) as path, ParquetFile(path) as file:
        failures = Failures.of(dataset, failed)
        for piece in declared_tables(dataset):
            table = failures.leave_out(piece, done)
            uniform.check(table)
            rewards_of(dataset, table)
            if "rollout_logprobs" not in table.column_names:
                nulls = pa.nulls(table.num_rows, pa.list_(pa.float32()))
                table = table.append_column("rollout_logprobs", nulls)
            numbers, _ = groups.add(table)
            file.write(renamed(table, NAMES, {"group_id": pa.array(numbers, pa.int64())}))
        done.close(dataset)
    if not uniform.has_values("rollout_logprobs"):
        done.remarks.append(
            "the dataset has no log-probabilities: return logprobs=None from the rollout function"
        )
    done.remarks += groups.remarks("TRL", "num_generations")
    return done
