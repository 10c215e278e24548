"""Set up the launched processes and their devices, and compare what each of them has."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import inspect
import os
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import rollout_io
from rollout_io.configuration import flat
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import ConfigError
from trainer.config.train_config import PATHS, TrainConfig, default_dtype, uses
from trainer.distributed.meeting import (
    ARRIVAL,
    join_group,
    machines,
    refuse_strangers,
    source_digest,
    together,
)
from trainer.distributed.processes import is_first_here
from trainer.distributed.sharding import is_on


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Create the Accelerator for `--num-processes`, `accelerate launch`, `torchrun`, or one process.

    The optimizer adamw_8bit does not work with FSDP.

    Raises:
        ConfigError: A tracker is not installed, or the launch settings are not supported.
    """
    together(lambda: _check(config), lambda _: _facts(config), patience=ARRIVAL)
    join_group()
    run, dtype = config.run, config.model.dtype or default_dtype()
    precision = "bf16" if dtype == "bfloat16" else "no"
    _forget_other_precision(precision)
    accelerator = Accelerator(
        mixed_precision=precision,
        log_with=list(run.trackers) or None,
        project_dir=run.out,
        cpu="LOCAL_RANK" in os.environ and not torch.accelerator.is_available(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    _MADE.append(weakref.ref(accelerator))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and dtype == "bfloat16":
        # Temperatures and log-probabilities must not be rounded.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return accelerator


def _check(config: TrainConfig) -> None:
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in config.run.trackers:
        if tracker not in available:
            expected = f"an installed tracker ({', '.join(available) or 'none is installed'})"
            raise ConfigError("config_value", "run.trackers", f"`{tracker}`", expected)
    if config.run.log_samples:
        load_tokenizer(config.model.path, needs_template=False)
    _check_launch(config.optimizer.algorithm)
    num_gpus, num_here = torch.accelerator.device_count(), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if torch.accelerator.is_available() and int(num_here) > num_gpus:
        expected = f"at most {num_gpus}, one per GPU"
        raise ConfigError("launch", "--num-processes", num_here, expected)


def _facts(config: TrainConfig) -> dict[str, Any]:
    """What must be the same in all processes before they exchange anything."""
    device = torch.accelerator.current_accelerator(check_available=True)
    settings = flat(dataclasses.asdict(config))
    return {
        "rollout-io": rollout_io.__version__,
        "source code of rollout-io": source_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.type if device else "cpu",
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "FSDP": {k: v for k, v in sorted(os.environ.items()) if "FSDP" in k},
    } | {key: settings[key] for key in settings if key not in PATHS}


_MADE: list[weakref.ref[Accelerator]] = []
"""The accelerators of this process so far."""


def _forget_other_precision(precision: str) -> None:
    """Clear the precision that Accelerate keeps for the whole process, after a run in another one."""
    state = AcceleratorState._shared_state
    if not state or state.get("_mixed_precision") == precision:
        return
    gc.collect()
    is_ours = bool(_MADE)
    if not is_ours or any(living() is not None for living in _MADE):
        used = state.get("_mixed_precision")
        finding = f"{used}, in use by another run or Accelerator of this process"
        hint = "drop that run first, or train in a process of its own"
        raise ConfigError("launch", "dtype", finding, precision, hint)
    _MADE.clear()
    AcceleratorState._reset_state()


def _check_launch(optimizer: str) -> None:
    refuse_strangers()
    where, expected = "accelerate launch", "data parallelism or FSDP2"
    num_accumulated = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if num_accumulated != "1":
        hint = "set batch.groups_per_mini_batch: it determines the size of an optimizer step"
        finding = f"gradient_accumulation_steps {num_accumulated}"
        raise ConfigError(
            "launch", where, finding, "1, because other values would divide the gradient", hint
        )
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        hint = "use FSDP2: it shards parameters, gradients and optimizer state like ZeRO-3"
        raise ConfigError("launch", where, "DeepSpeed", expected, hint)
    if not is_on("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        hint = "pass --fsdp_version 2, or set fsdp_version: 2 under fsdp_config"
        raise ConfigError("launch", where, "FSDP version 1", expected, hint)
    if optimizer == "adamw_8bit":
        finding, expected = "adamw_8bit with FSDP", "adamw, whose state can be sharded"
        hint = "pass --set optimizer.algorithm=adamw"
        raise ConfigError("launch", "optimizer.algorithm", finding, expected, hint)
    # Every process loads the model, which is checked before anything is sharded.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


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
