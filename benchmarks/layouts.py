"""Compare the `prefix` and `full` layouts; print each figure with its limit from the same run.

    python -m benchmarks.layouts [--trajectories N]

The first table compares trajectories of 60 turns, with contexts that grow to about 85,000 tokens;
both layouts are written with the same settings (zstd, checksums). Reading has two limits: mapping
an Arrow IPC file of the same columns into memory, which copies nothing, and copying its bytes.
Writing has two as well: writing and syncing the bytes of the finished file, and writing Arrow IPC
with zstd.
The second table shows the time to look up one random trajectory among N short trajectories
with ids in random order; its limit is reading its row group from an open file with pyarrow alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import rollout_io
from benchmarks.synthetic import (
    best_of,
    best_of_each,
    growing_trajectories,
    num_tokens,
    short_trajectories,
)
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas.ragged import Ragged

STORED = ("response_ids", "loss_mask", "rollout_logprobs", "reward")
TOKENS = ("prompt_token_ids", "prompt_suffix_ids", "response_ids")
LAYOUTS: tuple[Literal["full", "prefix"], ...] = ("full", "prefix")
WRITTEN_AT_ONCE = 20_000
ROUNDS = 7
LOOKUPS = 25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=60_000, metavar="N")
    num = parser.parse_args().trajectories
    with tempfile.TemporaryDirectory() as folder:
        compare_layouts(Path(folder))
        measure_lookup(Path(folder), num)


def compare_layouts(folder: Path) -> None:
    table = growing_trajectories(num_trajectories=8, num_turns=60, tokens_per_turn=1410)
    print(f"8 trajectories, 60 turns, {num_tokens(table):,} tokens of prompts and responses\n")
    stored = {"full": table, "prefix": encode_prefixes(table)}
    paths = {layout: folder / layout for layout in LAYOUTS}

    writes = best_of_each(3, {k: partial(write, table, paths[k], k) for k in LAYOUTS})
    files = {k: next(paths[k].iterdir()).read_bytes() for k in LAYOUTS}
    again = {k: partial(write_synced, folder / "bytes", files[k]) for k in LAYOUTS}
    packed = {k: partial(write_ipc, folder / "ipc", stored[k], "zstd") for k in LAYOUTS}
    synced, ipc = best_of_each(3, again), best_of_each(3, packed)

    print(f"{'':28}{'full':>10}{'prefix':>10}{'ratio':>8}   limit: fraction of it reached")
    size = {k: len(files[k]) / 1e6 for k in LAYOUTS}
    tokens = {k: sum(map(len, flat(stored[k]))) for k in LAYOUTS}
    limit = tokens["full"] / tokens["prefix"]
    reached = size["full"] / size["prefix"] / limit
    show("size, MB", size, f"tokens stored {limit:.1f}x: {reached:.0%}")
    show("write, s", writes, shares("its bytes, synced", synced, writes))
    show("", {}, shares("Arrow IPC with zstd", ipc, writes))
    for name, columns in (("read everything, s", None), ("read all but prompts, s", STORED)):
        chosen = table if columns is None else table.select(columns)
        write_ipc(folder / "mapped", chosen, None)
        actions: dict[str, Callable[[], Any]] = {
            **{k: partial(rollout_io.read, paths[k], columns) for k in LAYOUTS},
            "mapped": partial(read_mapped, folder / "mapped"),
            "copied": partial(read_copied, folder / "mapped"),
        }
        for layout in LAYOUTS:
            back = actions[layout]()
            assert back.select(chosen.column_names).cast(chosen.schema).equals(chosen)
        found = best_of_each(ROUNDS, actions)
        reads = {k: found[k] for k in LAYOUTS}
        for row, label in ((name, "mapped"), ("", "copied")):
            limits = dict.fromkeys(LAYOUTS, found[label])
            show(row, reads if row else {}, shares(f"Arrow IPC, {label}", limits, reads))


def measure_lookup(folder: Path, num: int) -> None:
    path = folder / "short"
    parts = range(0, num, WRITTEN_AT_ONCE)
    with rollout_io.RolloutWriter(path, shard_bytes=16 << 20) as writer:
        for first in parts:
            writer.write(short_trajectories(first, min(WRITTEN_AT_ONCE, num - first)))
    files = [pq.ParquetFile(file) for file in sorted(path.iterdir())]
    groups = [(f, i) for f in files for i in range(f.metadata.num_row_groups)]
    size = sum(file.stat().st_size for file in path.iterdir())
    print(
        f"\n{num:,} trajectories, {writer.num_rows:,} rows, {len(files)} shards, {len(groups)} row "
        f"groups, {size / 1e6:.0f} MB\n"
    )
    rng = np.random.default_rng(0)
    names = ("trajectory_id", "instance_id")
    times: dict[str, list[float]] = {name: [] for name in (*names, "limit")}
    for number in rng.integers(len(groups), size=LOOKUPS):
        file, index = groups[number]
        limit_s, group = best_of(3, partial(file.read_row_group, index))
        times["limit"].append(limit_s)
        row = group.slice(int(rng.integers(group.num_rows)), 1)
        for name in names:
            wanted = row.column(name)[0].as_py()
            # The first time counts: users have not opened the dataset before they look up a trajectory.
            found_s, found = best_of(1, partial(look_up, path, name, wanted))
            assert set(found[name]) == {wanted}
            times[name].append(found_s)
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    for name in names:
        share = median["limit"] / median[name]
        print(
            f"{'one ' + name + ', ms':28}{median[name]:10.1f}   "
            f"its row group alone {median['limit']:.1f}: {share:.0%}"
        )


def look_up(path: Path, name: str, wanted: str) -> pl.DataFrame:
    return rollout_io.scan(path).filter(pl.col(name) == wanted).collect()


def write(table: pa.Table, path: Path, layout: Literal["full", "prefix"]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with rollout_io.RolloutWriter(path, layout=layout) as writer:
        writer.write(table)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_ipc(path: Path, table: pa.Table, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=options) as file,
    ):
        file.write_table(table)


def read_mapped(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_copied(path: Path) -> list[np.ndarray]:
    columns = (chunk for column in read_mapped(path).columns for chunk in column.chunks)
    buffers = (buffer for chunk in columns for buffer in chunk.buffers() if buffer is not None)
    return [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]


def flat(table: pa.Table) -> list[np.ndarray]:
    return [Ragged.from_arrow(table.column(n)).values for n in TOKENS if n in table.column_names]


def show(name: str, values: dict[str, float], limit: str) -> None:
    figures = f"{'':28}"
    if values:
        full, prefix = values["full"], values["prefix"]
        figures = f"{full:10.3f}{prefix:10.3f}{full / prefix:7.1f}x"
    print(f"{name:28}{figures}   {limit}")


def shares(name: str, limits: dict[str, float], values: dict[str, float]) -> str:
    parts = (f"{limits[k]:.4f} and {limits[k] / values[k]:.1%}" for k in LAYOUTS)
    return f"{name} ({', '.join(parts)})"


if __name__ == "__main__":
    main()
