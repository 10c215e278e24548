"""Small runs whose updates are replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import trainer
from tests.helpers.configs import train_config
from trainer.forensics.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay_comparison import TIMES
from trainer.update import make_update

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "learning_rate_schedule": "cosine",
    "warmup_updates": 2,
    "groups_per_batch": 2,
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 2,
    "num_epochs": 2,
    "tokens_per_micro_batch": 32,
}


def train(paths: dict[str, str], out: Path, *, resume: bool = False, **settings: Any) -> Path:
    """Train on three groups: 12 updates in batches of 4, 2, 4 and 2."""
    given = paths | SETTINGS | settings
    trainer.train(train_config(**given, out=str(out)), resume=resume)
    return out


def line_of(found: Reconstruction) -> dict[str, Any]:
    """Make the step, and return its line of metrics, without times."""
    return plain(make_update(found.run, found.pending, found.progress).metrics)


def plain(line: Any) -> dict[str, Any]:
    """The line as the file has it, without times."""
    kept = {name: value for name, value in line.items() if name not in TIMES}
    return dict(json.loads(json.dumps(kept)))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def gradient_of(run: Path, update: int, change: Any = None) -> torch.Tensor:
    """The gradient of an update before it is clipped, of the mini-batch that `change` returns."""
    found = reconstruct(run, update)
    step = change(found) if change else found.pending
    kept: list[torch.Tensor] = []
    clip = torch.nn.utils.clip_grad_norm_

    def spy(parameters: Any, *args: Any) -> Any:
        given = list(parameters)
        kept.append(torch.cat([p.grad.flatten().clone() for p in given if p.grad is not None]))
        return clip(given, *args)

    torch.nn.utils.clip_grad_norm_ = spy
    try:
        make_update(found.run, step, found.progress)
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    return kept[0]
