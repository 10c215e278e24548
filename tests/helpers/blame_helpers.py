"""Blame compared with replays of the same update without a row."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer.forensics.blame.blame import Blame, blame
from trainer.forensics.replay.changes import Changes
from trainer.forensics.replay.reconstruct import reconstruct
from trainer.forensics.replay.replay import replay


def recorded_norm(run: Path, update: int) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(lines[update - 1]["grad_norm"])


def check_blame(
    run: Path,
    update: int,
    num_rows: int,
    held_out: str | None = None,
    *,
    is_simple: bool = True,
) -> Blame:
    """The norms without a row are those of replays without it; null if no simple factor gives them."""
    found = blame(run, update, top=num_rows, held_out=held_out)
    assert found.gradient_norm == pytest.approx(recorded_norm(run, update), rel=1e-4)
    of_formula = blame(run, update, top=0)  # a difference of squares
    both = found.rows.join(of_formula.rows, on="row", suffix="_of_formula")
    assert len(both) == len(found.rows) > 1
    close = {"rtol": 1e-4, "atol": 1e-3 * found.gradient_norm}
    is_known = both["norm_without"].is_not_null()
    assert is_known.all() == is_simple
    both = both.filter(is_known)
    np.testing.assert_allclose(both["norm_without"], both["norm_without_of_formula"], **close)
    for row in found.rows.filter(is_known).head(num_rows).iter_rows(named=True):
        check_without(found, row["norm_without"], Changes(rows=row["selectors"]))
    num_units = min(num_rows, 3) * (num_rows > 1)
    for row in found.trajectories.head(num_units).iter_rows(named=True):
        if row["norm_without"] is not None:
            check_without(found, row["norm_without"], Changes(rows=[row["trajectory_id"]]))
    for row in found.groups.head(num_units).iter_rows(named=True):
        if len(found.groups) > 1 and row["norm_without"] is not None:
            condition = f"instance_id = '{row['instance_id']}'"
            check_without(found, row["norm_without"], Changes(condition=condition))
    if not is_simple:
        return found
    first = found.rows.row(0, named=True)
    assert first["step_change"] == pytest.approx(step_change(found, first), rel=1e-3)
    if held_out is not None:
        assert math.isfinite(first["held_out_change"])
        assert first["held_out_change"] != 0
    return found


def check_without(found: Blame, norm_without: float, changes: Changes) -> None:
    changed = replay(found.run, found.update, changes).changed
    assert changed is not None
    expected = changed["grad_norm"]
    assert norm_without == pytest.approx(expected, abs=0.01 * found.gradient_norm)
    assert norm_without == pytest.approx(expected, rel=1e-3)


def step_change(found: Blame, row: dict) -> float:
    """How much the step differs in a replay without a row, from the weights after both."""
    learner = reconstruct(found.run, found.update).run
    before = [p for p in learner.policy.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in before])
    with tempfile.TemporaryDirectory() as folder:
        full, without = Path(folder, "full"), Path(folder, "without")
        replay(found.run, found.update, out=full)
        replay(found.run, found.update, Changes(rows=row["selectors"]), out=without)
        after, other = (weights_of(path, learner.policy) for path in (full, without))
    return float((other - after).norm() / (after - before).norm())


def weights_of(model: Path, policy: torch.nn.Module) -> torch.Tensor:
    """The trained weights of a model directory, in the order of the policy's parameters."""
    adapter = model / "adapter" / "adapter_model.safetensors"
    if adapter.is_file():
        saved = load_file(adapter)
        names = [n.removeprefix("model.") for n, p in policy.named_parameters() if p.requires_grad]
        return torch.cat(
            [saved["base_model.model." + n.replace(".default.", ".")].flatten() for n in names]
        )
    saved = load_file(model / "model.safetensors")
    names = [n.removeprefix("model.") for n, p in policy.named_parameters() if p.requires_grad]
    return torch.cat([saved[name].flatten() for name in names])
