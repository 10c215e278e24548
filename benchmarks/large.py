"""Measure wall time and peak memory of `merge` and `filter` on a dataset larger than memory.

    python -m benchmarks.large [--gb 10] [--dir DIR]

The benchmark writes a dataset of `--gb` gigabytes of Parquet below DIR (default: the system's
temporary directory), then runs `rollouts merge` and `rollouts filter` on it. Memory is the total
resident set of the command and its child processes, sampled ten times a second.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa

from benchmarks.synthetic import growing_trajectories, num_tokens
from rollout_io import RolloutWriter

COMMANDS = {"merge": [], "filter": ["--min-reward", "1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        dataset = Path(folder) / "steps"
        write(dataset, arguments.gb)
        print(f"\n{'':20}{'s':>8}{'MB/s':>8}{'peak MB':>10}")
        for name, options in COMMANDS.items():
            out = Path(folder) / name
            seconds, peak = run([name, str(dataset), "--out", str(out), *options])
            print(f"{name:20}{seconds:8.0f}{size_mb(dataset) / seconds:8.0f}{peak / 1e6:10.0f}")
            shutil.rmtree(out)


def write(dataset: Path, gigabytes: float) -> None:
    """Write copies of the same trajectories to a dataset, with different ids in each copy."""
    table = growing_trajectories(num_trajectories=600, num_turns=10, tokens_per_turn=640)
    written = 0
    with RolloutWriter(dataset, checked=True) as writer:
        while written == 0 or size_mb(dataset) < gigabytes * 1e3:
            writer.write(renamed(table, f"r{written}"))
            written += 1
    tokens = written * num_tokens(table)
    print(
        f"{size_mb(dataset) / 1e3:.1f} GB of Parquet, {len(list(dataset.glob('*.parquet')))} shards, "
        f"{written * table.num_rows:,} steps, {tokens / 1e9:.1f} G tokens"
    )


def renamed(table: pa.Table, prefix: str) -> pa.Table:
    for name in ("instance_id", "trajectory_id"):
        column = pa.compute.binary_join_element_wise(prefix, table.column(name), "-")
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def run(arguments: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds, and its peak resident bytes including child processes."""
    start, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "rollout_io", *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        own = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, resident(own))
            time.sleep(0.1)
    assert process.returncode == 0, arguments
    return time.monotonic() - start, peak


def resident(process: psutil.Process) -> int:
    total = 0
    for each in [process, *children(process)]:
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue
    return total


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
