"""Compare the learning curves of `rollouts rl` and of the simplest RL loop.

    python -m benchmarks.learning addition [--runs plain 0 2] [--iterations 40] [--out docs/learning]
    python -m benchmarks.learning running_sum --runs 0 --iterations 20

`addition` trains SmolLM2 on one-digit sums, with a plain Transformers loop (`benchmarks.naive_rl`)
and with `rollouts rl` on vLLM, with `max_staleness` 0 and 2. All runs use the same learning rate and
the same number of prompts and samples per update, and are evaluated on the same held-out sums,
sampled at temperature 1. `running_sum` has two turns per trajectory and merged rows; it supports
only `--runs 0`, because the plain loop has one turn. Seconds cover sampling, training and weight
updates, but not evaluations and the server's start. Curves are written to OUT as JSON Lines and an
image.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.naive_rl import NaiveLoop
from examples.addition import is_right
from pipelines.generation.processes import VllmServer
from trainer import rl

Curve = list[dict[str, Any]]
"""One entry per update: `update`, `seconds` so far, `return_mean`, and `held_out` if evaluated."""
NAMES = {"plain": "plain loop", "0": "synchronous", "2": "staleness 2"}
SEED = 0


def main() -> None:
    arguments = _arguments()
    out, task = Path(arguments.out), arguments.task
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        importlib.import_module(f"examples.{task}").main(folder / "tasks")
        for run in arguments.runs:
            # Each run has a separate process, so that it starts with the same memory.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                curve = process.submit(_curve, run, folder, arguments).result()
            lines = "".join(json.dumps(entry) + "\n" for entry in curve)
            (out / f"{task}_{run}.jsonl").write_text(lines, encoding="utf-8")
    curves = {name: _read(out / f"{task}_{run}.jsonl") for run, name in NAMES.items()}
    curves = {name: curve for name, curve in curves.items() if curve}
    print(table(curves))
    draw(curves, out / f"{task}.png")


def _curve(run: str, folder: Path, arguments: argparse.Namespace) -> Curve:
    if run == "plain":
        return list(naive_curve(folder, arguments))
    with _server(folder, arguments) as server:
        return our_curve(folder, server.url, int(run), arguments)


def _read(path: Path) -> Curve:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def naive_curve(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run `NaiveLoop`; print and yield an entry of its learning curve after each update."""
    loop = NaiveLoop(model=arguments.model, seed=SEED)
    tasks, held_out = (_tasks(folder / f"tasks/{name}.jsonl") for name in ("train", "held_out"))
    order: list[tuple[str, int]] = []
    for number in range(-(-arguments.iterations * 8 // len(tasks))):
        order += random.Random(SEED + number).sample(tasks, len(tasks))
    batches = [order[8 * i : 8 * i + 8] for i in range(arguments.iterations)]

    def evaluate(model: Any, tokenizer: Any) -> float:
        texts, _, _ = loop.sample(model, tokenizer, [prompt for prompt, _ in held_out])
        sums = [number for _, number in held_out for _ in range(loop.group_size)]
        return sum(map(is_right, texts, sums)) / len(sums)

    seconds = 0.0
    for update, line in enumerate(loop.run(batches, is_right, evaluate, arguments.every), 1):
        seconds += line.pop("seconds")
        found = {"update": update, "seconds": seconds} | line
        print(f"plain loop: {found}", flush=True)
        yield found


def our_curve(folder: Path, url: str, staleness: int, arguments: argparse.Namespace) -> Curve:
    """Run `rollouts rl` with a configuration in examples/, and return its learning curve."""
    run = folder / f"run{staleness}"
    config = rl.load_rl_config(
        f"examples/{arguments.task}.toml",
        [
            f"run.out={run}",
            f"model.path={arguments.model}",
            f"loop.tasks={folder}/tasks/train.jsonl",
            f"evaluate.tasks={folder}/tasks/held_out.jsonl",
            f"evaluate.every_iterations={arguments.every}",
            f"loop.num_iterations={arguments.iterations}",
            f"loop.max_staleness={staleness}",
            f"run.seed={SEED}",
            "generate.engine=vllm",
            f'generate.urls=["{url}"]',
        ],
    )
    rl.run(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return curve_of(lines)


def curve_of(lines: list[dict[str, Any]]) -> Curve:
    """Extract the learning curve from a run's `metrics.jsonl`, with one update per iteration.

    Example:
        >>> times = {"wait_seconds": 2.0, "seconds": 1.0, "sync_seconds": 0.5}
        >>> update = {"iteration": 0, "return_mean": 0.25, "staleness_histogram": {"0": 4}}
        >>> evaluation = {"iteration": 1, "evaluation/return_mean": 0.5}
        >>> curve_of([update | times, evaluation])[0]["held_out"]
        0.5
    """
    curve: Curve = []
    found = {line["iteration"]: line for line in lines if "evaluation/return_mean" in line}
    seconds = 0.0
    for line in lines:
        if "wait_seconds" in line:
            seconds += line["wait_seconds"] + line["seconds"] + line["sync_seconds"]
            update = line["iteration"] + 1
            entry = {"update": update, "seconds": seconds, "return_mean": line["return_mean"]}
            entry["staleness"] = line["staleness_histogram"]
            if update in found:
                entry["held_out"] = found[update]["evaluation/return_mean"]
            curve.append(entry)
    if 0 in found:
        start = {"update": 0, "seconds": 0.0, "held_out": found[0]["evaluation/return_mean"]}
        curve.insert(0, start)
    return curve


def table(curves: dict[str, Curve]) -> str:
    """Format each run's held-out rewards, and when they reached 0.9."""
    lines = []
    for name, curve in curves.items():
        evaluated = [entry for entry in curve if "held_out" in entry]
        best = max(evaluated, key=lambda entry: entry["held_out"])
        reached = next((entry for entry in evaluated if entry["held_out"] >= 0.9), None)
        shown = "never 0.9" if reached is None else _at(reached)
        last = curve[-1]
        lines.append(
            f"{name:12}  held-out {evaluated[0]['held_out']:.2f} (update {evaluated[0]['update']})"
            f" -> {last.get('held_out', float('nan')):.2f}, best {best['held_out']:.2f};"
            f" 0.9: {shown}; all {last['update']} updates: {last['seconds']:.0f} s"
        )
    return "\n".join(lines)


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Plot rewards over updates and over seconds, and a histogram of staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for number, (name, curve) in enumerate(curves.items()):
        evaluated = [entry for entry in curve if "held_out" in entry]
        color, held_out = f"C{number}", [entry["held_out"] for entry in evaluated]
        for panel, key in zip(panels, ("update", "seconds"), strict=False):
            panel.plot([e[key] for e in evaluated], held_out, "o-", color=color, label=name)
            panel.set(xlabel=key, ylabel="held-out mean reward", ylim=(0, 1.02))
        trained = [entry for entry in curve if "return_mean" in entry]
        x, y = [e["update"] for e in trained], [e["return_mean"] for e in trained]
        panels[0].plot(x, y, color=color, alpha=0.3)
        ages: dict[int, int] = {}
        for entry in trained:
            for age, rows in entry.get("staleness", {}).items():
                ages[int(age)] = ages.get(int(age), 0) + rows
        if ages:
            width, places = 0.4, [age + 0.4 * (number - 1) for age in sorted(ages)]
            panels[2].bar(places, [ages[age] for age in sorted(ages)], width, color=color)
    panels[2].set(xlabel="staleness", ylabel="rows trained", xticks=range(3))
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def _at(entry: dict[str, Any]) -> str:
    return f"update {entry['update']}, {entry['seconds']:.0f} s"


def _tasks(path: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["prompt"], line["sum"]) for line in lines]


def _server(folder: Path, arguments: argparse.Namespace) -> VllmServer:
    return VllmServer(
        arguments.model,
        python=arguments.python,
        log=folder / "server.log",
        arguments=["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"],
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=["addition", "running_sum"])
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--runs", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--out", default="docs/learning")
    return parser.parse_args()


if __name__ == "__main__":
    main()
