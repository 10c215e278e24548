"""Measure the viewer's server: a million trajectories, and rows of 32,000 tokens.

    python -m benchmarks.view [--trajectories N] [--folder DIR]

The benchmark writes two datasets and sends the requests of the page to the server's API. It prints
the time of each answer and the resident memory of the process. DIR keeps the datasets for later
runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import pyarrow as pa

from pipelines.view.api import Api
from pipelines.view.sources import Sources
from rollout_io import RolloutWriter
from schemas.ragged import Ragged, offsets_of

NUM_IDS, GROUP_SIZE, BATCH = 49_000, 8, 20_000
TOPICS = np.array(["math", "code", "web", "search"])
LONG_TOKENS = 32_000
NUM_LONG = 64

REPETITIONS = 5
FIRST_PAINT_S, FILTER_S, DRAW_S, FRAMES_PER_S, MEMORY_MB = 1.0, 1.0, 0.3, 30.0, 1000.0
CONDITIONS = [f"reward < 0.{n} AND topic = 'math'" for n in range(1, REPETITIONS + 1)]
# Times are read in the page, when the frame that shows the answer begins.
READY = """([selector, start]) => new Promise((done) => {
    const from = start ?? performance.now();
    const look = () => document.querySelector(selector) === null
        ? requestAnimationFrame(look) : done((performance.now() - from) / 1000);
    look();
})"""
FIRST_PAINT = """() => new Promise((done) => {
    const look = () => {  // the entry may come a frame after the paint
        const [paint] = performance.getEntriesByName("first-contentful-paint");
        paint === undefined ? requestAnimationFrame(look) : done(paint.startTime / 1000);
    };
    look();
})"""
FRAMES = """(milliseconds) => new Promise((done) => {
    const [times, end] = [[], performance.now() + milliseconds];
    const next = (now) => {
        times.push(now);
        if (now < end) requestAnimationFrame(next);
        else done(times.slice(1).map((time, at) => time - times[at]));
    };
    requestAnimationFrame(next);
})"""

QUESTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "first window": ("trajectories", {"offset": 0, "limit": 100}),
    "window in the middle": ("trajectories", {"offset": 500_000, "limit": 100}),
    "sorted by return": ("trajectories", {"sort": "return", "descending": 1, "limit": 100}),
    "sorted by a user column": ("trajectories", {"sort": "difficulty", "limit": 100}),
    "filter by reward": ("trajectories", {"where": "reward < 0.1", "limit": 100}),
    "filter by return": ("trajectories", {"where": '"return" >= 0.5', "limit": 100}),
    "filter by user columns": (
        "trajectories",
        {"where": "topic = 'math' AND difficulty < 0.1", "limit": 100},
    ),
    "filter by a window": (
        "trajectories",
        {"where": "max(reward) OVER (PARTITION BY instance_id) < 0.6", "limit": 100},
    ),
    "histogram of numbers": ("histogram", {"column": "return", "bins": 40}),
    "histogram of a selection": ("histogram", {"column": "difficulty", "where": "reward < 0.1"}),
    "histogram of texts": ("histogram", {"column": "topic"}),
    "a group": ("group", {"instance_id": "task-1000"}),
    "a tree": ("tree", {"instance_id": "task-2000"}),
    "tokens of a row": ("tokens", {"trajectory_id": "task-3000_4", "step_index": 0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--folder", type=Path, metavar="DIR")
    parser.add_argument("--no-server", action="store_true", help="only measure the page")
    parser.add_argument("--no-browser", action="store_true", help="only measure the server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        many = written(folder / f"view-{arguments.trajectories}", arguments.trajectories)
        long = written(folder / "view-long", NUM_LONG, LONG_TOKENS)
        if not arguments.no_browser:  # first, because it starts a server process
            measure_browser(many, long)
        if not arguments.no_server:
            measure_many(many)
            measure_long(long)


def measure_browser(many: Path, long: Path) -> None:
    """Print the page's delays in Chromium and the server's memory, next to their limits."""
    from tests.helpers.browser_helpers import chromium, viewing

    before = os.getloadavg()[0]
    with viewing(many, long) as (address, server), chromium() as browser:
        paints, tables, filters, frames = [], [], [], []
        rows: tuple[list[float], list[float]] = ([], [])
        for number in range(REPETITIONS):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = context.new_page()
            page.goto(f"{address}#/table")
            tables.append(page.evaluate(READY, ["tbody tr[data-row]", 0]))
            paints.append(page.evaluate(FIRST_PAINT))
            filters.append(filtered_s(page, CONDITIONS[number]))
            for at, found in enumerate(rows):
                found.append(
                    drawn_s(page, 2 * number // GROUP_SIZE, (2 * number + at) % GROUP_SIZE)
                )
            frames.append(scrolled(page))
            context.close()
        memory = psutil.Process(server.pid).memory_info().rss / 1e6
    medians = [statistics.median(found) for found in frames]
    late = [np.percentile(found, 95) for found in frames]
    print(
        f"in Chromium {browser.version}, {os.cpu_count()} cores, load {before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after, best and median of {REPETITIONS}:"
    )
    show_limit("first paint", paints, "s", FIRST_PAINT_S)
    show_limit("rows of the table", tables, "s", FIRST_PAINT_S)
    show_limit("a filter's answer", filters, "s", FILTER_S)
    show_limit(f"a page's first {LONG_TOKENS:,} tokens drawn", rows[0], "s", DRAW_S)
    show_limit(f"its next {LONG_TOKENS:,} tokens drawn", rows[1], "s", DRAW_S)
    show_limit("frame while scrolling, median", medians, "ms", 1000 / FRAMES_PER_S)
    show_limit("frame while scrolling, 95 %", late, "ms", 1000 / FRAMES_PER_S)
    show_limit("memory of the server", [memory], "MB", MEMORY_MB)
    print()


def filtered_s(page: Any, condition: str) -> float:
    """Apply a filter, and return the seconds from pressing Enter until its counts are shown."""
    page.fill("#where", condition)
    counts = ".counts data:first-of-type"
    all_ = page.get_attribute(counts, "value")
    page.evaluate(
        """() => document.querySelector(".filter").addEventListener(
            "submit", () => { window.submitted = performance.now() }, {capture: true})"""
    )
    page.press("#where", "Enter")
    page.wait_for_function("window.submitted !== undefined")
    since = page.evaluate("window.submitted")
    found: float = page.evaluate(READY, [f'{counts}:not([value="{all_}"])', since])
    return found


def drawn_s(page: Any, task: int, attempt: int) -> float:
    """Open a long row that is not cached, and return the seconds until it is drawn."""
    of = urlencode({"data": "d1", "trajectory": f"task-{task}_{attempt}", "task": f"task-{task}"})
    since = page.evaluate(
        "hash => { const now = performance.now(); location.hash = hash; return now }",
        f"#/tokens?{of}",
    )
    drawn = f'canvas[data-row="task-{task}_{attempt} 0"][data-drawn]'
    found: float = page.evaluate(READY, [drawn, since])
    return found


def scrolled(page: Any) -> list[float]:
    """Scroll for two seconds, and return the milliseconds between frames."""
    page.mouse.move(500, 600)
    page.evaluate(f"() => {{ window.frames_ = ({FRAMES})(2000) }}")  # not awaited
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        page.mouse.wheel(0, 400)
        time.sleep(0.01)
    found: list[float] = page.evaluate("window.frames_")
    assert page.evaluate("document.querySelector('.scroller').scrollTop") > 10_000
    return found


def show_limit(name: str, values: list[float], unit: str, limit: float) -> None:
    best, median = min(values), statistics.median(values)
    digits = 2 if unit == "s" else 0
    print(
        f"  {name:<32} {best:>6,.{digits}f} {unit}, {median:>6,.{digits}f} {unit}; "
        f"limit {limit:,.{digits}f} {unit}, best {limit / best:.1f} times below"
    )


def measure_many(path: Path) -> None:
    """Print the time to open a dataset with many rows, the time of each query, and the memory."""
    api, opened_s = opened(path)
    print(f"{path.name}: checked and indexed in {opened_s:.1f} s, {resident_mb():,.0f} MB")
    for name, (view, parameters) in QUESTIONS.items():
        show(name, api, f"/api/datasets/d0/{view}?{urlencode(parameters)}")
    print(f"resident memory: {resident_mb():,.0f} MB\n")


def measure_long(path: Path) -> None:
    """Print the time to read long rows that have not been read before."""
    api, _ = opened(path)
    seconds = []
    for number in range(0, NUM_LONG, 8):
        of = urlencode({"trajectory_id": f"task-{number // GROUP_SIZE}_0", "step_index": 0})
        seconds.append(timed(api, f"/api/datasets/d0/tokens?{of}"))
    median, worst = statistics.median(seconds), max(seconds)
    print(
        f"a row of {LONG_TOKENS:,} tokens: median {median * 1e3:.0f} ms, max {worst * 1e3:.0f} ms"
    )


def opened(path: Path) -> tuple[Api, float]:
    start_s = time.perf_counter()
    api = Api(Sources.open([str(path)]))
    return api, time.perf_counter() - start_s


def show(name: str, api: Api, url: str) -> None:
    first_s, again_s = timed(api, url), timed(api, url)
    print(f"  {name:<26} {first_s * 1e3:>7.0f} ms, again {again_s * 1e3:>5.0f} ms")


def timed(api: Api, url: str) -> float:
    start_s = time.perf_counter()
    api.answer(url)
    return time.perf_counter() - start_s


def resident_mb() -> float:
    found: float = psutil.Process().memory_info().rss / 1e6
    return found


def written(path: Path, num: int, num_tokens: int | None = None) -> Path:
    """Write a dataset of trajectories with one step each, unless it exists already."""
    if not path.exists():
        with RolloutWriter(path, checked=True) as writer:
            for table in tables(num, num_tokens):
                writer.write(table)
    return path


def tables(num: int, num_tokens: int | None) -> Iterator[pa.Table]:
    """Yield trajectories with random tokens, log-probabilities, rewards and user columns.

    Args:
        num: Number of trajectories.
        num_tokens: Tokens of each trajectory; None: 20 to 88.
    """
    rng, batch = np.random.default_rng(0), BATCH if num_tokens is None else GROUP_SIZE
    for first in range(0, num, batch):
        n = min(batch, num - first)
        if num_tokens is None:
            prompt, response = rng.integers(12, 40, n), rng.integers(8, 50, n)
        else:
            prompt, response = np.full(n, num_tokens // 4), np.full(n, num_tokens * 3 // 4)
        instance = [f"task-{i // GROUP_SIZE}" for i in range(first, first + n)]
        repetition = np.arange(first, first + n) % GROUP_SIZE
        names = [f"{a}_{b}" for a, b in zip(instance, repetition.tolist(), strict=True)]
        size = int(response.sum())
        yield pa.table(
            {
                "instance_id": instance,
                "repetition_id": repetition.astype(np.int32),
                "trajectory_id": names,
                "step_index": np.zeros(n, np.int32),
                "is_last_step": np.ones(n, np.bool_),
                "prompt_token_ids": lists(token_ids(rng, int(prompt.sum())), prompt, pa.int32()),
                "response_ids": lists(token_ids(rng, size), response, pa.int32()),
                "loss_mask": lists(rng.random(size) < 0.9, response, pa.bool_()),
                "rollout_logprobs": lists(
                    -rng.exponential(1.0, size).astype(np.float32), response, pa.float32()
                ),
                "reward": rng.random(n).round(2),
                "stop_reason": np.where(rng.random(n) < 0.1, "length", "stop").tolist(),
                "policy_version": rng.integers(0, 9, n).astype(np.int32),
                "agent": ["main"] * n,
                "token_source": ["engine"] * n,
                "difficulty": rng.random(n),
                "topic": TOPICS[rng.integers(0, len(TOPICS), n)].tolist(),
            }
        )


def token_ids(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, NUM_IDS, num).astype(np.int32)


def lists(values: np.ndarray, lengths: np.ndarray, kind: pa.DataType) -> pa.Array:
    return Ragged(values, offsets_of(lengths), np.ones(len(lengths), np.bool_)).to_arrow(kind)


if __name__ == "__main__":
    main()
