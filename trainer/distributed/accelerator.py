"""The Accelerator of a run: launch settings, and models replicated or sharded (FSDP2) over devices.

Sharded tensors are gathered for checkpoints, and tensors of checkpoints sharded like their parameters.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import rollout_io
from rollout_io.configuration import flat
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import ConfigError
from trainer.config.train_config import PATHS, TrainConfig, default_dtype
from trainer.distributed.meeting import ARRIVAL, join_group, refuse_strangers, together
from trainer.models.pictures import without_encoder


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
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
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
        "source code of rollout-io": _source_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.type if device else "cpu",
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "FSDP": {k: v for k, v in sorted(os.environ.items()) if "FSDP" in k},
    } | {key: settings[key] for key in settings if key not in PATHS}


_PACKAGES = ("schemas", "rollout_io", "pipelines", "trainer")


def _source_digest() -> str:
    """Hash the source code of the product, which may have been edited on one machine."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


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


def is_sharded(model: nn.Module) -> bool:
    """True if this process stores only part of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gathered(tensor: Tensor) -> Tensor:
    """Gather the shards of a tensor. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, gathering its shards. All processes must call this together."""
    return gathered(tensor.detach()).cpu()


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor] | None:
    """Gather all weights of a sharded model by name; tied weights share one tensor.

    Processes that do not `keep` the weights only help to gather them, and get None. All processes
    get None if the model is not sharded.
    """
    if not is_sharded(model):
        return None
    state, tensors = model.state_dict(keep_vars=True), dict[int, Tensor]()
    for tensor in state.values():
        if id(tensor) not in tensors:
            gathered = whole(tensor)
            tensors[id(tensor)] = gathered if keep else gathered.new_empty(0)
    return {name: tensors[id(tensor)] for name, tensor in state.items()} if keep else None


def under(module: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the weights of a submodule, keyed by their names within it.

    Example:
        >>> under("model", {"model.head": torch.zeros(1), "value_head.bias": torch.zeros(1)}).keys()
        dict_keys(['head'])
    """
    prefix = f"{module}."
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard an optimizer's tensor like its parameter; unchanged if the parameter is not sharded."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        mesh = parameter.device_mesh
        return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)
    return tensor


def without_reduction(model: nn.Module) -> AbstractContextManager[object]:
    """Accumulate gradients without exchanging them, if the model supports it."""
    no_sync = getattr(model, "no_sync", nullcontext)
    context: AbstractContextManager[object] = no_sync()
    return context


def wrap(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Place a policy or critic, and replicate or shard its parameters over the processes.

    Raises:
        ConfigError: The launch requests sharded parameters but they are not sharded.
    """
    with _whole_encoder(accelerator, model):
        model, optimizer = accelerator.prepare(model, optimizer)
    if is_on("ACCELERATE_USE_FSDP") and not is_sharded(model):
        finding = f"FSDP does not shard parameters on {accelerator.device.type}"
        hint = "launch without --use_fsdp: FSDP needs GPUs"
        raise ConfigError("launch", "accelerate launch", finding, hint=hint)
    return model, optimizer


def wrap_frozen(accelerator: Accelerator, model: nn.Module) -> Any:
    """Place a model that is only evaluated; shard it if the trained models are sharded."""
    model.requires_grad_(requires_grad=False)
    if accelerator.is_fsdp2:
        with _whole_encoder(accelerator, model):
            return fsdp2_prepare_model(accelerator, model)
    return accelerator.prepare_model(model, evaluation_mode=True)


@contextmanager
def _whole_encoder(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Keep the encoder of pictures out of FSDP in this context: each process has all of it.

    Only some processes have pictures to encode at a time, so a sharded encoder would wait forever
    for the others.
    """
    if not accelerator.is_fsdp2:
        yield
        return
    with without_encoder(model.model) as parts:
        yield
    for part in parts:
        part.to(accelerator.device)
        part.forward = accelerator.autocast()(part.forward)


def is_on(variable: str) -> bool:
    """True if an environment variable of Accelerate is set to true."""
    return os.environ.get(variable, "").lower() in ("1", "true")
