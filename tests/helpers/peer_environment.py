"""Run a program of the tests in the environment of another framework."""

import json
import os
import subprocess

import pytest

from tests.conftest import ROOT


def report_of(environment, make, *arguments):
    """The JSON that a program prints last in ROOT/environment; skips, naming `make`'s target, without it."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}: run `make {make}`")
    done = subprocess.run(
        [str(python), "-W", "ignore", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
