"""Time each verb on tiny data, next to the time it takes to import its libraries.

    python -m benchmarks.startup [--rounds N]

The limit is an interpreter that imports polars, pyarrow, numpy, msgspec and click, or only click
for verbs that need no other library. Verbs and limits alternate; each time is the minimum over all
rounds, and CPU time is user plus system.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
CALLS, REWARDS = str(EXAMPLES / "shop.calls.jsonl"), str(EXAMPLES / "shop.rewards.jsonl")
VERBS = {
    "--help": "--help",
    "stats --help": "stats --help",
    "view --help": "view --help",
    "record --help": "record --help",
    "formats --templates": "formats --templates",
    "formats": "formats",
    "convert": f"convert {CALLS} --rewards {REWARDS} --out OUT",
    "validate": "validate shop",
    "inspect": "inspect shop",
    "stats": "stats shop",
    "filter": "filter shop --where reward>=0 --out OUT",
    "merge": "merge shop --out OUT",
    "merge --undo": "merge --undo merged --out OUT",
    "drift": "drift shop",
    **{
        f"export {name}": f"export shop --format {name} --out OUT"
        for name in ("skyrl", "trl", "verl", "hf", "parquet")
    },
}
HEAVY = "import polars, pyarrow, numpy, msgspec, click"
LIMITS = {"imports of click": "import click", "imports of all five": HEAVY}
OF_CLICK = ("--help", "stats --help", "view --help", "record --help", "formats --templates")
"""Verbs whose limit is the import of click alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    commands = {name: [sys.executable, "-c", code] for name, code in LIMITS.items()}
    commands |= {name: _command(arguments) for name, arguments in VERBS.items()}
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (VERBS["convert"].replace("OUT", "shop"), "merge shop --out merged"):
            _measure(_command(arguments), folder)
        found = [
            {name: _measure(command, folder) for name, command in commands.items()}
            for _ in range(rounds)
        ]
    times = {
        name: tuple(map(min, zip(*(one[name] for one in found), strict=True))) for name in commands
    }
    print(f"{'':22}{'wall, s':>9}{'CPU, s':>9}{'limit, CPU s':>14}{'limit / CPU':>13}")
    for name, (wall_s, cpu_s) in times.items():
        limit_s = times["imports of click" if name in OF_CLICK else "imports of all five"][1]
        limit = "" if name in LIMITS else f"{limit_s:14.3f}{limit_s / cpu_s:13.0%}"
        print(f"{name:22}{wall_s:9.3f}{cpu_s:9.3f}{limit}")


def _command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollout_io", *arguments.split()]


def _measure(command: list[str], folder: str) -> tuple[float, float]:
    """Run a command; return its wall time and its CPU time in seconds."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    for out in Path(folder).glob("OUT*"):
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    return wall_s, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
