"""Measure `rollouts audit` on rollouts with planted faults, sampled by a real vLLM server.

    python -m benchmarks.audit --make DIR --seed 1      # minutes, 10 GB of memory, 12 GB of disk
    python -m benchmarks.audit --measure DIR

`--make` trains two short runs (all weights, and LoRA), keeps every version of their weights, samples
from these versions with vLLM, and plants faults. `DIR/data/NAME` are the datasets, `DIR/run` and
`DIR/lora_run` the candidates, and `DIR/labels.parquet` records the true origin of each row. The
audit never reads the labels. `--measure` runs the audit on every dataset, and compares the verdicts
with the labels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc

import rollout_io
from benchmarks.audit_data import (
    Case,
    Plan,
    Sampler,
    Scorer,
    distances,
    plan_adapters,
    plan_bfloat16,
    plan_in_flight,
    plan_merged,
    plan_raw,
    plan_steps,
    quantised_versions,
    round_weights,
    server,
    train,
    untied,
    versions_of,
    write,
)
from rollout_io.dataset.writer import RolloutWriter

DATASETS = ("steps", "merged", "raw", "bfloat16", "adapter", "in_flight")
LORA_RANK = 8


def main() -> None:
    arguments = _arguments()
    if arguments.make:
        make(Path(arguments.make), arguments)
    else:
        measure(Path(arguments.measure), arguments)


def make(out: Path, arguments: argparse.Namespace) -> None:
    """Train the runs unless they exist, sample all cases, and write datasets and labels."""
    out.mkdir(parents=True, exist_ok=True)
    parts = out / "parts"
    parts.mkdir()
    run, lora_run = out / "run", out / "lora_run"
    seed, wanted = arguments.seed, set(arguments.datasets)
    model = str(out / "model")
    if not Path(model).exists():
        untied(Path(arguments.model), out / "model")
    processed = ("--logprobs-mode", "processed_logprobs")
    log = out / "server.log"
    sampler = Sampler(parts, model, seed)
    with server(model, arguments.python, log, *processed) as url:
        if not run.exists():
            rate = arguments.learning_rate
            alone(train, run, url, model, seed=seed, iterations=5, rate=rate, rank=None)
        if not lora_run.exists():
            rate = arguments.lora_learning_rate
            alone(train, lora_run, url, model, seed=seed, iterations=3, rate=rate, rank=LORA_RANK)
        plan, adapters, in_flight = planned(run, lora_run, model, arguments)
        weights = weights_of(run, lora_run, model, parts)
        cases = [case for case in plan.cases if case.server == "processed"]
        sampler.run(cases, url, weights)
        for cases in in_flight:
            sampler.run_across_a_swap(cases, url, weights)
    if wanted & {"steps", "raw"}:
        with server(model, arguments.python, log) as url:
            sampler.run([c for c in plan.cases if c.server == "raw"], url, weights)
    if "bfloat16" in wanted:
        with server(model, arguments.python, log, *processed, dtype="bfloat16") as url:
            sampler.run([c for c in plan.cases if c.server == "bfloat16"], url, weights)
    if "adapter" in wanted:
        named = {f"adapter-{v}": f"v{v}" for v in adapters.versions if v}
        paths = versions_of(lora_run, model)
        loaded = [f"{n}={paths[key.removeprefix('adapter-')]}/adapter" for key, n in named.items()]
        lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", str(len(loaded))]
        with server(
            model, arguments.python, log, *processed, *lora, "--lora-modules", *loaded
        ) as url:
            served = {key: f"name:{name}" for key, name in named.items()}
            sampler.run(adapters.cases, url, served | {"adapter-0": "name:smollm2"})
    scorer = Scorer(versions_of(run, model))
    sampler.settle_swaps([case for cases in in_flight for case in cases], scorer)
    labels = write([*plan.cases, *adapters.cases], sampler, out / "data")
    labels.write_parquet(out / "labels.parquet")
    if "steps" in wanted:
        table = pl.from_arrow(rollout_io.read(out / "data" / "steps"))
        found = distances(table, labels, scorer)
        (out / "distances.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, values in found.items():
            print(
                f"{name}: mean |difference| {values['mean']:.5f} nats, median {values['q50']:.5f}"
            )
    (out / "README.md").write_text(README + f"\n```\n{table_text(counted(labels))}\n```\n")
    print(table_text(counted(labels)))


README = """# Rollouts with planted faults

Written by `python -m benchmarks.audit --make`. Audit a dataset with:

    rollouts audit DIR/data/steps --weights DIR/run --tokenizer DIR/model

| path | contents |
|---|---|
| `data/steps` | one step per row; float32 vLLM with processed log-probabilities |
| `data/merged` | trajectories of 2 to 4 turns, merged; one turn may have a fault |
| `data/raw` | like `steps`, but with raw log-probabilities |
| `data/bfloat16` | like `steps`, but from a vLLM server that computes in bfloat16 |
| `data/adapter` | rows from a vLLM server with LoRA adapters; the candidates are in `lora_run` |
| `data/in_flight` | the weights changed while the server sampled; cached keys and values stayed |
| `run`, `lora_run` | the runs of `rollouts rl`, with every version in `weights/`; version 0 is `model` |
| `labels.parquet` | the true origin of each step; never read by the audit |
| `distances.json` | how far apart consecutive versions are, in nats |

Rows are labelled with `policy_version`, `temperature`, `top_p` and `top_k`. In `labels.parquet`, `weights` is
the version that sampled the step ("3-int8": version 3, rounded; "foreign": the last weights of
`lora_run`), and `position` the first token of a swap that `weights_after` sampled. Spans by fault:
"""


def table_text(table: pl.DataFrame) -> str:
    """Format a table as text, without truncating it."""
    with pl.Config(tbl_rows=200, tbl_cols=30, tbl_width_chars=200, tbl_hide_dataframe_shape=True):
        return str(table)


def alone(work: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call a function in a separate process, so that its memory is freed afterwards."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(work, *arguments, **named).result()


def planned(
    run: Path, lora_run: Path, model: str, arguments: argparse.Namespace
) -> tuple[Plan, Plan, list[list[Case]]]:
    """Plan the cases of the selected datasets.

    Returns the plan of the run, the plan of the run with adapters, and the rounds of responses
    during which the weights are swapped.
    """
    wanted = set(arguments.datasets)
    plan = Plan(arguments.seed, [int(v) for v in versions_of(run, model)], arguments.scale)
    kinds = {"steps": plan_steps, "merged": plan_merged, "raw": plan_raw, "bfloat16": plan_bfloat16}
    for name, add in kinds.items():
        if name in wanted:
            add(plan)
    versions = [int(v) for v in versions_of(lora_run, model)]
    adapters = Plan(arguments.seed + 1, versions, arguments.scale)
    if "adapter" in wanted:
        plan_adapters(adapters, "lora")
    return plan, adapters, plan_in_flight(plan) if "in_flight" in wanted else []


def weights_of(run: Path, lora_run: Path, model: str, folder: Path) -> dict[str, str]:
    """Return the model directory for each value of `Call.weights`.

    Models with rounded weights are written to `folder`.
    """
    weights = versions_of(run, model)
    for version in quantised_versions([int(v) for v in weights]):
        for kind in ("bf16", "int8"):
            key, source = f"{version}-{kind}", Path(weights[str(version)])
            weights[key] = round_weights(source, folder / key, kind)
    *_, last = versions_of(lora_run, model).values()
    return weights | {"foreign": last}


def counted(labels: pl.DataFrame) -> pl.DataFrame:
    """Count spans and tokens by dataset and fault."""
    tokens = pl.col("num_tokens")
    aggregated = labels.group_by("dataset", "fault").agg(
        pl.len().alias("spans"), (tokens >= 20).sum().alias("spans of 20"), tokens.sum()
    )
    return aggregated.sort("dataset", "fault")


def measure(out: Path, arguments: argparse.Namespace) -> None:
    """Audit every dataset, and print how often the verdicts agree with the labels."""
    labels = pl.read_parquet(out / "labels.parquet")
    joined = []
    for name in [name for name in arguments.datasets if (out / "data" / name).exists()]:
        verdicts = audited(out, name, out / ("lora_run" if name == "adapter" else "run"), arguments)
        is_audited = pl.col("trajectory_id").is_in(verdicts["trajectory_id"].to_list())
        own = labels.filter(is_audited, dataset=name)
        joined.append(compared(own, verdicts).with_columns(dataset=pl.lit(name)))
    spans = pl.concat(joined)
    for (name,), part in spans.group_by("dataset", maintain_order=True):
        print(f"\n== {name}")
        report(part)
    print("\n== steps, merged and adapter (float32, processed)")
    report(spans.filter(pl.col("dataset").is_in(["steps", "merged", "adapter"])))
    wrong = spans.filter(~pl.col("is_right"), pl.col("num_tokens") >= 20)
    wrong.select(*SHOWN).write_csv(out / "wrong.csv")
    print(f"\n{len(wrong)} spans of at least 20 tokens with a wrong verdict: {out / 'wrong.csv'}")


SHOWN = (
    *("dataset", "trajectory_id", "step_index", "num_tokens", "fault", "kind", "labelled_version"),
    *("weights", "best_version", "weights_after", "second_version", "position", "swap_position"),
    *("temperature", "best_temperature", "top_p", "best_top_p", "top_k", "best_top_k", "shift"),
    *("offset", "variant", "engine_has_variant", "log_likelihood_ratio", "noise_scale"),
    "mean_difference",
)


def audited(out: Path, name: str, run: Path, arguments: argparse.Namespace) -> pl.DataFrame:
    """Run `rollouts audit`, print its cost, and return its verdicts."""
    folder = out / "verdicts"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.parquet"
    data = out / "data" / name
    if arguments.trajectories is not None:
        data = subset(data, out / "subsets" / name, arguments.trajectories)
    command = [sys.executable, "-m", "rollout_io", "audit", str(data), "--weights", str(run)]
    command += ["--tokenizer", str(out / "model"), "--out", str(path)]
    began = time.monotonic()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    wall_s = time.monotonic() - began
    if done.returncode not in {0, 1} or not done.stdout:
        raise RuntimeError(done.stderr)
    summary = json.loads(done.stdout)
    (folder / f"{name}.json").write_text(json.dumps(summary, indent=1))
    cost = summary["cost"]
    forwarded = f"{cost['num_forwarded_tokens']:,} tokens forwarded"
    print(f"{name}: {forwarded} = {cost['share']:.3f} of candidates x distinct tokens")
    print(f"  {cost['seconds']:.0f} s of forwarding, {wall_s:.0f} s in all", flush=True)
    return pl.read_parquet(path)


def subset(source: Path, target: Path, number: int) -> Path:
    """Write the first `number` trajectories of a dataset; trajectories are in random order."""
    if not target.exists():
        table = rollout_io.read(source)
        names = table.column("trajectory_id").unique().slice(0, number)
        chosen = table.filter(pc.is_in(table.column("trajectory_id"), names))
        with RolloutWriter(target, metadata=rollout_io.read_metadata(source)) as writer:
            writer.write(chosen)
    return target


def compared(labels: pl.DataFrame, verdicts: pl.DataFrame) -> pl.DataFrame:
    """Join verdicts with labels, and add columns that grade each verdict.

    `is_right`: the verdict names the planted fault and its parameters; `is_placed`: a swap is
    located within two tokens.
    """
    names = [name for name in verdicts.columns if name not in labels.columns]
    keys = ["trajectory_id", "step_index"]
    found = labels.join(verdicts.select(*keys, *names), on=keys, how="left")
    fault, kind = pl.col("fault"), pl.col("kind")
    true = pl.col("weights").str.extract(r"(\d+)", 1).cast(pl.Int32)
    after = pl.col("weights_after").str.extract(r"(\d+)", 1).cast(pl.Int32)
    is_best = pl.col("best_version") == true
    by_version = fault.is_in(["stale_version", "label_behind", "stuck_adapter"])
    same_temperature = (pl.col("best_temperature") / pl.col("temperature") - 1).abs() < 0.05
    is_right = (
        pl.when(fault == "clean")
        .then(kind.is_in(NO_FAULT))
        .when(by_version)
        .then((kind == "version") & is_best)
        .when(fault.is_in(["swap", "swap_in_flight"]))
        .then((kind == "swap") & is_best & (pl.col("second_version") == after))
        .when(fault == "temperature")
        .then((kind == "temperature") & same_temperature)
        .when(fault == "shifted")
        .then((kind == "offset") & (pl.col("offset") == -pl.col("shift")))
        .when(fault == "quantised")
        .then((kind == "noise") & is_best)
        .otherwise(kind == fault.replace(KINDS))
    )
    is_placed = (pl.col("swap_position") - pl.col("position")).abs() <= 2
    return found.with_columns(
        is_right=is_right.fill_null(value=False),
        is_placed=is_placed.fill_null(value=False),
    )


NO_FAULT = ["as_labelled", "too_short"]
KINDS = {
    "raw": "raw_logprobs",
    "truncated": "truncation",
    "foreign": "unknown_model",
    "prompt": "prompt",
}
"""Kinds of verdicts by fault, where the two names differ."""
LENGTHS = [5, 10, 20, 40, 80]


def report(spans: pl.DataFrame) -> None:
    """Print how well the audit detects the faults in one dataset."""
    clean, faulty = spans.filter(fault="clean"), spans.filter(pl.col("fault") != "clean")
    alarms = int((~clean["is_right"]).sum())
    rate = 1000 * alarms / max(len(clean), 1)
    print(f"false alarms: {alarms} of {len(clean)} clean spans = {rate:.2f} in 1,000")
    long = faulty.filter(pl.col("num_tokens") >= 20)
    every = spans.filter(pl.col("num_tokens") >= 20)
    print(
        f"named correctly, spans of 20 or more tokens: faulty {_share(long)}, all {_share(every)}"
    )
    for name in ("swap", "swap_in_flight"):
        swaps = long.filter(fault=name)
        if not len(swaps):
            continue
        placed = f"{swaps['is_placed'].sum()} of {len(swaps)} = {swaps['is_placed'].mean():.1%}"
        print(f"{name}: placed within 2 tokens: {placed}")
    length = pl.col("num_tokens").cut(LENGTHS, left_closed=True).alias("tokens")
    right = pl.col("is_right").mean().round(3)
    curve = faulty.group_by(length).agg(pl.len().alias("faulty spans"), right.alias("right"))
    print(table_text(curve.sort("tokens")))
    print(table_text(_confusion(every)))


def _share(spans: pl.DataFrame) -> str:
    if not len(spans):
        return "none"
    return f"{spans['is_right'].sum()} of {len(spans)} = {spans['is_right'].mean():.2%}"


def _confusion(spans: pl.DataFrame) -> pl.DataFrame:
    counts = spans.group_by("fault", "kind").len().sort("kind")
    wide = counts.pivot("kind", index="fault", values="len").fill_null(0).sort("fault")
    right = spans.group_by("fault").agg(pl.col("is_right").mean().round(3).alias("right"))
    return wide.join(right, on="fault")


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make", metavar="DIR")
    what.add_argument("--measure", metavar="DIR")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument(
        "--trajectories",
        type=int,
        help="with --measure: number of trajectories to audit in each dataset",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--lora-learning-rate", type=float, default=1e-3)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
