"""SkyRL's Search-R1 quick start on two CPU cores: search a corpus, answer, train on the reward.

    PYTHONPATH=. python examples/search_r1.py runs/search_r1 [--port 8642] [--set SECTION.KEY=VALUE]...

The script writes a corpus and tasks, serves the corpus, trains with search_r1.toml (`--set` overrides
its keys), validates the sampled dataset, and trains on it again, step by step and merged. The updates
must agree.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
from safetensors.torch import load_file

from examples.retriever import BM25, read_corpus, serving
from trainer.config.train_config import to_toml
from trainer.reports.run_plot import read_metrics
from trainer.run.checkpoint import latest_checkpoint

CONFIG = Path(__file__).with_suffix(".toml")
LAYOUTS = ("step", "merge")
SECTIONS = ("data", "batch", "advantage", "loss", "model", "optimizer", "run")
NAMES = re.findall(
    r"\w+",
    """
Alice Bruno Clara David Emma Frank Grace Henry Irene Jacob Karen Louis Maria Nina Oscar
Paula Quentin Rosa Simon Tina Victor Wendy Adam Bella Carl Diana Edward Fiona George Helen Ivan Julia
Kevin Laura Martin Nora Oliver Petra Robert Sarah Thomas Ursula Vera Walter Anna Boris Cecil Daisy
Eric Flora Gavin Hanna Igor Jane Kurt Linda Max Nancy Otto Pia Ralph Sofia Tom Violet""",
)
CITIES = re.findall(
    r"\w+",
    """
Paris London Rome Berlin Madrid Vienna Lisbon Dublin Prague Oslo Athens Cairo Tokyo
Boston Chicago Geneva""",
)
NUM_SHOWN, NUM_HELD_OUT = 2, 12
INSTRUCTION = (
    "Answer the question. First search with <search>query</search>, "
    "then answer with <answer>answer</answer>."
)


def main() -> None:
    parser = argparse.ArgumentParser(description="SkyRL's Search-R1 quick start on a CPU.")
    parser.add_argument("out", type=Path, metavar="OUT", help="New directory for all files.")
    parser.add_argument(
        "--port", type=int, default=8642, help="Port of the retriever; 0 picks a free one."
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    arguments = parser.parse_args()
    sys.exit(search_r1(arguments.out, arguments.port, arguments.overrides))


def search_r1(out: Path, port: int, overrides: Sequence[str]) -> int:
    """Run all stages; return the exit code of the first that fails, else 0."""
    write_data(out)
    with serving(read_corpus(out / "corpus.jsonl"), port) as url:
        own = [f"loop.tasks={out}/train.parquet", f"evaluate.tasks={out}/validation.parquet"]
        own.append(f"generate.env_config={{search_url = '{url}', topk = {default_topk()}}}")
        code = stage("rl", str(CONFIG), "--out", f"{out}/rl", *sets(*own, *overrides))
    code = code or stage("validate", f"{out}/rl/rollouts/*")
    for layout in LAYOUTS:
        code = code or train_again(out, layout)
    return code or compare(out)


def write_data(out: Path) -> None:
    """Write the corpus (two documents per person) and the tasks (a question per person).

    The tasks have SkyRL's columns.
    """
    chosen = random.Random(0)
    homes = {name: chosen.choice(CITIES) for name in NAMES}
    documents = []
    for name, home in homes.items():
        office = chosen.choice([city for city in CITIES if city != home])
        documents += [f'"{name}"\n{name} lives in {home}.', f'"{name}"\n{name} works in {office}.']
    shown = [
        message
        for name in NAMES[:NUM_SHOWN]
        for message in demonstration(name, homes[name], BM25(documents))
    ]
    asked = chosen.sample(NAMES[NUM_SHOWN:], len(NAMES) - NUM_SHOWN)
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"contents": document}) + "\n" for document in documents]
    (out / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    parts = {"validation": asked[:NUM_HELD_OUT], "train": asked[NUM_HELD_OUT:]}
    for split, names in parts.items():
        tasks = [task(name, homes[name], shown, split, row) for row, name in enumerate(names)]
        pl.DataFrame(tasks).write_parquet(out / f"{split}.parquet")


def question(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"Question: Where does {name} live?"}


def demonstration(name: str, home: str, index: BM25) -> list[dict[str, str]]:
    """Build an example conversation for the prompt, in the environment's format."""
    hits = index.search(name, default_topk())
    result = "".join(f"Doc {number}: {text}\n" for number, (text, _) in enumerate(hits, 1))
    found = f"\n<information>{json.dumps({'result': result})}</information>\n"
    return [
        question(name),
        {"role": "assistant", "content": f"<search>{name}</search>"},
        {"role": "user", "content": found},
        {"role": "assistant", "content": f"<answer>{home}</answer>"},
    ]


def task(name: str, home: str, shown: list[dict[str, str]], split: str, row: int) -> dict[str, Any]:
    system = {"role": "system", "content": INSTRUCTION}
    return {
        "data_source": "searchR1_homes",
        "prompt": [system, *shown, question(name)],
        "env_class": "search",
        "reward_spec": {"style": "rule", "ground_truth": {"target": [home]}},
        "extra_info": {"index": row, "split": split},
    }


def default_topk() -> int:
    return tomllib.loads(CONFIG.read_text())["generate"]["env_config"]["topk"]


def stage(*arguments: str) -> int:
    """Run one command in a separate process, so that its memory is freed before the next."""
    print(f"\n$ rollouts {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "rollout_io", *arguments]) as process:
        while True:
            with suppress(KeyboardInterrupt):  # the command receives it too, and exits
                return process.wait()


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def train_again(out: Path, layout: str) -> int:
    """Repeat the RL run's updates with `rollouts train` on its dataset, in the given layout."""
    loop = json.loads((out / "rl/config.json").read_text(encoding="utf-8"))
    sections = {name: loop[name] for name in SECTIONS}
    (out / "train.toml").write_text(to_toml(sections), encoding="utf-8")
    again = [loop["data"]["dataset"], "--model", loop["model"]["path"], "--out", f"{out}/{layout}"]
    config = ["--config", f"{out}/train.toml", "--set", f"batch.sequence_layout={layout}"]
    return stage("train", *again, *config)


def compare(out: Path) -> int:
    """Print the updates of both layouts side by side; return 1 if they differ, else 0."""
    step, merge = (read_metrics(out / layout) for layout in LAYOUTS)
    for number, (a, b) in enumerate(zip(step, merge, strict=True), 1):
        print(
            f"update {number}: loss {a['loss']:.6f} {b['loss']:.6f}, "
            f"gradient norm {a['grad_norm']:.5f} {b['grad_norm']:.5f}, "
            f"sequences {a['num_rows']} {b['num_rows']}, "
            f"tokens {a['num_forwarded_tokens']} {b['num_forwarded_tokens']}"
        )
    seconds = [sum(line["seconds"] for line in lines) for lines in (step, merge)]
    weights = [load_file(latest_checkpoint(out / x) / "model.safetensors") for x in LAYOUTS]
    farthest = max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0])
    print(f"step by step {seconds[0]:.0f} s, merged {seconds[1]:.0f} s")
    print(f"largest difference between weights: {farthest:.1e}")
    pairs = [
        (a[key], b[key]) for a, b in zip(step, merge, strict=True) for key in ("loss", "grad_norm")
    ]
    return int(not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in pairs))


if __name__ == "__main__":
    main()
