"""Digests of the models and of the user's functions of a run, to compare machines."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

from trainer.config.train_config import TrainConfig, uses
from trainer.distributed.meeting import machines
from trainer.distributed.processes import is_first_here


def model_digests(config: TrainConfig) -> dict[str, Any]:
    """Hash the models' directories and the files of the user's functions, by key of the configuration.

    Empty on a single machine, and in all but one process of each machine, because it reads all
    weights (about 1 s per GB).
    """
    if len(set(machines())) == 1 or not is_first_here():
        return {}
    models = {
        "model.path": config.model.path,
        "model.critic_model": config.model.critic_model,
        "loss.reference_model": config.loss.reference_model,
    }
    functions = {
        key: inspect.getfile(inspect.unwrap(one.function))
        for key, one in uses(config).items()
        if one.location
    }
    digests = dict[str, Any]()
    for key, path in (models | functions).items():
        if path:
            files = _files(Path(path))
            digests |= {f"{key}: {name}": _digest(file) for name, file in files.items()}
            digests[f"{key}: number of files"] = len(files)
    return digests


def _files(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {path.name: path}
    files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*"))}
    return {name: file for name, file in files.items() if file.is_file() and name[0] != "."}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
