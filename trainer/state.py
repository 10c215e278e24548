"""What a checkpoint keeps beside the models: where the run is, and what it needs to go on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from schemas.errors import RolloutError
from trainer.critic import CriticLearner
from trainer.plan import Plan
from trainer.sharding import sharded_like, whole
from trainer.update import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run is between two mini-batches.

    Attributes:
        batch: Batches gone through, over all epochs.
        mini_batch: Mini-batches of the next batch gone through, over its `epochs_per_batch`.
        kl_coef: What that batch multiplies the divergence by before it is taken off the reward.
        known: What the models said at that batch's start, [T] float32 on the CPU, by name:
            `old_logprobs`, `ref_logprobs`, `values`, those that the run needs. Empty between
            batches.
    """

    batch: int = 0
    mini_batch: int = 0
    kl_coef: float
    known: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        position: What comes next.
        global_step: Optimizer steps made.
        num_skipped: Mini-batches without a step.
        trained: Groups that gave a step a gradient.
    """

    position: Position
    global_step: int = 0
    num_skipped: int = 0
    trained: frozenset[str] = frozenset()

    def after(self, position: Position, moving: frozenset[str], *, stepped: bool) -> Progress:
        """The progress after one more mini-batch, in which the groups `moving` have a gradient."""
        return Progress(
            position=position,
            global_step=self.global_step + stepped,
            num_skipped=self.num_skipped + (not stepped),
            trained=self.trained | moving if stepped else self.trained,
        )

    @property
    def num_mini_batches(self) -> int:
        """Lines of `metrics.jsonl`."""
        return self.global_step + self.num_skipped


OptimizerTensors = dict[str, dict[str, Tensor]]
"""By optimizer, `optimizer` or `critic_optimizer`: state by parameter and name."""


def optimizer_tensors(learner: Learner, critic: CriticLearner | None) -> OptimizerTensors:
    """The optimizers' state: whole tensors, for which all processes must ask together."""
    keep = learner.accelerator.is_main_process
    found = {"optimizer": _state_of(learner.optimizer, learner.policy, keep=keep)}
    if critic is not None:
        found["critic_optimizer"] = _state_of(critic.optimizer, critic.critic, keep=keep)
    return found


def save_state(path: Path, optimizers: OptimizerTensors, digest: str, progress: Progress) -> None:
    """Write the directory `path`: JSON and safetensors, nothing that runs code when it is read."""
    path.mkdir()
    for name, tensors in optimizers.items():
        save_file(tensors, path / f"{name}.safetensors")
    save_file(progress.position.known, path / "batch.safetensors")
    position = progress.position
    run = {
        "batch": position.batch,
        "mini_batch": position.mini_batch,
        "kl_coef": position.kl_coef,
        "global_step": progress.global_step,
        "num_skipped": progress.num_skipped,
        "trained": sorted(progress.trained),
        "dataset": digest,
    }
    (path / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    (path / "rng.json").write_text(json.dumps(_generators()) + "\n", encoding="utf-8")


def dataset_digest(plan: Plan, index: pl.DataFrame) -> str:
    """Of the plan's trajectories, returns and masks, and of every row's lengths and sum of tokens.

    Args:
        plan: The run's plan.
        index: What `trainer.data.index_rows` returns.
    """
    counted = ("num_prompt_tokens", "num_trained_tokens", "num_forwarded_tokens", "token_sum")
    tables = plan.trajectories, index.select("trajectory_id", "step_index", *counted)
    return hashlib.sha256("".join(table.write_csv() for table in tables).encode()).hexdigest()


def load_progress(path: Path, digest: str) -> Progress:
    """Where the run was that wrote `path`.

    Raises:
        RolloutError: The state cannot be read, or the dataset is not the one it was written for.
    """
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        known = load_file(path / "batch.safetensors")
        same = run["dataset"] == digest
        position = Position(
            batch=run["batch"], mini_batch=run["mini_batch"], kl_coef=run["kl_coef"], known=known
        )
        progress = Progress(
            position=position,
            global_step=run["global_step"],
            num_skipped=run["num_skipped"],
            trained=frozenset(run["trained"]),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if not same:
        got = "other trajectories, returns or tokens than the run began with"
        raise RolloutError("resume_dataset", "dataset", got, "the same", "start another run")
    return progress


def restore(path: Path, learner: Learner, critic: CriticLearner | None) -> None:
    """Give the optimizers and the generators of random numbers the state they had.

    Raises:
        RolloutError: The state cannot be read, or is that of other models.
    """
    try:
        _restore_optimizer(learner.optimizer, learner.policy, path / "optimizer.safetensors")
        if critic is not None:
            file = path / "critic_optimizer.safetensors"
            _restore_optimizer(critic.optimizer, critic.critic, file)
        _restore_generators(json.loads((path / "rng.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> RolloutError:
    got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    hint = "name an earlier checkpoint in checkpoints/latest"
    return RolloutError("checkpoint_state", str(path), got, "the state of a run", hint)


def _state_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, keep: bool
) -> dict[str, Tensor]:
    """State by parameter and name, `lm_head.weight.exp_avg`; the settings are the configuration's."""
    names, found = [name for name, _ in _parameters(optimizer, model)], {}
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    for number, values in state.items():
        for name, tensor in _flat(values):
            if keep:
                found[f"{names[number]}.{name}"] = tensor
    return found


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Bitsandbytes counts steps with an int, nests its tensors, and shares some of them."""
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
        count = tensor.shape == () and tensor.dtype == torch.int64
        value = int(tensor) if count else sharded_like(tensor.clone(), parameters[number][1])
        state.setdefault(number, {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters in its order, by their names in the model without a wrapper."""
    names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
    return [(names[p], p) for group in optimizer.param_groups for p in group["params"]]


def _generators() -> dict[str, Any]:
    """State of the generators of random numbers, as JSON has it."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in on_gpu],
    }


def _restore_generators(states: dict[str, Any]) -> None:
    version, values, gauss = states["python"]
    random.setstate((version, tuple(values), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if num_gpus := torch.cuda.device_count():
        torch.cuda.set_rng_state_all(
            [torch.tensor(state, dtype=torch.uint8) for state in states["cuda"][:num_gpus]]
        )
