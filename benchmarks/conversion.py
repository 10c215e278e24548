"""Compare the conversion of a log of calls with typical glue code, and with parsing alone.

`python -m benchmarks.conversion [--megabytes 500]` first converts the shop log, repeated with
renamed sessions, then chats with long contexts. All ratios are from one run, in which the compared
programs alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import rollout_io

SHOP = Path(__file__).parents[1] / "examples" / "shop.calls.jsonl"
NUM_PAIRS = 5
NUM_TURNS, TURN_TOKENS = 20, 1_000
PEAK = (
    "import pathlib, rollout_io, sys\n"
    "rollout_io.convert([sys.argv[1]], sys.argv[2])\n"
    "lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
    "print(next(line for line in lines if line.startswith('VmHWM')).split()[1])\n"
)


class _Request(msgspec.Struct, gc=False):
    messages: msgspec.Raw
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None


class _Message(msgspec.Struct, gc=False):
    reasoning: str | None = None
    content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct, gc=False):
    index: int
    token_ids: list[int]
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    prompt_token_ids: list[int]
    choices: list[_Choice]


class _Call(msgspec.Struct, gc=False):
    """The fields of a call that a rollout table keeps."""

    session: str
    request: _Request
    response: _Response
    agent: str | None = None
    time: float | None = None
    final: bool = False
    reward: float | None = None
    policy_version: int | None = None


def repeated(path: Path, num_bytes: int) -> Path:
    """Write copies of the shop log to a file, with different session names in each copy."""
    lines = SHOP.read_bytes().splitlines(keepends=True)
    written = copy = 0
    with path.open("wb") as file:
        while written < num_bytes:
            prefix = b'"session": "copy-%d-' % copy
            written += sum(file.write(line.replace(b'"session": "', prefix, 1)) for line in lines)
            copy += 1
    return path


def grown(path: Path, num_bytes: int) -> Path:
    """Write chats of 20 turns and up to 20,000 tokens, in the format of the shop log."""
    record = json.loads(SHOP.read_bytes().splitlines()[0]) | {"final": False}
    del record["response"]["usage"]  # its counts would not match the new prompts
    rng = np.random.default_rng(0)
    written = chat = 0
    with path.open("wb") as file:
        while written < num_bytes:
            ids = rng.integers(0, 49_152, NUM_TURNS * TURN_TOKENS).tolist()
            for turn in range(1, NUM_TURNS + 1):
                record["session"], record["time"] = f"chat-{chat}/0", float(turn)
                record["response"]["prompt_token_ids"] = ids[: turn * TURN_TOKENS]
                written += file.write(json.dumps(record).encode() + b"\n")
            chat += 1
    return path


def typed_parse(log: Path) -> None:
    """Decode the kept fields of every line, and discard them."""
    decoder = msgspec.json.Decoder(_Call)
    with log.open("rb") as file:
        for line in file:
            decoder.decode(line)


def halves(log: Path, folder: Path) -> list[Path]:
    """Write the two halves of a log to files."""
    paths = [folder / "half-0.jsonl", folder / "half-1.jsonl"]
    middle = log.stat().st_size // 2
    with log.open("rb") as file, paths[0].open("wb") as first, paths[1].open("wb") as second:
        for line in file:
            (first if first.tell() < middle else second).write(line)
    return paths


def parse_at_once(logs: Sequence[Path]) -> None:
    """Parse all logs at once, each in a new process."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=typed_parse, args=(log,)) for log in logs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def glue(log: Path, out: Path) -> None:
    """Convert a log like a simple script: write all fields to Parquet with `datasets`."""
    import datasets  # imported here, because worker processes import this module too

    with log.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    datasets.Dataset.from_list(records).to_parquet(str(out / "glue.parquet"))


def lean_glue(log: Path, out: Path) -> None:
    """Convert a log like `glue`, but write only the fields that a rollout table keeps."""
    import datasets

    with log.open(encoding="utf-8") as file:
        rows = [_row(json.loads(line)) for line in file]
    datasets.Dataset.from_list(rows).to_parquet(str(out / "glue.parquet"))


def _row(call: dict[str, Any]) -> dict[str, Any]:
    choice = call["response"]["choices"][0]
    return {
        "session": call["session"],
        "agent": call["agent"],
        "time": call["time"],
        "prompt_token_ids": call["response"]["prompt_token_ids"],
        "response_ids": choice["token_ids"],
        "rollout_logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
        "stop_reason": choice["finish_reason"],
        "temperature": call["request"].get("temperature"),
        "messages": json.dumps(call["request"]["messages"]),
        "response_text": choice["message"]["content"],
    }


def seconds(work: Callable[[], object]) -> float:
    """Call `work`, and return the wall time in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_megabytes(log: Path, folder: Path) -> float:
    """Convert a log in a separate process, and return the peak memory of the process."""
    out = folder / "peak"
    command = [sys.executable, "-c", PEAK, str(log), str(out)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return int(found.stdout) / 1e3


def compare(name: str, log: Path, folder: Path) -> None:
    """Time the conversion of a log and its alternatives, and print speeds and ratios."""
    out, num_mb = folder / "ours", log.stat().st_size / 1e6

    def ours(workers: int = 1) -> None:
        shutil.rmtree(out, ignore_errors=True)
        rollout_io.convert([log], out, workers=workers)

    ours()  # warm up imports
    pairs = [(seconds(lambda: typed_parse(log)), seconds(ours)) for _ in range(NUM_PAIRS)]
    parse_s, ours_s = min(p for p, _ in pairs), min(o for _, o in pairs)
    ratios = sorted(o / p for p, o in pairs)
    print(f"{num_mb:,.0f} MB of calls, {name}")
    print(f"typed parse of the kept fields alone: {parse_s:.2f} s, {num_mb / parse_s:,.0f} MB/s")
    print(f"rollout_io.convert, 1 worker:  {ours_s:.2f} s, {num_mb / ours_s:,.0f} MB/s")
    middle = ratios[len(ratios) // 2]
    print(
        f"  {middle:.2f}x the parse alone (median of {NUM_PAIRS} pairs, {ratios[0]:.2f}-{ratios[-1]:.2f})"
    )
    print(f"  limit: the typed parse; {parse_s / ours_s:.0%} of it reached")
    parts = halves(log, folder)
    limit_s = min(seconds(lambda: parse_at_once(parts)) for _ in range(2))
    two_s = min(seconds(lambda: ours(2)) for _ in range(2))
    print(f"rollout_io.convert, 2 workers: {two_s:.2f} s, {num_mb / two_s:,.0f} MB/s")
    print(
        f"  limit: typed parses of both halves at once, {limit_s:.2f} s; {limit_s / two_s:.0%} of it reached"
    )
    print(
        f"  {ours_s / two_s:.2f}x as fast as 1 worker; limit: the parses, {parse_s / limit_s:.2f}x"
    )
    for fields, work in (("all fields", glue), ("the kept fields", lean_glue)):
        glue_s = seconds(lambda work=work: work(log, folder))
        print(f"json.loads + datasets, {fields}: {glue_s:.1f} s, {num_mb / glue_s:,.0f} MB/s")
        print(f"  rollout_io.convert with 1 worker is {glue_s / ours_s:.1f}x as fast")


def main() -> None:
    """Compare speeds, then print peak memory for logs of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--memory", type=int, nargs="*", default=[100, 2000], metavar="MEGABYTES")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = options.megabytes * 1_000_000
        compare("short chats", repeated(folder / "log.jsonl", num_bytes), folder)
        compare("contexts up to 20,000 tokens", grown(folder / "log.jsonl", num_bytes), folder)
        for size in options.memory:
            log = repeated(folder / "log.jsonl", size * 1_000_000)
            print(f"peak memory for {size:,} MB: {peak_megabytes(log, folder):,.0f} MB")


if __name__ == "__main__":
    main()
