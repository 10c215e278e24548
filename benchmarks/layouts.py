"""Compare the `prefix` and `full` layouts: bytes on disk, time to write, time to read.

Trajectories have 60 turns, with contexts that grow to about 85,000 tokens. Both layouts are written
with the same settings (zstd, checksums), and read and written in the same run.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pyarrow as pa

import rollout_io
from benchmarks.synthetic import best_of, growing_trajectories, num_tokens

STORED = ("response_ids", "loss_mask", "rollout_logprobs", "reward")


def main() -> None:
    table = growing_trajectories(num_trajectories=8, num_turns=60, tokens_per_turn=1410)
    print(f"8 trajectories, 60 turns, {num_tokens(table):,} tokens of prompts and responses\n")
    with tempfile.TemporaryDirectory() as folder:
        found = {
            layout: measure(table, Path(folder) / layout, layout) for layout in ("full", "prefix")
        }
    print(f"{'':28}{'full':>12}{'prefix':>12}{'ratio':>9}")
    for name, full in found["full"].items():
        prefix = found["prefix"][name]
        print(f"{name:28}{full:12.3f}{prefix:12.3f}{full / prefix:8.1f}x")


def measure(table: pa.Table, path: Path, layout: str) -> dict[str, float]:
    def write() -> None:
        shutil.rmtree(path, ignore_errors=True)
        with rollout_io.RolloutWriter(path, layout=layout) as writer:
            writer.write(table)

    write_s, _ = best_of(3, write)
    read_s, back = best_of(3, lambda: rollout_io.read(path))
    assert back.select(table.column_names).cast(table.schema).equals(table)
    part_s, _ = best_of(3, lambda: rollout_io.read(path, STORED))
    size = sum(file.stat().st_size for file in path.iterdir())
    return {
        "size, MB": size / 1e6,
        "write, s": write_s,
        "read everything, s": read_s,
        "read all but prompts, s": part_s,
    }


if __name__ == "__main__":
    main()
