"""How a run was launched: processes, devices, and who holds which parameters."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    fsdp2_prepare_model,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from schemas.errors import RolloutError
from trainer.config import TrainConfig
from trainer.sharding import is_sharded

PATIENCE = timedelta(hours=2)
"""How long processes wait for each other, such as for the one that writes a large checkpoint."""


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The processes and devices of `accelerate launch`, `torchrun`, or of a single process.

    Raises:
        RolloutError: A tracker is not installed, or the launch asks for what cannot be done here.
    """
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in config.trackers:
        if tracker not in available:
            expected = f"one of those installed: {', '.join(available) or 'none'}"
            raise RolloutError("config_value", "trackers", f"`{tracker}`", expected)
    _check_launch(config)
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=list(config.trackers) or None,
        project_dir=config.out,
        cpu="LOCAL_RANK" in os.environ and not torch.accelerator.is_available(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
    )
    if accelerator.num_processes != num_launched:
        got = f"{num_launched} processes that do not know of each other"
        hint = "torchrun --nproc_per_node N -m rollout_io train ..."
        raise RolloutError("launch", "WORLD_SIZE", got, "one run", hint)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and config.dtype == "bfloat16":
        # Neither the temperatures nor the log-probabilities may be rounded.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return accelerator


def wrap(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Place a model, and replicate or shard its parameters over the processes.

    Raises:
        RolloutError: The launch asks for sharded parameters, and they are not.
    """
    model, optimizer = accelerator.prepare(model, optimizer)
    if _is_on("ACCELERATE_USE_FSDP") and not is_sharded(model):
        got, expected = f"whole parameters on {accelerator.device.type}", "sharded ones, by FSDP"
        hint = "FSDP needs GPUs; launch without --use_fsdp"
        raise RolloutError("launch", "accelerate launch", got, expected, hint)
    return model, optimizer


def wrap_frozen(accelerator: Accelerator, model: nn.Module) -> Any:
    """Place a model that only answers; sharded where the others are."""
    model.requires_grad_(requires_grad=False)
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    return accelerator.prepare_model(model, evaluation_mode=True)


def _check_launch(config: TrainConfig) -> None:
    where, expected = "accelerate launch", "data parallelism or FSDP2"
    num_accumulated = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if num_accumulated != "1":
        hint = "groups_per_mini_batch says what a step takes, whatever tokens_per_micro_batch is"
        got = f"gradient_accumulation_steps {num_accumulated}"
        raise RolloutError("launch", where, got, "1: it would divide the gradient", hint)
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        hint = "FSDP2 shards parameters, gradients and optimizer state as ZeRO-3 does"
        raise RolloutError("launch", where, "DeepSpeed", expected, hint)
    if not _is_on("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        hint = "--fsdp_version 2, or fsdp_version: 2 under fsdp_config"
        raise RolloutError("launch", where, "FSDP version 1", expected, hint)
    if config.optimizer == "adamw_8bit":
        got, expected = "adamw_8bit with FSDP", "adamw, whose state can be sharded"
        raise RolloutError("launch", "optimizer", got, expected, "--set optimizer=adamw")
    # Every process loads the model: it is tried out before anything is sharded.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")
