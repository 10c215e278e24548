"""Run SkyRL's merge and validator on a Parquet file of steps, for benchmarks.merging.

It needs an environment with skyrl==0.3.0 and pyarrow (see tests/data/README.md), but not our
packages. It prints seconds as JSON, and writes the merged rows next to the file.
"""

from __future__ import annotations

import json
import sys
import time
import typing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic rejects typing's on Python 3.11

from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import merge_stepwise_output  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402


def main() -> None:
    path = Path(sys.argv[1])
    table = pq.read_table(path)
    seconds = {}
    start = time.perf_counter()
    output = to_lists(table)
    seconds["from_arrow"] = time.perf_counter() - start
    start = time.perf_counter()
    validate_generator_output(table.num_rows, output, step_wise=True)
    seconds["validate"] = time.perf_counter() - start
    start = time.perf_counter()
    merged = merge_stepwise_output(output)
    seconds["merge"] = time.perf_counter() - start
    start = time.perf_counter()
    made = to_arrow(merged)
    seconds["to_arrow"] = time.perf_counter() - start
    pq.write_table(made, path.with_suffix(".merged.parquet"))
    print(json.dumps(seconds))


def to_lists(table: pa.Table) -> dict:
    return {
        "prompt_token_ids": table.column("prompt_token_ids").to_pylist(),
        "response_ids": table.column("response_ids").to_pylist(),
        "loss_masks": table.column("loss_mask").cast(pa.list_(pa.int32())).to_pylist(),
        "rollout_logprobs": table.column("rollout_logprobs").to_pylist(),
        "rewards": table.column("reward").to_pylist(),
        "is_last_step": table.column("is_last_step").to_pylist(),
        "trajectory_ids": [
            TrajectoryID(instance_id=i, repetition_id=r)
            for i, r in zip(
                table.column("instance_id").to_pylist(),
                table.column("repetition_id").to_pylist(),
                strict=True,
            )
        ],
        "stop_reasons": None,
        "rollout_metrics": None,
        "rollout_expert_indices": None,
    }


def to_arrow(merged: dict) -> pa.Table:
    return pa.table(
        {
            "prompt_token_ids": pa.array(merged["prompt_token_ids"], pa.list_(pa.int32())),
            "response_ids": pa.array(merged["response_ids"], pa.list_(pa.int32())),
            "loss_mask": pa.array(merged["loss_masks"], pa.list_(pa.int8())),
            "rollout_logprobs": pa.array(merged["rollout_logprobs"], pa.list_(pa.float32())),
        }
    )


if __name__ == "__main__":
    main()
