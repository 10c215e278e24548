"""Bytes and CPU seconds of an update outside forward and backward, by number of processes.

    python -m benchmarks.data_plane [--processes 1 2 4 8] [--tokens 8000000] [--layout step]
    python -m benchmarks.data_plane --plan 1000000

Writes a synthetic dataset of one batch, and lets each process read, send, pack and add up as in an
update, without a model. `--plan N` measures index and plan of N trajectories in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from accelerate import Accelerator
from torch import distributed

import rollout_io
from schemas.columns import arrow_schema
from trainer.batch import cut_batch, index_rows, read_rows, to_batch
from trainer.batches.forest import padded_forests
from trainer.batches.plan import Plan, dataset_returns, make_plan
from trainer.config.train_config import TrainConfig, load_config
from trainer.distributed.balance import share_rows
from trainer.distributed.processes import local_groups
from trainer.loss import with_target_weights
from trainer.run.metrics import update_metrics
from trainer.run.run import Run

ATTEMPTS, PROMPT_SHARE, RESPONSE_TOKENS = 8, 0.75, 2048


def write(path: Path, num_tokens: int, row_tokens: int) -> int:
    """Write rows of `row_tokens` tokens; return their number."""
    rng, num_rows = np.random.default_rng(0), max(ATTEMPTS, num_tokens // row_tokens)
    num_rows -= num_rows % ATTEMPTS
    sizes = np.maximum(16, rng.lognormal(np.log(row_tokens) - 0.125, 0.5, num_rows).astype(int))
    schema = arrow_schema(("rollout_logprobs", "temperature", "reward"))
    with rollout_io.RolloutWriter(path, layout="full", checked=True) as writer:
        for row in range(num_rows):
            group, attempt = divmod(row, ATTEMPTS)
            response = max(1, int(sizes[row] * (1 - PROMPT_SHARE)))
            values: dict[str, Any] = {
                "instance_id": f"g{group}",
                "repetition_id": attempt,
                "trajectory_id": f"g{group}_{attempt}",
                "step_index": 0,
                "is_last_step": True,
                "prompt_token_ids": rng.integers(0, 50_000, sizes[row] - response),
                "response_ids": rng.integers(0, 50_000, response),
                "loss_mask": np.ones(response, bool),
                "rollout_logprobs": rng.normal(-1, 0.1, response).clip(max=0).astype(np.float32),
                "temperature": 1.0,
                "reward": float(attempt % 2),
                "token_source": "engine",
            }
            names = [field.name for field in schema if field.name in values]
            columns = [pa.array([values[name]], schema.field(name).type) for name in names]
            writer.write(
                pa.Table.from_arrays(columns, schema=pa.schema([schema.field(n) for n in names]))
            )
    return num_rows


class Received:
    """Counts the bytes that the collectives of torch deliver to this process."""

    def __init__(self) -> None:
        self.num_bytes = 0
        for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "all_gather"):
            setattr(distributed, name, partial(self._counted, getattr(distributed, name)))

    def _counted(self, function: Callable[..., Any], first: Any, *rest: Any, **options: Any) -> Any:
        tensors = first if isinstance(first, list) else [first]
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return function(first, *rest, **options)


def work(dataset: str, layout: str) -> None:
    """Measure one update in this process; the main process prints the largest figures of all."""
    accelerator = Accelerator(cpu=True)
    received, config = Received(), config_of(dataset, layout)
    plan = make_plan(dataset_returns(rollout_io.scan(dataset), config), config)
    update(accelerator, config, plan, received)  # the second time, everything has been used before
    figures = update(accelerator, config, plan, received)
    gathered: list[Any] = [figures]
    if accelerator.num_processes > 1:
        gathered = [None] * accelerator.num_processes
        distributed.all_gather_object(gathered, figures)
    if accelerator.is_main_process:
        print(json.dumps({name: max(one[name] for one in gathered) for name in figures}))


def update(
    accelerator: Accelerator, config: TrainConfig, plan: Plan, received: Received
) -> dict[str, float]:
    """Do what an update does outside the model; return seconds of the CPU and bytes received."""
    figures, (groups,) = dict[str, float](), plan.batches
    rollouts = rollout_io.scan(config.data.dataset)

    def measured(name: str, step: Callable[[], Any]) -> Any:
        before, start_s = received.num_bytes, time.process_time()
        result = step()
        figures[f"{name}_s"] = time.process_time() - start_s
        figures[f"{name}_bytes"] = received.num_bytes - before
        return result

    share = local_groups(accelerator, groups)
    rows = measured(
        "read", lambda: read_rows(rollouts, plan, share, config.batch) if share else None
    )
    every = measured("exchange", lambda: share_rows(accelerator, rows, plan, groups, config))
    batch = measured("arrays", lambda: to_batch(every))
    (mini_batch,) = measured("pack", lambda: cut_batch(batch, config.batch))
    run: Any = Run(config=config, accelerator=accelerator, policy=None, optimizer=None)  # type: ignore[arg-type]
    forests = mini_batch.forests
    measured("weights", lambda: with_target_weights(run, batch, forests))
    rng = np.random.default_rng(accelerator.process_index)
    names = ("loss", "policy_loss", "clip_ratio", "policy_entropy", "rollout_logprobs_diff")
    parts = [
        {name: torch.from_numpy(rng.normal(size=forest.num_targets)) for name in names}
        for forest in padded_forests(accelerator, forests)
    ]
    measured("metrics", lambda: update_metrics(accelerator, parts, "regular"))
    sizes = {"tokens": sum(forest.num_tokens for forest in forests), "micro_batches": len(forests)}
    return figures | sizes


def config_of(dataset: str, layout: str) -> TrainConfig:
    """Return a configuration whose only batch is the dataset."""
    settings = {
        "data.dataset": dataset,
        "model.path": "m",
        "run.out": "o",
        "batch.groups_per_batch": 1 << 30,
        "batch.groups_per_mini_batch": 1 << 30,
        "batch.sequence_layout": layout,
        "batch.tokens_per_micro_batch": 16_384,
        "run.record_tokens": "none",
    }
    return load_config(None, (), settings)


def plan_of(num_trajectories: int, folder: Path) -> dict[str, float]:
    """Measure index and plan of many short trajectories."""
    dataset = folder / "many"
    ids = np.arange(num_trajectories)
    with rollout_io.RolloutWriter(dataset, checked=True) as writer:
        for chunk in np.array_split(ids, max(1, num_trajectories // 50_000)):
            group = chunk // ATTEMPTS
            names = [f"g{g}" for g in group]
            writer.write(
                pl.DataFrame(
                    {
                        "instance_id": names,
                        "repetition_id": (chunk % ATTEMPTS).astype(np.int32),
                        "trajectory_id": [
                            f"{n}_{i % ATTEMPTS}" for n, i in zip(names, chunk, strict=True)
                        ],
                        "step_index": np.zeros(len(chunk), np.int32),
                        "is_last_step": np.ones(len(chunk), bool),
                        "prompt_token_ids": [[1, 2, 3, 4]] * len(chunk),
                        "response_ids": [[5, 6, 7, 8]] * len(chunk),
                        "loss_mask": [[True] * 4] * len(chunk),
                        "reward": (chunk % 2).astype(float),
                        "token_source": ["engine"] * len(chunk),
                    },
                    schema_overrides={
                        "prompt_token_ids": pl.List(pl.Int32),
                        "response_ids": pl.List(pl.Int32),
                    },
                )
            )
    config, rollouts = config_of(str(dataset), "step"), rollout_io.scan(dataset)
    figures: dict[str, float] = {}
    start_s = time.perf_counter()
    rollout_io.validate(dataset)
    figures["validate_s"], start_s = time.perf_counter() - start_s, time.perf_counter()
    plan = make_plan(dataset_returns(rollouts, config), config)
    figures["plan_s"], start_s = time.perf_counter() - start_s, time.perf_counter()
    index = index_rows(rollouts)
    figures["index_s"] = time.perf_counter() - start_s
    figures["plan_mb"] = plan.trajectories.estimated_size("mb")
    figures["index_mb"] = index.estimated_size("mb")
    return figures


def main() -> None:
    """Print a line of JSON per number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--row-tokens", type=int, default=8_000)
    parser.add_argument("--layout", default="step")
    parser.add_argument("--plan", type=int, metavar="N")
    parser.add_argument("--worker", metavar="DS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.layout)
        return
    with TemporaryDirectory() as folder:
        if given.plan:
            print(json.dumps(plan_of(given.plan, Path(folder))))
            return
        num_rows = write(Path(folder) / "ds", given.tokens, given.row_tokens)
        for number in given.processes:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*start, "--nproc-per-node", str(number), "-m", "benchmarks.data_plane"]
            arguments = ["--worker", f"{folder}/ds", "--layout", given.layout]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
            done = subprocess.run(
                [*command, *arguments], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            line = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps({"processes": number, "rows": num_rows} | line))


if __name__ == "__main__":
    main()
