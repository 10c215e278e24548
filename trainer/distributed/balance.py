"""Balance the rows of a batch over processes, and send them to the processes that forward them.

Each process reads some groups. For each of their rows it tells all others a few numbers (`outline`),
from which all decide alike which process forwards which row. The others learn only its size.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
from accelerate import Accelerator

from schemas.ragged import FloatArray, IntArray
from trainer.batch import to_batch
from trainer.batches.chains import place_steps
from trainer.batches.forest import MiniBatch, chain_lengths
from trainer.batches.plan import Plan
from trainer.config.train_config import TrainConfig
from trainer.distributed.processes import exchanged, gather_bytes, gather_in_main, over_processes

_PLANNED = ("instance_id", "trajectory_id", "trains", "advantage", "mini_batch")


def share_rows(
    accelerator: Accelerator,
    rows: pl.DataFrame | None,
    plan: Plan,
    groups: Sequence[str],
    config: TrainConfig,
) -> pl.DataFrame:
    """Return the rows of a batch for `to_batch`, with tokens in the rows that this process forwards.

    Args:
        accelerator: The Accelerator of the run.
        rows: Rows that this process read, from `read_rows`; None if it read none.
        plan: Plan of the run.
        groups: Groups of the batch.
        config: Configuration of the run.
    """
    num_ranks = accelerator.num_processes
    planned = plan.trajectories.filter(pl.col("instance_id").is_in(list(groups)))
    planned = planned.sort("trajectory_id").select(_PLANNED).with_row_index("planned")
    outlines = gather_bytes(accelerator, _packed(outline(rows, planned, config)))
    tables = [table for data in outlines if (table := _unpacked(data)) is not None]
    every = pl.concat(tables).join(planned, on="planned", maintain_order="left")
    every = every.drop("planned").with_row_index("row")
    ranks = every.with_columns(rank=ranks_of(every, config, num_ranks))["rank"]
    first = sum(
        len(t) for t in map(_unpacked, outlines[: accelerator.process_index]) if t is not None
    )
    parts = [b""] * num_ranks
    if rows is not None:
        rows = rows.drop(_PLANNED).with_columns(
            row=pl.int_range(len(rows), dtype=pl.UInt32) + first
        )
        own = ranks.slice(first, len(rows))
        parts = [_packed(rows.filter(own == rank)) for rank in range(num_ranks)]
    received = [
        table for data in exchanged(accelerator, parts) if (table := _unpacked(data)) is not None
    ]
    # Every process that read rows sends a table, if only for its columns.
    return every.join(pl.concat(received), on="row", how="left", maintain_order="left").drop("row")


def outline(
    rows: pl.DataFrame | None, planned: pl.DataFrame, config: TrainConfig
) -> pl.DataFrame | None:
    """Return the numbers of rows that all processes need: 18 bytes a row."""
    if rows is None:
        return None
    batch = to_batch(rows, config.batch.max_row_tokens, imitates=config.loss.is_supervised)
    lengths = chain_lengths(batch.prompts, batch.responses, batch.trains)
    index = rows.select("trajectory_id").join(planned, on="trajectory_id", maintain_order="left")
    return pl.DataFrame(
        {
            "planned": index["planned"],
            "num_forwarded": lengths.astype(np.int32),
            "num_targets": batch.num_targets.astype(np.int32),
            "num_response": batch.num_response.astype(np.int32),
            "greedy": batch.greedy,
            "truncated": batch.truncated,
        }
    )


def ranks_of(every: pl.DataFrame, config: TrainConfig, num_ranks: int) -> IntArray:
    """Return the process that forwards each row; -1 for a row without a target.

    The rows of a tree stay together unless the tree is larger than a process's share, and those of a
    trajectory stay together if its estimator takes token rewards.
    """
    is_tree, ranks = config.batch.sequence_layout == "tree", np.full(len(every), -1, np.int64)
    trajectory, group = (every[name].rank("dense").to_numpy() for name in _PLANNED[1::-1])
    scope = group if config.batch.tree_scope == "group" else trajectory
    costs = cost(every["num_forwarded"].to_numpy().astype(np.int64))
    mini_batch = every["mini_batch"].to_numpy()
    for number in np.unique(mini_batch):
        inside = np.flatnonzero(mini_batch == number)
        units = np.arange(len(inside))
        if is_tree:  # the rows of a scope are adjacent
            part, total = costs[inside], costs[inside].sum()
            _, first, unit = np.unique(scope[inside], return_index=True, return_inverse=True)
            before = np.cumsum(part) - part
            chunk = (before - before[first[unit]]) * num_ranks // max(total, 1)
            units = unit * num_ranks + np.minimum(chunk, num_ranks - 1).astype(np.int64)
        if config.advantage.by_token:
            last = np.zeros(int(trajectory.max()) + 1, np.int64)
            last[trajectory[inside]] = units
            units = last[trajectory[inside]] if is_tree else trajectory[inside]
        ranks[inside] = balance(costs[inside], units, num_ranks)
    return ranks


def _packed(table: pl.DataFrame | None) -> bytes:
    file = io.BytesIO()
    if table is not None:
        table.write_ipc(file, compression="uncompressed")
    return file.getvalue()


def _unpacked(data: bytes) -> pl.DataFrame | None:
    return pl.read_ipc(io.BytesIO(data)) if data else None


def gather_places(accelerator: Accelerator, rows: pl.DataFrame | None) -> pl.DataFrame | None:
    """Gather `place_steps` of the rows that each process read; None except in the main process."""
    table = None if rows is None else place_steps(rows)
    num_rows = pl.lit(0 if rows is None else len(rows)).alias("num_rows")
    sent = None if table is None else table.with_columns(num_rows)
    first, tables = 0, list[pl.DataFrame]()
    for data in gather_in_main(accelerator, _packed(sent)):
        if (part := _unpacked(data)) is not None and len(part):
            tables.append(part.with_columns(pl.col("row") + first))
            first += part["num_rows"][0]
    return pl.concat(tables).drop("num_rows") if tables else None


def with_repeated_share(
    accelerator: Accelerator, mini_batches: Sequence[MiniBatch]
) -> list[MiniBatch]:
    """Return mini-batches whose metric `repeated_share` counts the trees of all processes."""
    counts = [
        (m.num_distinct_tokens or 0, sum(f.num_tokens for f in m.forests)) for m in mini_batches
    ]
    shares = []
    for mini_batch, (num_distinct, num_tokens) in zip(
        mini_batches, over_processes(accelerator, counts, "sum").tolist(), strict=True
    ):
        share = {"repeated_share": num_tokens / max(num_distinct, 1) - bool(num_tokens)}
        metrics = share if mini_batch.num_distinct_tokens is not None else {}
        shares.append(replace(mini_batch, metrics=mini_batch.metrics | metrics))
    return shares


DEPTH_OF_DOUBLE_COST = 16_384
"""Depth at which a token's attention costs as much as its other operations: about 6 x hidden_size."""


def cost(lengths: IntArray) -> FloatArray:
    """Estimate the time to forward each row, in tokens: linear cost, plus attention with depth."""
    return lengths + lengths * (lengths - 1) / (2 * DEPTH_OF_DOUBLE_COST)


def balance(costs: FloatArray, units: IntArray, num_ranks: int) -> IntArray:
    """Assign the rows of a mini-batch to processes, so that all have about the same cost.

    Args:
        costs: [R] cost of each row.
        units: [R] rows with the same number go to the same process.
        num_ranks: Number of processes.

    Returns:
        [R] process of each row; -1 for rows of a unit without a cost, which no process needs.

    Example:
        >>> costs = np.array([1.0, 7.0, 3.0, 6.0, 2.0])
        >>> balance(costs, np.arange(5), 2).tolist()  # 7, 2 and 1; 6 and 3
        [0, 0, 1, 1, 0]
        >>> balance(costs, np.array([0, 0, 1, 1, 1]), 2).tolist()
        [1, 1, 0, 0, 0]
    """
    _, unit = np.unique(units, return_inverse=True)
    sums = np.bincount(unit, costs)
    rank_of = np.full(len(sums), -1, np.int64)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for number in np.argsort(-sums, kind="stable").tolist():
        if sums[number] > 0:
            load, rank = loads[0]
            rank_of[number] = rank
            heapq.heapreplace(loads, (load + float(sums[number]), rank))
    return rank_of[unit]
