"""Training state that a checkpoint stores beside the models, to resume from."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from schemas.errors import InputError
from schemas.ragged import IntArray
from trainer.batches.plan import Plan
from trainer.distributed.processes import gather_in_main
from trainer.distributed.sharding import sharded_like, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position of a run between two mini-batches.

    Attributes:
        batch: Number of completed batches, over all epochs.
        mini_batch: Completed mini-batches of the current batch, over its `epochs_per_batch` epochs.
        kl_coef: Coefficient of the divergence in the current batch's reward.
        outputs: Model outputs at the start of the current batch, [T] float32 on the CPU, by name:
            see `Batch.outputs`. Empty between batches.
        local_slots: With several processes, the [T] indices of the outputs of this process among those of
            all, and the number of all; None: the outputs are complete, as in a checkpoint.
    """

    batch: int = 0
    mini_batch: int = 0
    kl_coef: float
    outputs: dict[str, Tensor] = field(default_factory=dict)
    local_slots: tuple[IntArray, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        position: Position of the run.
        global_step: Optimizer steps taken.
        num_skipped: Mini-batches without an optimizer step.
        trained_groups: Groups that contributed a gradient to a step.
    """

    position: Position
    global_step: int = 0
    num_skipped: int = 0
    trained_groups: frozenset[str] = frozenset()

    def after(self, position: Position, groups: frozenset[str], *, stepped: bool) -> Progress:
        """Return the progress after a mini-batch in which these groups have a gradient."""
        return Progress(
            position=position,
            global_step=self.global_step + stepped,
            num_skipped=self.num_skipped + (not stepped),
            trained_groups=self.trained_groups | groups if stepped else self.trained_groups,
        )

    @property
    def num_mini_batches(self) -> int:
        """Number of mini-batches so far, with or without a step; each has a line of metrics."""
        return self.global_step + self.num_skipped


START = Progress(position=Position(kl_coef=0.0))


OptimizerTensors = dict[str, dict[str, Tensor]]
"""Per optimizer (`optimizer`, `critic_optimizer`): state tensors by parameter and name."""


Optimizers = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]
"""Models with their optimizers, by name; see `trainer.run.run.Run.optimizers`."""


def optimizer_tensors(optimizers: Optimizers, *, keep: bool) -> OptimizerTensors:
    """Gather the optimizers' state as full tensors; all processes must call this together.

    Processes that do not `keep` it only help to gather it.
    """
    return {
        name: _state_of(optimizer, model, keep=keep)
        for name, (model, optimizer) in optimizers.items()
    }


def with_whole_outputs(accelerator: Accelerator, progress: Progress) -> Progress:
    """Return the progress to save, with the outputs of all processes; all must call it together.

    Only the main process gets them.
    """
    position = progress.position
    if position.local_slots is None:
        return progress
    slots, number = position.local_slots
    # A process has the outputs of the rows that it forwards. A checkpoint has those of all, so that it can
    # be resumed with another number of processes.
    sent = save(position.outputs | {"slots": torch.from_numpy(slots)})
    outputs = {name: torch.full((number,), torch.nan) for name in position.outputs}
    for part in map(load, gather_in_main(accelerator, sent)):
        for name, values in outputs.items():
            values[part["slots"]] = part[name]
    return replace(progress, position=replace(position, outputs=outputs, local_slots=None))


def save_state(path: Path, optimizers: OptimizerTensors, digest: str, progress: Progress) -> None:
    """Write the state to the directory `path` as JSON and safetensors; loading it runs no code."""
    path.mkdir()
    for name, tensors in optimizers.items():
        save_file(tensors, path / f"{name}.safetensors")
    save_file(progress.position.outputs, path / "batch.safetensors")
    position = progress.position
    run = {
        "batch": position.batch,
        "mini_batch": position.mini_batch,
        "kl_coef": position.kl_coef,
        "global_step": progress.global_step,
        "num_skipped": progress.num_skipped,
        "trained": sorted(progress.trained_groups),
        "dataset": digest,
    }
    (path / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    (path / "rng.json").write_text(json.dumps(generators()) + "\n", encoding="utf-8")


IN_DIGEST = "trajectory_id", "step_index", "digest"
"""Columns of a dataset's index that identify its rows, with a digest of their values that train."""


def dataset_digest(plan: Plan, index: pl.DataFrame) -> str:
    """Hash the plan's trajectories, returns and masks, and every row's values that train, in order."""
    tables = plan.trajectories, index.select(IN_DIGEST)
    return table_digest(*tables)


def table_digest(*tables: pl.DataFrame) -> str:
    """Hash the values of tables."""
    return hashlib.sha256("".join(table.write_csv() for table in tables).encode()).hexdigest()


def load_progress(path: Path, digest: str | None = None) -> Progress:
    """Load the progress from a checkpoint's `state/` directory.

    If `digest` is given, it must match the digest of the run's dataset.

    Raises:
        InputError: The state cannot be read, or was written for a different dataset.
    """
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        outputs = load_file(path / "batch.safetensors")
        same = digest in (None, run["dataset"])
        position = Position(
            batch=run["batch"],
            mini_batch=run["mini_batch"],
            kl_coef=run["kl_coef"],
            outputs=outputs,
        )
        progress = Progress(
            position=position,
            global_step=run["global_step"],
            num_skipped=run["num_skipped"],
            trained_groups=frozenset(run["trained"]),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if not same:
        finding = "its trajectories, returns or tokens have changed since the run started"
        hint = "resume with the original dataset, or start a new run"
        raise InputError("resume_dataset", "dataset", finding, hint=hint)
    return progress


def restore(path: Path, optimizers: Optimizers) -> None:
    """Restore the state of the optimizers and random number generators.

    Raises:
        InputError: The state cannot be read, or belongs to different models.
    """
    try:
        for name, (model, optimizer) in optimizers.items():
            _restore_optimizer(optimizer, model, path / f"{name}.safetensors")
        restore_generators(json.loads((path / "rng.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finding = f"cannot read the state of the run: {reason}"
    hint = "write the name of an earlier checkpoint into checkpoints/latest"
    return InputError("checkpoint_state", str(path), finding, hint=hint)


def _state_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, keep: bool
) -> dict[str, Tensor]:
    """Return an optimizer's state tensors by parameter and name (`lm_head.weight.exp_avg`)."""
    names, tensors = [name for name, _ in _parameters(optimizer, model)], {}
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    for number, values in state.items():
        for name, tensor in _flat(values):
            if keep:
                tensors[f"{names[number]}.{name}"] = tensor
    return tensors


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Flatten optimizer state into named tensors.

    bitsandbytes stores the step as an int, nests dicts, and shares tensors between parameters.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((inner, tensor.clone()) for inner, tensor in _flat(value))
        else:
            yield name, whole(torch.as_tensor(value)).contiguous()


def _restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    parameters = _parameters(optimizer, model)
    numbers = {name: number for number, (name, _) in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in load_file(path).items():
        parameter, _, name = key.rpartition(".")
        number = numbers[parameter]
        # bitsandbytes counts its steps in an int, others in a float tensor: give each back what it had.
        count = tensor.shape == () and tensor.dtype == torch.int64
        value = int(tensor) if count else sharded_like(tensor.clone(), parameters[number][1])
        state.setdefault(number, {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> list[tuple[str, nn.Parameter]]:
    """List the optimizer's parameters in order, with their names in the unwrapped model."""
    names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
    return [(names[p], p) for group in optimizer.param_groups for p in group["params"]]


def generators() -> dict[str, Any]:
    """Return the state of the random number generators, as JSON types."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in on_gpu],
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Set the random number generators to a state from `generators`."""
    version, values, gauss = states["python"]
    random.setstate((version, tuple(values), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if num_gpus := torch.cuda.device_count():
        torch.cuda.set_rng_state_all(
            [torch.tensor(state, dtype=torch.uint8) for state in states["cuda"][:num_gpus]]
        )
