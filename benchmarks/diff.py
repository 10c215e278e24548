"""Measure `rollouts diff` on two datasets of many short trajectories.

    python -m benchmarks.diff [--num 100000] [--dir DIR]

Groups have eight attempts of one to three steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.synthetic import short_trajectories
from rollout_io import RolloutWriter

_CHUNK = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100_000)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        paths = [Path(folder) / name for name in "ab"]
        for seed, path in enumerate(paths):
            with RolloutWriter(path, checked=True) as writer:
                for first in range(0, arguments.num, _CHUNK):
                    writer.write(short_trajectories(first, _CHUNK, seed=seed))
        start = time.perf_counter()
        command = [sys.executable, "-m", "rollout_io", "diff", *map(str, paths), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"diff of 2 x {arguments.num:,} trajectories: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
