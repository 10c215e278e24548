"""Blame compared with what the run recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.forensics.blame import Blame, blame


def recorded_norm(run: Path, update: int) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(lines[update - 1]["grad_norm"])


def check_blame(run: Path, update: int) -> Blame:
    """The gradients of the rows add up to the update's, and so do their shares."""
    found = blame(run, update)
    assert found.gradient_norm == pytest.approx(recorded_norm(run, update), rel=1e-4)
    assert len(found.rows) > 1
    for table in (found.rows, found.trajectories, found.groups, found.shares):
        assert table["share"].sum() == pytest.approx(1, abs=1e-4)
    return found
