"""Trains a tiny model, and prints the peak of its resident memory in MB: `python -m tests.helpers.peak_memory DS MODEL OUT`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import rollout_io
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import VOCAB, save_tiny_model

NUM_ROWS = 40_000
FEW, MANY = 100, 2_500
"""Prompt tokens per row: 16 MB and 400 MB of token ids in `NUM_ROWS` rows."""
MOST_MORE_MB = 150
"""What a run may need more for `MANY` than for `FEW`: its batches of eight rows, and row groups of 4 MB."""


def write_rows(path, num_tokens):
    """Groups of four attempts with one step each, whose prompts are `num_tokens` random tokens."""
    rng, piece = np.random.default_rng(0), 4_000
    with rollout_io.RolloutWriter(path, row_group_rows=400, shard_bytes=16 << 20) as writer:
        for begin in range(0, NUM_ROWS, piece):
            row = np.arange(begin, begin + piece)
            columns = {
                "instance_id": [f"g{i // 4}" for i in row],
                "repetition_id": pa.array(row % 4, pa.int32()),
                "trajectory_id": [f"g{i // 4}_{i % 4}" for i in row],
                "step_index": pa.array(np.zeros(piece), pa.int32()),
                "is_last_step": [True] * piece,
                "prompt_token_ids": _lists(rng.integers(0, VOCAB, piece * num_tokens), num_tokens),
                "response_ids": _lists(rng.integers(0, VOCAB, piece * 4), 4),
                "loss_mask": pa.array([[True] * 4] * piece),
                "token_source": ["engine"] * piece,
                "reward": (row % 2).astype(float),
            }
            writer.write(pa.table(columns))
    return path


def _lists(values, length):
    offsets = pa.array(np.arange(0, len(values) + 1, length), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()))


def save_model(path):
    return save_tiny_model(path, max_position_embeddings=4 * MANY)


def peak_mb(dataset, model, out):
    """Peak resident memory of three updates in a process of their own, MB."""
    done = subprocess.run(
        [*(sys.executable, "-W", "ignore", "-m", "tests.helpers.peak_memory"),
         *(str(dataset), str(model), str(out))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    sys.stderr.write(f"{dataset}: {done.stdout}")
    return float(done.stdout.splitlines()[-1])


def main():
    import trainer

    dataset, model, out = sys.argv[1:]
    config = train_config(
        dataset=dataset,
        model=model,
        out=out,
        groups_per_batch=2,
        groups_per_mini_batch=2,
        max_updates=3,
        record_tokens="none",
    )
    assert trainer.train(config).num_updates == 3
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    sys.stdout.write(f"{int(peak[1]) / 1024}\n")


if __name__ == "__main__":
    main()
