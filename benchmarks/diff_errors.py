"""Measure how often `rollouts diff` is wrong: false alarms, coverage and power, by simulation.

    python -m benchmarks.diff_errors [--num 500] [--seed 0]

In each of six shapes of attempts and for several numbers of tasks, `differences` compares two
samples of one policy (A/A), and samples of two policies (A/B), `--num` times each. Prints, in
percent of these comparisons, the numbers of docs/guides/diff.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pipelines.statistics.differences import DIRECTIONS, differences

Floats = np.ndarray[Any, np.dtype[np.float64]]
Draw = Callable[[np.random.Generator, int, float], list[list[Floats]]]
_ENVIRONMENT = pl.List(pl.Struct({"key": pl.String, "value": pl.Float64}))
_LEFT_OUT = ("any `*`, A/B", "certain task, A/B", "no interval, A/B")
_FALLS = "environment/tests_failed"


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to draw the attempts at a task.

    Attributes:
        name: Its description.
        change: Expected change of the mean return under A/B.
        draw: From a generator, the number of tasks and the effect (0: A/A, 1: A/B): the returns of
            A and of B by task; NaN stands for a crash.
    """

    name: str
    change: float
    draw: Draw


def _yes_or_no(rng: np.random.Generator, rates: Floats, sizes: Floats) -> list[Floats]:
    return [rng.binomial(1, p, n).astype(float) for p, n in zip(rates, sizes, strict=True)]


def _beta(num: int, crashes: float = 0.0, most: int = 0) -> Draw:
    def draw(rng: np.random.Generator, num_tasks: int, effect: float) -> list[list[Floats]]:
        rates = rng.beta(0.5, 0.5, num_tasks)
        sides = []
        for factor in (1 - 0.3 * effect, 1.0):
            sizes = rng.integers(1, most + 1, num_tasks) if most else np.full(num_tasks, num)
            returns = _yes_or_no(rng, rates * factor, sizes)
            sides.append([np.where(rng.random(len(r)) < crashes, np.nan, r) for r in returns])
        return sides

    return draw


def _rare(rng: np.random.Generator, num_tasks: int, effect: float) -> list[list[Floats]]:
    sizes = np.full(num_tasks, 8)
    rates = (0.02, 0.02 + 0.02 * effect)
    return [_yes_or_no(rng, np.full(num_tasks, rate), sizes) for rate in rates]


def _heavy(rng: np.random.Generator, num_tasks: int, effect: float) -> list[list[Floats]]:
    level = rng.lognormal(0.0, 1.0, num_tasks)
    factors = (1.0, 1 + 0.5 * effect)
    return [[f * one * rng.lognormal(-0.5, 1.0, 8) for one in level] for f in factors]


def _skewed(rng: np.random.Generator, num_tasks: int, effect: float) -> list[list[Floats]]:
    level, gain = rng.normal(size=num_tasks), rng.lognormal(0.0, 1.5, num_tasks) * effect
    return [[one + rng.normal(0.0, 0.5, 8) for one in side] for side in (level, level + gain)]


SHAPES = (
    Shape("yes or no, 4 attempts", 0.15, _beta(4)),
    Shape("yes or no, 1 to 8 attempts", 0.15, _beta(0, most=8)),
    Shape("yes or no, 8 attempts, 40 % crash", 0.15, _beta(8, crashes=0.4)),
    Shape("rare successes, 2 % to 4 %", 0.02, _rare),
    Shape("heavy tails, 1.5 times as much", 0.5 * float(np.exp(0.5)), _heavy),
    Shape("gains of few tasks", float(np.exp(1.125)), _skewed),
)
SIZES = (3, 5, 10, 20, 50)


def attempts_of(returns: list[Floats], rng: np.random.Generator) -> pl.DataFrame:
    """Return lines as from `attempts`: the metrics are noise, and failed tests follow the return."""
    rows = []
    for task, values in enumerate(returns):
        for number, value in enumerate(values.tolist()):
            failed = bool(np.isnan(value))
            tests = 3 * (value <= 0) + rng.poisson(0.5)
            rows.append(
                {
                    "instance_id": f"t{task}",
                    "trajectory_id": f"t{task}_{number}",
                    "return": None if failed else value,
                    "error": "crash" if failed else None,
                    "environment": [{"key": "tests_failed", "value": float(tests)}],
                }
                | {name: float(rng.normal()) for name in ("steps", "response tokens")}
                | {name: float(rng.beta(2, 8)) for name in ("repeated 4-grams", "tool errors")}
            )
    schema = {"return": pl.Float64, "error": pl.String, "environment": _ENVIRONMENT}
    lines = pl.DataFrame(rows, schema_overrides=schema, infer_schema_length=None)
    kinds = {"version": pl.Int32, "greedy": pl.String, "stop_reason": pl.String}
    kinds |= dict.fromkeys(("tools", "failed_tools"), pl.List(pl.String))  # type: ignore[dict-item]
    return lines.with_columns(**{name: pl.lit(None, kind) for name, kind in kinds.items()})


def measured(shape: Shape, num_tasks: int, num: int, seed: int) -> list[float]:
    """Return the rates of one line of the table, over `num` comparisons for each effect."""
    rng = np.random.default_rng((seed, SHAPES.index(shape), num_tasks))
    rates: list[float] = []
    for effect in (0.0, 1.0):
        lines = []
        for _ in range(num):
            sides = (attempts_of(one, rng) for one in shape.draw(rng, num_tasks, effect))
            found = differences(*sides, directions=DIRECTIONS | {_FALLS: -1})
            returns = found.numbers.filter(name="return").drop_nulls("low").to_dicts()
            low, high = (returns[0]["low"], returns[0]["high"]) if returns else (-np.inf, np.inf)
            lines.append(
                [
                    low <= shape.change * effect <= high,
                    low > 0 or high < 0,
                    bool(found.numbers["is_certain"].any()),
                    bool(found.suspicions),
                    bool(found.tasks["is_certain"].any()),
                    not returns,
                ]
            )
        rates += np.mean(lines, axis=0).tolist()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    heads = ("covers", "excludes 0", "any `*`", "suspicion", "certain task", "no interval")
    columns = [f"{head}, {kind}" for kind in ("A/A", "A/B") for head in heads]
    shown = [name for name in columns if name not in _LEFT_OUT]
    print(f"| attempts | tasks | {' | '.join(shown)} |")
    print("|---|---|" + "---|" * len(shown))
    for shape in SHAPES:
        for num_tasks in SIZES:
            rates = measured(shape, num_tasks, arguments.num, arguments.seed)
            cells = [
                f"{100 * rate:.1f}"
                for name, rate in zip(columns, rates, strict=True)
                if name in shown
            ]
            print(f"| {shape.name} | {num_tasks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
