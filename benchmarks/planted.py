"""Measure the audit on rows of tiny models with planted faults, in minutes on a CPU.

    python -m benchmarks.planted --seeds 1 2 3 4

Each seed gives 24 clean rows, and 7 rows of each of 8 faults: another version, a swap, another
temperature or truncation, raw or shifted log-probabilities, more noise, and another model.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import torch

import rollout_io
from pipelines.generation.engines.base import Sampling
from tests.helpers.audit_helpers import Request, prompt_of, row, sample, save_versions, tiny_models
from tests.helpers.trainer_helpers import write_dataset
from trainer.forensics.audit.audit import run_audit
from trainer.forensics.audit.rows import read_audit_rows
from trainer.forensics.audit.weights import Weights, find_candidates

NUM_CLEAN, NUM_EACH, TEMPERATURE, FOREIGN = 24, 7, 0.7, 3
KINDS = (
    *("version", "swap", "temperature", "truncation", "raw_logprobs"),
    *("offset", "noise", "unknown_model"),
)
NEAR = 0.12
"""Largest error of a temperature that counts as right."""


def plant(path: Path, seed: int) -> pl.DataFrame:
    """Write a dataset and its candidates; return the truth about each row."""
    models = [*tiny_models(3, 0.1, initializer_range=0.3), *tiny_models(1, seed=9)]
    rng = np.random.default_rng(seed)
    kinds = np.array([*["as_labelled"] * NUM_CLEAN, *np.repeat(KINDS, NUM_EACH)])
    rng.shuffle(kinds)
    truth, requests = [], []
    for number, kind in enumerate(kinds.tolist()):
        side, position = number % 2, int(rng.integers(10, 30))
        usual = Request(prompt=prompt_of(rng), sampling=Sampling(temperature=TEMPERATURE))
        changes = {
            "version": {"versions": 0 if side else 2},
            "swap": {"versions": lambda at, position=position: 1 if at < position else 2},
            "temperature": {"sampling": Sampling(temperature=1.2 if side else 0.45)},
            "truncation": {"sampling": Sampling(temperature=TEMPERATURE, top_p=0.8)},
            "raw_logprobs": {"raw": True},
            "noise": {"noise": 0.3},
            "unknown_model": {"versions": FOREIGN},
        }
        requests.append(dataclasses.replace(usual, **changes.get(kind, {})))
        truth.append((f"g{number}_0", kind, position, side))
    rows = []
    for number, sampled in enumerate(sample(models, requests, seed=seed)):
        tokens, logprobs = sampled
        if kinds[number] == "offset":
            logprobs = [*logprobs[1:], -1.0] if number % 2 else [-1.0, *logprobs[:-1]]
        prompt = requests[number].prompt
        rows.append(row(number, 0, prompt, (tokens, logprobs), temperature=TEMPERATURE))
    write_dataset(path / "ds", rows, logprobs_mode="processed")
    save_versions(path / "weights", models[:FOREIGN])
    names = ["trajectory_id", "truth", "position", "side"]
    return pl.DataFrame(truth, schema=names, orient="row")


def audited(path: Path) -> pl.DataFrame:
    """Return the verdicts of an audit."""
    dataset = path / "ds"
    chunks = read_audit_rows(rollout_io.scan(dataset), rollout_io.read_metadata(dataset))
    weights = Weights(find_candidates([str(path / "weights")]), device=torch.device("cpu"))
    return run_audit(chunks, weights, dataset=str(dataset)).verdicts


def graded(verdicts: pl.DataFrame, truth: pl.DataFrame) -> pl.DataFrame:
    """Add `is_right`: the verdict names the fault, and its version, temperature or offset."""
    side, kind = pl.col("side"), pl.col("truth")
    temperature = pl.when(side == 1).then(1.2).otherwise(0.45)
    is_right = (
        pl.when(kind == "version")
        .then(pl.col("best_version") == 2 * (1 - side))
        .when(kind == "swap")
        .then((pl.col("best_version") == 1) & (pl.col("second_version") == 2))
        .when(kind == "temperature")
        .then((pl.col("best_temperature") - temperature).abs() < NEAR)
        .when(kind == "offset")
        .then(pl.col("offset") == 2 * side - 1)
        .otherwise(pl.lit(value=True))
    )
    joined = verdicts.join(truth, on="trajectory_id")
    return joined.with_columns(is_right=(pl.col("kind") == kind) & is_right.fill_null(value=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    tables = []
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            truth = plant(Path(folder), seed)
            tables.append(graded(audited(Path(folder)), truth).with_columns(seed=pl.lit(seed)))
    rows = pl.concat(tables)
    clean, faulty = rows.filter(truth="as_labelled"), rows.filter(pl.col("truth") != "as_labelled")
    wrong = faulty.filter(~pl.col("is_right"))
    print(f"faults named correctly: {len(faulty) - len(wrong)} of {len(faulty)}")
    print(f"false alarms: {int((~clean['is_right']).sum())} of {len(clean)} clean rows")
    swaps = faulty.filter(truth="swap")
    near = (swaps["swap_position"] - swaps["position"]).abs() <= 2
    print(f"swaps within 2 tokens of their position: {near.sum()} of {len(swaps)}")
    print(wrong.select("seed", "trajectory_id", "truth", "kind", "reason"))


if __name__ == "__main__":
    main()
