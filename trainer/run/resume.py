"""Resume a run: its checkpoint, what may change, and the state that a checkpoint stores for it.

The state is the progress, the optimizers, the random number generators, and the outputs of the models
at the start of a batch, if the run stops within it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from rollout_io.configuration import flat
from schemas.errors import ConfigError, InputError, count
from trainer.batches.plan import Plan
from trainer.config.train_config import PATHS, TrainConfig
from trainer.distributed.accelerator import sharded_like, whole
from trainer.distributed.processes import gather_in_main
from trainer.run.checkpoint import latest_checkpoint
from trainer.run.messages import say
from trainer.run.run import Position, Progress

MAY_CHANGE = {
    "run.out",
    "batch.max_updates",
    "batch.num_epochs",
    "run.save_every_updates",
    "run.keep_checkpoints",
    "batch.max_row_tokens",
    "batch.tokens_per_micro_batch",
    "run.record_tokens",
    "run.trackers",
    "run.log_samples",
}
"""Keys that do not affect past updates. `max_updates` and `num_epochs` may only grow, and
are fixed if the learning rate decays towards the last update."""
SETTINGS = "config.json"
"""File of a checkpoint's state: the configuration of the updates before it."""
_HINT = "resume with the configuration of the run, or start a new run"


def fixed_keys(config: TrainConfig) -> set[str]:
    """Return the keys of `MAY_CHANGE` that must not change under this configuration.

    These keys affect past updates, for example through the learning-rate schedule.
    """
    decays = config.optimizer.learning_rate_schedule != "constant"
    by_micro_batch = "micro_batch" in config.loss.reduction_inputs
    fixed = {"batch.max_updates", "batch.num_epochs"} if decays else set()
    return fixed | ({"batch.tokens_per_micro_batch"} if by_micro_batch else set())


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Return the latest checkpoint of the run in `config.run.out`; None if there is none yet.

    Raises:
        ConfigError: The configuration differs from the run's.
        InputError: `config.json` or `latest` is missing or invalid.
    """
    out = Path(config.run.out)
    saved = saved_config(out)
    if saved is not None:
        may_change = MAY_CHANGE - fixed_keys(config)
        before, now = (flat(values) for values in (saved, dataclasses.asdict(config)))
        check_same(before, now, may_change, out, growing="batch.num_epochs")
    latest = latest_checkpoint(out)
    if saved and latest and (latest / "state" / SETTINGS).exists():
        # The run's file is a user's to edit; what past updates used is not.
        used = json.loads((latest / "state" / SETTINGS).read_bytes())
        may_change = {*MAY_CHANGE, *PATHS}
        check_same(used, now, may_change, latest / "state", growing="batch.num_epochs")
    return latest


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by `section.key`, except paths and what may change."""
    settings = flat(dataclasses.asdict(config))
    return {key: settings[key] for key in settings if key not in {*MAY_CHANGE, *PATHS}}


def say_if_new(out: Path) -> None:
    """Log a note if there is no run to resume, because a mistyped name would start a second one."""
    if not (out / "config.json").is_file():
        say(f"no run in {out}: starting from the beginning")


def saved_config(out: Path) -> dict[str, Any] | None:
    """Read the configuration that a run saved in its directory; None if it has not saved any yet.

    Raises:
        InputError: The file cannot be read, or is missing although the run has checkpoints.
    """
    file = out / "config.json"
    if not file.is_file():
        if checkpoint := latest_checkpoint(out):
            finding = "the file is missing, although the run has checkpoints"
            hint = f"restore the file, or start a new run: --model {checkpoint}"
            raise InputError("resume_config", str(file), finding, hint=hint)
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        finding = f"cannot read the configuration of the run: {error}"
        raise InputError("resume_config", str(file), finding) from error


def check_same(
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    may_change: Collection[str],
    out: Path,
    *,
    growing: str,
) -> None:
    """Check that a configuration equals the saved configuration of the run to resume.

    Keys of sections are `section.key`.

    Raises:
        ConfigError: A key that must not change has a different value, or `growing` has decreased.
    """
    # As they will be read back: tuples become lists, and numbers keep what JSON keeps.
    now = json.loads(json.dumps(settings))
    fixed = [key for key in now if key not in may_change]
    # A run of an earlier version lacks newer keys; an empty value does not affect its updates.
    compared = [key for key in fixed if key in saved or now[key]]
    different = [key for key in compared if saved.get(key) != now[key]]
    if different:
        key, *others = different
        expected = f"{json.dumps(saved.get(key))}, as in {out}/config.json"
        also = f" (also different: {', '.join(others)})" if others else ""
        raise ConfigError("resume_config", key, json.dumps(now[key]), expected, _HINT + also)
    if now[growing] < saved.get(growing, 1):
        expected = f"at least {saved[growing]}"
        raise ConfigError("resume_config", growing, str(now[growing]), expected, _HINT)


def check_max_updates(max_updates: int | None, global_step: int) -> None:
    """Check that a run does not resume beyond its end.

    Raises:
        ConfigError: `batch.max_updates` is less than the number of updates before the checkpoint.
    """
    if max_updates is not None and max_updates < global_step:
        expected = f"at least {global_step}, the number of updates already made"
        raise ConfigError("resume_config", "batch.max_updates", str(max_updates), expected)


def lines_to_keep(path: Path, num_lines: int) -> bytes:
    """Read the first `num_lines` lines of `metrics.jsonl`.

    Raises:
        InputError: The file has fewer lines.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < num_lines:
        expected = f"{num_lines}, one per mini-batch trained before the checkpoint"
        raise InputError("resume_metrics", str(path), count(len(whole), "line"), expected)
    return b"".join(whole[:num_lines])


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
        "batch": position.batches_done,
        "mini_batch": position.mini_batches_done,
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
            batches_done=run["batch"],
            mini_batches_done=run["mini_batch"],
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
